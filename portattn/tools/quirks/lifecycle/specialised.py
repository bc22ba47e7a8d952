"""Specialised: one specialisation of our own kernels, as it failed; and compiling it again in a worker."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from portattn.compile.ensure import compile_in, over_limit
from portattn.launch import KernelCall, kernel_calls, meta_call
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.outcome import Incident
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.worker.client import Reply, Worker


class Specialised(msgspec.Struct, frozen=True, kw_only=True):
    """A problem, and exactly how the core kernel runs it. env: what the compiler sees beside its usual environment."""

    problem: Problem
    lowering: Lowering
    launch: Launch
    env: dict[str, str] = {}

    @property
    def kernel(self) -> str:
        return CORES[self.problem.op].name

    def plan(self, target: Target, registry: Registry) -> Plan:
        """A plan that runs this, whatever tuning and quirks would make of the problem."""
        path = registry.backends[target.backend].core_path
        return Plan(
            problem=self.problem, target=target.name, toolchain=str(target.toolchain), requested=path, path=path,
            kernel=self.kernel, lowering=self.lowering, launch=self.launch, env=self.env,
        )  # fmt: skip

    def launches(self, target: Target, registry: Registry) -> list[KernelCall]:
        made = self.plan(target, registry)
        return kernel_calls(made, meta_call(self.problem), target.arch.cores)[0]

    def cannot(self, target: Target) -> str:
        """Why no plan could have these choices, whatever its tuning; empty when one could."""
        kernel = CORES[self.problem.op]
        refused = kernel.cannot(self.problem)
        if refused:
            return refused[0]
        for choice, value, why in kernel.limits(self.problem, self.lowering, self.launch):
            if getattr(self.lowering, choice) != value:
                return f"{choice} must be {value}: {why}"
        return ""


def of_incident(incident: Incident) -> Specialised | None:
    """What failed in an incident; None for one that an older release kept, without its problem."""
    if incident.problem is None or incident.lowering is None or incident.launch is None:
        return None
    return Specialised(
        problem=incident.problem, lowering=incident.lowering, launch=incident.launch, env=incident.environment_set
    )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How compiling ended. text: what the compiler said, as probes match signatures against it."""

    reply: Reply
    function: str = ""

    @property
    def passed(self) -> bool:
        return self.reply.outcome == "ok"

    @property
    def text(self) -> str:
        reply = self.reply
        return "\n".join(part for part in (f"{reply.kind}: {reply.message}", reply.log) if part)


def compile_all(what: Specialised, target: Target, registry: Registry, worker: Worker, seconds: float) -> Outcome:
    """Compile every launch until one fails. What does not fit the chip fails as well."""
    made = what.plan(target, registry)
    last = Outcome(reply=Reply(outcome="ok"))
    for launch in what.launches(target, registry):
        reply = compile_in(worker, launch, made, target, seconds, "basic", again=False)
        over = over_limit(reply, target) if reply.outcome == "ok" else ""
        if over:
            reply = Reply(outcome="error", stage="load", kind="OutOfResources", message=over)
        last = Outcome(reply=reply, function=launch.function)
        if not last.passed:
            break
    return last


def is_it(outcome: Outcome, symptom: str, signature: str) -> bool:
    """Whether an outcome is the failure that is looked for: by its signature, or a hang by not ending."""
    if outcome.passed:
        return False
    if symptom == "hang" and outcome.reply.outcome == "hang":
        return True
    return bool(signature) and re.search(signature, outcome.text) is not None


def values_of(what: Specialised) -> dict[str, Any]:
    """Launch values and the choices that the kernel reads, by name: for reports."""
    return {**what.launch.values(), **{name: getattr(what.lowering, name) for name in CORES[what.problem.op].choices}}
