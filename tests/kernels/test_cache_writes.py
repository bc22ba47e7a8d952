"""write_cache against the definition, and the reference path against the same: equal numbers, and nothing else touched.

testing/random_writing.py has the definition: nearest numbers by looking among all of a format, rows one by one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from support import Device, run_core

from portattn.reference import writing
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import INTEGERS
from portattn.schema.tensors import KV_FORMAT, KV_LARGEST
from portattn.testing.random_writing import BEFORE, nearest, random_writing
from portattn.testing.verdict import judge

NEW: dict[str, Any] = {"heads_q": 3, "heads_k": 3, "head_dim": 24, "dtype": "bf16"}
APPEND: dict[str, Any] = NEW | {"op": "append_kv", "batch": 4, "seq_q": 5, "seq_k": 20, "seqlens_k": True}
PAGES: dict[str, Any] = NEW | {"op": "write_pages", "batch": 1, "seq_q": 21, "seq_k": 40, "page_size": 8}
OPS = {"append": APPEND, "pages": PAGES}
STORED = [("as_q", "none"), *((kind, s) for kind in (*KV_FORMAT.values(), "int4") for s in ("none", "head", "token")
          if kind not in INTEGERS or s != "none")]  # fmt: skip
ROTARY = [{"rotary": "neox", "rotary_dim": 24}, {"rotary": "interleaved", "rotary_dim": 24},
          {"rotary": "neox", "rotary_dim": 6}, {"rotary": "interleaved", "rotary_dim": 2}]  # fmt: skip


def check(device: Device, seed: int = 0, spare: bool = False, **fields: Any) -> None:
    """The kernel and the reference on calls of their own."""
    p = Problem(**fields)
    for run in (lambda call: run_core(device, call, launch={"block_m": 16}), writing.run):
        call = random_writing(p, seed, device=device.name, spare=spare)
        run(call)
        facts = judge(call, call.new_out(), None)
        assert facts == {"error": 0.0, "budget": 0.0, "wrong": 0}, run


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
    writing._put_all(cache, torch.zeros(1, 0, 2, 4), none, none, none.bool())
    assert bool((cache == BEFORE).all())


@pytest.mark.parametrize("op", OPS)
def test_without_tokens_nothing_is_written(device: Device, op: str) -> None:
    for run in (lambda call: run_core(device, call), writing.run):
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
    for run in (lambda call: run_core(device, call, launch={"block_m": 64}), writing.run):
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


def test_limits_are_those_that_engines_saturate_at() -> None:
    assert KV_LARGEST == {"e4m3": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0, "int8": 127.0}


@pytest.mark.parametrize("cache", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("new", ["fp16", "bf16", "fp32"])
def test_sixteen_and_thirty_two_bits_are_converted(device: Device, new: str, cache: torch.dtype) -> None:
    p = Problem(**PAGES | {"dtype": new})
    for run in (lambda call: run_core(device, call), writing.run):
        call = random_writing(p, 5, device=device.name)
        call.k, call.v = (torch.full_like(tensor, BEFORE, dtype=cache) for tensor in (call.k, call.v))
        run(call)
        assert judge(call, call.new_out(), None) == {"error": 0.0, "budget": 0.0, "wrong": 0}


@pytest.mark.parametrize("op", OPS)
def test_memory_around_the_cache_is_not_touched(device: Device, op: str) -> None:
    """The memory before the first row, between rows and behind the last one."""
    p = Problem(**OPS[op] | {"kv_format": "e4m3", "kv_scales": "token"})
    for run in (lambda call: run_core(device, call), writing.run):
        call = random_writing(p, 6, device=device.name, spare=True)
        run(call)
        for view in (call.k, call.v):
            memory = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
            outside = torch.ones_like(memory, dtype=torch.bool)
            outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            assert bool(outside.any())
            assert bool((memory[outside] == BEFORE).all())
