"""plan(problem, target, registry, verdicts, settings) -> Plan: which path runs, how, and why. A pure function.

Dispatch, explain, doctor, the matrix, the tests and the docs all call it; it can be asked about any machine.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from portattn import __version__
from portattn.core import CORES, CoreKernel
from portattn.errors import ArgumentError, PathUnavailable, QuirkConflict
from portattn.lowering import Launch, Lowering
from portattn.problem import Problem
from portattn.quirk import PATH_EFFECTS, Quirk, parse_overrides
from portattn.registry import Registry
from portattn.config import Settings
from portattn.target import Target
from portattn.verdict import NO_VERDICTS, Verdicts

REFERENCE = "reference"
GROUPS = ("auto", "vendor", REFERENCE)  # values of `backend` that name no single accelerated path


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A path that was not taken: why, and what would change that."""

    path: str
    reason: str
    hint: str = ""
    quirk: str = ""
    incident: str = ""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A quirk that changed this plan: its sentence, and what it set."""

    id: str
    sentence: str
    sets: dict[str, Any]
    note: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How one problem runs on one target.

    path       `triton` or `interpreter` (core kernels), a vendor path's name, or `reference`
    requested  what the caller asked for (`auto`, or a path)
    kernel, lowering, launch, env   of a core path; None and empty elsewhere
    quirks     those that changed the plan, in the order in which they were applied
    rejected   every path that comes before `path`, with its reason
    key        identifies the specialisation, target and toolchain for verdicts; empty without a kernel
    """

    problem: Problem
    target: str
    toolchain: str
    requested: str
    path: str
    kernel: str = ""
    lowering: Lowering | None = None
    launch: Launch | None = None
    env: dict[str, str] = {}
    quirks: tuple[Applied, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()
    key: str = ""

    @property
    def fell_back(self) -> bool:
        """Whether `auto` was asked for and a path that comes earlier had to be passed over."""
        return self.requested == "auto" and bool(self.rejected)

    @property
    def specialised(self) -> tuple[Lowering, Launch]:
        """Lowering and launch of a core path. Raises ValueError for a path that has none."""
        if self.lowering is None or self.launch is None:
            raise ValueError(f"the {self.path} path has no kernel of ours, so no lowering and no launch")
        return self.lowering, self.launch

    def explain(self) -> str:
        """The plan as text: path, kernel, quirks with their sentences, and every path not taken."""
        lines = [f"{self.problem}", f"on {self.target} with {self.toolchain}: {self.path} path"]
        if self.lowering and self.launch:
            shown = [f"{k}={v}" for k, v in msgspec.structs.asdict(self.launch).items() if k != "options"]
            shown += [f"{k}={v}" for k, v in self.launch.options]
            choices = {c: getattr(self.lowering, c) for c in CORES[self.problem.op].choices}
            lines.append(f"  kernel   {self.kernel}")
            lines.append(f"  launch   {' '.join(shown)}")
            lines.append("  lowering " + " ".join(f"{k}={v}" for k, v in choices.items()))
        lines += [f"  env      {k}={v}" for k, v in self.env.items()]
        lines += [f"  quirk    {q.id}: {q.sentence}" + (f" [{q.note}]" if q.note else "") for q in self.quirks]
        for r in self.rejected:
            hint = f" (hint: {r.hint})" if r.hint else ""
            lines.append(f"  not {r.path}: {r.reason}{hint}")
        lines += [f"  note     {n}" for n in self.notes]
        return "\n".join(lines)


class _Rejected(Exception):
    """Internal: the core path cannot be taken, with the reason."""

    def __init__(self, rejection: Rejection) -> None:
        self.rejection = rejection


def plan(
    problem: Problem,
    target: Target,
    registry: Registry | None = None,
    verdicts: Verdicts = NO_VERDICTS,
    settings: Settings | None = None,
) -> Plan:
    """Plan one problem on one target.

    Candidates in order: variants, the core kernel, the vendor's library, the reference. The first that nothing
    speaks against is the plan's path; `rejected` says what spoke against the others.

    Raises QuirkConflict when two quirks contradict each other, SettingError on an override that names no quirk,
    ArgumentError on an unknown backend, and PathUnavailable when the path that the caller named cannot run this.
    """
    registry = registry or Registry.load()
    settings = settings or Settings()
    backend = registry.backends[target.backend]
    requested = settings.backend
    names = [p for p in (backend.core_path, *(v.name for v in backend.vendor), REFERENCE) if p]
    if requested not in (*GROUPS, *names, "interpreter"):
        known = ", ".join(dict.fromkeys([*GROUPS, *names]))
        raise ArgumentError(problem.op, "backend", requested, f"{target.backend} knows {known}")

    base: dict[str, Any] = {
        "problem": problem,
        "target": target.name,
        "toolchain": str(target.toolchain),
        "requested": requested,
    }
    rejected: list[Rejection] = []
    floor = ""  # a quirk's `path` effect: vendor paths are not taken either when it is the reference
    if backend.core_path and (requested == backend.core_path or (requested == "auto" and target.backend != "cpu")):
        try:
            return Plan(**base, path=backend.core_path, **_core(problem, target, registry, verdicts, settings))
        except _Rejected as no:
            rejected.append(no.rejection)
            floor = _floor(no.rejection, registry)
    for vendor in backend.vendor:
        if requested not in ("auto", "vendor", vendor.name):
            continue
        if floor == REFERENCE:
            rejected.append(Rejection(path=vendor.name, reason="the quirk leads to the reference", quirk=rejected[0].quirk))
            continue
        no_vendor = vendor.rejects(problem, target)
        if no_vendor is None:
            return Plan(**base, path=vendor.name, rejected=tuple(rejected))
        rejected.append(no_vendor)
    if requested in ("auto", REFERENCE):
        return Plan(**base, path=REFERENCE, rejected=tuple(rejected))
    if not rejected:
        rejected.append(Rejection(path=requested, reason=f"{target.backend} has no such path", hint="backend='auto'"))
    raise PathUnavailable(f"{problem.op}: backend={requested!r} cannot run this on {target}", rejected)


def _floor(rejection: Rejection, registry: Registry) -> str:
    quirk = registry.quirks.get(rejection.quirk)
    return quirk.effect.path or "" if quirk else ""


def _core(
    problem: Problem, target: Target, registry: Registry, verdicts: Verdicts, settings: Settings
) -> dict[str, Any]:
    """The core kernel's part of a plan. Raises _Rejected when it cannot be taken."""
    path = registry.backends[target.backend].core_path
    kernel = CORES[problem.op]

    def reject(reason: str, hint: str = "", **also: str) -> _Rejected:
        return _Rejected(Rejection(path=path, reason=reason, hint=hint, **also))

    if target.arch.refused:
        raise reject(target.arch.refused)
    if not target.toolchain:
        raise reject("Triton is not installed", "pip install 'portattn[triton]', or triton-ascend on an NPU")
    cannot = kernel.cannot(problem)
    if cannot:
        raise reject(*cannot)

    lowering, launch, resident, notes = _base(problem, target, registry, kernel)
    lowering, launch, env, applied = _apply_quirks(kernel, problem, target, registry, settings, lowering, launch, path)
    launch = kernel.fit(problem, launch, target.arch, resident)
    if kernel.tiles(problem, launch) > target.arch.max_programs and lowering.grid != "persistent":
        lowering = msgspec.structs.replace(lowering, grid="persistent")
        notes.append(
            f"grid = persistent: {kernel.tiles(problem, launch)} tiles, {target.arch.name} launches up to "
            f"{target.arch.max_programs} programs"
        )
    key = specialisation_key(kernel, problem, target, lowering, launch, env)
    verdict = verdicts.get(key)
    if verdict is not None and not verdict.passed:
        raise reject(
            f"this specialisation failed here on {verdict.date}: {verdict.reason}",
            f"portattn quirks new --from-incident {verdict.incident}" if verdict.incident else "",
            incident=verdict.incident,
        )
    return {
        "kernel": kernel.name,
        "lowering": lowering,
        "launch": launch,
        "env": env,
        "quirks": applied,
        "notes": tuple(notes),
        "key": key,
    }


def _base(
    problem: Problem, target: Target, registry: Registry, kernel: CoreKernel
) -> tuple[Lowering, Launch, int, list[str]]:
    """Lowering and launch before any quirk: the tuning entry that holds, or the defaults."""
    notes = []
    features = problem.features() | {"programs": 0}
    tuning = registry.tuning(target)
    entry = tuning.find(kernel.name, features) if tuning else None
    if tuning and entry:
        lowering = msgspec.structs.replace(Lowering(), **entry.lowering)
        launch, resident = Launch().changed(dict(entry.launch)), entry.resident
        if not tuning.provenance.measured:
            notes.append(f"tuning for {target.arch.name} compiles without spills and was never timed")
    else:
        lowering, launch, resident = Lowering(), Launch(), 1
        notes.append(f"no tuning entry for {kernel.name} on {target.arch.name}: default tile")
    if problem.dtype == "fp32" and lowering.dot_precision not in target.arch.dot_precisions:
        lowering = msgspec.structs.replace(lowering, dot_precision=target.arch.dot_precisions[0])
    if lowering.load == "descriptor" and not problem.aligned:
        # Tensor descriptors need 16-byte aligned bases and strides and contiguous rows (CUDA driver API,
        # cuTensorMapEncodeTiled).
        lowering = msgspec.structs.replace(lowering, load="pointer")
        notes.append("load = pointer: descriptors need contiguous rows and 16-byte aligned bases and strides")
    return lowering, launch, resident, notes


def _apply_quirks(
    kernel: CoreKernel,
    problem: Problem,
    target: Target,
    registry: Registry,
    settings: Settings,
    lowering: Lowering,
    launch: Launch,
    path: str,
) -> tuple[Lowering, Launch, dict[str, str], tuple[Applied, ...]]:
    """Apply what holds, again and again until nothing new holds: one quirk's effect can make another one apply."""
    forced_on, forced_off = parse_overrides(settings.quirks, registry.quirks)
    env: dict[str, str] = {}
    set_by: dict[str, tuple[str, Any]] = {}
    applied: dict[str, Applied] = {}
    while True:
        programs = kernel.tiles(problem, kernel.fit(problem, launch, target.arch, 1))
        fresh = [
            quirk
            for quirk in registry.quirks.values()
            if quirk.id not in applied
            and quirk.id not in forced_off
            and (
                (quirk.id in forced_on and quirk.concerns(kernel.name, target))
                or quirk.applies(kernel.name, problem, target, lowering, launch, programs)
            )
        ]
        fresh = [q for q in fresh if _touches(q, kernel)]
        if not fresh:
            return lowering, launch, env, tuple(applied.values())
        for quirk in fresh:
            effect = quirk.effect
            if effect.kind == "path":
                raise _Rejected(
                    Rejection(path=path, reason=quirk.title, hint=_hint(quirk), quirk=quirk.id),
                )
            values: dict[str, Any] = getattr(effect, effect.kind)
            for name, value in values.items():
                choice = f"{effect.kind} {name}"
                if choice in set_by and set_by[choice][1] != value:
                    raise QuirkConflict(choice, set_by[choice], (quirk.id, value))
                set_by[choice] = (quirk.id, value)
            if effect.kind == "lowering":
                lowering = msgspec.structs.replace(lowering, **values)
            elif effect.kind == "launch":
                launch = launch.changed(values)
            else:
                env |= values
            note = ""
            if quirk.newer_than_seen(target.toolchain):
                note = f"last seen on {quirk.evidence.last_seen}; unverified on {target.toolchain}"
            applied[quirk.id] = Applied(id=quirk.id, sentence=quirk.sentence(), sets=dict(values), note=note)


def _touches(quirk: Quirk, kernel: CoreKernel) -> bool:
    """Whether the quirk's effect reaches this kernel: a choice that the kernel does not read changes nothing."""
    return quirk.effect.lowering is None or any(name in kernel.choices for name in quirk.effect.lowering)


def _hint(quirk: Quirk) -> str:
    ranges = ", ".join(f"{name} {spec}" for name, spec in quirk.when.toolchain.items())
    leads = f"the {quirk.effect.path} path is the better plan" if quirk.effect.path in PATH_EFFECTS else ""
    return f"{leads}; concerns {ranges}" if ranges else leads


@functools.lru_cache(maxsize=1)
def kernel_source_digest() -> str:
    """Digest of the kernels' source, so that a verdict about other code is never taken for one about this."""
    import portattn.kernels

    digest = hashlib.sha256()
    for path in sorted(Path(portattn.kernels.__path__[0]).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def specialisation_key(
    kernel: CoreKernel, problem: Problem, target: Target, lowering: Lowering, launch: Launch, env: dict[str, str]
) -> str:
    """Digest of everything that decides the machine code: what a verdict is about."""
    parts = {
        "portattn": __version__,
        "source": kernel_source_digest(),
        "kernel": kernel.name,
        "constexprs": kernel.constexprs(problem, lowering, launch),
        "dtype": problem.dtype,
        "optional": [problem.seqlens_q, problem.seqlens_k, problem.leftpad_q, problem.leftpad_k, problem.return_lse],
        "aligned": problem.aligned,
        "large": problem.large,
        "launch": [launch.num_warps, launch.num_stages, launch.splits > 1, launch.options],
        "env": env,
        "target": target.name,
        "toolchain": [target.toolchain.distribution, target.toolchain.version, target.toolchain.components],
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]
