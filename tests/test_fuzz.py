"""The fuzzers for a minute with fixed seeds, what they have found before, and that they see what is wrong.

`make fuzz ARGS="values --seconds 600 --processes 2"` is the long way."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import support
import torch
from fuzz import drawing, reducing, running, shapes, values
from fuzz.drawing import Case
from fuzz.kinds import KINDS, Pool, Shape, arguments, following
from places import ROOT
from support import Device

import portattn
from portattn.launch import triton_compat
from portattn.schema.problem import Problem

SECONDS = 25.0  # each
CASES = 400  # of values: fewer where they take longer than SECONDS


@pytest.fixture
def small_tiles(device: Device) -> Iterator[None]:
    with values.prepared(device.name):
        yield


def test_values(device: Device) -> None:
    found = running.collected(values.work(1, device.name, SECONDS, lambda: False, CASES))
    assert not found.failures, "\n\n".join(f"{f.why}\n{f.snippet}" for f in found.failures[:3])
    assert found.cases >= 1  # on a device each may compile for seconds


KNOWN: dict[str, Any] = {
    # Rows of a tile that are no queries gave weight to a key that a bias hides, and its value's NaN reached the others.
    "a value hidden by a bias": Case(
        problem=Problem(op="decode_attention", batch=1, heads_q=6, heads_k=2, seq_q=4, seq_k=34, head_dim=33,
                        dtype="fp32", seqlens_k=True, bias=True, return_lse=True, layout="bshd", aligned=False),
        seed=446841, backend="interpreter", extremes=True, q="-inf", k="normal", v="nan",
    ),
    "an infinite value hidden by a bias": Case(
        problem=Problem(op="decode_attention", batch=3, heads_q=4, heads_k=2, seq_q=4, seq_k=42, head_dim=8,
                        dtype="fp16", causal="bottom_right", window_left=100, bias=True, aligned=False),
        seed=195900, backend="interpreter", strides="transposed", q="largest", k="normal", v="inf",
    ),
    "a value hidden from padded queries": Case(
        problem=Problem(batch=2, heads_q=1, heads_k=1, seq_q=25, seq_k=42, head_dim=33, dtype="bf16",
                        causal="top_left", seqlens_k=True, softcap=True, sinks=True, bias=True, return_lse=True,
                        layout="bshd", aligned=False),
        seed=252284, backend="interpreter", scale=-0.3, softcap=0.01, q="-inf", k="largest", v="nan",
    ),
    # Times log2(e), which scores in base 2 are, 3e38 is infinite.
    "a bias of 3e38": Case(
        problem=Problem(batch=1, heads_q=1, heads_k=1, seq_q=1, seq_k=5, head_dim=40, dtype="fp32", bias=True,
                        aligned=False),
        seed=933134, backend="interpreter", softcap=1000.0, q="normal", k="normal", v="normal", wild="bias of 3e38",
    ),
    "sinks of 3e38": Case(
        problem=Problem(op="mla_attention", batch=2, heads_q=2, heads_k=1, seq_q=34, seq_k=64, head_dim=24,
                        head_dim_v=16, dtype="fp32", total_q=27, page_size=16, alibi_slopes=True, sinks=True,
                        num_splits=3, return_lse=True, aligned=False),
        seed=256485, backend="interpreter", scale=0.0, q="normal", k="normal", v="largest", wild="sinks of 3e38",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_found(device: Device, small_tiles: None, name: str) -> None:
    assert values.run(msgspec.structs.replace(KNOWN[name], backend=device.path), device.name).failure == ""


def test_cases_are_drawn_from_the_seed() -> None:
    drawn = [drawing.draw(5, number, "cpu") for number in range(300)]
    assert drawn == [drawing.draw(5, number, "cpu") for number in range(300)]
    assert {case.problem.op for case in drawn} == set(drawing.OPS)
    assert {case.wild for case in drawn} == {"", *drawing.WILD}
    assert {(case.k == "nan", case.v == "nan") for case in drawn} == set(itertools.product((True, False), repeat=2))


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_and_values_are_poisoned_apart(name: str) -> None:
    problem = Problem(batch=2, heads_q=2, heads_k=1, seq_q=3, seq_k=20, head_dim=8, dtype="fp32", seqlens_k=True)
    other = {"k": "v", "v": "k"}[name]
    call = values.call_of(Case(problem=problem, seed=3, backend="reference", **{name: "inf", other: "normal"}), "cpu")
    for b, length in enumerate(call.seqlens_k.tolist()):
        assert getattr(call, name)[b, :, length:].isposinf().all()
        assert getattr(call, name)[b, :, :length].isfinite().all()
    assert getattr(call, other).isfinite().all()


def _plant(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    right = portattn.attention

    def planted(*args: Any, **named: Any) -> Any:
        result = right(*args, **named)
        if named.get("sinks") is None:
            return result
        return (wrong(result[0]), result[1]) if isinstance(result, tuple) else wrong(result)

    monkeypatch.setattr(portattn, "attention", planted)


def _raise(out: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("planted")


PLANTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inexact": lambda out: out * 1.1, "not finite": lambda out: torch.full_like(out, float("nan")), "raised": _raise,
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_a_fault_is_found_and_its_case_made_smaller(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    _plant(monkeypatch, PLANTED[kind])
    problem = Problem(batch=2, heads_q=4, heads_k=2, seq_q=9, seq_k=20, head_dim=24, dtype="bf16", sinks=True,
                      causal="bottom_right", alibi_slopes=True, bias=True, return_lse=True)  # fmt: skip
    case = Case(problem=problem, seed=4, backend="reference", strides="sliced")
    assert values.run(case, "cpu").kind == kind
    smaller = reducing.reduced(case, lambda one: values._kind(one, "cpu") == kind, 20.0)
    p = smaller.problem
    assert (p.sinks, p.return_lse) == (True, False)
    assert (p.alibi_slopes, p.bias, p.causal, p.batch, p.heads_q, smaller.strides) == (
        False, False, "none", 1, 1, "plain",
    )  # fmt: skip
    said: list[Any] = []
    exec(compile(reducing.snippet(smaller, "cpu"), "snippet", "exec"), {"print": said.append})
    assert said[0].kind == kind


def test_an_lse_that_is_far_excuses_no_other_row() -> None:
    problem = Problem(
        batch=1, heads_q=2, heads_k=2, seq_q=4, seq_k=9, head_dim=8, dtype="fp32", sinks=True, return_lse=True
    )
    call = values.call_of(Case(problem=problem, seed=1, backend="reference"), "cpu")
    call.sinks = torch.tensor([values.HUGE, 0.0])
    out, lse = portattn.attention(call.q, call.k, call.v, sinks=call.sinks, return_lse=True, backend="reference")
    assert values.judge(call, out, lse, "ieee") == ""
    lse[0, 1, 2] += 0.01
    assert values.judge(call, out, lse, "ieee").startswith("inexact: an error of 0.01 in the LSE of plain rows")


def _command(*words: str) -> tuple[list[str], dict[str, Any]]:
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    return [sys.executable, "-m", "fuzz", *words], {"env": environment, "cwd": ROOT, "text": True}


def _recorded(place: Path, *words: str) -> running.Report:
    """A run of `shapes` without a device, wherever it runs: what is launched for an H100."""
    if support.TRITON is None or (support.TRITON.major, support.TRITON.minor) not in triton_compat.KNOWN:
        pytest.skip("no Triton whose launches are kept is installed")
    line, options = _command("shapes", "--device", "cpu", "--json", str(place), *words)
    options["env"]["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(line, **options, capture_output=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return msgspec.json.decode(place.read_bytes(), type=running.Report)


@pytest.mark.compiles
def test_shapes(tmp_path: Path) -> None:
    report = _recorded(tmp_path / "report.json", "--seconds", str(2 * SECONDS), "--seed", "1")
    assert report.green
    assert report.cases > 20
    assert report.counts["compared with a new process"] >= 1


KNOWN_TURNS = {
    # 5, 1 and 5, True are equal: the second was served by what the first had left, and not refused.
    "a window's type": [("fp32", Shape(alike=("window", 0))), ("fp32", Shape(alike=("window", 1)))]
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", KNOWN_TURNS)
def test_shapes_that_were_found(tmp_path: Path, name: str) -> None:
    assert _recorded(tmp_path / "report.json", "--turns", shapes.command(KNOWN_TURNS[name]).split("'")[1]).green


class _Forgetful:
    """Turns whose outcome depends on an earlier one: what `shapes` looks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad: shapes.Turn) -> None:
        self.bad, self.seen = bad, False
        monkeypatch.setattr(shapes.dispatch, "forget_plans", self.forget)

    def forget(self) -> None:
        self.seen = False

    def perform(self, turn: shapes.Turn) -> shapes.Outcome:
        wrong = self.seen and turn[1].keys == 65
        self.seen |= turn == self.bad
        return shapes.Outcome("triton", said=["launched for", 64 if wrong else turn[1].keys])


