"""Run probes: the arms of one quirk on one toolchain, whether they can run here, and many quirks side by side."""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from portattn.errors import ArgumentError, PortattnError
from portattn.planning.quirk_files import PROGRAM
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import installed_beside, installed_toolchain, is_installed
from portattn.tools import lab
from portattn.tools.lab.creating import OpenWorker, run_in_threads
from portattn.tools.quirks import probe_plans
from portattn.tools.quirks.examples import arches_of
from portattn.tools.quirks.probe_results import (
    MISSING,
    NOT_RUN,
    SIGNATURE,
    Arm,
    ArmName,
    ProbeResult,
    arm_of_reply,
    probe_outcome,
    probed_range,
    range_component,
    range_diff,
    saw,
)
from portattn.worker import client
from portattn.worker.client import Worker


def run_program(
    quirk: Quirk, arm: ArmName, target: Target, registry: Registry, worker: Worker, seconds: float, passes: str = ""
) -> Arm:
    """Run one arm; the outcome of the compiler or the program becomes the Arm."""
    backend = registry.backends[target.backend]
    file, _, function = quirk.evidence.probe.partition(":")  # the file lies beside the folder of its entry
    reply = worker.request(
        "probe", seconds, program=str((Path(quirk.file).parent.parent / file).resolve()), function=function, arm=arm,
        name=target.name, target=list(backend.triton_target(target.arch)), passes=passes, executor=sys.executable,
        path=os.pathsep.join(place for place in sys.path if place), adapter=backend.compile_adapter(),
    )  # fmt: skip
    return arm_of_reply(reply, quirk)


SECONDS = 180.0  # limit of one arm
# A compiled kernel that Triton has in its cache was not compiled: a probe looks at the compiler.
FRESH = {"TRITON_ALWAYS_COMPILE": "1"}
# Releases that no registry has, and what stands in for them: a lab toolchain, with the passes of that time. Only for
# probes whose entry says so (evidence.stand_in).
STAND_INS = {"triton-ascend==3.1.0": ("triton-ascend==3.2.0", "old")}


class ProbeError(PortattnError):
    """A quirk has no probe, or its probe cannot run on the requested toolchain; the text says why."""


def run(
    quirk: Quirk, toolchain: str | None = None, target: str | None = None, *, seconds: float = SECONDS,
    worker: Worker | None = None, registry: Registry | None = None,
) -> ProbeResult:  # fmt: skip
    """Probe a quirk on a toolchain; `target`: by default the probe's own, or the entry's first arch.

    A probe that cannot run here is `unverified`, with the reason. Raises ArgumentError on a bad toolchain or target."""
    registry = registry or Registry.load()
    begun = time.monotonic()
    where = place(quirk, toolchain, target, registry)
    in_range = probed_range(quirk, where)
    common = {"quirk": quirk.id, "toolchain": str(where.toolchain), "target": where.name, "in_range": in_range}
    arms: dict[ArmName, Arm] = {"control": NOT_RUN, "off": NOT_RUN, "on": NOT_RUN}
    missing = cannot(quirk, where, worker)
    if not missing:
        with contextlib.nullcontext(worker) if worker else _start(quirk, where) as child:
            for name in arms:
                arms[name] = _run_arm(quirk, name, where, registry, child, seconds)
                if name == "control" and arms[name].outcome != "pass":
                    break
                if name == "off" and (not arms[name].matched or quirk.effect.kind == "note"):
                    break
        missing = _without_a_word(quirk, arms)
    if missing:
        here = (common["toolchain"], where.name)
        dates = [seen.date for seen in quirk.verified if (seen.toolchain, seen.target) == here]
        since = f"last verified here on {max(dates)}" if dates else f"never verified on {where.toolchain}"
        reason = f"{missing}; {since}"
        return ProbeResult(**common, verdict="unverified", reason=reason, date=datetime.date.today())  # type: ignore[arg-type]
    verdict = probe_outcome(in_range, *(arms[name].word for name in ("control", "off", "on")))
    told = {"broken": "control", "ineffective": "on"}.get(verdict, "off")
    return ProbeResult(
        **common,  # type: ignore[arg-type]
        **arms,  # type: ignore[arg-type]
        verdict=verdict,
        reason=saw(quirk, arms[told]),  # type: ignore[index]
        stand_in=STAND_INS[str(where.toolchain)][0] if _stands(quirk, where) else "",
        diff=range_diff(quirk, where, verdict, affected_versions(quirk)),
        seconds=round(time.monotonic() - begun, 3),
        date=datetime.date.today(),
    )


