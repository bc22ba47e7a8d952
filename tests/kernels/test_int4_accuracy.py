"""How exact attention over int4 caches is: against float64 of the very numbers that it is given.

The bound is 1.2 times the root of the mean square error of exact attention that is rounded to the result's dtype once.
"""

from __future__ import annotations

import pytest
import torch
from support import Device, problem, random_call, run_core
from test_quantised_accuracy import INPUTS, assert_exact, run

from portattn.reference import blockwise, writing
from portattn.reference.stored import dequantize
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle

WIDTH, KEYS = 64, 700


def call_of(what: str, dtype: str, scales: str, device: str, keys: int = KEYS) -> Call:
    """Eight queries of each key/value head over a cache that the reference has written."""
    q, k, v = INPUTS[what](8, keys)
    sizes = {"batch": 1, "heads_k": 2, "seq_k": keys, "head_dim": WIDTH, "kv_format": "int4", "kv_scales": scales}
    p = problem(op="decode_attention", heads_q=16, seq_q=1, dtype=dtype, head_dim_v=WIDTH, **sizes)
    call = random_call(p, device="cpu")
    assert call.k_scale is not None
    assert call.v_scale is not None
    if scales == "head":
        call.k_scale, call.v_scale = (x.abs().amax((2, 3)) / 7.0 for x in (k, v))
    written = Call(
        problem=Problem(op="append_kv", heads_q=2, seq_q=keys, dtype="fp32", seqlens_k=True, **sizes), q=k, new_v=v,
        k=call.k, v=call.v, scale=1.0, k_scale=call.k_scale, v_scale=call.v_scale,
        seqlens_k=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    writing.run(written)
    call.q = q.reshape(1, 16, 1, WIDTH).to(call.q.dtype)
    for name in ("q", "k", "v", "k_scale", "v_scale"):
        setattr(call, name, getattr(call, name).to(device))
    return call


@pytest.mark.parametrize("scales", ["head", "token"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("what", INPUTS)
def test_kernels_lose_nothing_beside_the_results_rounding(
    device: Device, what: str, dtype: str, scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(what, dtype, scales, device.name)
    assert_exact(call, run(device, call, monkeypatch))


@pytest.mark.parametrize("what", INPUTS)
def test_so_does_the_reference(what: str) -> None:
    call = call_of(what, "bf16", "token", "cpu")
    assert_exact(call, blockwise.run(call)[0])


def test_tiny_scales_lose_nothing_in_float16(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times a probability they are far below float16's range."""
    call = call_of("normal", "fp16", "token", device.name)
    assert call.v_scale is not None
    word = call.v_scale.view(torch.int32)
    small = ((word & -16).view(torch.float32) * 2.0**-12).view(torch.int32) | (word & 15)
    call.v_scale = small.view(torch.float32)
    out = run(device, call, monkeypatch)
    assert float(out.abs().max()) < 2.0**-10
    torch.testing.assert_close(out.double(), oracle(call)[0], rtol=1e-3, atol=2.0**-25)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("scales", ["head", "token"])
def test_every_byte_is_read_exactly(device: Device, scales: str, dtype: str) -> None:
    """One key a sequence: the result is its value. All 256 bytes, and of tokens' scales all that may stand for 0."""
    p = problem(
        op="decode_attention", batch=16, heads_q=1, heads_k=1, seq_q=1, seq_k=1, head_dim=32, head_dim_v=512,
        dtype=dtype, kv_format="int4", kv_scales=scales,
    )  # fmt: skip
    call = random_call(p, device=device.name)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).expand(16, 1, 1, 256)
    scale = torch.ones(16, 1)
    if scales == "token":
        zeros = torch.arange(16, dtype=torch.int32)[:, None, None]
        scale = (torch.ones(16, 1, 1).view(torch.int32) | zeros).view(torch.float32)
    call.v, call.v_scale = codes.contiguous().to(device.name), scale.to(device.name)
    out, _ = run_core(device, call)
    expected = dequantize(
        call.v, "int4", call.v_scale if scales == "token" else call.v_scale[..., None], scales == "token"
    )
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0)
    first = torch.stack((torch.arange(256) % 16, torch.arange(256) // 16), dim=1).flatten() - 8.0
    if scales == "head":
        torch.testing.assert_close(out[0, 0, 0].float().cpu(), first, rtol=0, atol=0)
