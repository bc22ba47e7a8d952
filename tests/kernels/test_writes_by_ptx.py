"""write_cache with `unpack = ptx`: a reciprocal that is corrected once, and NVIDIA's own conversions.

What the instructions do is modelled here in float64, for machines without the chip; on one the kernel itself runs.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import Device, run_core
from test_cache_writes import OPS, PAGES, ROTARY

from portattn.planning.kernel_specs import CORES
from portattn.reference import writing
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import INTEGERS
from portattn.schema.tensors import KV_FORMAT, KV_LARGEST
from portattn.testing.random_writing import random_writing
from portattn.testing.verdict import judge

FORMATS = [(kind, s) for kind in (*KV_FORMAT.values(), "int4") for s in ("none", "head", "token")
           if kind not in INTEGERS or s != "none"]  # fmt: skip
BEYOND = 2.0**18  # what kernels/write.py holds quotients to before they are corrected


def every(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a 16-bit dtype, float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def scales_of_every_size() -> torch.Tensor:
    """Positive float32 scales, down to the smallest: of each exponent the first, the last and two at random."""
    generator = torch.Generator().manual_seed(0)
    fraction = torch.randint(0, 2**23, (255, 4), generator=generator, dtype=torch.int32)
    fraction[:, 0], fraction[:, 1] = 0, 2**23 - 1
    fraction[0, 0] = 1
    return ((torch.arange(255, dtype=torch.int32) << 23)[:, None] | fraction).view(torch.float32).flatten()


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a·b + c rounded once to float32, as a fused multiply-add has it.

    float64 holds the product. What it rounds off the sum is kept in the sum's last bit ("rounding to odd"), so that
    the second rounding goes where one alone would.
    """
    product, c = a.double() * b.double(), c.double()
    found = product + c
    part = found - product
    rest = (product - (found - part)) + (c - part)  # exact: Knuth's sum of two
    even = (found.view(torch.int64) & 1) == 0
    odd = torch.nextafter(found, torch.where(rest > 0, torch.inf, -torch.inf).double())
    return torch.where(even & (rest != 0) & found.isfinite(), odd, found).float()


def quotient(numbers: torch.Tensor, scale: torch.Tensor, turned: bool = True) -> torch.Tensor:
    """As kernels/write.py's quotient by PTX; `turned` False: the remainder is added as it is."""
    power = torch.where(scale < 2.0**-32, 2.0**96, torch.where(scale > 2.0**64, 2.0**-64, 1.0))
    divisor = scale * power
    inverse = 1.0 / divisor
    near = numbers * power
    about = near * inverse
    about = torch.where(about > BEYOND, BEYOND, torch.where(about < -BEYOND, -BEYOND, about))
    about = torch.where(about.isnan(), -BEYOND, about)  # max takes the number beside a NaN
    if turned:
        return fused(-fused(about, divisor, -near), inverse, about)
    return fused(fused(-about, divisor, near), inverse, about)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_corrected_reciprocal_stores_what_division_does(dtype: torch.dtype) -> None:
    """Every number, and scales of every size: equal bytes in every format. Where a quotient is inside, equal bits."""
    numbers = every(dtype)[:, None]
    for scale in scales_of_every_size()[::9].split(60):
        ours, exact = quotient(numbers, scale), numbers / scale
        for kind in KV_LARGEST:
            assert torch.equal(writing.eight_bits(ours, kind), writing.eight_bits(exact, kind)), kind
        inside = (exact.abs() > 2.0**-20) & (exact.abs() < BEYOND / 2)
        assert torch.equal(ours[inside], exact[inside])


def test_a_remainder_that_is_added_loses_the_sign_of_zero() -> None:
    numbers, scale = torch.tensor([-0.0, 0.0, -1e-30, 3.0]), torch.tensor(0.37)
    wrong = writing.eight_bits(quotient(numbers, scale, turned=False), "e4m3")
    right = writing.eight_bits(numbers / scale, "e4m3")
    assert (wrong != right).tolist() == [True, False, False, False]
    assert torch.equal(writing.eight_bits(quotient(numbers, scale), "e4m3"), right)


def rows_of_every_size(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 256 numbers (N, 256) around each of a dtype's exponents, some of them 0, infinite or NaN; and rows that
    hold nothing else."""
    generator = torch.Generator().manual_seed(0)
    finite = torch.finfo(dtype)
    exponents = torch.arange(math.log2(finite.smallest_normal) - 7, math.log2(finite.max) + 1).repeat_interleave(3)
    found = torch.randn(len(exponents), 256, generator=generator).double() * torch.exp2(exponents.double())[:, None]
    found[:, 0::7] *= torch.rand(found[:, 0::7].shape, generator=generator) ** 8  # to the format's small numbers
    found = found.clamp(finite.min, finite.max)
    found[0::3, 5], found[1::3, 100], found[1::3, 17], found[2::3, 200] = torch.inf, -torch.inf, torch.nan, -0.0
    alone = torch.zeros(6, 256, dtype=torch.float64)
    alone[1, 3], alone[2, 4], alone[3], alone[4], alone[5, ::2] = torch.inf, torch.nan, torch.nan, -torch.inf, -0.0
    return torch.cat((found, alone)).to(dtype)


def by_largest(widest: torch.Tensor, largest: float) -> torch.Tensor:
    inverse = torch.tensor(1 / largest)
    near = widest * inverse
    return fused(fused(-near, torch.tensor(largest), widest), inverse, near)


def scaled(rows: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels/packed_rows.py's scaled_rows."""
    size = rows.float().abs()
    widest, largest = torch.where(size < torch.inf, size, 0.0).amax(-1), KV_LARGEST[kind]
    scale = by_largest(widest, largest).clamp_min(2.0**-126)
    if rows.dtype == torch.bfloat16:
        limit = widest.clamp_min(largest * 2.0**-126)
        power = torch.where(scale < 2.0**-32, 2.0**96, 1.0)
        divisor = scale * power
    else:
        limit = widest.clamp_min(2.0**-24)
        power, divisor = torch.ones(()), by_largest(limit, largest)
    limit, power = (held.to(rows.dtype) for held in (limit, power))
    near = torch.where(rows.abs() > limit[:, None], rows.sign() * limit[:, None], rows)  # NaN stays
    near = (near * power[..., None]).float()
    inverse = 1.0 / divisor[:, None]
    about = near * inverse
    return fused(-fused(about, divisor[:, None], -near), inverse, about), scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KV_LARGEST)
