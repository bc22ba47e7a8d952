"""Host cost: what is called, how it is timed, and a run on the CPU, where the reference is called."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

import portattn
from portattn.errors import CompileWarning
from portattn.tools.bench import hostcost, hostshapes
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.hostshapes import PARTS, WARM, CallSequence, CallSizes


@pytest.fixture(scope="module")
def large() -> list[CallSequence]:
    """As on a GPU, but for memory."""
    return hostshapes.workloads("meta", CallSizes())


def test_every_part_has_workloads_of_names_of_their_own(large: list[CallSequence]) -> None:
    assert {workload.part for workload in large} == set(PARTS)
    assert len({(workload.part, workload.name) for workload in large}) == len(large)


def test_lengths_that_are_timed_were_never_seen(large: list[CallSequence]) -> None:
    new = [workload for workload in large if workload.part in "bd"]
    assert len(new) >= 8
    for workload in new:
        tensors = [workload.tensors(index) for index in range(-WARM, hostcost.CALLS)]
        lengths = [t.k.shape[0] if t.cu_seqlens_k is not None else t.k.shape[2] for t in tensors]
        if tensors[0].page_table is not None:
            lengths = [workload.case(index).seq_k for index in range(-WARM, hostcost.CALLS)]
        assert len(set(lengths)) == len(lengths), workload.name


def test_shapes_in_turn_were_all_made_before(large: list[CallSequence]) -> None:
    for workload in large:
        if workload.part == "c":
            count = int(workload.name.split()[1])
            assert workload.needed == count
            before = {workload.case(-1 - index).seq_k for index in range(count)}
            timed = [workload.case(index).seq_k for index in range(2 * count)]
            assert len(before) == count
            assert set(timed) == before
            assert timed[:count] == timed[count:]


def test_other_caches_have_other_strides(large: list[CallSequence]) -> None:
    by_name = {workload.name: workload for workload in large}
    view = by_name[f"decode, a view of a larger cache, {hostshapes.GROWING}"]
    anew = by_name[f"decode, caches of that length, {hostshapes.GROWING}"]
    assert view.tensors(0).k.stride() == view.tensors(1).k.stride()
    assert anew.tensors(0).k.is_contiguous()
    assert anew.tensors(0).k.stride() != anew.tensors(1).k.stride()
    wider = by_name["paged decode, a wider table"]
    tables = [wider.tensors(index).page_table for index in range(20)]
    assert len({table.shape[1] for table in tables if table is not None}) > 5


def test_what_is_told_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 calls of 1 to 100 µs; what comes between them does not count."""
    now, spent = 0, []

    class Clock:
        monotonic = staticmethod(lambda: 0.0)

        @staticmethod
        def perf_counter_ns() -> int:
            return now

    def prepare(index: int) -> Any:
        nonlocal now
        now += 5_000_000

        def call() -> None:
            nonlocal now
            now += 1000 * (100 - index)
            spent.append(index)

        return call

    monkeypatch.setattr(hostcost, "time", Clock)
    found = hostcost.measure("a", "calls", "someone", prepare, 100, 1.0)
    assert spent == list(range(100))
    assert (found.calls, found.median_us, found.p99_us, found.most_us, found.first_us) == (
        100,
        50.5,
        99.0,
        100.0,
        100.0,
    )


def test_compiles_inside_the_times_are_counted() -> None:
    def prepare(index: int) -> Any:
        return lambda: warnings.warn("dense_forward compiled", CompileWarning, stacklevel=1) if index == 2 else None

    assert hostcost.measure("b", "calls", OURS, prepare, 5, 60.0).compiled == 1
    assert hostcost.measure("b", "calls", OURS, lambda index: lambda: None, 5, 60.0).compiled == 0


