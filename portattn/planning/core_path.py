"""The core kernel's part of a plan: tuning, then quirks, then what the problem's sizes and the chip's limits ask."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from portattn.config import Settings
from portattn.errors import QuirkConflict
from portattn.planning.checks import PathRejected, undeclared_demand
from portattn.planning.evidence import evidence_cautions
from portattn.planning.gradients import INTERPRETER
from portattn.planning.kernel_specs import CORES, CoreKernel
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.compile_record import CompileRecords
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.plan import Applied, CoreChoice, Rejection
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import ASKED
from portattn.schema.quirk import PATH_EFFECTS, Effect, Quirk, concerning
from portattn.schema.symbolic_int import next_power_of_two, pin_sizes
from portattn.schema.target import Target
from portattn.schema.tuning import SPLIT_THRESHOLD
from portattn.source_tree import install_extra
from portattn.version import __version__


def choose(
    problem: Problem, target: Target, registry: Registry, records: CompileRecords, settings: Settings
) -> CoreChoice:
    """Kernel, lowering and launch for the problem. Raises Refused with the reason when the path cannot be taken."""
    path = registry.backends[target.backend].core_path
    kernel = CORES[problem.op]

    def refuse(reason: str, hint: str = "", **also: Any) -> PathRejected:
        return PathRejected(Rejection(path=path, reason=reason, hint=hint, **also))

    if target.arch.refused:
        raise refuse(target.arch.refused)
    if not target.toolchain:
        raise refuse("Triton is not installed", f"{install_extra('triton')}, or triton-ascend on an NPU")
    serving = registry.backends[target.backend].compilers
    distribution = target.toolchain.distribution
    if serving and distribution not in serving and compilers.is_compiler(distribution):
        raise refuse(f"{target.toolchain} compiles nothing for {target.backend}", f"needs {' or '.join(serving)}")
    for compiler, text in target.arch.toolchain.items():
        if target.toolchain.within(compiler, text) is False:
            reason = f"{target.toolchain} compiles nothing for {target.arch.name}"
            raise refuse(reason, f"needs {compiler} {text}")
    cannot = kernel.cannot(problem)
    if cannot:
        raise refuse(*cannot)
    denied = undeclared_demand(path, problem, (kernel.op,), kernel.takes)
    if denied:
        raise refuse(f"the core kernel {denied.reason}", denied.hint)

    base = _base(problem, target, registry, kernel)
    quirked = _Quirked(kernel, problem, target, base)
    try:
        quirked.apply(registry, settings)
    except QuirkConflict as conflict:
        if not any(registry.quirks[name].assumed(target.toolchain) for name in conflict.quirks):
            raise
        # Entries for different versions meet only because the version is not known: nobody made a mistake.
        raise refuse(
            f"{conflict}; both are assumed to apply, since {target.toolchain} does not say enough to rule one out",
            "switch one off by PORTATTN_QUIRKS=-<id>, or install a released compiler",
        ) from None
    lowering, launch = quirked.lowering, quirked.fitted
    cautions = () if path == INTERPRETER else evidence_cautions(kernel.name, target, settings, registry, problem)
    choice = CoreChoice(
        kernel=kernel.name,
        form=kernel.form(lowering),
        lowering=lowering,
        launch=launch,
        choices=kernel.read(problem, lowering),
        env=quirked.env,
        quirks=tuple(quirked.applied.values()),
        notes=(*cautions, *base.notes, *quirked.limits.values()),
        key=specialisation_key(
            kernel, problem, target, lowering, launch, quirked.env, adapter=_adapter(registry, target)
        ),
    )
    # A slow kernel is right: who asks for it by name gets it.
    blockers = [q for q in quirked.blockers if q.symptom != "slow" or settings.backend != path]
    if blockers:
        # The most restrictive is the one to name: what leads to the reference rules out more than what does not.
        blocker = max(blockers, key=lambda q: PATH_EFFECTS.index(q.effect.path or PATH_EFFECTS[0]))
        raise refuse(blocker.title, hint(blocker), quirk=blocker.id, choice=choice)
    record = records.get(choice.key)
    if record is not None and not record.passed:
        raise refuse(
            f"this specialisation {record.told()}",
            f"see incident {record.incident}" if record.incident else "",
            incident=record.incident,
            choice=choice,
        )
    return choice


def _untimed(target: Target) -> str:
    own, tuned = target.arch.name, target.arch.tuning or target.arch.name
    tile = f"nobody has timed this tile on {own}" + (f" (it is the one for {tuned})" if tuned != own else "")
    return f"{tile}: this concerns speed alone; `portattn tune` times others"


def timed_with_another(timed_with: str, target: Target) -> str:
    """Said of a choice by times with another compiler than the target's, with which it may have been timed since."""
    return f"chosen by times with {timed_with}, not with {target.toolchain}: speed alone; `portattn tune` compares"