def _without_a_word(quirk: Quirk, arms: dict[ArmName, Arm]) -> str:
    """Return why the arms say nothing about the compiler, or "": one failed before it, was killed, or lacks a part."""
    for name, arm in arms.items():
        timed_out = arm.kind == "timeout" and arm.stage in client.TRANSIENT_STAGES
        if arm.kind in client.TRANSIENT_KINDS or timed_out:
            return f"{name} arm: {saw(quirk, arm) or arm.kind}, which says nothing about the compiler"
        if arm.kind == MISSING:
            return (arm.text.splitlines() or [""])[0].removeprefix("Missing: ")
    return ""


def off(
    quirk: Quirk, toolchain: str | None = None, target: str | None = None, *, worker: Worker | None = None,
    registry: Registry | None = None,
) -> Arm:  # fmt: skip
    """Run only the arm without the work-around. Raises ProbeError if it cannot run here, else as `run` does."""
    registry = registry or Registry.load()
    where = place(quirk, toolchain, target, registry)
    if missing := cannot(quirk, where, worker):
        raise ProbeError(f"{quirk.id}: {missing}")
    with contextlib.nullcontext(worker) if worker else _start(quirk, where) as child:
        return _run_arm(quirk, "off", where, registry, child, SECONDS)


def place(quirk: Quirk, toolchain: str | None, target: str | None, registry: Registry) -> Target:
    """Return a probe's target: the named one, the one that a "plan:" probe states, or the entry's first arch."""
    stated = (
        probe_plans.parse(quirk.evidence.probe).target if quirk.evidence.probe.startswith(probe_plans.PREFIX) else ""
    )
    concerned = [f"{backend}:{arch}" for backend, arch in arches_of(quirk, registry)]
    if target is not None and target not in concerned:
        raise ArgumentError("quirks probe", "--target", target, f"{quirk.id} concerns {', '.join(concerned)}")
    chosen = target or stated or (concerned[0] if concerned else "")
    if not chosen:
        raise ProbeError(f"{quirk.id}: no arch of {quirk.when.backend or 'any backend'} that kernels are planned for")
    return registry.target(chosen, toolchain)


def cannot(quirk: Quirk, where: Target, worker: Worker | None = None) -> str:
    """Return why a quirk's probe cannot run on this toolchain here, or ""."""
    toolchain = str(where.toolchain)
    if not has_probe(quirk):
        return f"no probe: {quirk.evidence.probe.partition(':')[2].strip()}"
    compiler = Registry.load().backends[where.backend].compiler
    if where.toolchain.distribution != compiler:
        return f"{toolchain} compiles nothing for {where.backend}"
    if quirk.evidence.needs:
        return _no_device(quirk.evidence.needs, where)
    if worker is not None or is_installed(toolchain):
        return ""
    if toolchain in STAND_INS:
        if quirk.evidence.stand_in != toolchain:
            return f"{toolchain} is in no registry, and nothing stands in for it"
        toolchain = STAND_INS[toolchain][0]
    if lab.find(toolchain) is None:
        return f"{toolchain} is not here: `portattn lab create {toolchain}` makes it"
    return ""


def _no_device(needs: str, where: Target) -> str:
    from portattn.planning.registry import devices

    owner, _, pattern = needs.partition(":")
    here = [d for d in devices() if d.backend == owner and d.arch.matches(pattern) and d.name == where.name]
    if not here:
        return f"needs {needs}"
    if str(here[0].toolchain) != str(where.toolchain):
        return f"needs {needs} with {where.toolchain}: {here[0].toolchain} is installed"
    return ""


def has_probe(quirk: Quirk) -> bool:
    probe = quirk.evidence.probe
    return bool(PROGRAM.match(probe)) or probe.startswith(probe_plans.PREFIX)


def affected_versions(quirk: Quirk) -> list[str]:
    name = range_component(quirk)
    pairs = [seen.toolchain.partition("==") for seen in quirk.verified if seen.off == SIGNATURE]
    return [version for distribution, _, version in pairs if distribution == name]


