"""How exact attention over quantised q, k and v is: against float64 of the very numbers that it is given. The bound is
1.2 times the root of the mean square error of exact attention that is rounded to the result's dtype once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_right, problem, random_call, run_core

import portattn
from portattn.api import quantize
from portattn.reference import blockwise, write
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.schema.tensors import KV_DTYPE, KV_STORED
from portattn.testing.oracle import oracle

BOUND = 1.2
WIDTH = 64
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def normal(rows, keys):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, count, WIDTH, generator=generator) for count in (rows, keys, keys))
    return q, k, v


def outlier(rows, keys):
    """A channel of each that is 20 times as large as the others."""
    q, k, v = normal(rows, keys)
    q[..., 9] *= 20.0
    k[..., 5] *= 20.0
    v[..., 3] *= 20.0
    return q, k, v


def needle(rows, keys):
    q, k, v = normal(rows, keys)
    direction = k[:, :, keys // 3].clone()
    k[:, :, keys // 3] = direction * 2.0
    q = direction[:, :, None] * 1.5 + 0.3 * q
    return q, k, v


INPUTS: dict[str, Callable[[int, int], Inputs]] = {"normal": normal, "outlier": outlier, "needle": needle}


def call_of(inputs, kind, dtype, device):
    q, k, v = inputs
    p = problem(
        op="attention", batch=1, heads_q=q.shape[1], heads_k=q.shape[1], seq_q=q.shape[2], seq_k=k.shape[2],
        head_dim=q.shape[3], head_dim_v=v.shape[3], dtype=dtype, kv_format=kind, kv_scales="head",
    )  # fmt: skip
    call = random_call(p, device=device)
    made = portattn.quantize(*(t.to(device) for t in inputs), kind)
    call.q, call.k, call.v = (t.view(KV_STORED) for t in (made.q, made.k, made.v))
    call.q_scale, call.k_scale, call.v_scale = made.q_scale, made.k_scale, made.v_scale
    return call


def run(device, call, monkeypatch, lowering=None, **launch):
    """The kernel's result in the call's dtype. The interpreter cuts bfloat16 off, where chips round it: there the
    kernel stores float32, which torch rounds."""
    if device.path == "interpreter":
        shape = call.new_out().shape
        monkeypatch.setattr(Call, "new_out", lambda self: torch.full(shape, float("nan")))
    return run_core(device, call, lowering, launch)[0].to(call.dtype)


def written(what, kind, dtype, scales, device, keys=700, heads=2, width=64):
    """Eight queries of each key/value head over a cache that the reference has written."""
    q, k, v = (tensor[:, :heads] for tensor in INPUTS[what](8, keys))
    sizes = {"batch": 1, "heads_k": heads, "seq_k": keys, "head_dim": width, "kv_format": kind, "kv_scales": scales}
    p = problem(op="decode_attention", heads_q=8 * heads, seq_q=1, dtype=dtype, head_dim_v=width, **sizes)
    call = random_call(p, device="cpu")
    if scales == "head":  # of NVFP4 so that the largest block's scale is e4m3's largest
        largest = {"int4": 7.0, "nvfp4": 6.0 * 448.0}[kind]
        call.k_scale, call.v_scale = (x.abs().amax((2, 3)) / largest for x in (k, v))
    held = ("k", "v", "k_scale", "v_scale", "k_block_scale", "v_block_scale")
    write.run(Call(
        problem=Problem(op="append_kv", heads_q=heads, seq_q=keys, dtype="fp32", seqlens_k=True, **sizes), q=k, new_v=v,
        scale=1.0, seqlens_k=torch.zeros(1, dtype=torch.int32), **{name: getattr(call, name) for name in held},
    ))  # fmt: skip
    call.q = q.reshape(1, 8 * heads, 1, width).to(call.q.dtype)
    for name in ("q", *held):
        tensor = getattr(call, name)
        setattr(call, name, None if tensor is None else tensor.to(device))
    return call


def rms(error):
    return float(error.double().pow(2).mean().sqrt())


def assert_exact(call, out):
    exact, _ = oracle(call)
    rounded = rms(exact.to(out.dtype).double() - exact)
    assert rms(out.double() - exact) <= BOUND * rounded


def stored(what, kind, scales, dtype, device, keys=700):
    if kind in ("int4", "nvfp4"):
        return written(what, kind, dtype, scales, device)
    return call_of(INPUTS[what](16, keys), kind, dtype, device)


STORED = [("e4m3", "head"), ("e5m2", "head"), ("int4", "head"), ("int4", "token"), ("nvfp4", "head")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("kind", "scales"), STORED)
@pytest.mark.parametrize("what", INPUTS)
def test_kernels_lose_nothing_beside_the_results_rounding(device, what, kind, scales, dtype, monkeypatch):
    call = stored(what, kind, scales, dtype, device.name)
    assert_exact(call, run(device, call, monkeypatch))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("kind", "scales"), [("e4m3", "head"), ("int4", "token"), ("nvfp4", "head")])
@pytest.mark.parametrize("what", INPUTS)
def test_so_does_the_reference(what, kind, scales, dtype):
    call = stored(what, kind, scales, dtype, "cpu", keys=4096)
    assert_exact(call, blockwise.run(call)[0])


@pytest.mark.parametrize("operands", ["widened", "stored"])
def test_int8_products_are_exact_either_way(device, operands):
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
def test_operands_as_they_are_stored(device, kind, negative):
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
def test_int8_with_smoothed_keys_is_near_the_original(device, inputs):
    q, k, v = (t.to(device.name, torch.bfloat16) for t in inputs(64, 300))
    k = k + torch.linspace(-4.0, 4.0, WIDTH, device=device.name).bfloat16()  # a bias of channels, which is smoothed
    made = portattn.quantize(q, k, v, "sage")
    path = "interpreter" if device.path == "interpreter" else "triton"
    out, lse = portattn.attention(**made.arguments(), return_lse=True, backend=path)
    exact, exact_lse = portattn.attention(q.float(), k.float(), v.float(), return_lse=True)
    cosine = torch.nn.functional.cosine_similarity(out.double().flatten(), exact.double().flatten(), dim=0)
    assert cosine >= 0.9995
    torch.testing.assert_close(made.corrected(lse), exact_lse, rtol=0, atol=0.1)


def test_tiny_scales_lose_nothing_in_float16(device, monkeypatch):
    """Times a probability they are far below float16's range."""
    call = written("normal", "int4", "fp16", "token", device.name)
    word = call.v_scale.view(torch.int32)
    small = ((word & -16).view(torch.float32) * 2.0**-12).view(torch.int32) | (word & 15)
    call.v_scale = small.view(torch.float32)
    out = run(device, call, monkeypatch)
    assert float(out.abs().max()) < 2.0**-10
    torch.testing.assert_close(out.double(), oracle(call)[0], rtol=1e-3, atol=2.0**-25)


