"""merge = "last": the last program of a row tile merges, whichever that is, and leaves the tile's counter at 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import opcalls
import pytest
import torch
from kernel_cases import OPS, SPLITTING, page_loops, problem, with_lengths
from support import Device, assert_right, core_plan, poisoned, quick_interpreter, random_call

import portattn
from portattn import Target, corepath
from portattn.call import Call
from portattn.core import CORES, DecodeSplit
from portattn.launch import combine, kernel_calls, launch_all
from portattn.launch.counters import LEAST
from portattn.lowering import Launch, Lowering
from portattn.planner import plan

SINKS = {"sinks": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SPLITTING},
    "decode with sinks, no LSE": ("decode", SINKS | {"return_lse": False}),
    "decode, packed rows of two tiles": ("decode", {"heads_q": 18, "heads_k": 2, "seq_q": 3, "causal": "bottom_right"}),
    "decode, one head of keys, bf16": ("decode", {"heads_k": 1, "dtype": "bf16", "layout": "bshd"}),
    "ragged with sinks, no LSE": ("ragged", SINKS | {"causal": "bottom_right", "return_lse": False}),
    "wide values": ("decode", {"head_dim_v": 40}),
    "sparse with sinks": ("sparse", SINKS),
}
Pieces = tuple[torch.Tensor, "torch.Tensor | None"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The counters that launches have taken."""
    seen: list[torch.Tensor] = []
    original = combine.counters

    def counters(device: torch.device, count: int) -> torch.Tensor:
        seen.append(original(device, count))
        return seen[-1]

    monkeypatch.setattr(combine, "counters", counters)
    return seen


