"""`portattn quirks reduce`: the smallest specialisation of our own kernels that fails in the same way.

Delta debugging over a fixed list of simplifications (simplifications.py): from the simplest offer of each step to the
least simple one, keep the first that still fails with the signature; round after round until a whole one changes
nothing. Every try is one compile of the plan's kernels in a child process under a time limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from portattn.compile.compile_check import first_line, reproducer
from portattn.config import Settings
from portattn.errors import ArgumentError, PortattnError
from portattn.launch import signature
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.compile_record import Incident
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.tools.quirks.editing import edit
from portattn.tools.quirks.lifecycle.failure_report import failure_of
from portattn.tools.quirks.lifecycle.repro_command import plan_line
from portattn.tools.quirks.lifecycle.simplifications import OFFERS, Simplification, changing_steps
from portattn.tools.quirks.lifecycle.specialised import (
    CompileOutcome,
    Specialisation,
    compile_all,
    is_it,
    of_incident,
    values_of,
)
from portattn.tools.quirks.probe import plans
from portattn.worker.client import Reply, Worker

OP = "quirks reduce"
REDUCED = "-reduced"
MOST = 400  # compiles of one reduction
BEFORE = "compiled before"
SECONDS = 120.0  # limit of one compile


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is reduced: a specialisation, where it fails, and how the failure is told.

    off  quirks that are switched off where the specialisation is planned: the reduced quirk itself
    """

    id: str
    what: Specialisation
    target: Target
    symptom: str
    signature: str
    off: tuple[str, ...] = ()


class ReductionStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step. kept: it still fails in the same way; ended: how it ended otherwise."""

    step: str
    kept: bool
    ended: str


class Reduction(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    changed   what differs between before and after, "name: before -> after"
    tried     every step that was tried, in order
    compiles  how many compiles it took
    complete  False when the limit of compiles ended it
    probe     a "plan:" probe that states the smallest one; empty where none does
    command   a shell command that sends the smallest one to a compiler
    log       what the compiler said of it
    """

    id: str
    target: str
    toolchain: str
    signature: str
    before: Specialisation
    after: Specialisation
    changed: tuple[str, ...]
    tried: tuple[ReductionStep, ...]
    compiles: int
    complete: bool
    probe: str
    function: str
    command: str
    log: str


def of_quirk(quirk: Quirk, registry: Registry, toolchain: str | None) -> Subject:
    """The specialisation that a quirk's "plan:" probe states, without the quirk. Raises ArgumentError without one."""
    if not quirk.evidence.probe.startswith(plans.PREFIX):
        limit = f"must have a probe of the form {plans.PREFIX!r}, and {quirk.id} has {quirk.evidence.probe[:60]!r}"
        raise ArgumentError(OP, "ID", quirk.id, limit)
    stated = plans.parse(quirk.evidence.probe)
    target = registry.target(stated.target, toolchain)
    path = registry.backends[target.backend].core_path
    settings = Settings(quirks=f"-{quirk.id}", backend=path)
    made = plan(stated.problem, target, plans.with_start_values(registry, stated, target), settings=settings)
    lowering, launch = made.specialised
    what = Specialisation(problem=stated.problem, lowering=lowering, launch=launch, env=made.env)
    return Subject(
        id=quirk.id,
        what=what,
        target=target,
        symptom=quirk.symptom,
        signature=quirk.evidence.signature,
        off=(quirk.id,),
    )


def subject_of_incident(incident: Incident, registry: Registry, toolchain: str | None) -> Subject:
    """Raises ArgumentError on an incident that does not say what was compiled."""
    what = of_incident(incident, registry)
    if what is None:
        raise ArgumentError(OP, "ID", incident.id, "must be an incident that holds its problem: this one has none")
    failure = failure_of(incident)
    target = registry.target(incident.target, toolchain or incident.toolchain)
    return Subject(id=incident.id, what=what, target=target, symptom=incident.symptom, signature=failure.signature)


