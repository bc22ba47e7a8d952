"""Whether the code that Triton makes for an older NVIDIA GPU is right, run on a newer one: the parent's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from portattn.compile.ensure import compile_in, first_line, over_limit
from portattn.launch import kernel_calls, signature
from portattn.planning.planner import Plan
from portattn.planning.registry import Registry
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.numerics import numerics, request_of
from portattn.tools.matrix.cells import Numerics
from portattn.worker.client import Reply, Worker

BACKEND = "cuda"
# From sm_90 on Triton writes targets with a suffix (`sm_90a`), whose code runs on no other chip.
FIRST_BOUND = 90
# How a child says that the driver here is too old for the text (driver.py): no fault of the code's.
_NOT_HERE = ("PtxTooNew",)
# What is refused before anything is launched leaves the device's context, and the child, in order.
_UNHARMED = (*_NOT_HERE, "BadPtx")


class Older:
    """Runs of an older chip's code on this machine's newer GPU.

    seconds  time limit of each compile, and of each run
    here     targets that are devices of this machine
    """

    def __init__(self, seconds: float, here: Sequence[Target]) -> None:
        self.seconds = seconds
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
        if _capability(target) >= FIRST_BOUND:
            return (
                f"Triton's code for {target.arch.name} is for that chip only ({target.arch.name}a), and here is {here}"
            )
        if target.toolchain.distribution != "triton":
            return f"running an older chip's code was tried with community Triton's, and this is {target.toolchain}"
        return ""

    def label(self, target: Target) -> str:
        """What was really run: "sm_80 code on sm_90"; empty where nothing can be."""
        return (
            "" if self.lacks(target) or self.device is None else f"{target.arch.name} code on {self.device.arch.name}"
        )

    def check(self, plan: Plan, problem: Problem, target: Target, compiler: Worker, runner: Worker) -> Numerics:
        """Numerics of a core plan's kernels as the older chip's code.

        problem   what is run: the plan's, or one of other sizes (matrix/numerics.py: on_device)
        compiler  a child that compiles for the target
        runner    one of this Python, which may die of what it runs
        """
        lacks, where = self.lacks(target), self.label(target)
        if lacks:
            return Numerics(outcome="not_run", where=target.name, reason=lacks)
        request = request_of(plan, problem, plan.path, target.name, "cpu")
        codes = self._compiled(plan, request, target, compiler)
        if isinstance(codes, Reply):
            return numerics(codes, where, problem)
        needed, room = max(code["shared"] for code in codes), self.device.arch.local_memory if self.device else 0
        if needed > room:
            reason = f"needs {needed} bytes of shared memory, {where.rpartition(' ')[2]} has {room}"
            return Numerics(outcome="not_run", where=where, problem=problem, reason=reason)
        reply = runner.request("older", self.seconds, **request, texts=codes)
        if reply.outcome == "error" and reply.kind not in _UNHARMED:
            runner.close()  # a fault ends the context: what the same process ran next would fail as well
        if reply.kind in _NOT_HERE:
            return Numerics(outcome="not_run", where=where, problem=problem, reason=first_line(reply.message))
        return numerics(_staged(reply), where, problem)

    def _compiled(
        self, plan: Plan, request: dict[str, Any], target: Target, compiler: Worker
    ) -> list[dict[str, Any]] | Reply:
        """Each launch's code (launch.py), or the answer that says why there is none."""
        from portattn.testing.run_plan import call_of, plan_of

        small, found = plan_of(request, target), []
        for launch in kernel_calls(small, call_of(request), target.arch.cores)[0]:
            reply = compile_in(compiler, launch, small, target, self.seconds, "text")
            if reply.outcome != "ok":
                text = f"{launch.function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}"
                return msgspec.structs.replace(reply, message=text)
            over = over_limit(reply, target)  # of the older chip: the one that is here may have more
            if over:
                return Reply(outcome="error", kind="OutOfResources", message=f"{launch.function}: {over}")
            found.append(
                {
                    "text": str(reply.facts["ptx"]),
                    "shared": int(reply.facts["local_memory"]),
                    "num_warps": int(reply.facts["num_warps"]),
                    "scratch": int(reply.facts["scratch"]),
                    "signature": msgspec.to_builtins(signature(launch)),
                }
            )
        return found


def _staged(reply: Reply) -> Reply:
    """The answer with the stage in its message where the child did not get to say what went wrong."""
    if reply.outcome not in ("hang", "crash") or not reply.stage:
        return reply
    return msgspec.structs.replace(reply, message=f"{first_line(reply.message)}, at stage {reply.stage!r}")


def _capability(target: Target) -> int:
    """90 for sm_90."""
    return int(Registry.load().backends[BACKEND].triton_target(target.arch)[1])
