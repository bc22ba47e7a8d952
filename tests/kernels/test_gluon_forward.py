"""The scheduled forward of sm_90: when it is planned, that it compiles clean, and its numbers on such a chip."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import with_lengths
from support import Device, random_call

import portattn
from portattn import Problem, Target
from portattn.backends.cuda.forward import ForwardVariant
from portattn.call import Call
from portattn.config import Settings
from portattn.dispatch import detect_target, run_variant
from portattn.planner import plan
from portattn.reference.check import judge, nan_filled_memory

SM_90 = Target.parse("cuda:sm_90", "triton==3.6.0")
VARIANT = ForwardVariant()
BASE = Problem(
    batch=2, heads_q=4, heads_k=2, seq_q=333, seq_k=333, head_dim=128, dtype="bf16", return_lse=True,
)  # fmt: skip
PACKED = Problem(
    op="varlen_attention", batch=4, heads_q=4, heads_k=2, seq_q=300, seq_k=300, total_q=700, total_k=700, head_dim=128,
    dtype="bf16", return_lse=True,
)  # fmt: skip
CAUSAL = ("none", "bottom_right", "top_left")


def problem(base: Problem = BASE, **fields: Any) -> Problem:
    return msgspec.structs.replace(base, **fields)


@pytest.fixture
def chip(device: Device) -> Device:
    """A device that the kernel is for."""
    if device.path == "interpreter":
        pytest.skip("needs an sm_90")
    target, _ = detect_target(torch.device(device.name).type, None)
    no = VARIANT.rejects(BASE, target)
    if no is not None:
        pytest.skip(no.reason)
    return device


def assert_right(call: Call) -> None:
    with nan_filled_memory():
        _, out, lse = run_variant(VARIANT, call)
    facts = judge(call, out, lse)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
    assert facts.get("lse_error", 0.0) <= facts.get("lse_budget", 0.0) + 1e-30


SIZES: dict[str, dict[str, Any]] = {
    "square": {},
    "one row": {"seq_q": 1},
    "one key": {"seq_k": 1},
    "few keys": {"seq_q": 200, "seq_k": 70},
    "more queries": {"seq_q": 700, "seq_k": 130},
    "more keys": {"seq_q": 100, "seq_k": 1111},
    "whole tiles": {"seq_q": 384, "seq_k": 512},
    "no lse": {"return_lse": False},
    "bshd": {"layout": "bshd", "batch": 3},
    "one key head": {"heads_k": 1},
    "many tiles": {"batch": 3, "heads_q": 40, "heads_k": 8, "seq_q": 769, "seq_k": 769},
    "fp16": {"dtype": "fp16"},
    "lengths": {"seqlens_q": True, "seqlens_k": True, "batch": 5},
    "key lengths": {"seqlens_k": True, "batch": 5},
    "query lengths": {"seqlens_q": True, "batch": 5},
    "softcap": {"softcap": True},
    "sinks": {"sinks": True},
    "everything": {"softcap": True, "sinks": True, "seqlens_k": True, "seqlens_q": True, "window_left": 40, "batch": 4},
}
FEW_TILES: dict[str, dict[str, Any]] = {
    "whole": {"seq_q": 128, "seq_k": 4096},
    "ragged": {"seq_q": 77, "seq_k": 3001},
    "more splits than a row's tiles": {"seq_q": 400, "seq_k": 700},
    "window": {"seq_q": 100, "seq_k": 3000, "window_left": 700},
    "lengths": {"seq_q": 100, "seq_k": 3000, "batch": 3, "seqlens_q": True, "seqlens_k": True},
    "softcap": {"seq_q": 100, "seq_k": 3000, "softcap": True, "return_lse": False},
}
WINDOWS = [(0, -1), (100, -1), (-1, 30), (17, 5), (300, 200)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("name", SIZES)
def test_numbers(chip: Device, name: str, causal: str, head_dim: int) -> None:
    p = problem(causal=causal, head_dim=head_dim, head_dim_v=head_dim, **SIZES[name])
    for seed in range(2):
        assert_right(random_call(p, seed, device=chip.name, extremes=True))


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


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 136, 192])
def test_heads_between_the_kernel_s_widths(chip: Device, head_dim: int) -> None:
    for causal in CAUSAL:
        assert_right(random_call(problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal), 5, device=chip.name))
    narrow = problem(head_dim=head_dim, head_dim_v=head_dim - head_dim % 16 or 8)
    assert_right(random_call(narrow, 6, device=chip.name))


ROWS: dict[str, tuple[tuple[int, int], ...]] = {
    "random": ((100, 100), (1, 300), (299, 257), (300, 43)),
    "ends of tiles": ((128, 128), (64, 64), (192, 192), (127, 129)),
    "none": ((3, 0), (0, 5), (0, 0), (200, 20)),
    "one": ((512, 512),),
    "nothing at all": ((0, 0), (0, 0)),
    "many": tuple((1 + 7 * i % 50, 1 + 11 * i % 90) for i in range(100)),
}


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


def test_it_is_planned_where_it_can_run_and_only_there() -> None:
    assert plan(BASE, SM_90).path == "gluon_forward"
    assert plan(PACKED, SM_90).path == "gluon_forward"
    assert plan(BASE, SM_90, settings=Settings(backend="triton")).path == "triton"
    for target in ("cuda:sm_80", "cuda:sm_100", "rocm:gfx942"):
        made = plan(BASE, Target.parse(target, "triton==3.6.0"))
        assert (made.path, [n for n in made.notes if "gluon" in n]) == ("triton", [])
