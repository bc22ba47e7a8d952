"""The scheduled forward of sm_90 on such a chip: its numbers, and what it must not see or touch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gluon_forward_cases import BASE, CAUSAL, FEW_TILES, PACKED, ROWS, SIZES, UNSEEN, VARIANT, WINDOWS, problem
from kernel_cases import with_lengths
from support import Device, random_call
from variantchip import assert_variant_right, device_for

import portattn
from portattn.launch.variant import run_variant
from portattn.schema.call import TENSORS, Call
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import nan_filled_memory, on_cpu


@pytest.fixture
def chip(device: Device) -> Device:
    """A device that the kernel is for."""
    return device_for(VARIANT, BASE, device)


def assert_right(call: Call) -> None:
    assert_variant_right(VARIANT, call)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", SIZES)
def test_numbers(chip: Device, name: str, causal: str, head_dim: int) -> None:
    p = problem(causal=causal, head_dim=head_dim, head_dim_v=head_dim, **SIZES[name])
    for seed in range(2):
        assert_right(random_call(p, seed, device=chip.name, extremes=True))


@pytest.mark.parametrize("fields", [{}, {"seqlens_k": True}, {"seq_q": 1, "seq_k": 3000}], ids=str)
def test_the_largest_sinks(chip: Device, fields: dict[str, Any]) -> None:
    """One takes all the weight or none, and is as it was given where it is a row's LSE."""
    call = random_call(problem(sinks=True, **fields), 4, device=chip.name, extremes=True)
    most = torch.finfo(torch.float32).max
    call.sinks = torch.tensor([3e38, -3e38, most, -most], device=chip.name)
    assert_right(call)
    with nan_filled_memory():
        _, _, lse = run_variant(VARIANT, call)
    assert lse is not None
    torch.testing.assert_close(lse.cpu().double(), oracle(on_cpu(call))[1], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(chip: Device, window: tuple[int, int], causal: str, head_dim: int) -> None:
    left, right = window
    if causal != "none":
        right = -1
    for sizes in (
        {},
        {"seq_q": 500, "seq_k": 260},
        {"seq_q": 130, "seq_k": 900},
        {"seqlens_q": True, "seqlens_k": True},
    ):
        p = problem(
            causal=causal, head_dim=head_dim, head_dim_v=head_dim, window_left=left, window_right=right, **sizes
        )
        assert_right(random_call(p, 3, device=chip.name, extremes=True))


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_both_ends_of_one_tile(chip: Device, head_dim: int, causal: str) -> None:
    """NaN before the window and behind the keys of one tile, which warp groups clear at the same time."""
    p = problem(
        batch=32, heads_q=8, heads_k=8, seq_q=9, seq_k=60, head_dim=head_dim, head_dim_v=head_dim, causal=causal,
        window_left=17, seqlens_q=True, seqlens_k=True,
    )  # fmt: skip
    for seed in range(3):
        call = random_call(p, seed, device=chip.name, poison="v")
        for _ in range(3):
            assert_right(call)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 136, 192])
def test_heads_between_the_kernel_s_widths(chip: Device, head_dim: int) -> None:
    for causal in CAUSAL:
        assert_right(random_call(problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal), 5, device=chip.name))
    narrow = problem(head_dim=head_dim, head_dim_v=head_dim - head_dim % 16 or 8)
    assert_right(random_call(narrow, 6, device=chip.name))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", ROWS)
def test_packed(chip: Device, name: str, causal: str, head_dim: int) -> None:
    queries, keys = zip(*ROWS[name], strict=True)
    for fields in ({}, {"sinks": True, "softcap": True}, {"window_left": 30}):
        p = problem(
            PACKED, batch=len(queries), seq_q=max(1, *queries), seq_k=max(1, *keys), total_q=sum(queries) + 3,
            total_k=sum(keys) + 3, causal=causal, head_dim=head_dim, head_dim_v=head_dim, **fields,
        )  # fmt: skip
        assert_right(with_lengths(random_call(p, 7, device=chip.name), keys, queries))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", FEW_TILES)
def test_keys_of_few_tiles_are_split(chip: Device, name: str, causal: str, head_dim: int) -> None:
    fields = {"batch": 1, "heads_q": 2, "heads_k": 1} | FEW_TILES[name]
    for seed in range(2):
        p = problem(causal=causal, head_dim=head_dim, head_dim_v=head_dim, **fields)
        assert_right(random_call(p, seed, device=chip.name, extremes=True))


