"""[[verified]] tables: what probes saw, written into the quirks' own files. Comments and layout are kept."""

from __future__ import annotations

import re
from pathlib import Path

import tomlkit
from tomlkit.items import AoT, Table

from portattn.errors import DataError
from portattn.schema.quirk import ProbeRun, Quirk
from portattn.tools.quirks import editing
from portattn.tools.quirks.probe.results import ProbeResult, saw

SAID_NOTHING = ("unverified", "broken", "inconclusive")  # verdicts of probes that saw nothing about their quirk


def verified_of(quirk: Quirk, result: ProbeResult) -> ProbeRun | None:
    """The table for a result; None where nothing was seen that is worth keeping."""
    if result.verdict in SAID_NOTHING:
        return None
    return ProbeRun(
        toolchain=result.toolchain,
        target=result.target,
        level=result.level,
        off=result.off.word,
        on=result.on.word,
        date=result.date,
        saw=saw(quirk, result.off) if result.off.outcome != "pass" else "",
        stand_in=result.stand_in,
    )


def record(quirk: Quirk, results: list[ProbeResult]) -> int:
    """Write the results of one quirk into its file, one table for each (toolchain, target); how many were written.

    A table of an earlier probe is replaced. The file is replaced whole or not at all; one that would break the schema
    is never written. Raises DataError when the file is not the quirk's any more, or cannot be written.
    """
    seen = [table for result in results if (table := verified_of(quirk, result)) is not None]
    if not seen:
        return 0
    path = Path(quirk.file)
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    if document.get("id") != quirk.id:
        raise DataError(path, 1, f"key 'id': the file is {document.get('id')!r} now, and not {quirk.id!r}")
    tables = document.get("verified")
    if not isinstance(tables, AoT):
        tables = tomlkit.aot()
        document.append("verified", tables)
    for new in seen:
        places = [
            i for i, t in enumerate(tables) if (t.get("toolchain"), t.get("target")) == (new.toolchain, new.target)
        ]
        if places:
            _fill(tables[places[0]], new)
        else:
            tables.append(_fill(tomlkit.table(), new))
    _replace(path, tomlkit.dumps(document))
    return len(seen)


def _fill(table: Table, new: ProbeRun) -> Table:
    """Set the table's keys; what is empty is left out."""
    for name in ("toolchain", "target", "stand_in", "level", "off", "on", "saw", "date"):
        value = getattr(new, name)
        if value == "":
            table.pop(name, None)
        elif table.get(name) != value:
            table[name] = value
    return table


def _replace(path: Path, text: str) -> None:
    """Write the file, laid out as the others are."""
    # A table begins after an empty line, and after its comment where it has one.
    text = re.sub(r"(?m)^(?!#)(.+)\n+(?=\[\[verified\]\]$)", r"\1\n\n", text.rstrip("\n") + "\n")
    editing.replace(path, text)
