"""The cases that the project's seed kernels ran: small ones of the same structure here, in full size on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import check
from support import Device

from portattn.tools.bench.contenders import own
from portattn.tools.bench.gate import admit, as_call
from portattn.tools.bench.sets import SETS
from portattn.tools.bench.tensors import Tensors

CASES = {case.name: case for case in SETS["seed"]}
# What is smaller: batches, heads and lengths. Groups of heads, their widths, pages and the share of tokens stay.
SMALLER: dict[str, dict[str, Any]] = {
    "seed prefill causal": {"batch": 1, "heads_q": 8, "heads_k": 2, "seq_q": 48, "seq_k": 48},
    "seed prefill padded": {
        "batch": 4, "heads_q": 4, "heads_k": 1, "seq_q": 32, "seq_k": 32, "lengths_q": (4, 12, 20, 32),
        "lengths_k": (4, 12, 20, 32),
    },
    "seed decode": {"batch": 2, "heads_q": 8, "heads_k": 2, "seq_k": 100},
    "seed paged decode": {"seq_k": 64, "lengths_k": (62, 58, 63)},
    "seed sparse": {"heads_q": 8, "heads_k": 2, "seq_k": 1000, "tokens": 20},
    "seed sparse magicpig": {"heads_q": 8, "heads_k": 2, "seq_k": 1000, "tokens": 20},
    "seed sparse paged": {"heads_q": 4, "heads_k": 4, "seq_k": 800, "tokens": 16},
}  # fmt: skip


@pytest.mark.parametrize(("name", "parts"), [(n, 1) for n in CASES] + [(n, 3) for n in CASES if CASES[n].reads_cache])
def test_a_seed_kernels_case_scaled_down(device: Device, name: str, parts: int) -> None:
    case = msgspec.structs.replace(CASES[name], **SMALLER[name])
    assert case.group == CASES[name].group
    call = as_call(case, Tensors.random(case, torch.device(device.name)))
    check(device, replace(call, problem=msgspec.structs.replace(call.problem, return_lse=True)), parts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_seed_kernels_case(name: str) -> None:
    """As a user calls it, compared on a sample of sequences, heads and rows: one pair of them at a time in float64."""
    case = CASES[name]
    tensors = Tensors.random(case, torch.device("cuda"))
    admitted = admit(case, tensors, own(case, tensors, backend="triton"))
    assert admitted.refused == {}
    assert max(admitted.errors.values()) <= admitted.budget
