"""Block masks in dense_forward and on the reference path: random lists of blocks against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import problem
from reference_cases import run as run_reference
from support import Device, assert_right, random_call, run_core

BLOCKS: dict[str, Any] = {"block_mask": True, "block_q": 16, "block_k": 16, "seq_q": 50, "seq_k": 77}
FEATURES: dict[str, dict[str, Any]] = {
    "alone": {},
    "mask": {"mask": True, "causal": "bottom_right", "block_k": 32},
    "more": {"window_left": 20, "sinks": True, "bias": True, "softcap": True, "alibi_slopes": True},
    "lengths": {"seqlens_q": True, "seqlens_k": True, "causal": "top_left", "block_q": 48, "block_k": 48},
    "dropout": {"dropout": True, "dtype": "fp16"},
    "a head in two parts": {"head_dim": 576, "head_dim_v": 16, "seq_q": 20},
}
LOWERINGS: dict[str, dict[str, str]] = {
    "finite": {"mask_value": "finite"}, "exp": {"exp": "exp"}, "persistent": {"grid": "persistent"},
    "branch": {"select": "branch"}, "block_ptr": {"load": "block_ptr"}, "transposed": {"k_tile": "transposed"},
    "rotated": {"pipeline": "rotated"},
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_random_lists_are_right(device: Device, feature: str) -> None:
    for seed, poison in enumerate(("k", "v")):
        call = random_call(problem("dense", **(BLOCKS | FEATURES[feature])), seed, device=device.name, poison=poison)
        assert_right(call, *run_core(device, call))
        assert_right(call, *run_reference(call))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_way_to_lower_it(device: Device, lowering: str) -> None:
    call = random_call(problem("dense", **BLOCKS), 3, device=device.name)
    assert_right(call, *run_core(device, call, LOWERINGS[lowering]))