SHAPES = {
    "whole": (2, 128, 4, 2, 64), "ragged": (2, 101, 4, 2, 80), "short": (1, 1, 6, 1, 16), "odd": (1, 70, 2, 2, 40),
}  # fmt: skip
NAMES = ("q", "k", "q_scale", "k_scale")


def tensors(name, layout, device):
    batch, rows, heads_q, heads_k, columns = SHAPES[name]
    torch.manual_seed(3)
    found = []
    for heads in (heads_q, heads_k, heads_k):
        shape = (batch, heads, rows, columns) if layout == "bhsd" else (batch, rows, heads, columns)
        found.append(torch.randn(shape, device=device).mul(3).bfloat16())
    found[1] += 2
    return found


def made_both_ways(given, block, smooth, layout):
    rows_first = layout == "bshd"
    return (
        quantize._sage_by_kernel(*given, block, smooth, rows_first),
        quantize._sage_by_torch(*given, block, smooth, rows_first, (None, None)),
    )


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", SHAPES)
def test_it_makes_what_torch_makes(device, name, layout, smooth):
    given = tensors(name, layout, device.name)
    for block in (32, 64) if name == "ragged" else (16,):
        ours, theirs = made_both_ways(given, block, smooth, layout)
        for field in NAMES:
            found, expected = getattr(ours, field), getattr(theirs, field)
            assert found.shape == expected.shape
            assert found.is_contiguous()
            if device.name == "cpu":
                assert torch.equal(found, expected)
            else:  # a quotient half a bit off rounds to the number beside
                torch.testing.assert_close(
                    found.float(), expected.float(), rtol=1e-6, atol=1.0 if "_" not in field else 0
                )
                assert (found != expected).sum() <= max(2, found.numel() // 500) or "_" in field
        assert (ours.lse_shift is None) is (not smooth)
        if smooth:
            torch.testing.assert_close(ours.lse_shift, theirs.lse_shift, rtol=1e-5, atol=1e-4)


def test_views_and_zeros(device):
    """Rows that lie apart, a head of zeros, and numbers whose scale would be no normal number."""
    q, k, v = tensors("ragged", "bhsd", device.name)
    q, k = q.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([k, k], -1)[..., : k.shape[-1]]
    q[:, 0] = 0
    k[:, 1] = 1e-38
    ours, theirs = made_both_ways([q, k, v], 32, False, "bhsd")
    assert torch.equal(ours.q_scale[:, 0], torch.ones_like(ours.q_scale[:, 0]))
    assert not ours.q[:, 0].any()
    for field in NAMES:
        torch.testing.assert_close(getattr(ours, field).float(), getattr(theirs, field).float(), rtol=1e-6, atol=1.0)
    assert ours.v is v


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


def quantised(device, name, kind, scales, *, scale=None, **fields):
    p = problem(**(SMALL | CALLS[name] | {"kv_format": kind, "kv_scales": scales} | fields))
    return random_call(p, seed=3, device=device, scale=scale)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("kind", "scales"), SCALED)
def test_the_reference_is_right(kind, scales, name):
    call = quantised("cpu", name, kind, scales)
    assert_right(call, *blockwise.run(call))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("kind", "scales"), SCALED)
def test_kernels_are_right(device, kind, scales, name):
    """NaN, or a scale that is NaN, infinite, negative or 0, is wherever a row or a key does not count."""
    call = quantised(device.name, name, kind, scales)
    assert_right(call, *run_core(device, call))
