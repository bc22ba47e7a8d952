"""Candidates that are compiled by running them in child processes, which may fail, die or hang."""

import os
import threading
from typing import Any

import msgspec
import pytest
from faketunable import SMALL, choice

from portattn.tools.tune import run
from portattn.tools.tune.classes import parse
from portattn.tools.tune.run import CandidateJob, warm_all
from portattn.tools.tune.tunable import Choice


def asked(code: str, **changes) -> CandidateJob:
    fields = {"target": "cpu:generic", "kernel": "dense_forward", "case": parse(SMALL), "device": "cpu"}
    return CandidateJob(code=code, **(fields | {"choice": choice(16)} | changes))


def work(request: dict[str, Any], enter: Any) -> dict[str, Any]:
    """What a child does in place of running a candidate."""
    code = msgspec.json.decode(request["candidate"], type=CandidateJob).code
    if code == "dies":
        os._exit(3)
    if code == "hangs":
        threading.Event().wait(60)
    return {"facts": {"failure": "" if code == "fits" else f"not {code}"}}


@pytest.mark.parametrize(
    ("codes", "over", "expected"),
    [
        (("dies", "hangs", "fits", "small"), False, {"fits": "", "small": "not small"}), (("fits",), True, {}),
        ((), False, {}),
    ],
)  # fmt: skip
def test_every_candidate_is_run_in_a_child_until_time_is_over(codes, over, expected):
    found: dict[str, str] = {}
    warm_all(
        [asked(code) for code in codes], 2, 15.0, found.__setitem__, lambda: over, "tools.tune.test_tune_warm:work"
    )
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