def _stands(quirk: Quirk, where: Target) -> bool:
    return str(where.toolchain) in STAND_INS and quirk.evidence.stand_in == str(where.toolchain)


def _start(quirk: Quirk, where: Target) -> Worker:
    name = STAND_INS[str(where.toolchain)][0] if _stands(quirk, where) else str(where.toolchain)
    return lab.worker(name, environment=FRESH, **{"runs": "kernels"} if quirk.evidence.needs else {})


def _run_arm(quirk: Quirk, arm: ArmName, where: Target, registry: Registry, worker: Worker, seconds: float) -> Arm:
    passes = STAND_INS[str(where.toolchain)][1] if _stands(quirk, where) else ""
    run_arm = probe_plans.run_arm if quirk.evidence.probe.startswith(probe_plans.PREFIX) else run_program
    return run_arm(quirk, arm, where, registry, worker, seconds, passes)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One quirk to probe on one toolchain; `target` None is the probe's own."""

    quirk: Quirk
    toolchain: str
    target: str | None = None


def toolchains(registry: Registry) -> tuple[list[str], list[str]]:
    """Return toolchains that can be probed here (installed, made, and stand-ins), and the lab's others."""
    here = [str(one) for one in (installed_toolchain(), *installed_beside()) if one]
    made = {environment.toolchain for environment in lab.environments()}
    there = [name for name in lab.toolchains() if name in made or name in here]
    named = {quirk.evidence.stand_in for quirk in registry.quirks.values()}
    stand_ins = [name for name, (real, _) in STAND_INS.items() if name in named and real in there]
    found = [*there, *(name for name in (*here, *sorted(made)) if name not in there), *stand_ins]
    return list(dict.fromkeys(found)), [name for name in lab.toolchains() if name not in found]


def jobs(quirks: Iterable[Quirk], names: Sequence[str], target: str | None, registry: Registry) -> list[Job]:
    """Return a job for each quirk and each toolchain of its backend; one job if no toolchain matters."""
    found = []
    for quirk in quirks:
        fitting = [name for name in names if _fits(quirk, name, target, registry)]
        if quirk.evidence.needs:  # a device is used by what is installed here
            fitting = [name for name in fitting if is_installed(name)] or fitting[:1]
        elif not has_probe(quirk):
            fitting = fitting[:1] or list(names[:1])
        found += [Job(quirk=quirk, toolchain=name, target=target) for name in fitting]
    return found


def _fits(quirk: Quirk, name: str, target: str | None, registry: Registry) -> bool:
    where = place(quirk, name, target, registry)
    compiler = Registry.load().backends[where.backend].compiler
    return where.toolchain.distribution == compiler and (name not in STAND_INS or quirk.evidence.stand_in == name)


def execute(
    wanted: Sequence[Job], registry: Registry, seconds: float, parallel: int, done: Callable[[Job, ProbeResult], None]
) -> None:
    """Run every job, telling `done` in this thread; an interrupt, or its error, kills children and drops the rest."""

    def one(job: Job, open_worker: OpenWorker) -> ProbeResult:
        where, worker = place(job.quirk, job.toolchain, job.target, registry), None
        if not cannot(job.quirk, where):
            worker = open_worker((job.toolchain, bool(job.quirk.evidence.needs)), lambda: _start(job.quirk, where))
        return run(job.quirk, job.toolchain, job.target, seconds=seconds, worker=worker, registry=registry)

    run_in_threads(wanted, one, parallel, done)


def with_diffs(pairs: Sequence[tuple[Job, ProbeResult]], registry: Registry) -> list[ProbeResult]:
    """Return the results with their diffs, each from all results of its quirk."""
    found = []
    for job, result in pairs:
        name = range_component(job.quirk)
        others = [
            other.toolchain.partition("==")[2]
            for known, other in pairs
            if known.quirk.id == job.quirk.id
            and other.off.word == SIGNATURE
            and other.toolchain.startswith(f"{name}==")
        ]
        where = registry.target(result.target, result.toolchain)
        text = range_diff(job.quirk, where, result.verdict, [*affected_versions(job.quirk), *others])
        found.append(msgspec.structs.replace(result, diff=text))
    return found
