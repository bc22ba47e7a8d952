"""The registry as pages: `python -m portattn.tools.quirks.pages > docs/quirk-catalogue.md` writes the catalogue.

With `--verification` it is docs/quirk-verification.md: what probes have seen, quirks × toolchains (verification.py).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from portattn.planning.registry import Registry
from portattn.schema import toml_reader
from portattn.schema.quirk import Quirk
from portattn.tools.quirk_text import fields

# Reports that are no entries are notes of the repository, not data that a plan reads: they do not ship in the wheel.
LEFT_OUT = Path(__file__).parents[3] / "docs" / "quirks-left-out.toml"

_HEAD = """\
# Catalogue of quirks

Generated from the registry by `python -m portattn.tools.quirks.pages > docs/quirk-catalogue.md`; do not edit.
[Quirks](quirks.md) explains the fields, and how to add an entry. {count} entries: {workarounds} work around a bug,
{limits} state a limit of a chip or language.
"""
_SECTIONS = (
    ("workaround", "Work-arounds", "Bugs of a compiler. Each has a range of versions, and goes when its bug is gone."),
    ("limit", "Limits", "Facts of a chip or language, which no probe makes stale."),
)
COLUMNS = 118  # of a line


class DismissedReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report that was looked at and is no entry, and why."""

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
    """The catalogue as Markdown: work-arounds, limits, then what is no entry and why."""
    entries = sorted(quirks, key=lambda quirk: quirk.id)
    kinds = [quirk.kind for quirk in entries]
    parts = [
        _HEAD.format(count=len(entries), workarounds=kinds.count("workaround"), limits=kinds.count("limit")),
    ]
    for kind, title, about in _SECTIONS:
        parts.append(f"## {title}\n\n{about}\n")
        parts += [_entry(quirk) for quirk in entries if quirk.kind == kind]
    parts.append("## Not in the registry\n\nReports about attention that were examined, and why they are no entries.\n")
    reports = tuple(left_out)
    for backend in dict.fromkeys(report.backend for report in reports):
        items = [_item(_left_out(report)) for report in reports if report.backend == backend]
        parts.append(f"### {backend}\n\n" + "\n".join(items) + "\n")
    return "\n".join(parts)


def _entry(quirk: Quirk) -> str:
    """One entry: what goes wrong, where, what is done about it, and the evidence."""
    evidence, said = quirk.evidence, fields(quirk)
    if evidence.upstream.startswith("http"):
        said["Source"] += f" ([upstream]({evidence.upstream}))"
    title = "\n".join(textwrap.wrap(f"**{quirk.title}** ({quirk.symptom})", COLUMNS))
    items = "\n".join(_item(f"{name}: {text}") for name, text in said.items())
    return f"### `{quirk.id}`\n\n{title}\n\n{items}\n"


def _left_out(report: DismissedReport) -> str:
    return f"**{report.what}** ({report.where}). Source: {report.source}. Why not: {report.reason}"


def _item(text: str) -> str:
    """An item of a list, broken between words; an address stays whole, and no issue's number begins a heading."""
    words = " ".join(text.split()).replace(" #", " \\#")
    return textwrap.fill(
        f"- {words}", COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def main(arguments: Sequence[str] = ()) -> None:
    """Write a page about the registry that comes with portattn to standard output: the catalogue, or the other one."""
    if list(arguments) == ["--verification"]:
        from portattn.tools.quirks.verification import render as verification

        sys.stdout.write(verification(Registry.load()))
    elif arguments:
        sys.exit(f"python -m portattn.tools.quirks.pages: {' '.join(arguments)!r} is not --verification")
    else:
        sys.stdout.write(render(Registry.load().quirks.values(), load_left_out()))


if __name__ == "__main__":
    main(sys.argv[1:])
