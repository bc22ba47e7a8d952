"""Shared by the tests of quirks: files planted in a folder, registries read from it, and plans made with them."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from places import tables

from portattn.config import Settings
from portattn.planning.backend import Backend
from portattn.planning.planner import plan
from portattn.planning.quirk_files import load_quirks
from portattn.planning.registry import Registry, find_backends
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem

TABLES = tables(__file__)

PROBLEM = Problem(batch=2, heads_q=8, heads_k=8, seq_q=1024, seq_k=1024, head_dim=128)
DECODE = Problem(op="decode_attention", batch=2, heads_q=8, heads_k=8, seq_q=1, seq_k=8192, head_dim=128)

VALID = TABLES["valid"]


def plant(
    folder: Path, quirk_id: str, effect: str, when: str = "", title: str = "planted", symptom: str = "wrong-result",
    kind: str = "workaround", evidence: str = 'last_seen = "triton==3.6.0"\nreview_by = 2027-06-01',
) -> Path:  # fmt: skip
    """Write one quirk file under folder/<backend>/ and give its path. `when.backend` follows from the id."""
    backend = quirk_id.split("-")[0]
    if backend != "any":
        when = f'backend = "{backend}"\n{when}'
    place = folder / backend
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{quirk_id}.toml"
    path.write_text(
        VALID.format(id=quirk_id, title=title, symptom=symptom, kind=kind, when=when, effect=effect, evidence=evidence),
        encoding="utf-8",
    )
    return path


def without_variants(backends: Mapping[str, Backend]) -> dict[str, Backend]:
    copies = {name: copy.copy(backend) for name, backend in backends.items()}
    for backend in copies.values():
        backend.variants = ()
    return copies


def registry(folder: Path, variants: bool = False) -> Registry:
    """portattn's own backends with the quirks of a folder only, and no tuning: plans start from the defaults. Nor any
    variant, unless `variants`: what quirks make of the core's plans is seen on every chip."""
    backends = find_backends() if variants else without_variants(find_backends())
    quirks = load_quirks([folder / name for name in (*backends, "any")], tuple(backends))
    return Registry(
        backends=dict(backends), arches={name: Registry.load().arches[name] for name in backends},
        tunings={name: {} for name in backends},
        quirks={name: quirk for name, quirk in quirks.items() if quirk.retired is None},
    )  # fmt: skip


def planned(
    known: Registry, target: str = "cuda:sm_90", toolchain: str = "triton==3.6.0", problem: Problem = PROBLEM,
    **settings: Any,
) -> Plan:  # fmt: skip
    return plan(problem, known.target(target, toolchain), known, settings=Settings(**settings))


def active(made: Plan) -> set[str]:
    """Ids of the quirks that a plan says it applied, whatever path it took."""
    return {applied.id for applied in made.quirks} | {r.quirk for r in made.rejected if r.quirk}