class _Base(msgspec.Struct):
    """Lowering and launch before any quirk, and what to say about them."""

    lowering: Lowering
    launch: Launch
    occupancy: int
    split_threshold: float
    notes: list[str]


def _base(problem: Problem, target: Target, registry: Registry, kernel: CoreKernel) -> _Base:
    """The tuning entry that holds, or the defaults."""
    notes = []
    tuning = registry.tuning(target)
    entry = tuning.find(kernel.name, problem.features(), target.toolchain) if tuning else None
    if tuning and entry:
        lowering = msgspec.structs.replace(Lowering(), **entry.lowering)
        launch, occupancy, split_threshold = (
            Launch().changed(dict(entry.launch)),
            entry.occupancy,
            entry.split_threshold,
        )
        timed_with = tuning.timed_with(entry)
        if not timed_with:
            notes.append(_untimed(target))
        elif timed_with != str(target.toolchain):
            notes.append(timed_with_another(timed_with, target))
    else:
        lowering, launch, occupancy, split_threshold = Lowering(), Launch(), 1, SPLIT_THRESHOLD
        notes.append(f"no tuning entry for {kernel.name} on {target.arch.name}: default tile")
    tried = compilers.tried_range(target.toolchain.distribution)
    if tried and target.toolchain.within(target.toolchain.distribution, tried) is False:
        notes.append(f"{target.toolchain} is none of the versions that were tried: {tried}")
    if problem.dtype == "fp32" and lowering.dot_precision not in target.arch.dot_precisions:
        lowering = msgspec.structs.replace(lowering, dot_precision=target.arch.dot_precisions[0])
    if problem.dtype != "fp32" and lowering.dot_precision == "bf16x6":
        lowering = msgspec.structs.replace(lowering, dot_precision="ieee")  # parts are of float32 alone
    return _Base(lowering, launch, occupancy, split_threshold, notes)


class _Quirked:
    """Lowering, launch and compile environment while quirks and hard limits are applied to them.

    launch, fitted  what tuning and quirks ask for, and that with what follows from the problem's sizes
    programs        as many as that launches
    limits          choice -> what a hard limit made of it, for people
    """

    def __init__(self, kernel: CoreKernel, problem: Problem, target: Target, base: _Base) -> None:
        self.kernel, self.problem, self.target = kernel, problem, target
        self.lowering, self.launch, self.occupancy, self.split_threshold = (
            base.lowering,
            base.launch,
            base.occupancy,
            base.split_threshold,
        )
        self.fitted, self.programs = base.launch, 0
        self.env: dict[str, str] = {}
        self.applied: dict[str, Applied] = {}
        self.blockers: list[Quirk] = []
        self.limits: dict[str, str] = {}
        self._set_by: dict[tuple[str, str], tuple[str, Any]] = {}  # (kind, name) -> (quirk, value)

    def apply(self, registry: Registry, settings: Settings) -> None:
        """Apply what holds, again and again until nothing new holds: one quirk's effect can make another one apply.

        Hard limits are applied before each round, so that quirks are judged by the lowering that would run, and after
        the last one, so that no quirk undoes them. Cautions change nothing: they are judged by what comes out.
        """
        forced_on, forced_off = registry.overrides(settings.quirks)
        found = concerning(registry.quirks.values(), self.kernel.name, self.target)
        concerned = [q for q in found if q.id not in forced_off and self._touches(q)]
        waiting = [q for q in concerned if q.effect.kind != "note"]
        while True:
            self._settle()
            fresh = [q for q in waiting if self._holds(q, q.id in forced_on)]
            if not fresh:
                break
            for quirk in fresh:
                waiting.remove(quirk)
                self._take(quirk)
        for quirk in concerned:
            if quirk.effect.kind == "note" and self._holds(quirk, quirk.id in forced_on):
                self._take(quirk)

    def _settle(self) -> None:
        """Fit the launch to the problem's sizes (what a quirk set stays), and apply the hard limits."""
        arch = self.target.arch
        pinned = {name for kind, name in self._set_by if kind == "launch"}
        self.fitted = self.kernel.fit(
            self.problem, self.lowering, self.launch, arch, self.occupancy, pinned, self.split_threshold
        )
        tiles = self.programs = self.kernel.tiles(self.problem, self.fitted)
        if tiles > arch.max_programs:
            self._limit("grid", "persistent", f"{tiles} tiles, {arch.name} launches up to {arch.max_programs} programs")
        for choice, value, why in self.kernel.limits(self.problem, self.lowering, self.fitted):
            self._limit(choice, value, why)

    def _limit(self, choice: str, value: str, why: str) -> None:
        """Set a choice that the chip or the data leaves no freedom in, and say so where a quirk set it otherwise."""
        if getattr(self.lowering, choice) == value:
            return
        self.lowering = msgspec.structs.replace(self.lowering, **{choice: value})
        self.limits[choice] = f"{choice} = {value}: {why}"
        for quirk, applied in self.applied.items():
            if choice in applied.sets:
                kept = {name: set_to for name, set_to in applied.sets.items() if name != choice}
                note = "; ".join(filter(None, (applied.note, f"overruled: {self.limits[choice]}")))
                self.applied[quirk] = msgspec.structs.replace(applied, sets=kept, note=note)

    def _reached(self, effect: Effect) -> dict[str, bool | int | str]:
        """What the effect sets that this kernel reads: the rest changes nothing."""
        if effect.lowering is not None:
            return {name: value for name, value in effect.sets.items() if name in self.kernel.choices}
        if effect.launch is not None and not self.kernel.splits_keys:
            return {name: value for name, value in effect.sets.items() if name != "splits"}
        return effect.sets

    def _touches(self, quirk: Quirk) -> bool:
        if quirk.effect.path == "core":
            return False  # rejects variants
        return bool(self._reached(quirk.effect)) or not quirk.effect.sets

    def _holds(self, quirk: Quirk, forced: bool) -> bool:
        if forced:
            return quirk.concerns(self.kernel.name, self.target)
        return quirk.applies(self.kernel.name, self.problem, self.target, self.lowering, self.fitted, self.programs)

    def _take(self, quirk: Quirk) -> None:
        effect = quirk.effect
        sets: dict[str, Any] = self._reached(effect)
        for name, value in sets.items():
            first = self._set_by.setdefault((effect.kind, name), (quirk.id, value))
            if first[1] != value:
                raise QuirkConflict(f"{effect.kind} {name}", first, (quirk.id, value))
        if effect.lowering is not None:
            self.lowering = msgspec.structs.replace(self.lowering, **sets)
        elif effect.launch is not None:
            self.launch = self.launch.changed(sets)
        elif effect.env is not None:
            self.env |= effect.env
        elif effect.path is not None:
            self.blockers.append(quirk)
            sets = {"path": effect.path}
        note = quirk.doubt(self.target.toolchain)
        self.applied[quirk.id] = Applied(id=quirk.id, sentence=quirk.sentence(), sets=sets, note=note)


