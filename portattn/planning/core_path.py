"""The core kernel's part of a plan: tuning, then quirks, then limits of the problem's sizes and of the chip."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from portattn.config import Settings
from portattn.errors import QuirkConflict
from portattn.planning.backend import PathRejection, undeclared_demand
from portattn.planning.data_files import VerifiedRun, load_verified
from portattn.planning.kernel_specs import CORES, DECIDING, ONE_ORDER, CoreKernel, family, invariant_launch
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.compile_record import CompileRecords
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import BACKWARD
from portattn.schema.plan import AppliedQuirk, CoreChoice, Rejection
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import ASKED, FOREIGN
from portattn.schema.quirk import PATH_EFFECTS, Effect, Quirk, concerning
from portattn.schema.symbolic_int import next_power_of_two, pin_sizes
from portattn.schema.target import Target
from portattn.schema.tuning import SPLIT_THRESHOLD
from portattn.source_tree import install_extra
from portattn.version import __version__

CORE = "triton"
INTERPRETER = "interpreter"  # the CPU's core path: planned only when it is asked for by name


def backward_problem(problem: Problem) -> Problem:
    """Return the problem of a problem's gradients, with all of them that may be asked for.

    Raise PathRejection for a feature without gradients by kernels (block_mask)."""
    lacking = [name for name in FOREIGN[BACKWARD[problem.op]] if name not in FOREIGN[problem.op]]
    if lacking := [name for name in lacking if getattr(problem, name)]:
        raise PathRejection(Rejection(path=CORE, reason=f"its gradients' kernels take no {', '.join(lacking)}"))
    return msgspec.structs.replace(
        problem,
        op=BACKWARD[problem.op],
        needs_grad=False,
        num_splits=0,
        return_lse=False,
        grad_lse=problem.return_lse,
        grad_bias=problem.bias,
        grad_slopes=problem.alibi_slopes,
    )


def own_path(backend: str, device_type: str) -> str | None:
    """Return the `backend` with which to plan the gradients of a call, or None if it names no kernel."""
    if device_type == "cpu":
        return backend if backend == INTERPRETER else None
    if backend in ("auto", CORE):
        return backend
    return "auto" if backend in own_names() else None


@functools.lru_cache(maxsize=1)
def own_names() -> frozenset[str]:
    """Return the paths that are kernels of portattn's own."""
    return frozenset((CORE, INTERPRETER, *Registry.load().variant_names()))


_seen = functools.lru_cache(maxsize=16)(load_verified)


def seen_to_run(target: Target, registry: Registry | None = None, problem: Problem | None = None) -> VerifiedRun | None:
    """Return the evidence for this arch with this toolchain, and for a problem if one is given, or None."""
    backend = (registry or Registry.load()).backends[target.backend]
    toolchain = str(target.toolchain)
    found = (seen for seen in _seen(backend.folder) if target.arch.name in seen.arch and toolchain == seen.toolchain)
    return next((seen for seen in found if problem is None or seen.covers(problem)), None)


def canaries_wanted(
    target: Target, settings: Settings, registry: Registry | None = None, problem: Problem | None = None
) -> bool:
    """Return whether a kernel family must have passed its canaries before it runs here, or runs a given problem."""
    return settings.canary == "always" or (settings.canary == "auto" and seen_to_run(target, registry, problem) is None)


def evidence_cautions(
    kernel: str, target: Target, settings: Settings, registry: Registry | None = None, problem: Problem | None = None
) -> tuple[str, ...]:
    """Return a plan's caution: no complete test run of the kernel is known there, or canaries run although one is."""
    if seen_to_run(target, registry, problem) is not None:
        return (f"canary='always': the canaries of {kernel} run before its first call",) * (settings.canary == "always")
    decides = "its canaries must pass before its first call"
    if settings.canary == "never":
        decides = "canary='never' runs it without canaries"
    of = "" if seen_to_run(target, registry) is None else ", for such problems"
    where = f"{target.arch.name} with {target.toolchain}"
    return (f"{kernel} has no complete test run on {where}{of}: {decides}",)


