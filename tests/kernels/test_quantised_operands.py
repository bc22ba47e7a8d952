"""attention and varlen_attention over quantised q, k and v, against the float64 oracle of the dequantised numbers."""

from __future__ import annotations

from typing import Any

import pytest
from support import Device, assert_right, problem, random_call, run_core

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.schema.tensors import KV_DTYPE

FORMATS = tuple(KV_DTYPE)
SMALL: dict[str, Any] = {"heads_q": 4, "heads_k": 2, "batch": 3, "seq_q": 19, "seq_k": 37, "dtype": "bf16"}
# Calls with features that decide how scales are read: paddings, packed rows, masked and hidden keys, a negative scale.
CALLS: dict[str, dict[str, Any]] = {
    "padded": {
        "op": "attention", "seqlens_q": True, "seqlens_k": True, "leftpad_q": True, "leftpad_k": True,
        "causal": "bottom_right", "return_lse": True,
    },
    "fp16_bshd": {
        "op": "attention", "dtype": "fp16", "layout": "bshd", "window_left": 9, "window_right": 5, "softcap": True,
    },
    "masked": {"op": "attention", "mask": True, "bias": True, "alibi_slopes": True, "sinks": True, "head_dim_v": 24},
    "packed": {
        "op": "varlen_attention", "total_q": 40, "total_k": 80, "causal": "bottom_right", "return_lse": True,
        "sinks": True,
    },
    "packed_fp16": {"op": "varlen_attention", "total_q": 40, "total_k": 80, "dtype": "fp16", "causal": "top_left"},
}  # fmt: skip
SCALED = [
    *((kind, scales) for kind in FORMATS if kind != "int8" for scales in ("none", "head")), ("int8", "head"),
    ("int8", "token"),
]  # fmt: skip


def quantised(device: str, name: str, kind: str, scales: str, *, scale: float | None = None, **fields: Any) -> Call:
    p = problem(**(SMALL | CALLS[name] | {"kv_format": kind, "kv_scales": scales} | fields))
    return random_call(p, seed=3, device=device, scale=scale)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("kind", "scales"), SCALED)
def test_the_reference_is_right(kind: str, scales: str, name: str) -> None:
    call = quantised("cpu", name, kind, scales)
    assert_right(call, *blockwise.run(call))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("kind", "scales"), SCALED)
def test_kernels_are_right(device: Device, kind: str, scales: str, name: str) -> None:
    """NaN, or a scale that is NaN, infinite, negative or 0, is wherever a row or a key does not count."""
    call = quantised(device.name, name, kind, scales)
    assert_right(call, *run_core(device, call))
