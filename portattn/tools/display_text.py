"""Text for people: a quirk's lines on pages, tables in Markdown, and legends of schedules and tiles (never in JSON)."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.quirk import Quirk, describe_effect


def setting(name: str, value: object) -> str:
    return f"{name} {value}" if str(value)[:1] in "<>!=" else f"{name} = {value}"


def fields(quirk: Quirk) -> dict[str, str]:
    when, evidence = quirk.when, quirk.evidence
    conditions = [f"`{text}`" for text in when.features]
    conditions += [f"`{setting(name, value)}`" for name, value in (*when.lowering.items(), *when.launch.items())]
    seen = f", last seen on {evidence.last_seen}" if evidence.last_seen else ""
    return {
        "Where": f"{when.backend or 'any'}, {_code(when.arch) or 'all chips'}",
        "Toolchains": ", ".join(f"{name} {text}" for name, text in when.toolchain.items()) or "all",
        "Only when": ", ".join([_code(when.kernels) or "every kernel", *conditions]),
        "Effect": describe_effect(quirk.effect) + (f"; cost: {quirk.effect.cost}" if quirk.effect.cost else ""),
        "Source": evidence.source,
        "Review": (f"by {evidence.review_by}" if evidence.review_by else "none due") + seen,
    }


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join("| " + " | ".join(_cell(text) for text in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """Escape pipes, which would end the cell, also inside backticks."""
    return " ".join(text.split()).replace("|", "\\|")


NAMED = 3  # names that a line lists; of more it gives the number


def plural(count: int, noun: str, many: str = "") -> str:
    return f"{count} {noun if count == 1 else many or f'{noun}s'}"


def names_or_count(names: Sequence[str], noun: str) -> str:
    return ", ".join(names) if len(names) <= NAMED else plural(len(names), noun)


COLUMNS = 110
TILES = "128×64 w4 s2: block_m × block_n, num_warps, num_stages; then compiler options, and lowering by its values"


def of_plans(plans: Iterable[Plan]) -> list[str]:
    names: dict[str, dict[str, None]] = {}
    for plan in plans:
        if plan.schedule:
            names.setdefault(plan.path, {}).update(dict.fromkeys(plan.schedule))
    known = _legends()
    return [line for path, shown in names.items() for line in _lines(path, known.get(path, {}), shown)]


def of_kernels(kernels: Iterable[str]) -> list[str]:
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