def choose(
    problem: Problem, target: Target, registry: Registry, records: CompileRecords, settings: Settings
) -> CoreChoice:
    """Return kernel, lowering and launch for the problem; raise PathRejection if the path cannot be taken."""
    path = registry.backends[target.backend].core_path
    kernel = CORES[problem.op]

    def refuse(reason: str, hint: str = "", **also: Any) -> PathRejection:
        return PathRejection(Rejection(path=path, reason=reason, hint=hint, **also))

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
        # Entries for different versions meet only because the version is not known: that is no mistake.
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
        # Name the most restrictive: a quirk that leads to the reference rules out more paths than others.
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


BY_BOUND = "this tile was chosen by a bound, never timed: this concerns speed alone; `portattn tune` times others"


def _untimed(target: Target) -> str:
    own, tuned = target.arch.name, target.arch.tuning or target.arch.name
    tile = f"this tile was not timed on {own}" + (f" (it is the one for {tuned})" if tuned != own else "")
    return f"{tile}: this concerns speed alone; `portattn tune` times others"


def timed_with_another(timed_with: str, target: Target) -> str:
    """Return the note that a choice was timed with another compiler than the target's."""
    return f"chosen by times with {timed_with}, not with {target.toolchain}: speed alone; `portattn tune` compares"


class _Base(msgspec.Struct):
    lowering: Lowering
    launch: Launch
    occupancy: int
    split_threshold: float
    notes: list[str]


