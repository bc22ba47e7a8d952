"""Work in child processes: errors, hanging children, children that die, and time; and candidates that are compiled by
running them in such children."""

import os
import threading
from pathlib import Path

import pytest
from faketunable import SMALL, choice

from portattn.tools.tune import run
from portattn.tools.tune.classes import parse
from portattn.tools.tune.run import CandidateJob, in_children, warm_all
from portattn.tools.tune.tunable import Choice


def asked(code: str, **changes) -> CandidateJob:
    fields = {"target": "cpu:generic", "kernel": "dense_forward", "case": parse(SMALL), "device": "cpu"}
    return CandidateJob(code=code, **(fields | {"choice": choice(16)} | changes))


def work(one: CandidateJob) -> str:
    if one.code == "dies":
        os._exit(3)
    return "" if one.code == "fits" else f"not {one.code}"


@pytest.mark.parametrize(
    ("codes", "over", "expected"),
    [
        (("fits", "small"), False, {"fits": "", "small": "not small"}), (("dies",), False, {}), (("fits",), True, {}),
        ((), False, {}),
    ],
)  # fmt: skip
def test_every_candidate_is_run_in_a_child_until_time_is_over(codes, over, expected):
    found: dict[str, str] = {}
    warm_all([asked(code) for code in codes], 2, found.__setitem__, lambda: over, work)
    assert found == expected


@pytest.mark.interpreter
def test_what_a_child_does_is_run_the_candidate(monkeypatch):
    small = Choice(launch={"block_m": 16, "block_n": 16, "num_stages": 1})
    assert run.warm(asked("a", choice=small)) == ""

    def refuse(call):
        raise type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})("shared memory, required")

    class Tunable:
        name = "dense_forward"

        def build(self, problem, choice, target):
            return type("Built", (), {"start": staticmethod(refuse)})

    monkeypatch.setattr(run, "tunables", lambda target: [Tunable()])
    assert run.warm(asked("a")) == "OutOfResources: shared memory, required"


def ends(item: int) -> int:
    if item:
        raise ValueError(f"item {item}")
    os._exit(1)


def test_what_a_child_raises_is_raised_here_and_one_that_dies_is_said():
    with pytest.raises(ValueError, match="item 3"):
        in_children([3], ends, 1, lambda item, found: None)
    assert not in_children([0], ends, 1, lambda item, found: None)


def waits(item: Path) -> None:
    item.write_text(str(os.getpid()))
    threading.Event().wait(60)


def test_children_that_hang_are_killed(tmp_path):
    marks = [tmp_path / "1", tmp_path / "2"]
    assert not in_children(marks, waits, 2, lambda item, found: None, lambda: all(m.exists() for m in marks))
    for mark in marks:
        with pytest.raises(ProcessLookupError):  # no such process any more
            os.kill(int(mark.read_text() or 0), 0)
