"""plan(problem, target, registry, records, settings) -> Plan: the path that runs, how, and why. A pure function.

`candidates` lists a plan's paths in order: variants, the core kernel, vendors' libraries, the reference. A variant's
part of a plan is here: its own requirements, then the quirks and records that reject it; core_path.py has the core
kernel's."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import pathlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from portattn.config import Settings, current
from portattn.errors import ArgumentError, PathUnavailable, PortattnError
from portattn.planning import core_path
from portattn.planning.backend import Backend, PathRejection, Variant, VendorPath, undeclared_demand
from portattn.planning.core_path import (
    INTERPRETER,
    OPTIONAL,
    backward_problem,
    evidence_cautions,
    hint,
    kernel_source_digest,
    own_path,
    timed_with_another,
)
from portattn.planning.data_files import has_arches
from portattn.planning.kernel_specs import CORES, ONE_ORDER, varies
from portattn.planning.registry import Registry
from portattn.schema.compile_record import NO_RECORDS, CompileRecords
from portattn.schema.ops import MODS, ROWS
from portattn.schema.plan import AppliedQuirk, Plan, Rejection
from portattn.schema.problem import Problem
from portattn.schema.quirk import Quirk, concerning
from portattn.schema.symbolic_int import pin_sizes
from portattn.schema.target import Target
from portattn.version import __version__

FORBIDDING = ("path", "note")  # effects that reach a variant: it has no lowering and no launch that could be set

UNTIMED = "this schedule was not timed: this concerns speed alone"


class VariantChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A variant's part of a plan."""

    schedule: dict[str, Any]
    quirks: tuple[AppliedQuirk, ...]  # cautions about the variant
    notes: tuple[str, ...]
    key: str  # for records: of the kernels' source, the schedule, target and toolchain


def choose_variant(
    variant: Variant, problem: Problem, target: Target, registry: Registry, records: CompileRecords, settings: Settings
) -> VariantChoice:
    """Return how the variant runs the problem; raise PathRejection if it does not."""
    no = variant.rejects(problem, target) or undeclared_demand(variant.name, problem, variant.ops, variant.takes)
    if no is not None:
        raise PathRejection(no)
    found = quirks_of(variant.name, problem, target, registry, settings)
    blocker = next((quirk for quirk in found if quirk.effect.path), None)
    if blocker is not None:
        raise PathRejection(Rejection(path=variant.name, reason=blocker.title, hint=hint(blocker), quirk=blocker.id))
    schedule = variant.describe(problem)
    key = variant_key(variant, problem, schedule, target)
    record = records.get(key)
    if record is not None and not record.passed:
        raise PathRejection(
            Rejection(
                path=variant.name,
                reason=f"it {record.told()}",
                hint=f"see incident {record.incident}" if record.incident else "",
                incident=record.incident,
            )
        )
    known = target.toolchain
    cautions = tuple(AppliedQuirk(id=q.id, sentence=q.sentence(), note=q.doubt(known)) for q in found)
    notes = evidence_cautions(variant.name, target, settings, registry, problem)
    timed_with = variant.timed_with(problem)
    if schedule and not timed_with:
        notes += (UNTIMED,)
    elif schedule and timed_with != str(target.toolchain):
        notes += (timed_with_another(timed_with, target),)
    if problem.invariant:
        notes += (f"{ONE_ORDER}: key tiles of one size, keys not split, in every operation of this kernel",)
    return VariantChoice(schedule=schedule | variant.sizes(problem), quirks=cautions, notes=notes, key=key)


def quirks_of(name: str, problem: Problem, target: Target, registry: Registry, settings: Settings) -> list[Quirk]:
    """Return the quirks that reject a variant, or caution about it, for a problem on a target."""
    on, off = registry.overrides(settings.quirks)
    return [
        quirk
        for quirk in concerning(registry.quirks.values(), name, target)
        if quirk.effect.kind in FORBIDDING
        and quirk.id not in off
        and (quirk.reaches(name, problem, target) or (quirk.id in on and quirk.names_variant(name, target)))
    ]


def variant_key(variant: Variant, problem: Problem, schedule: dict[str, Any], target: Target) -> str:
    """Return a record's key for the variant's kernels, as far as a Problem decides it."""
    parts = {
        "portattn": __version__,
        "source": source_digest(variant),
        "variant": variant.name,
        "schedule": schedule,
        "dtype": problem.dtype,
        "cache": [problem.kv_format, problem.kv_scales, problem.has_lists],
        "functions": [getattr(problem, name) for name in MODS],
        "optional": {name: getattr(problem, name) for name in OPTIONAL} | {"packed": problem.packed},
        "target": target.name,
        "toolchain": [target.toolchain.distribution, target.toolchain.version, target.toolchain.components],
    }
    return hashlib.sha256(msgspec.json.encode(pin_sizes(parts), order="deterministic")).hexdigest()[:32]


