"""append_kv and write_pages into NVFP4 caches: the bytes and scales that looking among all numbers gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Device, problem, run_core

from portattn.reference import writing
from portattn.testing.random_writing import judge_writing, random_writing

CASES: dict[str, dict[str, Any]] = {
    "append": {
        "op": "append_kv", "batch": 3, "seq_q": 7, "seq_k": 20, "head_dim": 32, "head_dim_v": 16, "seqlens_k": True,
    },
    "pages": {"op": "write_pages", "batch": 1, "seq_q": 19, "seq_k": 24, "page_size": 6, "head_dim": 48},
    "pages_rotated_hpd": {
        "op": "write_pages", "batch": 1, "seq_q": 11, "seq_k": 32, "page_size": 16, "head_dim": 32, "rotary": "neox",
        "rotary_dim": 16, "page_layout": "hpd", "dtype": "fp32",
    },
}  # fmt: skip


def case(name: str, scales: str) -> Any:
    stored = {"heads_q": 2, "heads_k": 2, "dtype": "bf16", "kv_format": "nvfp4", "kv_scales": scales}
    return problem(**stored | CASES[name])


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("name", CASES)
def test_every_byte_is_the_nearest_number(device: Device, name: str, scales: str, spare: bool) -> None:
    """Of ties, NaN, infinity, numbers that are too large or too small, and rows of zeros; nothing else is touched."""
    for run in (lambda call: run_core(device, call), writing.run):
        call = random_writing(case(name, scales), seed=5, device=device.name, spare=spare)
        run(call)
        assert judge_writing(call) == {"error": 0.0, "budget": 0.0, "wrong": 0}


def test_ties_go_to_the_even_code(device: Device) -> None:
    """Of blocks whose largest number is 6, and whose scale is 1: numbers halfway between two of the format."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    row = torch.cat((middle, -middle, torch.tensor([6.0, -0.0])))
    codes = [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 7, 8]
    for run in (lambda call: run_core(device, call), writing.run):
        call = random_writing(case("pages", "none"), seed=5, device=device.name)
        call.q.copy_(row.repeat(3))
        call.slots.copy_(torch.arange(19))
        run(call)
        low, high = (call.k[0, 0, 0, :8].cpu() & 15).tolist(), (call.k[0, 0, 0, :8].cpu() >> 4 & 15).tolist()
        assert [code for pair in zip(low, high, strict=True) for code in pair] == codes
        assert call.k_block_scale[0, 0, 0].view(torch.float8_e4m3fn).float().tolist() == [1.0, 1.0, 1.0]
