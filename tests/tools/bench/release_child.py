"""A release's process whose device is the CPU: small cases, a clock that needs no device, faults on request.

FAULTS (a variable of the environment, JSON) says by release what happens there: {"3.6.0": {"wrong": "paged"}}.
    slow   factor of its times
    wrong  text of a case whose result is wrong
    dies, hangs, fails  text of a case at whose first turn the process ends, hangs, or the call raises
    start  what identifying raises
    is     the release that it says it is; asks: it looks which one it is
TURNS (the same) names a file, to which each turn adds a line when it begins and one when it ends."""

import json
import os
import time
from typing import Any

import torch
from benchfakes import FakeClock, a_run
from tiny import shrunk

from portattn.schema.toolchain import installed_toolchain
from portattn.tools.bench import releases
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import OURS

NAME = os.environ["RELEASE"]
FAULTS = json.loads(os.environ.get("FAULTS", "{}")).get(NAME, {})


class Clock(FakeClock):
    """Writes down when it works, so that a test sees whether others did at the same moment."""

    case = ""

    def turn_ms(self, run: Any, timing: str, calls: int, expected_ms: float) -> float:
        with open(os.environ["TURNS"], "a") as file:
            file.write(f"{time.monotonic()} {NAME} {os.getpid()}\n")
        super().turn_ms(run, timing, calls, expected_ms)
        if self.hit("dies"):
            os._exit(3)
        if self.hit("hangs"):
            time.sleep(600)
        if self.hit("fails"):
            raise RuntimeError("an unlucky launch")
        time.sleep(0.001)
        with open(os.environ["TURNS"], "a") as file:
            file.write(f"{time.monotonic()} {NAME} {os.getpid()}\n")
        return float(FAULTS.get("slow", 1.0))

    def hit(self, fault: str) -> bool:
        return fault in FAULTS and FAULTS[fault] in self.case


class Session(releases.Session):
    def identify(self, about: dict[str, Any]) -> Any:
        if "start" in FAULTS:
            raise RuntimeError(FAULTS["start"])
        fields: dict[str, Any] = {
            name: about[name] for name in ("sets", "asked", "rounds", "backend", "core", "only_host")
        }
        fields["cells"] = len(fields["asked"])
        found = str(installed_toolchain()) if FAULTS.get("asks") else f"triton=={FAULTS.get('is', NAME)}"
        return a_run(toolchain=found, commit=about["commit"], ceilings=None, **fields)

    def prepare(self, case: Case, backend: str, core: bool) -> releases.PreparedCase:
        CLOCK.case = case.name
        made = super().prepare(shrunk(case), backend, core)
        if "wrong" not in FAULTS or FAULTS["wrong"] not in case.name:
            return made
        return releases.PreparedCase(budget=made.budget, refused={OURS: "error 1.0 is over the budget"})

    def compile(self, case: Case, backend: str, core: bool) -> str:
        return super().compile(shrunk(case), backend, core)


CLOCK = Clock()
SESSION = Session(torch.device("cpu"), CLOCK)


def answer(request: Any, enter: Any) -> dict[str, Any]:
    return releases.answer_request(SESSION, request, enter)
