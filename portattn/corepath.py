"""The core kernel's part of a plan: tuning, then quirks, then what the problem's sizes and the chip's limits ask."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from portattn import __version__
from portattn.config import Settings
from portattn.core import CORES, CoreKernel, next_power_of_two
from portattn.errors import QuirkConflict
from portattn.lowering import Launch, Lowering
from portattn.planned import Applied, CoreChoice, Rejection
from portattn.problem import Problem
from portattn.quirk import Quirk, parse_overrides
from portattn.registry import Registry
from portattn.target import Target
from portattn.verdict import Verdicts


class Refused(Exception):
    """The core path cannot be taken. Never leaves the planner."""

    def __init__(self, rejection: Rejection) -> None:
        self.rejection = rejection
        super().__init__(rejection.reason)


def choose(problem: Problem, target: Target, registry: Registry, verdicts: Verdicts, settings: Settings) -> CoreChoice:
    """Kernel, lowering and launch for the problem. Raises Refused with the reason when the path cannot be taken."""
    path = registry.backends[target.backend].core_path
    kernel = CORES[problem.op]

    def refuse(reason: str, hint: str = "", **also: Any) -> Refused:
        return Refused(Rejection(path=path, reason=reason, hint=hint, **also))

    if target.arch.refused:
        raise refuse(target.arch.refused)
    if not target.toolchain:
        raise refuse("Triton is not installed", "pip install 'portattn[triton]', or triton-ascend on an NPU")
    cannot = kernel.cannot(problem)
    if cannot:
        raise refuse(*cannot)

    base = _base(problem, target, registry, kernel)
    quirked = _Quirked(kernel, problem, target, base)
    quirked.apply(registry, settings)
    lowering, notes = quirked.lowering, base.notes
    launch = kernel.fit(problem, quirked.launch, target.arch, base.resident)
    tiles = kernel.tiles(problem, launch)
    if tiles > target.arch.max_programs and lowering.grid != "persistent":
        lowering = msgspec.structs.replace(lowering, grid="persistent")
        notes.append(
            f"grid = persistent: {tiles} tiles, {target.arch.name} launches up to {target.arch.max_programs} programs"
        )
    choice = CoreChoice(
        kernel=kernel.name,
        lowering=lowering,
        launch=launch,
        env=quirked.env,
        quirks=tuple(quirked.applied.values()),
        notes=tuple(notes),
        key=specialisation_key(kernel, problem, target, lowering, launch, quirked.env),
    )
    for blocker in quirked.blockers:
        # A slow kernel is right: who asks for it by name gets it.
        if blocker.symptom != "slow" or settings.backend != path:
            raise refuse(blocker.title, _hint(blocker), quirk=blocker.id, choice=choice)
    verdict = verdicts.get(choice.key)
    if verdict is not None and not verdict.passed:
        raise refuse(
            f"this specialisation failed here on {verdict.date}: {verdict.reason}",
            f"see incident {verdict.incident}" if verdict.incident else "",
            incident=verdict.incident,
            choice=choice,
        )
    return choice


class _Base(msgspec.Struct):
    """Lowering and launch before any quirk, and what to say about them."""

    lowering: Lowering
    launch: Launch
    resident: int
    notes: list[str]


def _base(problem: Problem, target: Target, registry: Registry, kernel: CoreKernel) -> _Base:
    """The tuning entry that holds, or the defaults, made to fit the arch's dot precisions and the data's alignment."""
    notes = []
    tuning = registry.tuning(target)
    entry = tuning.find(kernel.name, problem.features() | {"programs": 0}) if tuning else None
    if tuning and entry:
        lowering = msgspec.structs.replace(Lowering(), **entry.lowering)
        launch, resident = Launch().changed(dict(entry.launch)), entry.resident
        if not tuning.provenance.measured:
            notes.append(f"tuning for {target.arch.name} was compiled and never timed")
    else:
        lowering, launch, resident = Lowering(), Launch(), 1
        notes.append(f"no tuning entry for {kernel.name} on {target.arch.name}: default tile")
    if problem.dtype == "fp32" and lowering.dot_precision not in target.arch.dot_precisions:
        lowering = msgspec.structs.replace(lowering, dot_precision=target.arch.dot_precisions[0])
    if lowering.load == "descriptor" and not problem.aligned:
        # Tensor descriptors need contiguous rows, and bases and strides that are multiples of 16 bytes (CUDA driver
        # API, cuTensorMapEncodeTiled).
        lowering = msgspec.structs.replace(lowering, load="pointer")
        notes.append("load = pointer: descriptors need contiguous rows and 16-byte aligned bases and strides")
    return _Base(lowering, launch, resident, notes)


class _Quirked:
    """Lowering, launch and compile environment while quirks are applied to them."""

    def __init__(self, kernel: CoreKernel, problem: Problem, target: Target, base: _Base) -> None:
        self.kernel, self.problem, self.target = kernel, problem, target
        self.lowering, self.launch, self.resident = base.lowering, base.launch, base.resident
        self.env: dict[str, str] = {}
        self.applied: dict[str, Applied] = {}
        self.blockers: list[Quirk] = []
        self._set_by: dict[str, tuple[str, Any]] = {}

    def apply(self, registry: Registry, settings: Settings) -> None:
        """Apply what holds, again and again until nothing new holds: one quirk's effect can make another one apply."""
        forced_on, forced_off = parse_overrides(settings.quirks, registry.quirks)
        waiting = [q for q in registry.quirks.values() if q.id not in forced_off and self._touches(q)]
        while True:
            # Judged as it would be launched: short problems shrink the tuned tile.
            fitted = self.kernel.fit(self.problem, self.launch, self.target.arch, self.resident)
            fresh = [q for q in waiting if self._holds(q, q.id in forced_on, fitted)]
            if not fresh:
                return
            for quirk in fresh:
                waiting.remove(quirk)
                self._take(quirk)

    def _touches(self, quirk: Quirk) -> bool:
        """Whether the quirk's effect reaches this kernel: a choice that the kernel does not read changes nothing."""
        lowering = quirk.effect.lowering
        return lowering is None or any(name in self.kernel.choices for name in lowering)

    def _holds(self, quirk: Quirk, forced: bool, launch: Launch) -> bool:
        if forced:
            return quirk.concerns(self.kernel.name, self.target)
        programs = self.kernel.tiles(self.problem, launch)
        return quirk.applies(self.kernel.name, self.problem, self.target, self.lowering, launch, programs)

    def _take(self, quirk: Quirk) -> None:
        effect = quirk.effect
        for name, value in effect.sets.items():
            choice = f"{effect.kind} {name}"
            first = self._set_by.setdefault(choice, (quirk.id, value))
            if first[1] != value:
                raise QuirkConflict(choice, first, (quirk.id, value))
        sets: dict[str, Any] = dict(effect.sets)
        if effect.lowering is not None:
            self.lowering = msgspec.structs.replace(self.lowering, **effect.lowering)
        elif effect.launch is not None:
            self.launch = self.launch.changed(effect.launch)
        elif effect.env is not None:
            self.env |= effect.env
        elif effect.path is not None:
            self.blockers.append(quirk)
            sets = {"path": effect.path}
        unverified = quirk.newer_than_seen(self.target.toolchain)
        note = f"last seen on {quirk.evidence.last_seen}, unverified on {self.target.toolchain}" if unverified else ""
        self.applied[quirk.id] = Applied(id=quirk.id, sentence=quirk.sentence(), sets=sets, note=note)


def _hint(quirk: Quirk) -> str:
    ranges = ", ".join(f"{name} {spec}" for name, spec in quirk.when.toolchain.items())
    better = f"the {quirk.effect.path} path is the better plan" if quirk.symptom == "slow" else ""
    return "; ".join(part for part in (better, f"concerns {ranges}" if ranges else "") if part)


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
        # decode_combine is specialised by the splits rounded up.
        "launch": [launch.num_warps, launch.num_stages, next_power_of_two(launch.splits), launch.options],
        "env": env,
        "target": target.name,
        "toolchain": [target.toolchain.distribution, target.toolchain.version, target.toolchain.components],
    }
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]
