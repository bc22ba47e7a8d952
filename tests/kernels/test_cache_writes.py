"""write_cache against the definition, and the reference path against the same: equal numbers, and nothing else touched.
testing/random_writing.py has the definition: nearest numbers by looking among all of a format, rows one by one."""

import math
from typing import Any

import msgspec
import pytest
import torch
from support import Device, run_core

from portattn.planning.kernel_specs import CORES
from portattn.reference import write
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import FORMATS, ONE_SCALE
from portattn.schema.tensors import KV_DTYPE, KV_FORMAT
from portattn.testing.random_writing import BEFORE, nearest, random_writing
from portattn.testing.verdict import judge

NEW: dict[str, Any] = {"heads_q": 3, "heads_k": 3, "head_dim": 24, "dtype": "bf16"}
APPEND: dict[str, Any] = NEW | {"op": "append_kv", "batch": 4, "seq_q": 5, "seq_k": 20, "seqlens_k": True}
PAGES: dict[str, Any] = NEW | {"op": "write_pages", "batch": 1, "seq_q": 21, "seq_k": 40, "page_size": 8}
OPS = {"append": APPEND, "pages": PAGES}
STORED = [("as_q", "none"), *((kind, scales) for kind in ONE_SCALE if "append_kv" in FORMATS[kind].ops
                              for scales in FORMATS[kind].scales)]  # fmt: skip
ROTARY = [{"rotary": "neox", "rotary_dim": 24}, {"rotary": "interleaved", "rotary_dim": 24},
          {"rotary": "neox", "rotary_dim": 6}, {"rotary": "interleaved", "rotary_dim": 2}]  # fmt: skip


def check(device: Device, seed: int = 0, spare: bool = False, **fields: Any) -> None:
    p = Problem(**fields)
    for run in (lambda call: run_core(device, call, launch={"block_m": 16}), write.run):
        call = random_writing(p, seed, device=device.name, spare=spare)
        run(call)
        assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}, run


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("stored", STORED, ids="-".join)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_formats_and_scales(device: Device, op: str, stored: tuple[str, str], dtype: str) -> None:
    check(device, **OPS[op] | {"dtype": dtype, "kv_format": stored[0], "kv_scales": stored[1]})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rotary", ROTARY, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("stored", [("as_q", "none"), ("e4m3", "token"), ("int4", "token")], ids="-".join)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rotation(device: Device, op: str, rotary: dict[str, Any], stored: tuple[str, str], dtype: str) -> None:
    check(device, 1, **OPS[op] | rotary | {"dtype": dtype, "kv_format": stored[0], "kv_scales": stored[1]})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fields", [
    {"head_dim": 40, "head_dim_v": 16}, {"head_dim": 16, "head_dim_v": 33}, {"heads_q": 1, "heads_k": 1},
    {"layout": "bshd"}, {"page_layout": "hpd"}, {"page_size": 1}, {"page_size": 5}, {"seq_q": 1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("spare", [False, True])
def test_shapes_and_strides(device: Device, op: str, fields: dict[str, Any], spare: bool) -> None:
    if ("page_size" in fields or "page_layout" in fields) and op == "append":
        fields = {"seq_q": 7, "batch": 1}
    if "layout" in fields and op == "pages":
        fields = {"seq_q": 40}
    stored = {"kv_format": "int8", "kv_scales": "token"} if spare else {}
    check(device, 2, spare, **OPS[op] | fields | stored)


@pytest.mark.parametrize("op", OPS)
def test_a_persistent_grid_writes_the_same(device: Device, op: str) -> None:
    call = random_writing(Problem(**OPS[op] | {"seq_q": 17, "kv_format": "e5m2"}), 3, device=device.name)
    run_core(device, call, {"grid": "persistent"}, {"block_m": 4})
    assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}


@pytest.mark.parametrize("op", OPS)
def test_tiles_as_wide_as_the_head_write_the_same(device: Device, op: str) -> None:
    """What compilers need that read a tile whole and mask it then; here of a width that every compiler takes."""
    fields = {"head_dim": 32, "head_dim_v": 16, "kv_format": "e4m3", "kv_scales": "token"}
    call = random_writing(Problem(**OPS[op] | fields), 4, device=device.name)
    run_core(device, call, {"reads": "inside"}, {"block_m": 16})
    assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}


def test_the_reference_on_a_device_puts_no_rows_where_there_are_none() -> None:
    """On an accelerator it writes all rows, and those without a place where another goes: of none there is no first."""
    cache, none = torch.full((3, 8, 2, 4), BEFORE), torch.zeros(1, 0, dtype=torch.int64)
    write._put_all(cache, torch.zeros(1, 0, 2, 4), none, none, none.bool())
    assert bool((cache == BEFORE).all())


@pytest.mark.parametrize("op", OPS)
def test_without_tokens_nothing_is_written(device: Device, op: str) -> None:
    for run in (lambda call: run_core(device, call), write.run):
        call = random_writing(Problem(**OPS[op]), device=device.name)
        call.q, call.new_v = call.q[:, :, :0], call.new_v[:, :, :0]
        call.slots = None if call.slots is None else call.slots[:0]
        call.problem = msgspec.structs.replace(call.problem, seq_q=0)
        run(call)
        assert bool((call.k == BEFORE).all())
        assert bool((call.v == BEFORE).all())