def test_a_call_that_serves_another_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [("prefill", Shape(keys=keys)) for keys in (1, 17, 64, 30, 65, 64)]
    here: Any = _Forgetful(monkeypatch, turns[2])
    found = shapes._compared(here, 0, 10, turns, [here.perform(turn) for turn in turns])
    (failure,) = found.failures
    assert (found.cases, failure.case) == (6, 14)
    assert failure.why.endswith("64, alone 65")
    assert shapes.turns_of(failure.snippet.split("'")[1]) == [turns[2], turns[4]]


def test_bytes_are_compared() -> None:
    one = torch.tensor([0.0, 1.0])
    first = shapes.Outcome("triton", tensors=[one])
    assert first.same(shapes.Outcome("triton", tensors=[one.clone()]))
    other = shapes.Outcome("triton", tensors=[torch.tensor([-0.0, 1.0])])
    assert not first.same(other)
    assert first.digest() != other.digest()
    assert "1 of 2 elements of result 0" in first.differs(other)


def test_every_kind_has_shapes_that_run() -> None:
    pool, r = Pool("cpu", large=False), random.Random(1)
    for kind in KINDS:
        ran = 0
        for _ in range(12):
            shape = following(kind, Shape(), r)
            given = arguments(kind, msgspec.structs.replace(shape, alike=("", 0), keys=min(shape.keys, 70)), pool)
            if given is None:
                continue
            assert getattr(portattn, kind.op)(**given | {"backend": "reference"}) is not None
            ran += 1
        assert ran > 6, kind.name


def test_an_interrupt_ends_with_a_report(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    words, options = _command("values", "--device", "cpu", "--seconds", "600", "--json", str(place))
    process = subprocess.Popen(
        words, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=support.interruptible
    )
    end = time.monotonic() + 120
    for line in process.stderr:  # progress: until there is a case
        if " 0 cases" not in line or time.monotonic() > end:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    report = msgspec.json.decode(place.read_bytes(), type=running.Report)
    assert report.ended == "interrupt", err
    assert report.cases >= 1
    assert process.returncode in (130, 1)
    assert f"{report.cases} cases" in out


def test_a_failure_that_does_not_come_again_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device a fault may depend on who else runs there."""
    case = drawing.draw(3, 5, "cpu")
    monkeypatch.setattr(values, "REDUCED", 1)
    monkeypatch.setattr(values, "reduced", lambda case, fails, seconds: case)
    monkeypatch.setattr(values, "run", lambda case, device: values.Outcome(path="", failure=""))
    found = values._failure(3, 5, case, values.Outcome(path="", failure="inexact: an error of 2"), "cpu", nth=1)
    assert found.why == "once, and not again: inexact: an error of 2"
