"""The machine code that Triton makes of a plan's kernels, in a functional model of the chip: the parent's side."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from portattn.backends.rocm.emulator.amdgpu import ARCHES, Finding
from portattn.launch import KernelCall
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.executor import Executor, small_problems
from portattn.worker.client import Reply

OLDEST = Version("3.4")  # Triton whose code the model was tried with


class EmulatorExecutor(Executor):
    """Launches in the model. Compiles in the toolchain's own child, runs in one of this Python."""

    name = "emulated"
    level = "emulated"
    task = "portattn.backends.rocm.emulator.execute:compare"
    code_task = "portattn.backends.rocm.emulator.execute:run_code"
    arches = tuple(ARCHES)
    findings = tuple(kind.__name__ for kind in Finding.__subclasses__())

    def lacks(self, target: Target) -> str:
        """Why this target's code cannot be run in a model; empty when it can."""
        if declined := self.declines(target):
            return declined
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

    def piece(self, launch: KernelCall, reply: Reply) -> dict[str, Any]:
        facts = reply.facts
        return {
            "text": str(facts.get("amdgcn", "")),
            "lds": int(facts["scratchpad_bytes"]),
            "waves": int(facts["num_warps"]),
        }
