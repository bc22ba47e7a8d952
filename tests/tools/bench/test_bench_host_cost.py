"""The set host-cost: what is called, how it is timed, and a run on the CPU, where the reference is called."""

import dataclasses
import gc
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from places import ROOT

import portattn
from portattn.errors import CompileWarning
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.workloads import Measure
from portattn.worker.own_kernels import load

host = load(str(ROOT / "scripts" / "bench_sets" / "host_cost.py"))
SMALL = dataclasses.replace(host.TINY, turns=(4,))


@pytest.fixture(scope="module")
def large() -> list[Any]:
    return host.sequences("meta", host.CallSizes())


def test_lengths_of_the_sequences(large: list[Any]) -> None:
    """Lengths of parts b and d that are timed were never seen; shapes in turn were all made before."""
    assert {one.part for one in large} == set("abcdef")
    assert len({(one.part, one.name) for one in large}) == len(large)
    new = [one for one in large if one.part in "bd"]
    assert len(new) >= 8
    for one in new:
        made = [one.make(index) for index in range(-host.WARM, host.CALLS)]
        lengths = [t.k.shape[0] if t.cu_seqlens_k is not None else t.k.shape[2] for _, t in made]
        lengths = lengths if made[0][1].page_table is None else [case.seq_k for case, _ in made]
        assert len(set(lengths)) == len(lengths), one.name
    for one in (one for one in large if one.part == "c"):
        count = int(one.name.split()[1])
        assert one.needed == count
        before = {one.make(-1 - index)[0].seq_k for index in range(count)}
        timed = [one.make(index)[0].seq_k for index in range(2 * count)]
        assert (len(before), set(timed)) == (count, before)
        assert timed[:count] == timed[count:]


def test_other_caches_have_other_strides(large: list[Any]) -> None:
    by_name = {one.name: one for one in large}
    view = by_name[f"decode, a view of a larger cache, {host.GROWING}"]
    anew = by_name[f"decode, caches of that length, {host.GROWING}"]
    assert view.make(0)[1].k.stride() == view.make(1)[1].k.stride()
    assert anew.make(0)[1].k.is_contiguous()
    assert anew.make(0)[1].k.stride() != anew.make(1)[1].k.stride()
    tables = [by_name["paged decode, a wider table"].make(index)[1].page_table for index in range(20)]
    assert len({table.shape[1] for table in tables}) > 5


def test_what_is_told_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 calls of 1 to 100 µs; what comes between them does not count."""
    now, spent = 0, []

    class Clock:
        monotonic = staticmethod(lambda: 0.0)
        perf_counter_ns = staticmethod(lambda: now)

    def prepare(index: int) -> Any:
        nonlocal now
        now += 5_000_000

        def call() -> None:
            nonlocal now
            now += 1000 * (100 - index)
            spent.append(index)

        return call

    monkeypatch.setattr(host, "time", Clock)
    found = host.measured(prepare, 100, 1.0)
    assert spent == list(range(100))
    assert found == {
        "calls": 100, "median_us": 50.5, "p99_us": 99.0, "most_us": 100.0, "first_us": 100.0, "compiled": 0,
    }  # fmt: skip


def test_compiles_inside_the_times_are_counted() -> None:
    def prepare(index: int) -> Any:
        return lambda: warnings.warn("dense_forward compiled", CompileWarning, stacklevel=1) if index == 2 else None

    assert host.measured(prepare, 5, 60.0)["compiled"] == 1
    assert host.measured(lambda index: lambda: None, 5, 60.0)["compiled"] == 0


def test_plans_are_there_only_where_a_call_made_them() -> None:
    """Making a call plans nothing; a sequence of first calls forgets before each."""
    from portattn.api import dispatch

    dispatch.forget_plans()
    found = {one.part: one for one in host.sequences("cpu", host.TINY)}
    call = host._ours(found["b"])(0)
    assert dispatch._planned.cache_info().currsize == 0
    call()
    assert dispatch._planned.cache_info().currsize == 1
    host._ours(found["e"])(0)
    assert dispatch._planned.cache_info().currsize == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TINY": SMALL, "WARM": 0, "CALLS": 2}.items():
        monkeypatch.setattr(host, name, value)


@pytest.mark.usefixtures("quick")
def test_a_run_on_the_cpu() -> None:
    rows = list(host.host_cost(Measure("cpu", tiny=True)))
    ours = [row for row in rows if row["contender"].startswith(OURS)]
    assert not [row for row in ours if "failed" in row]
    assert {row["part"] for row in ours} == set("abcdef")
    for row in ours:
        assert 0 < row["median_us"] <= row["p99_us"] <= row["most_us"]
        assert row["path"] in ("sdpa", "reference") if row["part"] == "f" else row["path"] == "sdpa"
        assert row["compiled"] == 0
    assert {"sdpa", "portattn prepared"} <= {row["contender"] for row in rows if "median_us" in row}
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_training_call_is_a_forward_and_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours and of peers; the tensors of other parts stay without gradients, and nothing is added up."""
    found = {one.name: one for one in host.sequences("cpu", host.TINY) if one.trains}
    assert set(found) == {"attention", "varlen"}
    calls = []
    forward = portattn.attention
    monkeypatch.setattr(portattn, "attention", lambda *args, **named: calls.append(1) or forward(*args, **named))
    _, t = found["attention"].make(0)
    whole = t.leaves()
    out = portattn.attention(whole.q, whole.k, whole.v, causal="bottom_right")
    expected = torch.autograd.grad(out, (whole.q, whole.k, whole.v), torch.ones_like(out))
    calls.clear()
    for prepare in (host._ours(found["attention"]), host._peer(found["attention"], "sdpa")):
        call = prepare(0)
        for _ in range(2):
            torch.testing.assert_close(call(), expected, rtol=0.05, atol=0.05)
    assert len(calls) == 2
    assert not t.q.requires_grad
    assert host._others(found["attention"])[0] == "sdpa"


@pytest.mark.usefixtures("quick")
def test_gradients_are_recorded_in_training_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(host, "_ours", lambda one: lambda index: lambda: seen.append(torch.is_grad_enabled()))
    for one in host.sequences("cpu", SMALL):
        seen.clear()
        host.timed(one, OURS, 1, 5.0)
        assert set(seen) == {one.trains}


@pytest.mark.usefixtures("quick")
def test_failures_and_late_rows_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portattn, "decode_attention", Mock(side_effect=RuntimeError("no device\nmore")))
    rows = list(host.host_cost(Measure("cpu", tiny=True, only="a ")))
    assert {(row["name"].split(",")[0], row["failed"]) for row in rows if "failed" in row} == {("decode", "no device")}
    assert any(row["name"] == "attention" and "median_us" in row for row in rows)
    late = Measure("cpu", tiny=True, end=0.0)
    assert list(host.host_cost(late)) == []
    assert any(name.startswith("b decode") for name in late.left)
