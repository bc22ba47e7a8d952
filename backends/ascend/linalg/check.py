"""Whether what triton-ascend makes of a plan's kernels is right: the parent's side.

The launches of a small problem are lowered in one child (triton-ascend's Python) and executed in another (this one).
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from typing import Any

import msgspec

from portattn.backends.ascend.linalg.footprint import footprint
from portattn.backends.ascend.linalg.lints import Lint, lints
from portattn.backends.ascend.linalg.operations import read
from portattn.backends.ascend.linalg.tools import missing
from portattn.compile.ensure import compile_in, first_line
from portattn.launch import KernelCall, kernel_calls, signature
from portattn.planning.planner import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.numerics import numerics, request_of, scaled
from portattn.tools.matrix.cells import Facts, Numerics
from portattn.worker.client import Reply, Worker

TEXT = "linalg"  # the lowered text among a worker's facts


def looked_at(reply: Reply, launch: KernelCall, target: Target) -> tuple[Facts, list[Lint]]:
    """Facts and lints of one lowered launch; the reply's facts hold its text, the facts returned do not."""
    facts = dict(reply.facts)
    text = str(facts.pop(TEXT, ""))
    names = tuple(signature(launch).types)
    arch = target.arch
    # Double buffering, which is on unless it is switched off, takes the other half.
    room = arch.local_memory if launch.launch.get("multibuffer") is False else arch.local_memory // 2
    found = lints(text, launch.function, names, launch.grid, arch.max_programs, room)
    facts["tile_bytes"] = footprint(read(text))
    for lint in found:
        name = lint.name.replace("-", "_")
        facts[name] = int(facts.get(name, 0)) + lint.value
    return facts, found


def small_problems(plan: Plan) -> list[Problem]:
    """The plan's problem with small sizes: a batch with a ragged and an empty sequence, and one full sequence alone.

    The last sequence of a batch ends where memory does: an access past it is seen only where its last tile is in use.
    """
    small = scaled(plan.problem, plan.specialised[1])
    totals = {
        name: None if getattr(small, name) is None else longest
        for name, longest in (("total_q", small.seq_q), ("total_k", small.seq_k))
    }
    alone = msgspec.structs.replace(small, batch=1, **totals)
    return [small] if alone == small else [small, alone]


class Executed:
    """Executed lowerings, each distinct one once, however many cells and threads ask.

    task  what the runner is asked for
    """

    task = "execute"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._found: dict[str, Future[Numerics]] = {}
        self._lock = threading.Lock()

    def lacks(self, target: Target) -> str:
        """What is missing to execute what is compiled for a target; empty when nothing is."""
        return missing()

    def where(self, target: Target) -> str:
        return f"x86, as {target.toolchain} lowers it for {target.arch.name}"

    def problems(self, plan: Plan) -> list[Problem]:
        """What is run in place of the plan's problem."""
        return small_problems(plan)

    def piece(self, reply: Reply) -> Any:
        """What the runner needs of one compiled launch."""
        return str(reply.facts.get(TEXT, ""))

    def check(self, plan: Plan, target: Target, compiler: Worker, runner: Worker) -> Numerics:
        """Numerics of a core plan's lowered kernels on its small problems: the first that is not right, or the worst.

        compiler  a child that lowers for the target; runner: one of this Python, which may die of what it runs
        """
        where, lacks = self.where(target), self.lacks(target)
        if lacks:
            return Numerics(outcome="not_run", where=where, reason=lacks)
        worst: Numerics | None = None
        for problem in self.problems(plan):
            seen = self._one(plan, problem, target, compiler, runner, where)
            if seen.outcome != "pass":
                return seen
            if worst is None or _share(seen) > _share(worst):
                worst = seen
        assert worst is not None, "a plan has small problems"
        return worst

    def _one(
        self, plan: Plan, problem: Problem, target: Target, compiler: Worker, runner: Worker, where: str
    ) -> Numerics:
        from portattn.testing.run_plan import call_of, plan_of

        request = request_of(plan, problem, plan.path, target.name, "cpu")
        small, call = plan_of(request, target), call_of(request)
        texts = []
        for launch in kernel_calls(small, call, target.arch.cores)[0]:
            reply = compile_in(compiler, launch, small, target, self.seconds, "text")
            if reply.outcome != "ok":
                cause = f"{launch.function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}"
                return Numerics(
                    outcome=reply.outcome, where=where, problem=problem, reason=f"on a small problem, {cause}"
                )
            texts.append(self.piece(reply))
        # What the text does depends on the chip only by its number of cores.
        parts: list[Any] = [self.task, request | {"target": ""}, target.arch.cores, texts]
        key = hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
        with self._lock:
            mine = key not in self._found
            future = self._found.setdefault(key, Future())
        if mine:
            try:
                future.set_result(
                    judged(runner.request(self.task, self.seconds, **request, texts=texts), where, problem)
                )
            except BaseException as error:
                future.set_exception(error)  # a waiting thread must not wait for ever
                raise
        return msgspec.structs.replace(future.result(), where=where)


def judged(reply: Reply, where: str, problem: Problem) -> Numerics:
    """A runner's answer as Numerics. An access outside an argument's memory is a failure, whatever the numbers."""
    strays = str(reply.facts.get("strays", ""))
    facts = {name: value for name, value in reply.facts.items() if name != "strays"}
    found = numerics(msgspec.structs.replace(reply, facts=facts), where, problem)
    if not strays:
        return found
    reason = "; ".join(filter(None, (found.reason, f"outside its memory: {strays}")))
    return msgspec.structs.replace(found, outcome="fail", reason=reason)


def _share(seen: Numerics) -> float:
    """How much of its budget an error takes."""
    pairs = ((seen.error, seen.budget), (seen.lse_error, seen.lse_budget))
    return max((error / budget for error, budget in pairs if error is not None and budget), default=0.0)
