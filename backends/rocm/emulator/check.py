"""Whether the machine code that Triton makes of a plan's kernels is right, in a functional model of the chip."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from portattn.backends.ascend.linalg.check import Executed, small_problems
from portattn.backends.rocm.emulator.amdgpu.isa import ARCHES
from portattn.planning.planner import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.worker.client import Reply

OLDEST = Version("3.4")  # Triton whose code the model was tried with


class Emulated(Executed):
    """Emulated launches, each distinct one once. Compiles in the toolchain's own child, runs in one of this Python."""

    task = "emulate"

    def lacks(self, target: Target) -> str:
        """Why this target's code cannot be run in a model; empty when it can."""
        if target.arch.name not in ARCHES:
            return f"{target.arch.name} has no model here; modelled are {', '.join(ARCHES)}"
        found = target.toolchain
        if found.distribution != "triton" or Version(found.version) < OLDEST:
            return f"the model was tried with the code of Triton {OLDEST} and newer, and this is {found}"
        return ""

    def where(self, target: Target) -> str:
        return f"a model of {target.arch.name}, code of {target.toolchain}"

    def problems(self, plan: Plan) -> list[Problem]:
        return small_problems(plan)[:1]

    def piece(self, reply: Reply) -> Any:
        facts = reply.facts
        return {
            "text": str(facts.get("amdgcn", "")),
            "lds": int(facts["local_memory"]),
            "waves": int(facts["num_warps"]),
        }
