"""The registry as pages of the site (scripts/site_pages.py): a catalogue of quirks; probes' results × toolchains."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
from packaging.version import Version

from portattn.planning.registry import Registry
from portattn.schema import toml_reader
from portattn.schema.quirk import ProbeRun, Quirk
from portattn.tools.display_text import fields, table
from portattn.tools.quirks.draft_texts import render_template
from portattn.tools.quirks.probe import has_probe
from portattn.tools.quirks.probe_results import RED, recorded_outcome


def render_verification(registry: Registry) -> str:
    quirks = sorted(registry.quirks.values(), key=lambda quirk: quirk.id)
    seen = {
        quirk.id: {(v.target, v.toolchain): verdict(quirk, v, registry) for v in quirk.verified} for quirk in quirks
    }
    counts = Counter(word for words in seen.values() for word in words.values())
    silent = [(f"`{quirk.id}`", quirk.kind, _unverified(quirk)) for quirk in quirks if not quirk.verified]
    sections = [text for compiler in ("triton", "triton-ascend") for text in _section(compiler, quirks, seen)]
    sections.append("## Not verified\n\nEntries without a result, and why.\n\n" + table(("id", "kind", "why"), silent))
    return render_template(
        "verification_page.jinja", count=len(quirks), probed=sum(map(bool, seen.values())),
        both=len(on_both_sides(registry)), sections="\n".join(sections).removesuffix("\n"),
        results=", ".join(f"{number} {word}" for word, number in counts.most_common()) or "none yet",
    )  # fmt: skip


def _unverified(quirk: Quirk) -> str:
    return f"needs {quirk.evidence.needs}" if has_probe(quirk) else quirk.evidence.probe.partition(":")[2].strip()


def verdict(quirk: Quirk, seen: ProbeRun, registry: Registry) -> str:
    return recorded_outcome(quirk, seen, registry.target(seen.target, seen.toolchain))


def on_both_sides(registry: Registry) -> list[str]:
    """Return ids that are confirmed on a toolchain and absent on another."""
    return [
        quirk.id for quirk in registry.quirks.values()
        if {"confirmed", "absent"} <= {verdict(quirk, seen, registry) for seen in quirk.verified}
    ]  # fmt: skip


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


# Reports that are no entries are notes of the repository, not data that a plan reads: they do not ship in the wheel.
LEFT_OUT = Path(__file__).resolve().parents[1] / "docs" / "quirks-left-out.toml"


class DismissedReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report that was examined and is no entry, and why."""

    backend: str
    what: str
    where: str
    source: str
    reason: str


class _LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    report: tuple[DismissedReport, ...]


def load_left_out(path: Path = LEFT_OUT) -> tuple[DismissedReport, ...]:
    """Read the reports that are no entries. Raises DataError (file, line, key) on anything outside their schema."""
    data, text = toml_reader.read(path)
    return toml_reader.convert(data, _LeftOut, path, text).report


def render(quirks: Iterable[Quirk], left_out: Iterable[DismissedReport]) -> str:
    entries = sorted(quirks, key=lambda quirk: quirk.id)
    return render_template("catalogue_page.jinja", entries=entries, reports=tuple(left_out), said=_said)


def _said(quirk: Quirk) -> dict[str, str]:
    said = {name: " ".join(text.split()) for name, text in fields(quirk).items()}
    if quirk.evidence.upstream.startswith("http"):
        said["Source"] += f" ([upstream]({quirk.evidence.upstream}))"
    return said
