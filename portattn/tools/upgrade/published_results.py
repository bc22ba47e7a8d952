"""Published figures, by the compiler that they were measured with: figures of one compiler say nothing of another's."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from portattn.schema import toml_reader
from portattn.tools.upgrade.toolchain_pair import Pair

FILE = Path(__file__).parent / "figures.toml"


class PublishedResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one page of the documentation. A page that compares compilers has an entry for each.

    target     the chip's; toolchain: NAME==VERSION
    """

    page: str
    what: str
    target: str
    toolchain: str
    date: datetime.date


class TargetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a target of the upgrade: of one thing on one page, with each release that it has them of.

    releases  the compilers that they were measured with
    carries   whether the new compiler is among them
    lost      whether the old one is, and the new one is not
    """

    page: str
    what: str
    target: str
    releases: tuple[str, ...]
    carries: bool
    lost: bool

    @property
    def measured_with(self) -> str:
        return ", ".join(self.releases)


class Page(NamedTuple):
    """The figures of a page and a target together: a report has a line for each page."""

    page: str
    target: str
    figures: tuple[TargetFigures, ...]

    @property
    def carries(self) -> bool:
        """Whether all of them carry over."""
        return all(one.carries for one in self.figures)

    @property
    def in_part(self) -> bool:
        """Whether some do, and not all."""
        return any(one.carries for one in self.figures) and not self.carries


class _PublishedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    figures: tuple[PublishedResult, ...]


@functools.lru_cache(maxsize=1)
def read_published_results() -> tuple[PublishedResult, ...]:
    """Every page's figures. Raises DataError (file, line, key) on a broken file."""
    data, text = toml_reader.read(FILE)
    return toml_reader.convert(data, _PublishedFile, FILE, text).figures


def figures(pairs: Collection[Pair]) -> Iterator[TargetFigures]:
    """The published figures of the targets, and whether they hold for the new compiler."""
    measured: dict[tuple[str, str, str], list[str]] = {}
    for one in read_published_results():
        measured.setdefault((one.page, one.what, one.target), []).append(one.toolchain)
    for (page, what, target), releases in measured.items():
        for old, new in pairs:
            if new.target.name == target:
                carries = new.compiler in releases
                yield TargetFigures(
                    page=page,
                    what=what,
                    target=target,
                    releases=tuple(releases),
                    carries=carries,
                    lost=old.compiler in releases and not carries,
                )


def pages(found: Iterable[TargetFigures]) -> list[Page]:
    """The figures by their pages, in order."""
    together: dict[tuple[str, str], list[TargetFigures]] = {}
    for one in found:
        together.setdefault((one.page, one.target), []).append(one)
    return [Page(page, target, tuple(ones)) for (page, target), ones in together.items()]