def test_plans_are_there_only_where_a_call_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a call plans nothing; a workload of first calls forgets before each."""
    from portattn.api import dispatch

    dispatch.forget_plans()
    found = {workload.part: workload for workload in hostshapes.workloads("cpu", CallSizes.small())}
    call = hostcost._ours(found["b"])(0)
    assert dispatch._planned.cache_info().currsize == 0
    call()
    assert dispatch._planned.cache_info().currsize == 1
    hostcost._ours(found["e"])(0)
    assert dispatch._planned.cache_info().currsize == 0


@pytest.fixture(scope="module")
def small_run() -> hostcost.HostRun:
    with torch.no_grad():
        return hostcost.run("cpu", 300.0, dataclasses.replace(CallSizes.small(), turns=(4,)), {}, calls=2, warm=0)


def test_a_run_on_the_cpu(small_run: hostcost.HostRun) -> None:
    ours = [line for line in small_run.lines if line.contender.startswith(OURS)]
    assert not [line for line in ours if line.failed]
    assert {line.part for line in ours} == set(PARTS)
    for line in ours:
        assert line.median_us is not None
        assert 0 < line.median_us <= line.p99_us <= line.most_us
        assert line.path in ("sdpa", "reference") if line.part == "f" else line.path == "sdpa"
        assert line.compiled == 0
    assert {"sdpa", "portattn prepared"} <= {line.contender for line in small_run.lines if not line.failed}
    text = msgspec.json.encode(small_run)
    assert len(msgspec.json.decode(text, type=hostcost.HostRun).lines) == len(small_run.lines)


def test_a_training_call_is_a_forward_and_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours and of peers; the tensors of other parts stay without gradients, and nothing is added up."""
    found = {w.name: w for w in hostshapes.workloads("cpu", CallSizes.small()) if w.trains}
    assert set(found) == {"attention", "varlen"}
    calls = []
    forward = portattn.attention
    monkeypatch.setattr(portattn, "attention", lambda *args, **named: calls.append(1) or forward(*args, **named))
    t = found["attention"].tensors(0)
    whole = t.leaves()
    out = portattn.attention(whole.q, whole.k, whole.v, causal="bottom_right")
    expected = torch.autograd.grad(out, (whole.q, whole.k, whole.v), torch.ones_like(out))
    calls.clear()
    for prepare in (hostcost._ours(found["attention"]), hostcost._peer(found["attention"], "sdpa")):
        call = prepare(0)
        for _ in range(2):
            for one, other in zip(call(), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    assert len(calls) == 2
    assert not t.q.requires_grad
    assert hostcost._others(found["attention"])[0] == "sdpa"
    assert not hostcost._line(found["attention"], OURS, 2, 0, 60.0).failed
    assert len(calls) > 4


def test_gradients_are_recorded_in_training_calls_alone() -> None:
    seen: list[bool] = []

    def prepare(index: int) -> Any:
        return lambda: seen.append(torch.is_grad_enabled())

    with hostcost.collected_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostcost, "_ours", lambda workload: prepare)
        for workload in hostshapes.workloads("cpu", dataclasses.replace(CallSizes.small(), turns=(4,))):
            seen.clear()
            hostcost._line(workload, OURS, 1, 0, 5.0)
            assert set(seen) == {workload.trains}


def test_a_run_leaves_the_collector_as_it_was(small_run: hostcost.HostRun) -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_table(small_run: hostcost.HostRun) -> None:
    text = hostcost.markdown(small_run)
    for title in PARTS.values():
        assert f"### {title}" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| call", "| ---"))]
    assert len(rows) == len(small_run.lines)
    assert {row.count("|") for row in rows} == {9}


def test_who_gets_no_time_is_named() -> None:
    found = hostcost.run("cpu", 0.0, CallSizes.small(), {})
    assert not found.lines
    assert any(name.startswith("b decode") for name in found.left_out)
    assert "No time was left for: a attention: portattn" in hostcost.markdown(found)


def test_a_failure_is_told_and_the_rest_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("no device\nmore")

    monkeypatch.setattr(portattn, "decode_attention", broken)
    monkeypatch.setattr(hostcost, "run", functools.partial(hostcost.run, calls=1, warm=0))
    place = tmp_path / "host.json"
    words = ["--device", "cpu", "--seconds", "120", "--out", str(place), "--markdown", str(tmp_path / "host.md")]
    before = torch.is_grad_enabled()
    try:
        done = CliRunner().invoke(hostcost.main, words)
    finally:
        torch.set_grad_enabled(before)
    assert done.exit_code == 1, done.output
    run = msgspec.json.decode(place.read_bytes())
    failed = [line for line in run["lines"] if line["contender"] == OURS and line["failed"]]
    assert {line["failed"] for line in failed} == {"no device"}
    assert {line["name"].split()[0] for line in failed} == {"decode", "decode,"}
    assert any(line["name"] == "attention" and not line["failed"] for line in run["lines"])
