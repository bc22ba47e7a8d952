"""The arms of one quirk on one toolchain, and whether they can be run here."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

from portattn.errors import ArgumentError, PortattnError
from portattn.planning.quirk_checks import PROGRAM
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.target import Target
from portattn.schema.toolchain import is_installed
from portattn.tools import lab
from portattn.tools.quirks.examples import arches_of
from portattn.tools.quirks.probe import plans, programs, ranges
from portattn.tools.quirks.probe.results import (
    MISSING,
    NOT_RUN,
    SIGNATURE,
    Arm,
    ArmName,
    ProbeResult,
    probe_outcome,
    probed_range,
    saw,
)
from portattn.worker import exit_status
from portattn.worker.client import Worker

SECONDS = 180.0  # limit of one arm
# A compiled kernel that Triton has in its cache was not compiled: a probe looks at the compiler.
FRESH = {"TRITON_ALWAYS_COMPILE": "1"}
# Releases that no registry has, and what stands in for them: a lab toolchain, with the passes of that time. Only for
# probes whose entry says so (evidence.stand_in).
STAND_INS = {"triton-ascend==3.1.0": ("triton-ascend==3.2.0", "old")}


class ProbeError(PortattnError):
    """A quirk has no probe, or its probe cannot be run on the toolchain that was asked for. The text says why."""


def run(
    quirk: Quirk,
    toolchain: str | None = None,
    target: str | None = None,
    *,
    seconds: float = SECONDS,
    worker: Worker | None = None,
    registry: Registry | None = None,
) -> ProbeResult:
    """Probe a quirk on a toolchain: the installed one, or one of the lab. The arms run one after the other.

    target   BACKEND:ARCH; by default the probe's own, or the first arch that the entry names
    worker   a child under that toolchain's Python; by default one is started and ended
    What cannot be run here is the verdict `unverified`, with the reason. Raises ArgumentError on a malformed toolchain
    or target, and on a target that the quirk does not concern.
    """
    registry = registry or Registry.load()
    begun = time.monotonic()
    where = place(quirk, toolchain, target, registry)
    in_range = probed_range(quirk, where)
    common = {"quirk": quirk.id, "toolchain": _name(where), "target": where.name, "in_range": in_range}
    missing = cannot(quirk, where, worker)
    if missing:
        reason = f"{missing}; {_since(quirk, where)}"
        return ProbeResult(**common, verdict="unverified", reason=reason, date=datetime.date.today())  # type: ignore[arg-type]
    arms: dict[ArmName, Arm] = {"control": NOT_RUN, "off": NOT_RUN, "on": NOT_RUN}
    with _child(quirk, where, worker) as child:
        arm = _runner(quirk, where, registry, child, seconds)
        arms["control"] = arm("control")
        if arms["control"].outcome == "pass":
            arms["off"] = arm("off")
            if arms["off"].matched and quirk.effect.kind != "note":
                arms["on"] = arm("on")
    silent = next(((name, arm) for name, arm in arms.items() if _says_nothing(arm)), None)
    if silent:
        name, ended = silent
        told = f"{name} arm: {saw(quirk, ended) or ended.kind}, which says nothing about the compiler"
        reason = f"{told}; {_since(quirk, where)}"
        return ProbeResult(**common, verdict="unverified", reason=reason, date=datetime.date.today())  # type: ignore[arg-type]
    lacking = next((a.text for a in arms.values() if a.kind == MISSING), "")
    if lacking:
        reason = f"{lacking.splitlines()[0].removeprefix('Missing: ')}; {_since(quirk, where)}"
        return ProbeResult(**common, verdict="unverified", reason=reason, date=datetime.date.today())  # type: ignore[arg-type]
    verdict = probe_outcome(in_range, *(arms[name].word for name in ("control", "off", "on")))
    told = {"broken": "control", "ineffective": "on"}.get(verdict, "off")
    return ProbeResult(
        **common,  # type: ignore[arg-type]
        **arms,  # type: ignore[arg-type]
        verdict=verdict,
        reason=saw(quirk, arms[told]),  # type: ignore[index]
        stand_in=STAND_INS[_name(where)][0] if _stands(quirk, where) else "",
        diff=ranges.diff(quirk, where, verdict, affected_versions(quirk)),
        seconds=round(time.monotonic() - begun, 3),
        date=datetime.date.today(),
    )


def _says_nothing(arm: Arm) -> bool:
    """Whether an arm failed for what says nothing about a compiler: it was killed, or never came to the compiler."""
    return arm.kind in exit_status.TRANSIENT_KINDS or (
        arm.kind == "timeout" and arm.stage in exit_status.TRANSIENT_STAGES
    )


def off(
    quirk: Quirk,
    toolchain: str | None = None,
    target: str | None = None,
    *,
    seconds: float = SECONDS,
    worker: Worker | None = None,
    registry: Registry | None = None,
) -> Arm:
    """Only the arm without the work-around. Raises ProbeError where it cannot be run here, else as `run` does."""
    registry = registry or Registry.load()
    where = place(quirk, toolchain, target, registry)
    missing = cannot(quirk, where, worker)
    if missing:
        raise ProbeError(f"{quirk.id}: {missing}")
    with _child(quirk, where, worker) as child:
        return _runner(quirk, where, registry, child, seconds)("off")


def place(quirk: Quirk, toolchain: str | None, target: str | None, registry: Registry) -> Target:
    """Where a probe runs: the named target, the one that a "plan:" probe states, or the entry's first arch."""
    stated = plans.parse(quirk.evidence.probe).target if quirk.evidence.probe.startswith(plans.PREFIX) else ""
    concerned = [f"{backend}:{arch}" for backend, arch in arches_of(quirk, registry)]
    if target is not None and target not in concerned:
        raise ArgumentError("quirks probe", "--target", target, f"{quirk.id} concerns {', '.join(concerned)}")
    chosen = target or stated or (concerned[0] if concerned else "")
    if not chosen:
        raise ProbeError(f"{quirk.id}: no arch of {quirk.when.backend or 'any backend'} that kernels are planned for")
    return registry.target(chosen, toolchain)


