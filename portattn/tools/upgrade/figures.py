"""Published figures, by the compiler that they were measured with: figures of one compiler say nothing of another's."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from portattn.schema import toml_reader
from portattn.tools.upgrade.sides import Pair

FILE = Path(__file__).parent / "figures.toml"


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one page of the documentation. A page that compares compilers has an entry for each.

    target     the chip's; toolchain: NAME==VERSION
    """

    page: str
    what: str
    target: str
    toolchain: str
    date: datetime.date


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a target of the upgrade.

    carries  whether they were measured with the new compiler
    lost     whether with the old one, and the page has none of the new one for the same
    """

    page: str
    what: str
    target: str
    measured_with: str
    carries: bool
    lost: bool


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    figures: tuple[Published, ...]


@functools.lru_cache(maxsize=1)
def published() -> tuple[Published, ...]:
    """Every page's figures. Raises DataError (file, line, key) on a broken file."""
    data, text = toml_reader.read(FILE)
    return toml_reader.convert(data, _File, FILE, text).figures


def figures(pairs: Collection[Pair]) -> Iterator[Figures]:
    """The published figures of the targets, and whether they hold for the new compiler."""
    measured = {(one.page, one.what, one.target, one.toolchain) for one in published()}
    for one in published():
        for old, new in pairs:
            if new.target.name == one.target:
                both = (one.page, one.what, one.target, new.compiler) in measured
                yield Figures(
                    page=one.page,
                    what=one.what,
                    target=one.target,
                    measured_with=one.toolchain,
                    carries=one.toolchain == new.compiler,
                    lost=one.toolchain == old.compiler and not both,
                )
