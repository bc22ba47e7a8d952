"""What the names in schedules and tables of tiles mean, for people: below what prints them, and never in JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from portattn.planning.registry import Registry
from portattn.schema.plan import Plan

COLUMNS = 110
TILES = "128×64 w4 s2: block_m × block_n, num_warps, num_stages; then compiler options, and lowering by its values"


def of_plans(plans: Iterable[Plan]) -> list[str]:
    """Lines about the schedules of plans, a paragraph for each variant; none where no plan has one."""
    names: dict[str, dict[str, None]] = {}
    for plan in plans:
        if plan.schedule:
            names.setdefault(plan.path, {}).update(dict.fromkeys(plan.schedule))
    known = _legends()
    return [line for path, shown in names.items() for line in _lines(path, known.get(path, {}), shown)]


def of_kernels(kernels: Iterable[str]) -> list[str]:
    """Lines about the choices of kernels and variants as tables write them."""
    known, found, tiles = _legends(), list(dict.fromkeys(kernels)), False
    lines: list[str] = []
    for kernel in found:
        if kernel in known:
            lines += _lines(kernel, known[kernel], known[kernel])
        elif not tiles:
            tiles = True
            lines.append(TILES)
    return lines


def _legends() -> dict[str, Mapping[str, str]]:
    return {variant.name: variant.legend for one in Registry.load().backends.values() for variant in one.variants}


def _lines(name: str, legend: Mapping[str, str], shown: Iterable[str]) -> list[str]:
    said = "; ".join(f"{one}: {legend[one]}" for one in shown if one in legend)
    if not said:
        return []
    return textwrap.wrap(f"{name}: {said}", COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