@pytest.mark.parametrize("kind", KV_FORMAT.values())
def test_every_number_of_a_format_and_what_lies_between(device: Device, kind: str) -> None:
    """All float16 numbers: each is nearest to one of a format's, or halfway between two."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    scales = "head" if kind == "int8" else "none"
    sizes = {"dtype": "fp16", "head_dim": 256, "seq_q": 86, "seq_k": 88}
    p = Problem(**PAGES | sizes | {"kv_format": kind, "kv_scales": scales})
    numbers = torch.zeros(86 * 3 * 256, dtype=torch.float16)
    numbers[: len(every)] = every
    for run in (lambda call: run_core(device, call, launch={"block_m": 64}), write.run):
        call = random_writing(p, device=device.name)
        call.q = numbers.view(86, 3, 256).transpose(0, 1)[None].to(device.name)
        call.slots = torch.arange(86, device=device.name)
        if kind == "int8":
            call.k_scale = torch.full((1, 3), 0.125, device=device.name)
        run(call)
        ours = call.k.transpose(1, 2).reshape(88, 3, 256)[:86].cpu()
        given = numbers.float() / (0.125 if kind == "int8" else 1.0)
        assert torch.equal(ours, nearest(given, kind).view(86, 3, 256))


def test_the_definition_knows_torch_s_own_numbers() -> None:
    """Of numbers that a format holds, and of those between two, torch's conversion gives the same."""
    numbers = torch.linspace(-3.0, 3.0, 20001)
    for dtype, kind in KV_FORMAT.items():
        if kind != "int8":
            assert torch.equal(nearest(numbers, kind), numbers.to(dtype).view(torch.int8)), kind


@pytest.mark.parametrize("cache", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("new", ["fp16", "bf16", "fp32"])
def test_sixteen_and_thirty_two_bits_are_converted(device: Device, new: str, cache: torch.dtype) -> None:
    p = Problem(**PAGES | {"dtype": new})
    for run in (lambda call: run_core(device, call), write.run):
        call = random_writing(p, 5, device=device.name)
        call.k, call.v = (torch.full_like(tensor, BEFORE, dtype=cache) for tensor in (call.k, call.v))
        run(call)
        assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}


@pytest.mark.parametrize("op", OPS)
def test_memory_around_the_cache_is_not_touched(device: Device, op: str) -> None:
    """The memory before the first row, between rows and behind the last one."""
    p = Problem(**OPS[op] | {"kv_format": "e4m3", "kv_scales": "token"})
    for run in (lambda call: run_core(device, call), write.run):
        call = random_writing(p, 6, device=device.name, spare=True)
        run(call)
        for view in (call.k, call.v):
            memory = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
            outside = torch.ones_like(memory, dtype=torch.bool)
            outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            assert bool(outside.any())
            assert bool((memory[outside] == BEFORE).all())


BEYOND = 2.0**18  # what kernels/write.py holds quotients to before they are corrected


def every(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def scales_of_every_size() -> torch.Tensor:
    """Positive float32 scales, down to the smallest: of each exponent the first, the last and two at random."""
    fraction = torch.randint(0, 2**23, (255, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    fraction[:, 0], fraction[:, 1] = 0, 2**23 - 1
    fraction[0, 0] = 1
    return ((torch.arange(255, dtype=torch.int32) << 23)[:, None] | fraction).view(torch.float32).flatten()


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a·b + c rounded once to float32, as a fused multiply-add has it. float64 holds the product. What it rounds off
    the sum is kept in the sum's last bit ("rounding to odd"), so that the second rounding goes where one alone
    would."""
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
        for kind in KV_DTYPE:
            assert torch.equal(write.eight_bits(ours, kind), write.eight_bits(exact, kind)), kind
        inside = (exact.abs() > 2.0**-20) & (exact.abs() < BEYOND / 2)
        assert torch.equal(ours[inside], exact[inside])


def test_a_remainder_that_is_added_loses_the_sign_of_zero() -> None:
    numbers, scale = torch.tensor([-0.0, 0.0, -1e-30, 3.0]), torch.tensor(0.37)
    wrong = write.eight_bits(quotient(numbers, scale, turned=False), "e4m3")
    right = write.eight_bits(numbers / scale, "e4m3")
    assert (wrong != right).tolist() == [True, False, False, False]
    assert torch.equal(write.eight_bits(quotient(numbers, scale), "e4m3"), right)


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
    """Return kernels/quantize.py's divide_rows."""
    size = rows.float().abs()
    widest, largest = torch.where(size < torch.inf, size, 0.0).amax(-1), FORMATS[kind].largest
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
@pytest.mark.parametrize("kind", KV_DTYPE)
def test_rows_by_their_largest_number_store_what_division_does(kind: str, dtype: torch.dtype) -> None:
    sizes = every(dtype).abs()
    sizes = sizes[sizes < torch.inf]
    exact = sizes / torch.full_like(sizes, FORMATS[kind].largest)
    assert torch.equal(by_largest(sizes, FORMATS[kind].largest).clamp_min(2.0**-126), exact.clamp_min(2.0**-126))
    rows = rows_of_every_size(dtype)
    ours, scale = scaled(rows, kind)
    assert torch.equal(scale, write.token_scale(rows.float(), kind))
    assert torch.equal(write.eight_bits(ours, kind), write.eight_bits(rows.float() / scale[:, None], kind))


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
@pytest.mark.parametrize("stored", STORED[1:], ids="-".join)
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
        found.append((call.k.clone(), call.v.clone(), call.k_scale.clone()))
    torch.testing.assert_close(*found, rtol=0, atol=0)