def _base(problem: Problem, target: Target, registry: Registry, kernel: CoreKernel) -> _Base:
    """Return the tuning entry that holds, or the defaults; one lowering and launch for a family of invariant ops."""
    if problem.invariant and family(kernel.name):
        precise = target.arch.dot_precisions
        precision = "tf32x3" if problem.dtype == "fp32" and "tf32x3" in precise else precise[0]
        launch = invariant_launch(problem)
        note = f"{ONE_ORDER}: tiles of {launch.block_m} rows and {launch.block_n} keys for any sizes, keys not split, "
        lowering = msgspec.structs.replace(Lowering(), dot_precision=precision, pipeline="masked")
        return _Base(lowering, launch, 1, SPLIT_THRESHOLD, [note + "no kernel of one chip, no vendor's library"])
    notes = []
    tuning = registry.tuning(target)
    features = problem.features() | ({"aligned": False} if problem.invariant else {})
    entry = tuning.find(kernel.name, features, target.toolchain) if tuning else None
    if tuning and entry:
        lowering = msgspec.structs.replace(Lowering(), **entry.lowering)
        launch, occupancy, split_threshold = (
            Launch().changed(dict(entry.launch)),
            entry.occupancy,
            entry.split_threshold,
        )
        timed_with = tuning.timed_with(entry)
        if not timed_with:
            notes.append(BY_BOUND if entry.by_bound else _untimed(target))
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
    """Lowering, launch and compile environment while quirks and hard limits are applied to them."""

    def __init__(self, kernel: CoreKernel, problem: Problem, target: Target, base: _Base) -> None:
        self.kernel, self.problem, self.target = kernel, problem, target
        self.lowering, self.launch, self.occupancy, self.split_threshold = (
            base.lowering,
            base.launch,
            base.occupancy,
            base.split_threshold,
        )
        self.fitted, self.programs = base.launch, 0  # the launch with values from the problem's sizes, and its programs
        self.env: dict[str, str] = {}
        self.applied: dict[str, AppliedQuirk] = {}
        self.blockers: list[Quirk] = []
        self.limits: dict[str, str] = {}  # choice -> its value by a hard limit, for people
        self._set_by: dict[tuple[str, str], tuple[str, Any]] = {}  # (kind, name) -> (quirk, value)
        self._whose: dict[str, str] = {}  # quirk -> the kernel of the family that it is about

    def apply(self, registry: Registry, settings: Settings) -> None:
        """Apply quirks until no new one holds: one quirk's effect can make another one apply.

        Hard limits come before each round, so that quirks see the lowering that would run, and after the last one, so
        that no quirk undoes them. Cautions change nothing, and are judged by the result."""
        self._backend = registry.backends[self.target.backend]
        forced_on, forced_off = registry.overrides(settings.quirks)
        found = concerning(registry.quirks.values(), self.kernel.name, self.target)
        if self.problem.invariant:
            found += self._of_family(registry, {quirk.id for quirk in found})
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

    def _of_family(self, registry: Registry, own: set[str]) -> list[Quirk]:
        """Return other kernels' quirks that decide bits which this kernel's results share with theirs."""
        found: list[Quirk] = []
        for name in family(self.kernel.name):
            quirks = concerning(registry.quirks.values(), name, self.target)
            deciding = [q for q in quirks if q.id not in own and q.effect.kind in ("launch", "lowering")]
            for quirk in (q for q in deciding if DECIDING & q.effect.sets.keys()):
                own.add(quirk.id)
                self._whose[quirk.id] = name
                found.append(quirk)
        return found

    def _settle(self) -> None:
        """Fit the launch to the problem's sizes, except a quirk's values, and apply the hard limits."""
        arch = self.target.arch
        pinned = {name for kind, name in self._set_by if kind == "launch"}
        self.fitted = self.kernel.fit(
            self.problem, self.lowering, self.launch, arch, self.occupancy, pinned, self.split_threshold
        )
        if self.fitted.options:
            self._leave_out_options()
        tiles = self.programs = self.kernel.tiles(self.problem, self.fitted)
        if tiles > arch.max_programs:
            self._limit("grid", "persistent", f"{tiles} tiles, {arch.name} launches up to {arch.max_programs} programs")
        for choice, value, why in self.kernel.limits(self.problem, self.lowering, self.fitted):
            self._limit(choice, value, why)

    def _leave_out_options(self) -> None:
        """Leave out compiler options that the target's release lacks: Triton raises on one, or passes over it."""
        for name, value in self.fitted.options:
            if why := self._backend.lacks_option(name, self.target.toolchain):
                kept = tuple(pair for pair in self.fitted.options if pair[0] != name)
                self.fitted = msgspec.structs.replace(self.fitted, options=kept)
                self.limits[name] = f"{name} = {value!r} is left out: {why}"

    def _limit(self, choice: str, value: str, why: str) -> None:
        """Set a choice that the chip or the data dictates, and note it if a quirk set another value."""
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
        """Return the effect's values that this kernel reads."""
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
        name = self._whose.get(quirk.id, self.kernel.name)
        if forced:
            return quirk.concerns(name, self.target)
        return quirk.applies(name, self.problem, self.target, self.lowering, self.fitted, self.programs)

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
        self.applied[quirk.id] = AppliedQuirk(id=quirk.id, sentence=quirk.sentence(), sets=sets, note=note)


def hint(quirk: Quirk) -> str:
    """Return the remedy for a path that a quirk rejects."""
    ranges = ", ".join(f"{name} {spec}" for name, spec in quirk.when.toolchain.items())
    better = f"the {quirk.effect.path} path is the better plan" if quirk.symptom == "slow" else ""
    return "; ".join(part for part in (better, f"concerns {ranges}" if ranges else "") if part)


# Fields of a problem that say which optional arguments a kernel gets, and under which contract its records count.
OPTIONAL = (
    *(name for name in ASKED if name != "softcap"), "dropout", "grad_lse", "grad_bias", "grad_slopes", "grad_captured",
    "invariant",
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def kernel_source_digest() -> str:
    """Return a digest of the kernels' source: a record of other code must not count."""
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
    adapter: str = "",  # digest of another package's file that compiles for the target
) -> str:
    """Return a digest of a Problem's part of the inputs that decide the machine code; code_key adds the launches'."""
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
    """Return a digest of the file of a backend's compile adapter; empty for a module's, which has a release."""
    place = registry.backends[target.backend].compile_adapter().rpartition(":")[0]
    return _digest(place) if place.endswith(".py") else ""


@functools.lru_cache(maxsize=16)
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
