"""NVFP4 caches: e2m1 numbers with an e4m3 scale for each 16 of a row, against the float64 oracle of the dequantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Device, assert_right, problem, random_call, run_core
from test_quantised_accuracy import INPUTS, WIDTH, assert_exact, run

from portattn.reference import blockwise, writing
from portattn.schema.call import Call
from portattn.schema.problem import Problem

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
    "decode_tree": {
        "op": "decode_attention", "seq_k": 70, "seqlens_k": True, "tree_mask": True, "seq_q": 5, "head_dim": 32,
    },
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
    return run_core(device, call, lowering, launch)


@pytest.mark.parametrize("scales", ["none", "head"])
@pytest.mark.parametrize("cache", CACHES)
def test_kernels_are_right(device: Device, cache: str, scales: str) -> None:
    """Scales that are NaN, negative or the largest are wherever a token is not attended."""
    call = quantised(device.name, cache, scales)
    assert_right(call, *blockwise.run(call))
    for splits in (1, 2):
        assert_right(call, *on(device, call, splits=splits))


LOWERINGS: dict[str, dict[str, str]] = {
    "block pointers": {"load": "block_ptr"},
    "rows of keys": {"k_tile": "row", "q_operand": "reload"},
    "a rotated loop": {"pipeline": "rotated"},
    "exact tiles": {"reads": "inside", "mask_value": "finite", "exp": "exp"},
}


@pytest.mark.parametrize("lowering", LOWERINGS.values(), ids=LOWERINGS)
def test_every_way_to_lower_it_is_right(device: Device, lowering: dict[str, str]) -> None:
    width = 32 if "reads" in lowering else 48  # its tiles are as wide as the head
    call = quantised(device.name, "decode", "head", head_dim=width, head_dim_v=32)
    assert_right(call, *on(device, call, lowering))


@pytest.mark.parametrize("strides", ["spare", "transposed", "sliced", "combined"])
def test_any_strides(device: Device, strides: str) -> None:
    """Of scales the last axis alone is contiguous, as in a page [K | scales of K | V | scales of V]."""
    cache = "paged_small_pages" if strides == "combined" else "decode_fp16_bshd"
    fields = {} if strides == "combined" else {"head_dim_v": 32}
    call = quantised(device.name, cache, "head", strides, **fields)
    assert_right(call, *blockwise.run(call))
    assert_right(call, *on(device, call))


@pytest.mark.parametrize("fields", [{"seq_q": 0}, {"seq_k": 0}], ids=str)
def test_nothing_to_attend(device: Device, fields: dict[str, int]) -> None:
    call = quantised(device.name, "decode_two_parts", "head", head_dim=32, **fields)
    assert_right(call, *blockwise.run(call))
    assert_right(call, *on(device, call))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_number_under_every_scale_is_read_exactly(device: Device, dtype: str) -> None:
    """One key a sequence: the result is its value. All 16 numbers in a block, and all 127 scales."""
    p = problem(
        op="decode_attention", batch=4, heads_q=1, heads_k=1, seq_q=1, seq_k=1, head_dim=16, head_dim_v=512,
        dtype=dtype, kv_format="nvfp4", kv_scales="none",
    )  # fmt: skip
    call = random_call(p, device=device.name)
    codes = torch.tensor([low | low + 1 << 4 for low in range(0, 16, 2)], dtype=torch.uint8).repeat(32)
    scales = torch.arange(128, dtype=torch.uint8).clamp(max=126)
    call.v = codes.view(torch.int8).expand(4, 1, 1, 256).contiguous().to(device.name)
    call.v_block_scale = scales.view(torch.int8).view(4, 1, 1, 32).to(device.name)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    factors = scales.view(torch.float8_e4m3fn).float().view(4, 1, 1, 32, 1)
    expected = (torch.cat((numbers, -numbers)) * factors).flatten(-2)
    for out in (on(device, call)[0], blockwise.run(call)[0]):
        torch.testing.assert_close(out.float().cpu(), expected, rtol=0, atol=0)


def written(what: str, dtype: str, scales: str, device: str, keys: int = 700, heads: int = 2) -> Call:
    """Eight queries of each key/value head over a cache that the reference has written."""
    q, k, v = (t[:, :heads] for t in INPUTS[what](8, keys))
    sizes = {"batch": 1, "heads_k": heads, "seq_k": keys, "head_dim": WIDTH, "kv_format": "nvfp4", "kv_scales": scales}
    p = problem(op="decode_attention", heads_q=8 * heads, seq_q=1, dtype=dtype, head_dim_v=WIDTH, **sizes)
    call = random_call(p, device="cpu")
    if scales == "head":  # so that the largest block's scale is e4m3's largest
        call.k_scale, call.v_scale = (x.abs().amax((2, 3)) / (6.0 * 448.0) for x in (k, v))
    writing.run(Call(
        problem=Problem(op="append_kv", heads_q=heads, seq_q=keys, dtype="fp32", seqlens_k=True, **sizes), q=k, new_v=v,
        k=call.k, v=call.v, scale=1.0, k_scale=call.k_scale, v_scale=call.v_scale, k_block_scale=call.k_block_scale,
        v_block_scale=call.v_block_scale, seqlens_k=torch.zeros(1, dtype=torch.int32),
    ))  # fmt: skip
    call.q = q.reshape(1, 8 * heads, 1, WIDTH).to(call.q.dtype)
    for name in ("q", "k", "v", "k_scale", "v_scale", "k_block_scale", "v_block_scale"):
        tensor = getattr(call, name)
        setattr(call, name, None if tensor is None else tensor.to(device))
    return call


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("what", INPUTS)
def test_kernels_lose_nothing_beside_the_results_rounding(
    device: Device, what: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = written(what, dtype, "head", device.name)
    assert_exact(call, blockwise.run(call)[0])
    assert_exact(call, run(device, call, monkeypatch))
