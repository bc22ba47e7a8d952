"""What probes have seen, as a page: quirks × toolchains, with result and date, from the [[verified]] tables."""

from __future__ import annotations

from collections import Counter

from packaging.version import Version

from portattn.planning.registry import Registry
from portattn.schema.quirk import ProbeRun, Quirk
from portattn.tools.quirks.markdown import table
from portattn.tools.quirks.probe.results import RED, recorded_outcome
from portattn.tools.quirks.probe.running import has_probe

_HEAD = """\
# Verification of the quirks

Generated from the registry by `python -m portattn.tools.quirks.pages --verification > docs/quirk-verification.md`;
do not edit. `portattn quirks probe --all-toolchains --record` makes the data: every toolchain of the lab compiles
each quirk's probe without and with its work-around. [Quirks](quirks.md#probes) explains the results.

{count} entries: {probed} have been probed, {both} of them on two toolchains or more, one with the bug and one without.
Results: {results}.
"""
_UNPROBED = "Entries without a result, and why.\n\n"


def render(registry: Registry) -> str:
    """The page as Markdown."""
    quirks = sorted(registry.quirks.values(), key=lambda quirk: quirk.id)
    seen = {
        quirk.id: {(v.target, v.toolchain): verdict(quirk, v, registry) for v in quirk.verified} for quirk in quirks
    }
    counts = Counter(word for words in seen.values() for word in words.values())
    parts = [
        _HEAD.format(
            count=len(quirks),
            probed=sum(bool(words) for words in seen.values()),
            both=len(on_both_sides(registry)),
            results=", ".join(f"{number} {word}" for word, number in counts.most_common()) or "none yet",
        )
    ]
    for compiler in ("triton", "triton-ascend"):
        parts += _section(compiler, quirks, seen)
    silent = [
        (f"`{quirk.id}`", quirk.kind, f"needs {quirk.evidence.needs}" if has_probe(quirk) else _reason(quirk))
        for quirk in quirks
        if not quirk.verified
    ]
    parts.append("## Not verified\n\n" + _UNPROBED + table(("id", "kind", "why"), silent))
    return "\n".join(parts)


def _reason(quirk: Quirk) -> str:
    return quirk.evidence.probe.partition(":")[2].strip()


def verdict(quirk: Quirk, seen: ProbeRun, registry: Registry) -> str:
    """What a recorded probe says of the entry as it is now."""
    return recorded_outcome(quirk, seen, registry.target(seen.target, seen.toolchain))


def on_both_sides(registry: Registry) -> list[str]:
    """Ids that are confirmed on a toolchain and absent on another."""
    found = []
    for quirk in registry.quirks.values():
        words = {verdict(quirk, seen, registry) for seen in quirk.verified}
        if {"confirmed", "absent"} <= words:
            found.append(quirk.id)
    return found


def _section(compiler: str, quirks: list[Quirk], seen: dict[str, dict[tuple[str, str], str]]) -> list[str]:
    names = {name for words in seen.values() for _, name in words if name.partition("==")[0] == compiler}
    toolchains = sorted(names, key=lambda name: Version(name.partition("==")[2]))
    if not toolchains:
        return []
    rows = []
    for quirk in quirks:
        dates = {(v.target, v.toolchain): v for v in quirk.verified}
        for target in dict.fromkeys(target for target, name in seen[quirk.id] if name in toolchains):
            cells = [_cell(seen[quirk.id].get((target, name)), dates.get((target, name))) for name in toolchains]
            rows.append((f"`{quirk.id}`", quirk.kind, target, *cells))
    columns = ("id", "kind", "target", *(name.partition("==")[2] for name in toolchains))
    return [f"## {compiler}\n\n" + table(columns, rows)]


def _cell(word: str | None, seen: ProbeRun | None) -> str:
    if word is None or seen is None:
        return ""
    shown = f"**{word}**" if word in RED else word
    stood = f", on {seen.stand_in} with old passes" if seen.stand_in else ""
    lowered = f", {seen.level}" if seen.level != "compiles" else ""
    return f"{shown} {seen.date}{lowered}{stood}"
