"""Executor: runs a plan's compiled code on a machine without its chip, and compares it with the oracle.

A backend provides its executors (Backend.executors). The launches of a small problem are compiled in one child, under
the toolchain's Python, and run in another, under this one, which the code may kill.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal

import msgspec

from portattn.compile.compile_check import compile_in, first_line
from portattn.errors import PluginWarning, warn_caller
from portattn.launch import KernelCall, kernel_calls
from portattn.planning.registry import Registry, own_backends
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.quirk import Level
from portattn.schema.target import Target
from portattn.testing.findings import Facts, Lint, Numerics
from portattn.testing.numerics import numerics, request_of, scale_down
from portattn.worker.client import Reply, Worker


class Executor:
    """Runs of a backend's code, each distinct one once, however many threads ask.

    name       the field of a matrix cell that it fills
    level      evidence level of right numbers
    task       task of the running child (portattn/worker/serve.py)
    code_task  function that runs one kernel of a probe in a child; empty without one
    runs_on    `cpu`: any machine will do; `device`: another chip of the family has to be here, and `where` names both
    interprets whether its task runs the kernels' Python under Triton's interpreter: its child then is one for that
    asks       the compiler's output for the real problem: `full` facts of machine code, or its `text`, which `analyze`
               reads. Executed code is always a text
    lowers_to  language of that text, if it is not machine code; else empty
    arches     chips whose code it runs; empty: all of its backend
    findings   kinds of errors of the running child that prove the code wrong, beside wrong numbers
    """

    name: Literal["lowered", "emulated", "older"]
    level: Level
    task: str
    code_task: str = ""
    runs_on: Literal["cpu", "device"] = "cpu"
    interprets: bool = False
    asks: Literal["text", "full"] = "full"
    lowers_to: str = ""
    arches: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()

    def __init__(self, seconds: float) -> None:
        """seconds: time limit of each compile, and of each run."""
        self.seconds = seconds
        self._found: dict[str, Future[Numerics]] = {}
        self._lock = threading.Lock()

    def lacks(self, target: Target) -> str:
        """Return the missing requirements for executing code of a target, or an empty text."""
        raise NotImplementedError

    def declines(self, target: Target) -> str:
        """Why the chip's own file says that this executor cannot run its code; empty where it can."""
        return str(target.arch.executors.get(self.name, {}).get("lacks", ""))

    def where(self, target: Target) -> str:
        """What is run, and on what: in reports, and the label of a level of `runs`."""
        raise NotImplementedError

    def problems(self, plan: Plan) -> list[Problem]:
        """Return the problems to run in place of the plan's."""
        return small_problems(plan)

    def piece(self, launch: KernelCall, reply: Reply) -> Any:
        """What the running child needs of one compiled launch."""
        raise NotImplementedError

    def exceeds(self, reply: Reply, target: Target) -> str:
        """Why compiled code does not fit its chip, where running it elsewhere would not show it; empty when it does."""
        return ""

    def refusal(self, function: str, reply: Reply) -> str:
        """Return the message about a failed compile."""
        return f"on a small problem, {function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}"

    def analyze(self, reply: Reply, launch: KernelCall, target: Target) -> tuple[Facts, list[Lint]]:
        """Facts and lints of one compiled launch of the real problem."""
        return dict(reply.facts), []

    def check(
        self, plan: Plan, target: Target, compiler: Worker, runner: Worker, problems: Sequence[Problem] = ()
    ) -> Numerics:
        """Return the numerics of a core plan's compiled kernels: the first wrong ones, or the worst.

        compiler  a child that compiles for the target; runner: a child of this Python, which the code may kill
        problems  problems to run; by default from `problems`
        """
        where, lacks = self.where(target), self.lacks(target)
        if lacks:
            return Numerics(outcome="not_run", where=where, reason=lacks)
        worst: Numerics | None = None
        for problem in problems or self.problems(plan):
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

        request, pieces = request_of(plan, problem, plan.path, target.name, "cpu"), []
        small, call = plan_of(request, target), call_of(request)
        for launch in kernel_calls(small, call, target.arch.cores)[0]:
            reply = compile_in(compiler, launch, small, target, self.seconds, "text")
            if reply.outcome != "ok":
                reason = self.refusal(launch.function, reply)
                return Numerics(outcome=reply.outcome, where=where, problem=problem, reason=reason)
            if over := self.exceeds(reply, target):
                reason = f"error: OutOfResources: {launch.function}: {over}"
                return Numerics(outcome="error", where=where, problem=problem, reason=reason)
            pieces.append(self.piece(launch, reply))
        return self.run(request, pieces, problem, target, runner, where)

    def run(
        self,
        request: dict[str, Any],
        pieces: list[Any],
        problem: Problem,
        target: Target,
        runner: Worker,
        where: str,
    ) -> Numerics:
        """Run compiled launches in a child; a second asker waits for the first one's answer."""
        # What the code does depends on the chip only by its number of cores.
        parts: list[Any] = [self.task, request | {"target": ""}, target.arch.cores, pieces]
        key = hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()
        with self._lock:
            mine = key not in self._found
            future = self._found.setdefault(key, Future())
        if mine:
            try:
                reply = runner.request(self.task, self.seconds, **request, texts=pieces)
                future.set_result(reply_numerics(reply, where, problem))
            except BaseException as error:
                future.set_exception(error)  # a waiting thread must not wait for ever
                raise
        return msgspec.structs.replace(future.result(), where=where)


def small_problems(plan: Plan) -> list[Problem]:
    """The plan's problem with small sizes: a batch with a ragged and an empty sequence, and one full sequence alone.

    The last sequence of a batch ends where memory does: an access past it is seen only where its last tile is in use.
    """
    small = scale_down(plan.problem, plan.specialised[1])
    totals = {
        name: None if getattr(small, name) is None else longest
        for name, longest in (("total_q", small.seq_q), ("total_k", small.seq_k))
    }
    alone = msgspec.structs.replace(small, batch=1, **totals)
    return [small] if alone == small else [small, alone]


def reply_numerics(reply: Reply, where: str, problem: Problem) -> Numerics:
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


def executors(backend: str, seconds: float = 0.0, here: Sequence[Target] = ()) -> dict[str, Executor]:
    """A backend's executors by name; `here` are targets that are devices of this machine.

    None of a backend of another package whose `executors` raises: it stops nobody's work on other chips.
    """
    asked = Registry.load().backends[backend]
    try:
        return {found.name: found for found in asked.executors(seconds, here)}
    except Exception as error:
        if backend in own_backends():
            raise
        warn_caller(f"backend {backend}: executors() raised {type(error).__name__}: {error}", PluginWarning)
        return {}


def lacks(name: str, target: Target, here: Sequence[Target] = ()) -> str:
    """Why no executor of this name runs a target's code here; empty when one does.

    Of a backend that has none by that name, the first one that another backend has says why.
    """
    for backend in dict.fromkeys((target.backend, *Registry.load().backends)):
        found = executors(backend, here=here).get(name)
        if found is not None:
            return found.lacks(target)
    return f"nothing runs the code of {target.name} where it is not"


def arches(name: str) -> dict[str, str]:
    """The chips that executors of this name are for, and the backend of each."""
    found = ((backend, executors(backend).get(name)) for backend in Registry.load().backends)
    return {arch: backend for backend, one in found if one is not None for arch in one.arches}


def analyst(target: Target) -> Executor | None:
    """The executor that reads what the compiler makes for a target, where that is no machine code; else None."""
    return next((one for one in executors(target.backend).values() if one.lowers_to), None)
