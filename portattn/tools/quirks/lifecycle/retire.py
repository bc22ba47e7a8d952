"""`portattn quirks retire`: an entry that is needed no more becomes a tombstone. Its file and its id stay."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import tomlkit
from packaging.version import InvalidVersion, Version

from portattn.errors import ArgumentError
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk, Verified
from portattn.schema.toolchain import COMPILERS, COMPONENTS, TRIED, parse_range
from portattn.tools.quirks.examples import RELEASES
from portattn.tools.quirks.lifecycle.editing import edit

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


def newest(verified: tuple[Verified, ...]) -> tuple[Verified, ...]:
    """The blocks of the newest probe: of the last day, those of the newest compiler."""
    last = max((block.date for block in verified), default=None)
    of_day = [block for block in verified if block.date == last]
    version = max((_version(block.toolchain) for block in of_day), default=None)
    return tuple(block for block in of_day if _version(block.toolchain) == version)


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
    not exist, and, without `force`, on an entry that its newest probe confirms. DataError where the file would no
    longer load, OSError where it cannot be written.
    """
    quirk = _living(quirk_id, registry)
    if not reason.strip():
        raise ArgumentError(OP, "--reason", reason, "must say why, in a few words")
    _check_fixed_in(fixed_in)
    if replaced_by and (replaced_by == quirk_id or replaced_by not in registry.quirks):
        raise ArgumentError(OP, "--replaced-by", replaced_by, "must be the id of another entry that lives")
    confirmed = [block for block in newest(quirk.verified) if (block.off, block.on) == ("fail:signature", "pass")]
    if confirmed and not force:
        block = confirmed[0]
        limit = (
            f"must be confirmed no more: its probe of {block.date} failed without the work-around and passed with it "
            f"on {block.target} with {block.toolchain}. Probe it again, or give --force"
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
        supported = parse_range(TRIED[name]) if name in TRIED else None
        for version in RELEASES.get(name, ()):
            if supported is not None and supported.contains(version) and parse_range(text).contains(version):
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
    if name not in COMPILERS + COMPONENTS:
        raise ArgumentError(OP, "--fixed-in", text, f"must name one of {', '.join(COMPILERS + COMPONENTS)}")


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


def _version(toolchain: str) -> Version:
    try:
        return Version(toolchain.partition("==")[2])
    except InvalidVersion:
        return Version("0")
