"""`portattn quirks retire`: an entry that is needed no more becomes a tombstone. Its file and its id stay."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import tomlkit
from packaging.version import InvalidVersion, Version

from portattn.errors import ArgumentError
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.quirk import ProbeRun, Quirk
from portattn.schema.toolchain import nameable, parse_range, unknown_name
from portattn.tools.quirks.editing import edit
from portattn.tools.quirks.examples import releases
from portattn.tools.quirks.probe.results import probe_outcome

OP = "quirks retire"


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """What was written.

    still_in_range  supported compilers on which the entry applied until now: they lose its work-around
    """

    id: str
    file: str
    date: datetime.date
    reason: str
    fixed_in: str
    replaced_by: str
    still_in_range: tuple[str, ...]


def confirming(quirk: Quirk) -> tuple[ProbeRun, ...]:
    """Probes by which the bug is alive on a compiler that is supported, or newer: without the work-around it failed.

    A file has one result for each compiler and chip, the latest.
    """
    return tuple(
        block
        for block in quirk.verified
        if probe_outcome(True, "pass", block.off, block.on) == "confirmed" and not _before_supported(block.toolchain)
    )


def _before_supported(toolchain: str) -> bool:
    """Whether a compiler is older than every one that is supported."""
    name, _, version = toolchain.partition("==")
    tried = compilers.tried_range(name)
    if not tried:
        return False
    supported = [Version(known) for known in releases(name) if parse_range(tried).contains(known)]
    return bool(supported) and Version(version) < min(supported)


def retire(
    quirk_id: str,
    registry: Registry,
    reason: str,
    *,
    fixed_in: str = "",
    replaced_by: str = "",
    force: bool = False,
    today: datetime.date | None = None,
) -> Tombstone:
    """Write the tombstone into the entry's file, which keeps its comments; whole or not at all.

    Raises ArgumentError on an unknown or retired id, an empty reason, a malformed `fixed_in`, a successor that does
    not exist, and, without `force`, on an entry that a probe confirms on a supported compiler. DataError where the file
    would no longer load, or cannot be written.
    """
    quirk = _living(quirk_id, registry)
    if not reason.strip():
        raise ArgumentError(OP, "--reason", reason, "must say why, in a few words")
    _check_fixed_in(fixed_in)
    if replaced_by and (replaced_by == quirk_id or replaced_by not in registry.quirks):
        raise ArgumentError(OP, "--replaced-by", replaced_by, "must be the id of another entry that lives")
    confirmed = confirming(quirk)
    if confirmed and not force:
        block = max(confirmed, key=lambda one: Version(one.toolchain.partition("==")[2]))
        others = sorted({one.toolchain for one in confirmed if one.toolchain != block.toolchain})
        also = f"; and with {', '.join(others)}" if others else ""
        limit = (
            f"must be confirmed no more on a supported compiler: its probe of {block.date} failed without the "
            f"work-around on {block.target} with {block.toolchain}{also}. Probe it again, or give --force"
        )
        raise ArgumentError(OP, "ID", quirk_id, limit)
    date = today or datetime.date.today()
    _bury(
        Path(quirk.file),
        quirk_id,
        {"date": date, "reason": reason.strip(), "fixed_in": fixed_in, "replaced_by": replaced_by},
    )
    return Tombstone(
        id=quirk_id, file=quirk.file, date=date, reason=reason.strip(), fixed_in=fixed_in, replaced_by=replaced_by,
        still_in_range=still_in_range(quirk),
    )  # fmt: skip


def still_in_range(quirk: Quirk) -> tuple[str, ...]:
    """Supported releases that the entry's range has."""
    found = []
    for name, text in quirk.when.toolchain.items():
        tried = compilers.tried_range(name)
        for version in releases(name) if tried else ():
            if parse_range(tried).contains(version) and parse_range(text).contains(version):
                found.append(f"{name}=={version}")
    return tuple(found)


def _living(quirk_id: str, registry: Registry) -> Quirk:
    if quirk_id in registry.retired:
        tombstone = registry.retired[quirk_id].retired
        assert tombstone is not None
        raise ArgumentError(OP, "ID", quirk_id, f"was retired on {tombstone.date}: {tombstone.reason}")
    if quirk_id not in registry.quirks:
        raise ArgumentError(OP, "ID", quirk_id, "must be an entry's id; `portattn quirks list` names all")
    return registry.quirks[quirk_id]


def _check_fixed_in(text: str) -> None:
    if not text:
        return
    name, _, version = text.partition("==")
    try:
        Version(version)
    except InvalidVersion:
        raise ArgumentError(OP, "--fixed-in", text, "must be NAME==VERSION, as in triton==3.7.1") from None
    if not nameable(name):
        raise ArgumentError(OP, "--fixed-in", text, f"must name a compiler or component; {name!r} is {unknown_name()}")


def _bury(path: Path, quirk_id: str, values: dict[str, str | datetime.date]) -> None:
    """Add the [retired] table."""
    table = tomlkit.table()
    for name, value in values.items():
        if value != "":
            table[name] = value

    def add(document: tomlkit.TOMLDocument) -> None:
        document.add(tomlkit.nl())
        document["retired"] = table

    edit(path, quirk_id, add)
