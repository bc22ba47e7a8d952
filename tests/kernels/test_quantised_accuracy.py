"""How exact attention over quantised q, k and v is: against float64 of the very numbers that it is given.

The bound is 1.2 times the root of the mean square error of exact attention that is rounded to the result's dtype once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import Device, problem, random_call, run_core

import portattn
from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.schema.tensors import KV_DTYPE, KV_STORED
from portattn.testing.oracle import oracle

BOUND = 1.2
WIDTH = 64
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def normal(rows: int, keys: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, count, WIDTH, generator=generator) for count in (rows, keys, keys))
    return q, k, v


def outlier(rows: int, keys: int) -> Inputs:
    """A channel of each that is 20 times as large as the others."""
    q, k, v = normal(rows, keys)
    q[..., 9] *= 20.0
    k[..., 5] *= 20.0
    v[..., 3] *= 20.0
    return q, k, v


def needle(rows: int, keys: int) -> Inputs:
    """One key that every query looks for, among others that are none."""
    q, k, v = normal(rows, keys)
    direction = k[:, :, keys // 3].clone()
    k[:, :, keys // 3] = direction * 2.0
    q = direction[:, :, None] * 1.5 + 0.3 * q
    return q, k, v


INPUTS: dict[str, Callable[[int, int], Inputs]] = {"normal": normal, "outlier": outlier, "needle": needle}


def call_of(inputs: Inputs, kind: str, dtype: str, device: str) -> Call:
    q, k, _ = inputs
    p = problem(
        op="attention", batch=1, heads_q=q.shape[1], heads_k=q.shape[1], seq_q=q.shape[2], seq_k=k.shape[2],
        head_dim=WIDTH, dtype=dtype, kv_format=kind, kv_scales="head",
    )  # fmt: skip
    call = random_call(p, device=device)
    made = portattn.quantize(*(t.to(device) for t in inputs), kind)
    call.q, call.k, call.v = (t.view(KV_STORED) for t in (made.q, made.k, made.v))
    call.q_scale, call.k_scale, call.v_scale = made.q_scale, made.k_scale, made.v_scale
    return call


def run(device: Device, call: Call, monkeypatch: pytest.MonkeyPatch, **launch: int) -> torch.Tensor:
    """The kernel's result in the call's dtype. The interpreter cuts bfloat16 off, where chips round it: there the
    kernel stores float32, which torch rounds."""
    if device.path != "interpreter":
        return run_core(device, call, launch=launch)[0]
    shape = call.new_out().shape
    monkeypatch.setattr(Call, "new_out", lambda self: torch.full(shape, float("nan")))
    out, _ = run_core(device, call, launch=launch)
    return out.to(call.dtype)


def rms(error: torch.Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt())


def assert_exact(call: Call, out: torch.Tensor) -> None:
    exact, _ = oracle(call)
    rounded = rms(exact.to(out.dtype).double() - exact)
    assert rms(out.double() - exact) <= BOUND * rounded


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("what", INPUTS)
def test_kernels_lose_nothing_beside_the_results_rounding(
    device: Device, what: str, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(INPUTS[what](16, 700), kind, dtype, device.name)
    assert_exact(call, run(device, call, monkeypatch))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("what", INPUTS)
def test_so_does_the_reference(what: str, dtype: str) -> None:
    call = call_of(INPUTS[what](16, 4096), "e4m3", dtype, "cpu")
    assert_exact(call, blockwise.run(call)[0])


def test_a_needle_among_64k_keys_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exactly as in bfloat16: its value is the largest part of every row's result."""
    q, k, v = needle(16, 65536)
    inputs = q[:, :1], k[:, :1], v[:, :1]
    call = call_of(inputs, "e4m3", "bf16", device.name)
    out = run(device, call, monkeypatch, block_n=2048 if device.path == "interpreter" else 64)
    assert_exact(call, out)
    wide = portattn.attention(*(t.to(device.name, torch.bfloat16) for t in inputs))
    value = inputs[2][:, :, 65536 // 3][:, :, None].to(device.name)
    found, in_bf16 = (torch.cosine_similarity(t.float(), value, dim=-1) for t in (out, wide))
    assert in_bf16.min() > 0.99
    assert found.min() > in_bf16.min() - 2e-3  # the value itself is of 4 bits


@pytest.mark.parametrize("operands", ["widened", "stored"])
def test_int8_products_are_exact_either_way(device: Device, operands: str) -> None:
    """A sum of 512 products of int8 numbers is below 2^24: exact in int32 and in float32."""
    call = random_call(problem(
        op="attention", batch=2, heads_q=2, heads_k=1, seq_q=20, seq_k=70, head_dim=512, head_dim_v=32, dtype="fp16",
        kv_format="int8", kv_scales="token",
    ), device=device.name)  # fmt: skip
    call.q, call.k = (torch.full_like(t, 127) for t in (call.q, call.k))
    call.q[:, :, :, 1] = -128
    out, _ = run_core(device, call, {"operands": operands}, {"block_n": 32})
    other, _ = run_core(device, call, {"operands": "widened"}, {"block_n": 32})
    torch.testing.assert_close(out, other, rtol=0, atol=0)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("kind", KV_DTYPE)
def test_operands_as_they_are_stored(device: Device, kind: str, negative: bool) -> None:
    """By the chip's own products, which the interpreter computes in full."""
    if kind == "e4m3fnuz":
        pytest.skip("neither the interpreter nor an NVIDIA chip has products of float8_e4m3fnuz")
    p = problem(
        op="attention", batch=2, heads_q=2, heads_k=1, seq_q=20, seq_k=70, head_dim=32, dtype="bf16", kv_format=kind,
        kv_scales="head", negative_scale=negative,
    )  # fmt: skip
    call = random_call(p, device=device.name, scale=-0.2 if negative else 0.2)
    stored, widened = (run_core(device, call, {"operands": how})[0] for how in ("stored", "widened"))
    torch.testing.assert_close(stored, widened, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("inputs", [normal, needle])
def test_int8_with_smoothed_keys_is_near_the_original(device: Device, inputs: Callable[[int, int], Inputs]) -> None:
    q, k, v = (t.to(device.name, torch.bfloat16) for t in inputs(64, 300))
    k = k + torch.linspace(-4.0, 4.0, WIDTH, device=device.name).bfloat16()  # a bias of channels, which is smoothed
    made = portattn.quantize(q, k, v, "sage")
    path = "interpreter" if device.path == "interpreter" else "triton"
    out, lse = portattn.attention(**made.arguments(), return_lse=True, backend=path)
    exact, exact_lse = portattn.attention(q.float(), k.float(), v.float(), return_lse=True)
    cosine = torch.nn.functional.cosine_similarity(out.double().flatten(), exact.double().flatten(), dim=0)
    assert cosine >= 0.9995
    torch.testing.assert_close(made.corrected(lse), exact_lse, rtol=0, atol=0.1)
