"""Code that Triton makes for an older NVIDIA GPU, run on a newer one that is here: the parent's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from portattn.compile.compile_check import first_line, over_limit
from portattn.launch import KernelCall, signature
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.executor import Executor
from portattn.testing.findings import Numerics
from portattn.testing.numerics import numerics, on_device
from portattn.worker.client import Reply, Worker

BACKEND = "cuda"
# How a child says that the driver here is too old for the text (execute.py): no fault of the code's.
_NOT_HERE = ("PtxTooNew",)
# What is refused before anything is launched leaves the device's context, and the child, in order.
_UNHARMED = (*_NOT_HERE, "BadPtx")


class PtxExecutor(Executor):
    """An older chip's code on this machine's newer GPU. here: targets that are devices of this machine."""

    name = "older"
    level = "runs"
    task = "portattn.backends.cuda.ptx_compat.execute:compare"
    runs_on = "device"

    def __init__(self, seconds: float, here: Sequence[Target]) -> None:
        super().__init__(seconds)
        self.device = max((t for t in here if t.backend == BACKEND), key=_capability, default=None)

    def lacks(self, target: Target) -> str:
        """Why this target's code cannot be run here as that of an older chip; empty when it can."""
        if target.backend != BACKEND:
            return f"{target.name} is no NVIDIA GPU, whose code a newer one runs"
        if self.device is None:
            return f"running {target.arch.name} code needs an NVIDIA GPU newer than {target.arch.name}; none is here"
        here = self.device.arch.name
        if _capability(target) >= _capability(self.device):
            return f"running {target.arch.name} code as an older chip's needs a GPU newer than it, and here is {here}"
        if declined := self.declines(target):  # Triton writes targets with a suffix, whose code runs on no other chip
            return f"{declined}, and here is {here}"
        if target.toolchain.distribution != "triton":
            return f"running an older chip's code was tried with community Triton's, and this is {target.toolchain}"
        return ""

    def where(self, target: Target) -> str:
        """What is really run: "sm_80 code on sm_90"; the target's name where nothing can be."""
        if self.lacks(target) or self.device is None:
            return target.name
        return f"{target.arch.name} code on {self.device.arch.name}"

    def problems(self, plan: Plan) -> list[Problem]:
        return [on_device(plan.problem, BACKEND)]

    def exceeds(self, reply: Reply, target: Target) -> str:
        """Of the older chip: the one that is here may have more."""
        return over_limit(reply, target)

    def refusal(self, function: str, reply: Reply) -> str:
        cause = f"{function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}"
        return f"{reply.outcome}: {reply.kind}: {cause}"[:500]

    def piece(self, launch: KernelCall, reply: Reply) -> dict[str, Any]:
        """A launch's code (execute.py: Code)."""
        return {
            "text": str(reply.facts["ptx"]),
            "shared": int(reply.facts["scratchpad_bytes"]),
            "num_warps": int(reply.facts["num_warps"]),
            "scratch": int(reply.facts["scratch"]),
            "signature": msgspec.to_builtins(signature(launch)),
        }

    def run(
        self,
        request: dict[str, Any],
        pieces: list[Any],
        problem: Problem,
        target: Target,
        runner: Worker,
        where: str,
    ) -> Numerics:
        """Run each time: what a device does is not the text's doing alone."""
        assert self.device is not None, "check asks lacks first"
        needed, room = max(code["shared"] for code in pieces), self.device.arch.scratchpad_bytes
        if needed > room:
            reason = f"needs {needed} bytes of shared memory, {self.device.arch.name} has {room}"
            return Numerics(outcome="not_run", where=where, problem=problem, reason=reason)
        reply = runner.request(self.task, self.seconds, **request, texts=pieces)
        if reply.outcome == "error" and reply.kind not in _UNHARMED:
            runner.close()  # a fault ends the context: what the same process ran next would fail as well
        if reply.kind in _NOT_HERE:
            return Numerics(outcome="not_run", where=where, problem=problem, reason=first_line(reply.message))
        return numerics(_staged(reply), where, problem)


def _staged(reply: Reply) -> Reply:
    """The answer with the stage in its message where the child did not get to say what went wrong."""
    if reply.outcome not in ("hang", "crash") or not reply.stage:
        return reply
    return msgspec.structs.replace(reply, message=f"{first_line(reply.message)}, at stage {reply.stage!r}")


def _capability(target: Target) -> int:
    """90 for sm_90."""
    return int(Registry.load().backends[BACKEND].triton_target(target.arch)[1])