def reduce(
    subject: Subject,
    registry: Registry,
    worker: Worker,
    *,
    seconds: float = SECONDS,
    most: int = MOST,
    say: Callable[[ReductionStep, int], None] = lambda tried, compiles: None,
) -> Reduction:
    """Shrink while it fails in the same way. `say` gets each step and the number of compiles so far.

    Raises PortattnError when the specialisation does not fail here in the first place.
    """
    if not subject.signature and subject.symptom != "hang":
        raise PortattnError(f"{subject.id}: a {subject.symptom} without a signature cannot be told by compiling")
    seen: dict[str, bool] = {}
    compiles, last = 0, CompileOutcome(reply=Reply(outcome="ok"))

    def fails(what: Specialisation) -> tuple[bool, str]:
        nonlocal compiles, last
        key = _key(what, subject.target, registry)
        if key in seen:
            return seen[key], BEFORE
        compiles += 1
        outcome = compile_all(what, subject.target, registry, worker, seconds)
        seen[key] = is_it(outcome, subject.symptom, subject.signature)
        last = outcome if seen[key] else last
        return seen[key], "the same" if seen[key] else _ended(outcome.passed, outcome.reply.kind, outcome.reply.message)

    same, ended = fails(subject.what)
    if not same:
        raise PortattnError(f"{subject.id} does not fail on {subject.target}: {ended}")
    now, tried = subject.what, list[ReductionStep]()

    def first_that_fails(offered: Iterable[Simplification]) -> Specialisation | None:
        for step in offered:
            if compiles >= most:
                return None
            reason = step.result.cannot(subject.target)
            same, ended = (False, reason) if reason else fails(step.result)
            if same or ended != BEFORE:
                tried.append(ReductionStep(step=step.name, kept=same, ended=ended))
                say(tried[-1], compiles)
            if same:
                return step.result
        return None

    progress = True
    while progress:
        progress = False
        for offers in OFFERS:
            while (simpler := first_that_fails(changing_steps(offers, now))) is not None:
                now, progress = simpler, True
    return Reduction(
        id=subject.id,
        target=subject.target.name,
        toolchain=str(subject.target.toolchain),
        signature=subject.signature,
        before=subject.what,
        after=now,
        changed=tuple(_changed(subject.what, now)),
        tried=tuple(tried),
        compiles=compiles,
        complete=compiles < most,
        probe=plan_line(now, subject.target, registry, subject.off),
        function=last.function,
        command=_command(now, last.function, subject.target, registry, worker.python),
        log=last.text,
    )


def _key(what: Specialisation, target: Target, registry: Registry) -> str:
    """What the compiler sees: problems that differ in nothing else are one compile."""
    seen = [signature(launch) for launch in what.launches(target, registry)]
    return hashlib.sha256(msgspec.json.encode([seen, what.env], order="deterministic")).hexdigest()


def _command(what: Specialisation, function: str, target: Target, registry: Registry, python: str) -> str:
    """The request for the launch that fails, as a shell command."""
    launch = next(launch for launch in what.launches(target, registry) if launch.function == function)
    return reproducer(launch, what.plan(target, registry), target, python)


def _ended(passed: bool, kind: str, message: str) -> str:
    return "compiles" if passed else f"fails otherwise: {kind}: {first_line(message)[:120]}"


def _changed(before: Specialisation, after: Specialisation) -> Iterator[str]:
    for part in ("problem", "env"):
        old, new = (msgspec.to_builtins(getattr(what, part)) for what in (before, after))
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                yield f"{name}: {old.get(name)} -> {new.get(name)}"
    old, new = values_of(before), values_of(after)
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)} -> {new.get(name)}"


def incident_of(reduced: Reduction, original: Incident, registry: Registry) -> Incident:
    """The smallest one as an incident of its own, <id>-reduced, which `quirks new --from-incident` takes."""
    target = registry.target(reduced.target, reduced.toolchain)
    launch = next(i for i in reduced.after.launches(target, registry) if i.function == reduced.function)
    return msgspec.structs.replace(
        original,
        id=f"{original.id.removesuffix(REDUCED)}{REDUCED}",
        log=reduced.log,
        command=reduced.command,
        toolchain=reduced.toolchain,
        specialisation=msgspec.to_builtins(signature(launch)),
        problem=reduced.after.problem,
        lowering=reduced.after.lowering,
        launch=reduced.after.launch,
        environment_set=reduced.after.env,
    )


def write_probe(reduced: Reduction, registry: Registry) -> str:
    """Put the smallest one into the quirk's `probe`; the file's name. Comments and layout are kept.

    Raises PortattnError where no "plan:" probe states it, and DataError where the file would no longer load.
    """
    quirk = registry.quirks[reduced.id]
    if not reduced.probe:
        raise PortattnError(
            f"{reduced.id}: no probe of the form {plans.PREFIX!r} states the smallest one; see the command"
        )
    edit(Path(quirk.file), quirk.id, lambda document: document["evidence"].update(probe=reduced.probe))
    return quirk.file