@contextmanager
def in_order(order: list[int]) -> Iterator[None]:
    """Inside the block the interpreter runs programs in this order."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: original(order[x], y, z)
    try:
        yield
    finally:
        del builder.set_grid_idx


def run(device: Device, call: Call, splits: int, merge: str, order: str = "", **launch: int) -> Pieces:
    lowering = {"page_loop": page_loops(call.problem)[0], "merge": merge}
    plan = core_plan(device, call.problem, lowering, {"splits": splits, **launch})
    if device.path == "interpreter":
        quick_interpreter()
    with poisoned():
        launches, out, lse = kernel_calls(plan, call, 3)
        assert [one.function for one in launches[1:]] == ["combine"] * (merge == "launch" and splits > 1)
        programs = launches[0].grid[0]
        orders = {
            "": list(range(programs)),
            "reversed": list(range(programs))[::-1],
            "mixed": torch.randperm(programs, generator=torch.Generator().manual_seed(splits)).tolist(),
        }
        if order:
            with in_order(orders[order]):
                launch_all(launches, plan, call.q)
        else:
            launch_all(launches, plan, call.q)
    return out, lse


def a_call(device: Device, case: str, seed: int = 3) -> Call:
    name, fields = CASES[case]
    return random_call(problem(name, **fields), seed, device=device.name)


def same(found: Pieces, expected: Pieces) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("splits", [2, 3, 17])
@pytest.mark.parametrize("case", CASES)
def test_it_is_right_and_the_counters_are_0_again(
    device: Device, taken: list[torch.Tensor], case: str, splits: int
) -> None:
    """17 splits are more than some tiles have keys for, and more than one turn of the merge."""
    call = a_call(device, case)
    first = run(device, call, splits, "last")
    assert_right(call, *first)
    same(run(device, call, splits, "last"), first)
    assert len(taken) == 2
    assert all(not counters.any() for counters in taken)


@pytest.mark.interpreter
@pytest.mark.parametrize("order", ["reversed", "mixed"])
@pytest.mark.parametrize("case", CASES)
def test_the_result_does_not_depend_on_which_program_is_last(
    device: Device, taken: list[torch.Tensor], case: str, order: str
) -> None:
    call = a_call(device, case)
    same(run(device, call, 5, "last", order), run(device, call, 5, "last"))
    assert all(not counters.any() for counters in taken)


@pytest.mark.parametrize("warps", [1, 8])
def test_any_number_of_rows_and_splits_at_a_time(device: Device, warps: int) -> None:
    """Few registers: a row and some of its splits at a time. Many: all of them."""
    call = a_call(device, "decode, packed rows of two tiles")
    kernel = CORES["decode_attention"]
    assert isinstance(kernel, DecodeSplit)
    lowering = Lowering(merge="last")
    sizes = kernel.merging(call.problem, lowering, Launch(block_m=16, num_warps=warps, splits=100))
    assert (sizes["MERGE_ROWS"], sizes["MERGE_CHUNK"]) == ((1, 64) if warps == 1 else (4, 128))
    assert_right(call, *run(device, call, 100, "last", num_warps=warps))


@pytest.mark.parametrize("name", [name for name in SPLITTING if "sparse" not in name])
def test_rows_without_keys_are_empty(device: Device, name: str) -> None:
    p = problem(name)
    queries = {"queries": [3, 0, 19][: p.batch]} if p.packed else {}
    call = with_lengths(random_call(p, 5, device=device.name), [0, 30, 0][: p.batch], **queries)
    if call.leftpad_k is not None:
        call.leftpad_k.zero_()
    out, lse = run(device, call, 3, "last")
    assert_right(call, out, lse)
    assert lse is not None
    rows = slice(3) if p.packed else slice(None)
    assert (out[0, :, rows] == 0).all()
    assert (lse[0, :, rows] == float("-inf")).all()


@pytest.mark.parametrize("name", SPLITTING)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
def test_what_is_not_finite_goes_where_a_launch_takes_it(device: Device, name: str, tensor: str, value: float) -> None:
    call = random_call(problem(name), 7, device=device.name)
    getattr(call, tensor)[0, 0, 0, 3] = value
    for found, expected in zip(run(device, call, 3, "last"), run(device, call, 3, "launch"), strict=True):
        assert found is not None
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_each_launch_takes_counters_of_its_own(device: Device, taken: list[torch.Tensor]) -> None:
    """And none is taken before: a launch that is captured is told so by the stream it is on."""
    call = a_call(device, "decode")
    plan = core_plan(device, call.problem, {"merge": "last"}, {"splits": 3})
    launches, out, _ = kernel_calls(plan, call, 3)
    assert taken == []
    assert launches[0].arguments["counters"].is_meta
    launch_all(launches, plan, call.q)
    first = out.clone()
    launch_all(launches, plan, call.q)
    assert torch.equal(out, first)
    assert len({counters.data_ptr() for counters in taken}) == 2
    groups = launches[0].grid[0] // 3
    assert all(counters.numel() >= max(groups, LEAST) for counters in taken)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["decode", "paged", "ragged", "sparse", "mla"])
def test_a_kept_call_takes_counters_anew(monkeypatch: pytest.MonkeyPatch, taken: list[torch.Tensor], name: str) -> None:
    """As on an accelerator, where the second call goes by what the first one kept."""
    opcalls.pretend_accelerator(monkeypatch)
    monkeypatch.setattr(corepath, "Lowering", lambda: Lowering(merge="last"))
    call = random_call(opcalls.problem(name, num_splits=2, sinks=True), seed=1)
    op, arguments = call.problem.op, opcalls.given(call)
    first, again = (opcalls.perform(op, arguments) for _ in range(2))
    made = portattn.last_plan()
    assert made is not None
    assert (made.path, made.specialised[0].merge) == ("triton", "last")
    opcalls.assert_right(call, *first)
    same(again, first)
    assert len(taken) == 2
    assert len({counters.data_ptr() for counters in taken}) == 2
    assert all(not counters.any() for counters in taken)


@pytest.mark.parametrize("target", ["rocm:gfx942", "ascend:ascend910b2", "cuda:sm_90"])
def test_who_may_not_merge_so_says_why(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setattr(corepath, "Lowering", lambda: Lowering(merge="last"))
    toolchain = "triton-ascend==3.2.0" if target.startswith("ascend") else "triton==3.6.0"
    made = plan(problem("decode", dtype="bf16", num_splits=4), Target.parse(target, toolchain))
    said = [note for note in made.notes if note.startswith("merge = launch: ")]
    assert (made.specialised[0].merge, len(said)) == (("last", 0) if target == "cuda:sm_90" else ("launch", 1))


def test_one_split_merges_nothing(device: Device) -> None:
    for name in OPS:
        p = problem(name)
        if not CORES[p.op].splits_keys:
            continue
        call = random_call(p, device=device.name)
        plans = [core_plan(device, p, {"page_loop": page_loops(p)[0], "merge": merge}) for merge in ("launch", "last")]
        first, other = (kernel_calls(plan, call, 3)[0] for plan in plans)
        assert len(first) == len(other) == 1
        assert first[0].constexprs == other[0].constexprs
        assert not other[0].each