def hint(quirk: Quirk) -> str:
    """What would help where a quirk rejects a path."""
    ranges = ", ".join(f"{name} {spec}" for name, spec in quirk.when.toolchain.items())
    better = f"the {quirk.effect.path} path is the better plan" if quirk.symptom == "slow" else ""
    return "; ".join(part for part in (better, f"concerns {ranges}" if ranges else "") if part)


# Fields of a problem that say which optional arguments a kernel gets.
OPTIONAL = (*(name for name in ASKED if name != "softcap"), "dropout", "grad_lse", "grad_bias", "grad_slopes")


@functools.lru_cache(maxsize=1)
def kernel_source_digest() -> str:
    """Digest of the kernels' source, so that a record about other code is never taken for one about this."""
    import portattn.kernels

    digest = hashlib.sha256()
    for path in sorted(Path(portattn.kernels.__path__[0]).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def specialisation_key(
    kernel: CoreKernel,
    problem: Problem,
    target: Target,
    lowering: Lowering,
    launch: Launch,
    env: dict[str, str],
    adapter: str = "",
) -> str:
    """Return a digest of a Problem's part of the inputs that decide the machine code; code_key adds the launches'.

    adapter  digest of another package's file that compiles for the target
    """
    rows = launch.of_rows()
    parts = {
        "portattn": __version__,
        "source": kernel_source_digest(),
        "kernel": kernel.name,
        "constexprs": kernel.constexprs(problem, lowering, launch),
        "dtype": problem.dtype,
        # Absent features are compiled away.
        "optional": {name: getattr(problem, name) for name in OPTIONAL} | {"packed": problem.packed},
        "aligned": problem.aligned,
        "large": problem.large,
        # combine is specialised by the splits rounded up.
        "launch": [launch.num_warps, launch.num_stages, next_power_of_two(launch.splits), launch.options],
        "rows": kernel.of_rows and [rows.block_m, rows.block_n, rows.num_warps, rows.num_stages],
        "env": env,
        "target": target.name,
        "toolchain": [target.toolchain.distribution, target.toolchain.version, target.toolchain.components],
    }
    parts |= {"adapter": adapter} if adapter else {}
    return hashlib.sha256(msgspec.json.encode(pin_sizes(parts), order="deterministic")).hexdigest()[:32]


def _adapter(registry: Registry, target: Target) -> str:
    """Digest of the file that a backend's compile adapter is in; empty for one of a module, which has a release."""
    place = registry.backends[target.backend].compile_adapter().rpartition(":")[0]
    return _digest(place) if place.endswith(".py") else ""


@functools.lru_cache(maxsize=16)
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