def cannot(quirk: Quirk, where: Target, worker: Worker | None = None) -> str:
    """Why a quirk's probe cannot be run on this toolchain here; empty when it can."""
    toolchain = _name(where)
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
    """Why a probe that needs a device cannot run: there is none of the kind, or its compiler is another one."""
    from portattn.planning.detect_target import devices

    owner, _, pattern = needs.partition(":")
    here = [d for d in devices() if d.backend == owner and d.arch.matches(pattern) and d.name == where.name]
    if not here:
        return f"needs {needs}"
    if str(here[0].toolchain) != str(where.toolchain):
        return f"needs {needs} with {_name(where)}: {_name(here[0])} is installed"
    return ""


def has_probe(quirk: Quirk) -> bool:
    """Whether there is something to run, here or on another machine."""
    probe = quirk.evidence.probe
    return bool(PROGRAM.match(probe)) or probe.startswith(plans.PREFIX)


def affected_versions(quirk: Quirk) -> list[str]:
    """Versions of the range's component on which the bug was recorded."""
    name = ranges.component(quirk)
    pairs = [seen.toolchain.partition("==") for seen in quirk.verified if seen.off == SIGNATURE]
    return [version for distribution, _, version in pairs if distribution == name]


def _since(quirk: Quirk, where: Target) -> str:
    dates = [seen.date for seen in quirk.verified if seen.toolchain == _name(where) and seen.target == where.name]
    return f"last verified here on {max(dates)}" if dates else f"never verified on {_name(where)}"


def _name(where: Target) -> str:
    """The compiler alone, without components."""
    return str(where.toolchain)


def _stands(quirk: Quirk, where: Target) -> bool:
    return _name(where) in STAND_INS and quirk.evidence.stand_in == _name(where)


def _child(quirk: Quirk, where: Target, worker: Worker | None) -> _Child:
    if worker is not None:
        return _Child(worker, ours=False)
    name = STAND_INS[_name(where)][0] if _stands(quirk, where) else _name(where)
    if quirk.evidence.needs:
        return _Child(lab.worker(None, environment=FRESH, runs="kernels"), ours=True)
    return _Child(lab.worker(name, environment=FRESH), ours=True)


class _Child:
    """A worker, ended with the block when it was started for it."""

    def __init__(self, worker: Worker, ours: bool) -> None:
        self.worker, self.ours = worker, ours

    def __enter__(self) -> Worker:
        return self.worker

    def __exit__(self, *_: object) -> None:
        if self.ours:
            self.worker.close()


def _runner(
    quirk: Quirk, where: Target, registry: Registry, worker: Worker, seconds: float
) -> Callable[[ArmName], Arm]:
    passes = STAND_INS[_name(where)][1] if _stands(quirk, where) else ""
    run_arm = plans.run_arm if quirk.evidence.probe.startswith(plans.PREFIX) else programs.run_arm
    return lambda name: run_arm(quirk, name, where, registry, worker, seconds, passes)