def source_digest(variant: Variant) -> str:
    """Return a digest of the variant's folder, of its chip's if that lies around it, and of the core kernels."""
    return _source_digest(inspect.getfile(type(variant)))


@functools.lru_cache(maxsize=64)
def _source_digest(file: str) -> str:
    digest = hashlib.sha256(kernel_source_digest().encode())
    own = pathlib.Path(file).parent
    around = own.parent
    folders = [own, around] if has_arches(around) else [own]  # it has the variants' shared files
    for path in sorted(path for kind in ("*.py", "*.toml") for folder in folders for path in folder.glob(kind)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


TAKES = {
    op: kernel.takes
    | (set() if ROWS[op].writes else {"needs_grad"})
    | ({"dropout"} if "dropout_p" in ROWS[op].values else set())
    | ({"grad_captured"} if "score_mod" in ROWS[op].values and not ROWS[op].gradient_of else set())
    for op, kernel in CORES.items()
}


OTHER_BITS = "backend='triton' in every call: the core's bits are others"
REFERENCE = "reference"
GROUPS = ("auto", "vendor", REFERENCE)  # values of `backend` that name no single accelerated path


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of planner.plan."""

    problem: Problem
    target: Target
    registry: Registry
    records: CompileRecords
    settings: Settings

    def plan(self, path: str, **fields: Any) -> Plan:
        return Plan(
            problem=self.problem,
            target=self.target.name,
            toolchain=str(self.target.toolchain),
            requested=self.settings.backend,
            path=path,
            **fields,
        )


@dataclass(frozen=True)
class Path:
    """One way to run a problem."""

    name: str
    plan: Callable[[PlanRequest], Plan]  # or raise PathRejection with the reason
    extra: bool = False  # a later path covers all that this one does: passing it over is no fall-back
    # Why a later path is better for a problem that this one can run; else empty.
    defers: Callable[[Problem], str] = lambda problem: ""
    # Variant.owns_invariant_rows
    owns_invariant_rows: Callable[[Problem, Target], bool] = lambda problem, target: False


def _variant(variant: Variant) -> Path:
    def plan(asked: PlanRequest) -> Plan:
        taken = choose_variant(variant, _of_forward(asked), asked.target, asked.registry, asked.records, asked.settings)
        return asked.plan(variant.name, needs=variant.needs, **_trained(variant.name, asked, _fields(taken)))

    owns = variant.owns_invariant_rows
    return Path(variant.name, plan, extra=True, defers=variant.defers_to_core, owns_invariant_rows=owns)


def _core(name: str) -> Path:
    def plan(asked: PlanRequest) -> Plan:
        taken = core_path.choose(_of_forward(asked), asked.target, asked.registry, asked.records, asked.settings)
        return asked.plan(name, **_trained(name, asked, _fields(taken)))

    return Path(name, plan)


def _of_forward(asked: PlanRequest) -> Problem:
    """Return the problem that a kernel declares: the gradients of captured tensors are the backward pass's alone."""
    problem = asked.problem
    return msgspec.structs.replace(problem, grad_captured=0) if problem.needs_grad else problem


def _trained(name: str, asked: PlanRequest, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's fields, with a note on any gradients' path; raise PathRejection if no kernel computes them."""
    if not asked.problem.needs_grad:
        return fields
    backend = asked.registry.backends[asked.target.backend]
    requested = own_path(asked.settings.backend, backend.device_type) or "auto"
    settings = msgspec.structs.replace(asked.settings, backend=requested)
    taken: Plan | None = None
    no = Rejection(path=name, reason="no kernel computes its gradients")
    paths: Iterable[Path] = ()
    try:
        problem = msgspec.structs.replace(
            backward_problem(asked.problem), deterministic=settings.deterministic or settings.invariant
        )
        gradients = dataclasses.replace(asked, problem=problem, settings=settings)
        paths = _own(gradients, backend, requested)
    except PathRejection as refused:
        no = refused.rejection
    for path in paths:
        try:
            made = path.plan(gradients)
        except PathRejection as refused:
            no = refused.rejection
            if requested == "auto" and path.owns_invariant_rows(gradients.problem, asked.target):
                break
            continue
        if requested != "auto" or not path.defers(gradients.problem):
            taken = made
            break
        taken = taken or made
    if taken is None:
        reason = f"gradients are asked for: {no.reason}"
        raise PathRejection(Rejection(path=name, reason=reason, hint=no.hint, quirk=no.quirk, incident=no.incident))
    kernel = taken.kernel or taken.path
    cautions = evidence_cautions(kernel, asked.target, asked.settings, asked.registry, gradients.problem)
    said = () if taken.path == INTERPRETER else cautions
    return {**fields, "notes": (*fields["notes"], *said, _gradients_by(taken.path))}


def _fields(taken: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(taken, name) for name in taken.__struct_fields__}


def _vendor(library: VendorPath, extra: bool) -> Path:
    def plan(asked: PlanRequest) -> Plan:
        no = library.rejects(asked.problem, asked.target)
        return _unless(
            no or undeclared_demand(library.name, asked.problem, library.ops, library.takes), asked, library.name
        )

    return Path(library.name, plan, extra)


def _reference(asked: PlanRequest) -> Plan:
    problem = asked.problem
    instead = ROWS[problem.op].trained_by
    if problem.needs_grad and instead and asked.settings.backend != REFERENCE:
        # Calls are refused before they are planned (validate/checks.py, refuse_gradients): this is of a Problem's plan.
        hint = f"torch.no_grad() for inference; to train, {instead}; or backend='reference'"
        raise PathRejection(Rejection(path=REFERENCE, reason=f"{problem.op} has no gradient", hint=hint))
    takes = TAKES[problem.op]
    if problem.invariant and (why := _reference_varies(problem, asked.registry.backends[asked.target.backend])):
        raise PathRejection(Rejection(path=REFERENCE, reason=f"{why} (invariant=True)"))
    return _unless(undeclared_demand(REFERENCE, problem, CORES, takes), asked, REFERENCE)


def _reference_varies(problem: Problem, backend: Backend) -> str:
    """Return why a row's bits on the reference depend on the rest of the call, or an empty text."""
    reasons = {
        "a vendor's products decide its bits": backend.device_type != "cpu",
        "its gradients are products over all rows": problem.needs_grad or problem.backward,
        "left padding moves its tiles of keys": problem.leftpad_q or problem.leftpad_k,
    }
    if no := varies(problem):
        return no[0]
    return next((text for text, holds in reasons.items() if holds), "")


def _unless(rejection: Rejection | None, asked: PlanRequest, path: str) -> Plan:
    if rejection is not None:
        raise PathRejection(rejection)
    return asked.plan(path, notes=(_gradients_by(path),) if asked.problem.needs_grad else ())


def _gradients_by(path: str) -> str:
    """Return a training plan's note; torch differentiates vendors' paths and the reference."""
    return f"gradients by {path}"


def candidates(asked: PlanRequest) -> Iterator[Path]:
    """Return the paths that the caller's `backend` allows, in order; raise ArgumentError on an unknown one."""
    backend, requested = asked.registry.backends[asked.target.backend], asked.settings.backend
    known = _names(backend)
    if requested not in known_names(backend):
        raise ArgumentError(asked.problem.op, "backend", requested, f"{asked.target.backend} knows {', '.join(known)}")
    return _candidates(asked, backend, requested)


def known_names(backend: Backend) -> tuple[str, ...]:
    """Return the values of `backend=` on a backend's devices, with portattn's own kernels, which a plan may refuse."""
    return tuple(dict.fromkeys([*_names(backend), "triton", INTERPRETER]))


def _names(backend: Backend) -> tuple[str, ...]:
    own = [variant.name for variant in backend.variants]
    named = [name for name in (*own, backend.core_path, *(library.name for library in backend.vendor)) if name]
    return tuple(dict.fromkeys([*GROUPS, *named]))


def _own(asked: PlanRequest, backend: Backend, requested: str) -> Iterator[Path]:
    """Yield portattn's own kernels: variants for the target's chip, and the core."""
    automatic = requested == "auto"
    for variant in backend.variants:
        concerned = asked.problem.op in variant.ops and asked.target.arch.name in variant.arches
        concerned = concerned and (not variant.formats or asked.problem.q_format in variant.formats)
        if requested == variant.name or (automatic and concerned):
            yield _variant(variant.for_toolchain(asked.target.toolchain))
    if backend.core_path and (requested == backend.core_path or (automatic and backend.core_path != INTERPRETER)):
        yield _core(backend.core_path)


def _candidates(asked: PlanRequest, backend: Backend, requested: str) -> Iterator[Path]:
    automatic = requested == "auto"
    yield from _own(asked, backend, requested)
    for library in backend.vendor:
        if automatic or requested in ("vendor", library.name):
            # Without a core kernel before it, the reference serves every problem.
            yield _vendor(library, extra=backend.core_path == INTERPRETER)
    if automatic or requested == REFERENCE:
        yield Path(REFERENCE, _reference)


def check_path(who: str, argument: str, path: str, target: Target | None = None) -> None:
    """Raise ArgumentError on a `backend=` that no call could take; without a target any device's names count.

    `who` and `argument` are the names of the function and its argument in the error."""
    backends = Registry.load().backends
    asked = list(backends.values()) if target is None else [backends[target.backend]]
    known = dict.fromkeys(name for backend in asked for name in known_names(backend))
    if path not in known:
        raise ArgumentError(who, argument, path, f"must be one of {', '.join(known)}")


def check_settings(who: str, target: Target | None = None) -> None:
    """Raise SettingError or ArgumentError on settings that every call would refuse."""
    settings = current()
    Registry.load().overrides(settings.quirks)
    check_path(who, "PORTATTN_BACKEND", settings.backend, target)


def wrong_settings(who: str, target: Target | None = None) -> str:
    """Return the text of the error that check_settings raises, or an empty string."""
    try:
        check_settings(who, target)
    except PortattnError as error:
        return str(error)
    return ""


NOT_INTERPRETED = (
    "not interpreter: Triton's interpreter is for checking the core kernels, and far slower than the reference "
    "(hint: backend='interpreter')"
)


def plan(
    problem: Problem,
    target: Target,
    registry: Registry | None = None,
    records: CompileRecords = NO_RECORDS,
    settings: Settings | None = None,
) -> Plan:
    """Plan one problem on one target: take the first path of `candidates` that nothing rejects.

    Raises QuirkConflict when two quirks contradict each other, SettingError on an override that names no quirk,
    ArgumentError on an unknown backend, and PathUnavailable when the path that the caller named cannot run this."""
    registry = registry or Registry.load()
    settings = settings or Settings()
    registry.overrides(settings.quirks)  # a misspelt id is an error on every path
    if settings.invariant and problem.sums:
        # invariant=True never splits keys: num_splits=1 demands nothing more, and a variant would refuse the demand.
        splits = 0 if problem.num_splits == 1 else problem.num_splits
        problem = msgspec.structs.replace(problem, invariant=True, num_splits=splits)
    asked = PlanRequest(problem, target, registry, records, settings)
    automatic = settings.backend == "auto"
    core = registry.backends[target.backend].core_path

    rejected: list[Rejection] = []
    # Why paths were passed over that cover nothing that a later one does not.
    notes: list[str] = [problem.function_note] if problem.function_note else []
    notes += [NOT_INTERPRETED] if automatic and core == INTERPRETER else []
    quirks: dict[str, AppliedQuirk] = {}  # quirks that reject a path before the one that is taken
    deferred: Plan | None = None  # of a path that leaves the problem to a later one, which is faster at it
    barred = ""  # the quirk that leads to the reference
    for path in candidates(asked):
        try:
            if barred and path.name != REFERENCE:
                raise PathRejection(Rejection(path=path.name, reason=f"{barred} leads to the reference", quirk=barred))
            made = path.plan(asked)
        except PathRejection as refused:
            no = refused.rejection
            if automatic and path.owns_invariant_rows(problem, target):
                first = f"{problem.op}: only {path.name} sums such rows in one order (invariant=True), and cannot here"
                raise PathUnavailable(first, [msgspec.structs.replace(no, hint=no.hint or OTHER_BITS)]) from None
            if deferred is not None and not path.extra:
                return msgspec.structs.replace(deferred, notes=(*deferred.notes, no.note()))
            if path.extra and automatic:
                notes.append(no.note("it"))
            else:
                rejected.append(no)
            found = _against(no, registry, target)
            quirks |= {quirk.id: quirk for quirk in found}
            if not path.extra and any(quirk.sets["path"] == REFERENCE for quirk in found):
                barred = no.quirk
            continue
        why = path.defers(problem) if automatic else ""
        if not why:
            return msgspec.structs.replace(
                made, quirks=(*quirks.values(), *made.quirks), notes=(*notes, *made.notes), rejected=tuple(rejected)
            )
        deferred = deferred or msgspec.structs.replace(made, notes=(*notes, *made.notes))
        notes.append(Rejection(path=path.name, reason=f"leaves such problems to the core: {why}").note("it"))
    if not rejected:
        offered = f"; its core kernels run by backend={core!r}" if core else ""
        rejected.append(Rejection(path=settings.backend, reason=f"{target.backend} has no such path{offered}"))
    raise PathUnavailable(f"{problem.op}: backend={settings.backend!r} cannot run this on {target}", rejected)


def _against(no: Rejection, registry: Registry, target: Target) -> list[AppliedQuirk]:
    if no.choice is not None:
        return [quirk for quirk in no.choice.quirks if "path" in quirk.sets] if no.quirk else []
    if not no.quirk:
        return []
    quirk = registry.quirks[no.quirk]
    sets, doubt = {"path": quirk.effect.path}, quirk.doubt(target.toolchain)
    return [AppliedQuirk(id=quirk.id, sentence=quirk.sentence(), sets=sets, note=doubt)]
