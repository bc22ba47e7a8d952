"""An arm of a probe program: run in a worker, which need not have portattn installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.tools.quirks.probe.results import Arm, ArmName, arm_of_reply
from portattn.worker.client import Worker


def program_of(quirk: Quirk) -> Path:
    """The file of the quirk's probe: beside the folder of its entry."""
    return Path(quirk.file).parent.parent / quirk.evidence.probe


def run_arm(
    quirk: Quirk, arm: ArmName, target: Target, registry: Registry, worker: Worker, seconds: float, passes: str = ""
) -> Arm:
    """Run one arm. Whatever the compiler or the program does is the Arm."""
    backend = registry.backends[target.backend]
    reply = worker.request(
        "probe",
        seconds,
        program=str(program_of(quirk).resolve()),
        arm=arm,
        name=target.name,
        target=list(backend.triton_target(target.arch)),
        passes=passes,
        executor=sys.executable,
        path=os.pathsep.join(place for place in sys.path if place),
        adapter=backend.compile_adapter(),
    )
    return arm_of_reply(reply, quirk)