def test_rows_by_their_largest_number_store_what_division_does(kind: str, dtype: torch.dtype) -> None:
    sizes = every(dtype).abs()
    sizes = sizes[sizes < torch.inf]
    exact = sizes / torch.full_like(sizes, KV_LARGEST[kind])
    assert torch.equal(by_largest(sizes, KV_LARGEST[kind]).clamp_min(2.0**-126), exact.clamp_min(2.0**-126))
    rows = rows_of_every_size(dtype)
    ours, scale = scaled(rows, kind)
    assert torch.equal(scale, writing.token_scale(rows.float(), kind))
    assert torch.equal(writing.eight_bits(ours, kind), writing.eight_bits(rows.float() / scale[:, None], kind))


def test_ptx_is_for_what_is_quantised() -> None:
    kernel = CORES["write_pages"]

    def limits(unpack: Any, **fields: Any) -> list[tuple[str, str]]:
        problem = Problem(**PAGES | {"kv_format": "e4m3", "kv_scales": "token"} | fields)
        return [limit[:2] for limit in kernel.limits(problem, Lowering(unpack=unpack), Launch())]

    assert limits("ptx") == limits("bytes") == limits("ptx", kv_format="int4") == []
    assert limits("words") == limits("ptx", kv_format="as_q", kv_scales="none") == [("unpack", "bytes")]


def on_a_chip(device: Device) -> None:
    if device.name == "cpu":
        pytest.skip("Triton's interpreter knows no PTX")
    if device.name == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("conversions to float8 are there from sm_89 on")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("stored", FORMATS, ids="-".join)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_formats_and_scales_by_ptx(device: Device, op: str, stored: tuple[str, str], dtype: str) -> None:
    on_a_chip(device)
    whole = {"rotary": "neox", "rotary_dim": 64, "head_dim": 64}  # rotated whole: in halves
    for seed, rotary in enumerate(({}, ROTARY[0], whole)):
        p = Problem(**OPS[op] | rotary | {"dtype": dtype, "kv_format": stored[0], "kv_scales": stored[1]})
        call = random_writing(p, seed, device=device.name)
        run_core(device, call, {"unpack": "ptx"}, {"block_m": 16})
        assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}


@pytest.mark.parametrize("kind", KV_FORMAT.values())
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_number_by_every_size_of_scale(device: Device, kind: str, dtype: str) -> None:
    """Against the kernel that divides and counts by itself, byte by byte: 255 heads, each with a scale of its own."""
    on_a_chip(device)
    numbers = every({"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
    scales = scales_of_every_size().view(255, 4)
    sizes = {"heads_q": 255, "heads_k": 255, "head_dim": 256, "seq_q": 256, "seq_k": 256, "dtype": dtype}
    p = Problem(**PAGES | sizes | {"kv_format": kind, "kv_scales": "head"})
    for column in range(4):
        found = []
        for unpack in ("bytes", "ptx"):
            call = random_writing(p, device=device.name)
            rows = numbers.to(call.q.dtype).view(1, 1, 256, 256)
            call.q, call.new_v = (rows.expand(1, 255, -1, -1).to(device.name) for _ in range(2))
            call.k_scale = call.v_scale = scales[:, column].view(1, 255).to(device.name)
            call.slots = torch.arange(256, device=device.name)
            run_core(device, call, {"unpack": unpack}, {"block_m": 16})
            found.append(call.k.clone())
        differing = (found[0] != found[1]).sum().item()
        assert differing == 0, f"{differing} of {found[0].numel()} bytes differ"


@pytest.mark.parametrize("kind", KV_FORMAT.values())
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_of_every_size_by_ptx(device: Device, kind: str, dtype: str) -> None:
    """A scale for each token, against the kernel that divides and counts by itself: bytes and scales."""
    on_a_chip(device)
    rows = rows_of_every_size({"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
    sizes = {"heads_q": 1, "heads_k": 1, "head_dim": 256, "head_dim_v": 256, "dtype": dtype}
    p = Problem(**PAGES | sizes | {"seq_q": len(rows), "seq_k": 512, "kv_format": kind, "kv_scales": "token"})
    found = []
    for unpack in ("bytes", "ptx"):
        call = random_writing(p, device=device.name)
        call.q = call.new_v = rows.to(device.name)[None, None]
        call.slots = torch.arange(len(rows), device=device.name)
        run_core(device, call, {"unpack": unpack}, {"block_m": 16})
        assert call.k_scale is not None
        found.append((call.k.clone(), call.v.clone(), call.k_scale.clone()))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
