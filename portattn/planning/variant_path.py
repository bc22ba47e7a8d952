"""A variant's part of a plan: its own requirements, then the quirks and records that reject it."""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

import msgspec

from portattn.config import Settings
from portattn.planning.backend import Variant
from portattn.planning.checks import PathRejected, undeclared_demand
from portattn.planning.core_path import OPTIONAL, hint, kernel_source_digest, timed_with_another
from portattn.planning.data_files import has_arches
from portattn.planning.evidence import evidence_cautions
from portattn.planning.registry import Registry
from portattn.schema.compile_record import CompileRecords
from portattn.schema.plan import Applied, Rejection
from portattn.schema.problem import Problem
from portattn.schema.quirk import Quirk, concerning
from portattn.schema.symbolic_int import pin_sizes
from portattn.schema.target import Target
from portattn.version import __version__

FORBIDDING = ("path", "note")  # effects that reach a variant: it has no lowering and no launch that could be set

UNTIMED = "nobody has timed this schedule: this concerns speed alone"


class VariantChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a variant runs.

    schedule  as the variant describes it
    quirks    cautions about it
    notes     what else should be known
    key       identifies the kernels' source, the schedule, target and toolchain for records
    """

    schedule: dict[str, Any]
    quirks: tuple[Applied, ...]
    notes: tuple[str, ...]
    key: str


def choose(
    variant: Variant, problem: Problem, target: Target, registry: Registry, records: CompileRecords, settings: Settings
) -> VariantChoice:
    """How the variant runs the problem. Raises Refused with the reason when it does not."""
    no = variant.rejects(problem, target) or undeclared_demand(variant.name, problem, variant.ops, variant.takes)
    if no is not None:
        raise PathRejected(no)
    found = quirks_of(variant.name, problem, target, registry, settings)
    blocker = next((quirk for quirk in found if quirk.effect.path), None)
    if blocker is not None:
        raise PathRejected(Rejection(path=variant.name, reason=blocker.title, hint=hint(blocker), quirk=blocker.id))
    schedule = variant.describe(problem)
    key = key_of(variant, problem, schedule, target)
    record = records.get(key)
    if record is not None and not record.passed:
        raise PathRejected(
            Rejection(
                path=variant.name,
                reason=f"it {record.told()}",
                hint=f"see incident {record.incident}" if record.incident else "",
                incident=record.incident,
            )
        )
    known = target.toolchain
    cautions = tuple(Applied(id=q.id, sentence=q.sentence(), note=q.doubt(known)) for q in found)
    notes = evidence_cautions(variant.name, target, settings, registry, problem)
    timed_with = variant.timed_with(problem)
    if schedule and not timed_with:
        notes += (UNTIMED,)
    elif schedule and timed_with != str(target.toolchain):
        notes += (timed_with_another(timed_with, target),)
    return VariantChoice(schedule=schedule | variant.sizes(problem), quirks=cautions, notes=notes, key=key)


def quirks_of(name: str, problem: Problem, target: Target, registry: Registry, settings: Settings) -> list[Quirk]:
    """The quirks that reject a variant, or caution about it, for a problem on a target."""
    on, off = registry.overrides(settings.quirks)
    return [
        quirk
        for quirk in concerning(registry.quirks.values(), name, target)
        if quirk.effect.kind in FORBIDDING
        and quirk.id not in off
        and (quirk.reaches(name, problem, target) or (quirk.id in on and quirk.names_variant(name, target)))
    ]


def key_of(variant: Variant, problem: Problem, schedule: dict[str, Any], target: Target) -> str:
    """What a record about the variant's kernels is about, as far as a Problem says it."""
    parts = {
        "portattn": __version__,
        "source": source_digest(variant),
        "variant": variant.name,
        "schedule": schedule,
        "dtype": problem.dtype,
        "optional": {name: getattr(problem, name) for name in OPTIONAL} | {"packed": problem.packed},
        "target": target.name,
        "toolchain": [target.toolchain.distribution, target.toolchain.version, target.toolchain.components],
    }
    return hashlib.sha256(msgspec.json.encode(pin_sizes(parts), order="deterministic")).hexdigest()[:32]


def source_digest(variant: Variant) -> str:
    """Digest of the variant's folder, of its chip's where that lies around it, and of the core kernels, of which it may
    launch one."""
    return _digest(inspect.getfile(type(variant)))


@functools.lru_cache(maxsize=64)
def _digest(file: str) -> str:
    digest = hashlib.sha256(kernel_source_digest().encode())
    own = Path(file).parent
    around = own.parent
    folders = [own, around] if has_arches(around) else [own]  # what several variants share lies there
    for path in sorted(path for kind in ("*.py", "*.toml") for folder in folders for path in folder.glob(kind)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
