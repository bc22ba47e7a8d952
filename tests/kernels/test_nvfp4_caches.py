"""NVFP4 caches: e2m1 numbers with an e4m3 scale for each 16 of a row, against the float64 oracle of the dequantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import TILE, Device, assert_right, problem, random_call, run_core

from portattn.reference import blockwise
from portattn.schema.call import Call

SMALL: dict[str, Any] = {"heads_q": 4, "heads_k": 2, "seq_q": 2, "batch": 3, "dtype": "bf16", "kv_format": "nvfp4"}
CACHES: dict[str, dict[str, Any]] = {
    "decode": {
        "op": "decode_attention", "seq_k": 50, "seqlens_k": True, "leftpad_k": True, "window_left": 9,
        "causal": "bottom_right", "head_dim": 32,
    },
    "decode_fp16_bshd": {
        "op": "decode_attention", "seq_k": 40, "dtype": "fp16", "layout": "bshd", "mask": True, "head_dim": 48,
        "head_dim_v": 16,
    },
    "decode_two_parts": {"op": "decode_attention", "seq_k": 37, "head_dim": 576, "head_dim_v": 32, "return_lse": True},
    "decode_tree": {"op": "decode_attention", "seq_k": 70, "seqlens_k": True, "tree_mask": True, "seq_q": 5, "head_dim": 32},
    "paged_small_pages": {"op": "paged_attention", "page_size": 6, "seq_k": 42, "bias": True, "head_dim": 80},
    "paged_packed_hpd": {
        "op": "paged_attention", "page_size": 16, "seq_k": 48, "page_layout": "hpd", "total_q": 9, "seq_q": 5,
        "causal": "bottom_right", "sinks": True, "dtype": "fp16", "softcap": True, "head_dim": 32,
    },
}  # fmt: skip


def quantised(device: str, cache: str, scales: str, strides: str = "plain", **fields: Any) -> Call:
    p = problem(**(SMALL | CACHES[cache] | {"kv_scales": scales} | fields))
    return random_call(p, seed=3, device=device, strides=strides)


def on(device: Device, call: Call, lowering: dict[str, str] | None = None, **launch: int) -> Any:
    page_loop = "flat_masked" if call.problem.page_size % TILE else "per_page"
    return run_core(device, call, {"page_loop": page_loop} | (lowering or {}), launch)


@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("cache", CACHES)
def test_kernels_are_right(device: Device, cache: str, scales: str) -> None:
    """Scales that are NaN, negative or the largest are wherever a token is not attended."""
    call = quantised(device.name, cache, scales)
    assert_right(call, *blockwise.run(call))
    for splits in (1, 2):
        assert_right(call, *on(device, call, splits=splits))
