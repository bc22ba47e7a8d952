"""append_kv and write_pages into NVFP4 caches: the bytes and scales that looking among all numbers gives."""

from __future__ import annotations

from typing import Any

import pytest
from support import Device, problem, run_core

from portattn.reference import writing
from portattn.testing.random_writing import judge_writing, random_writing

CASES: dict[str, dict[str, Any]] = {
    "append": {"op": "append_kv", "batch": 3, "seq_q": 7, "seq_k": 20, "head_dim": 32, "head_dim_v": 16, "seqlens_k": True},
    "pages": {"op": "write_pages", "batch": 1, "seq_q": 19, "seq_k": 24, "page_size": 6, "head_dim": 48},
    "pages_rotated_hpd": {
        "op": "write_pages", "batch": 1, "seq_q": 11, "seq_k": 32, "page_size": 16, "head_dim": 32, "rotary": "neox",
        "rotary_dim": 16, "page_layout": "hpd", "dtype": "fp32",
    },
}  # fmt: skip


def case(name: str, scales: str) -> Any:
    return problem(**{"heads_q": 2, "heads_k": 2, "dtype": "bf16", "kv_format": "nvfp4", "kv_scales": scales} | CASES[name])


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("name", CASES)
def test_every_byte_is_the_nearest_number(device: Device, name: str, scales: str, spare: bool) -> None:
    """Of ties, NaN, infinity, numbers that are too large or too small, and rows of zeros; nothing else is touched."""
    for run in (lambda call: run_core(device, call), writing.run):
        call = random_writing(case(name, scales), seed=5, device=device.name, spare=spare)
        run(call)
        assert judge_writing(call) == {"error": 0.0, "budget": 0.0, "wrong": 0}