def test_a_scale_of_nothing(chip: Device) -> None:
    assert_right(random_call(problem(causal="bottom_right"), 2, device=chip.name, scale=0.0))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("many", [False, True], ids=["split", "whole"])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_row_sees_may_be_anything(chip: Device, name: str, many: bool, head_dim: int) -> None:
    fields, keys = UNSEEN[name]
    heads = {"heads_q": 64, "heads_k": 32} if many else {"batch": 1, "heads_q": 2, "heads_k": 1}
    p = problem(head_dim=head_dim, head_dim_v=head_dim, **fields, **heads)
    call = random_call(p, 3, device=chip.name)
    expected = run_variant(VARIANT, call)[1]
    for value in (float("nan"), float("inf")):
        call.k[:, :, keys] = call.v[:, :, keys] = value
        assert torch.equal(run_variant(VARIANT, call)[1], expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
def test_packed_neighbours_may_hold_anything(chip: Device, causal: str, head_dim: int) -> None:
    queries, keys = (100, 1, 130, 69), (70, 33, 200, 97)
    for fields in ({}, {"window_left": 30}):
        p = problem(
            PACKED, **fields, causal=causal, head_dim=head_dim, head_dim_v=head_dim, total_q=303, total_k=403,
            seq_q=130, seq_k=200,
        )  # fmt: skip
        call = with_lengths(random_call(p, 7, device=chip.name), keys, queries)
        expected = run_variant(VARIANT, call)[1]
        for of in (0, 2):  # the others must not notice
            spoilt = dataclasses.replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v.clone())
            rows = slice(sum(queries[:of]), sum(queries[: of + 1]))
            some = slice(sum(keys[:of]), sum(keys[: of + 1]))
            spoilt.q[:, :, rows] = spoilt.k[:, :, some] = spoilt.v[:, :, some] = float("nan")
            out = run_variant(VARIANT, spoilt)[1]
            others = torch.ones(p.query_rows[1], dtype=torch.bool, device=out.device)
            others[rows] = False
            assert torch.equal(out[:, :, others], expected[:, :, others])


@pytest.mark.parametrize("softcap", [30.0, 64.0, 256.0, 3e4, 1e8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_caps_of_any_size(chip: Device, head_dim: int, softcap: float) -> None:
    """A tanh's absolute error times the cap may be more than a score has."""
    for causal in ("none", "bottom_right"):
        p = problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal, softcap=True)
        call = random_call(p, 4, device=chip.name)
        call.softcap = softcap
        assert_right(call)
        if softcap < 1e3:  # scores past the series, and past where the cap is reached
            call.scale = softcap / head_dim**0.5
            assert_right(call)


LOWEST, HIGHEST = -(2**31), 2**31 - 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
def test_wild_beginnings_and_lengths_touch_nothing_outside(chip: Device, causal: str, head_dim: int) -> None:
    """They are clamped; what is not of a sequence's own rows stays as it was, and other sequences are right."""
    fields: dict[str, Any] = {"causal": causal, "head_dim": head_dim, "head_dim_v": head_dim}
    packed = random_call(problem(PACKED, **fields, window_left=50), 3, device=chip.name)
    for wild in ((LOWEST, HIGHEST, -1, 600, 2**30), (HIGHEST, 0, 0, LOWEST, 3), (700, 699, 5, 700, 0), (0, 0, 0, 0, 0)):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            call = dataclasses.replace(packed)
            setattr(call, name, torch.tensor(wild, dtype=torch.int32, device=chip.name))
            assert fenced(call)
    p = problem(**fields, batch=5, seqlens_q=True, seqlens_k=True)
    padded = random_call(p, 3, device=chip.name)
    exact = run_variant(VARIANT, padded)[1]
    for name in ("seqlens_q", "seqlens_k"):
        call = dataclasses.replace(padded)
        changed = getattr(padded, name).clone()
        changed[1::2] = torch.tensor([LOWEST, HIGHEST], dtype=torch.int32, device=chip.name)
        setattr(call, name, changed)
        assert fenced(call)
        assert torch.equal(run_variant(VARIANT, call)[1][::2], exact[::2])


def fenced(call: Call) -> bool:
    """Whether a run writes nothing before and after the memory of out and LSE."""
    fence, results = 1 << 16, []
    tensors: dict[str, Any] = {name: getattr(call, name) for name in TENSORS}
    for name, like in (("out", call.new_out()), ("lse", call.new_lse())):
        memory = torch.full((like.numel() + 2 * fence,), 7.0, dtype=like.dtype, device=like.device)
        tensors[name] = torch.as_strided(memory, like.shape, like.stride(), fence)
        results.append(memory)
    VARIANT.launcher(call)(tensors)
    torch.cuda.synchronize()
    return all(bool((m[:fence] == 7.0).all() and (m[-fence:] == 7.0).all()) for m in results)


def test_launches_that_wait_for_another_stream_run_beside_its_next_ones(chip: Device) -> None:
    """No two of them may draw from one counter (tests/backends/cuda/test_counters.py)."""
    call = random_call(
        problem(head_dim=64, head_dim_v=64, heads_q=40, heads_k=8, seq_q=512, seq_k=512), 5, device=chip.name
    )
    tensors: dict[str, Any] = {name: getattr(call, name) for name in TENSORS}
    launch, expected, _ = run_variant(VARIANT, call)
    slow, fast, gate = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    small = random_call(problem(batch=1, heads_q=1, heads_k=1, seq_q=1, seq_k=1, return_lse=False), 5, device=chip.name)
    small_tensors = {name: getattr(small, name) for name in TENSORS} | {"out": small.new_out(), "lse": None}
    other = VARIANT.launcher(small)
    results = [call.new_out() for _ in range(8)]
    torch.cuda.synchronize()
    with torch.cuda.stream(fast):
        for _ in range(500):
            other(small_tensors)
        gate.record()
    with torch.cuda.stream(slow):
        slow.wait_event(gate)
        for out in results:
            launch(tensors | {"out": out, "lse": call.new_lse()})
    with torch.cuda.stream(fast):
        for _ in range(500):
            other(small_tensors)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in results)


def test_strides(chip: Device) -> None:
    call = random_call(problem(batch=1), 8, device=chip.name)
    expected = run_variant(VARIANT, call)[1]
    for name in ("q", "k", "v"):
        setattr(call, name, getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(run_variant(VARIANT, call)[1], expected)
    broadcast = random_call(problem(), 9, device=chip.name)
    broadcast.k, broadcast.v = (t[:1].expand(t.shape) for t in (broadcast.k, broadcast.v))
    assert_right(broadcast)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_are_bit_equal(chip: Device, head_dim: int, causal: str, packed: bool) -> None:
    fields: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim, "causal": causal, "return_lse": False}
    base = PACKED if packed else BASE
    sizes = {"heads_q": 16, "heads_k": 4, "batch": 4}
    sizes |= (
        {"total_q": 9000, "total_k": 9000, "seq_q": 4000, "seq_k": 4000} if packed else {"seq_q": 2048, "seq_k": 2048}
    )
    call = random_call(problem(base, **fields, **sizes), 7, device=chip.name)
    _, first, _ = run_variant(VARIANT, call)
    different = 0
    for _ in range(300):
        _, out, _ = run_variant(VARIANT, call)
        different += int(not torch.equal(out.nan_to_num(5.0), first.nan_to_num(5.0)))
    assert different == 0


def test_the_public_call_takes_it_keeps_it_and_replays_it(chip: Device) -> None:
    call = random_call(problem(return_lse=False, causal="bottom_right"), 5, device=chip.name)
    first = portattn.attention(call.q, call.k, call.v, causal=True)
    assert portattn.last_plan().path == "gluon_forward"
    for _ in range(3):
        assert torch.equal(first, portattn.attention(call.q, call.k, call.v, causal=True))
    core = portattn.attention(call.q, call.k, call.v, causal=True, backend="triton")
    torch.testing.assert_close(first, core, atol=2e-2, rtol=2e-2)
    swapped = [t.transpose(1, 2).contiguous() for t in (call.q, call.k, call.v)]
    for _ in range(2):
        again = portattn.attention(*swapped, causal=True, layout="bshd")
        assert torch.equal(again.transpose(1, 2), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = portattn.attention(call.q, call.k, call.v, causal=True)
    call.q.neg_()
    streams = [torch.cuda.Stream() for _ in range(3)]
    expected = portattn.attention(call.q, call.k, call.v, causal=True)
    torch.cuda.synchronize()
    found = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            found.append(portattn.attention(call.q, call.k, call.v, causal=True))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)
    assert torch.equal(held, expected)


def test_packed_rows_by_the_public_call(chip: Device) -> None:
    lengths = (100, 1, 299, 300)
    p = problem(PACKED, causal="bottom_right", return_lse=True)
    call = with_lengths(random_call(p, 7, device=chip.name), lengths, lengths)
    rows = [t[0].transpose(0, 1) for t in (call.q, call.k, call.v)]
    arguments = (*rows, call.cu_seqlens_q, call.cu_seqlens_k, 300, 300)
    first = portattn.varlen_attention(*arguments, causal=True, return_lse=True)
    assert portattn.last_plan().path == "gluon_forward"
    for _ in range(2):
        again = portattn.varlen_attention(*arguments, causal=True, return_lse=True)
        assert torch.equal(first[0].nan_to_num(5.0), again[0].nan_to_num(5.0))
        assert torch.equal(first[1], again[1])
