"""Two results beside each other. Times of different runs do not compare on a card that is capped in power: what does is
how far ahead of the same peer ours were in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from portattn.tools.bench.contenders import MINE
from portattn.tools.bench.goals import geomean
from portattn.tools.bench.results import Figures, Result, Row
from portattn.tools.bench.timing import ratio


class ContenderChange(msgspec.Struct, frozen=True, kw_only=True):
    """One of our contenders in one case of both results.

    before, after  its ratio to `peer` in each; None where the results share no peer there
    change         after over before; above 1 is faster than before
    ms             its own device times in milliseconds (before, after), for what they are worth
    """

    set: str
    case: str
    name: str
    peer: str
    before: float | None
    after: float | None
    change: float | None
    ms: tuple[float, float]


class SetChange(msgspec.Struct, frozen=True, kw_only=True):
    """Geometric mean of a set's changes, for one contender; cells: how many there are."""

    set: str
    name: str
    cells: int
    change: float


def changes(before: Result, after: Result) -> list[ContenderChange]:
    """Every case and contender of ours that both results have times of."""
    earlier = {(row.set, row.name): row for row in before.rows}
    found = []
    for row in after.rows:
        old = earlier.get((row.set, row.name))
        for name in MINE if old else ():
            assert old is not None
            was, now = old.figures(name), row.figures(name)
            if was and now and was.rounds_ms and now.rounds_ms:
                found.append(_change(old, row, was, now))
    return found


def _change(old: Row, row: Row, was: Figures, now: Figures) -> ContenderChange:
    peer = _shared(old, row)
    first = second = None
    if peer:
        first, second = ratio(peer[0].rounds_ms, was.rounds_ms), ratio(peer[1].rounds_ms, now.rounds_ms)
    assert was.ms is not None
    assert now.ms is not None
    return ContenderChange(
        set=row.set, case=row.name, name=now.name, peer=peer[0].name if peer else "", before=first, after=second,
        change=second / first if first and second else None, ms=(was.ms, now.ms),
    )  # fmt: skip


def _shared(old: Row, row: Row) -> tuple[Figures, Figures] | None:
    """Return the fastest peer of the earlier row that the later row has too."""
    pairs = [(f, row.figures(f.name)) for f in old.contenders if f.peer and f.rounds_ms]
    both = [(was, now) for was, now in pairs if now is not None and now.rounds_ms]
    return min(both, key=lambda pair: pair[0].ms or float("inf"), default=None)


def by_set(found: Iterable[ContenderChange]) -> list[SetChange]:
    groups: dict[tuple[str, str], list[float]] = {}
    for change in found:
        if change.change is not None:
            groups.setdefault((change.set, change.name), []).append(change.change)
    return [
        SetChange(set=set_, name=name, cells=len(values), change=geomean(values))
        for (set_, name), values in groups.items()
    ]


def slower(found: Sequence[ContenderChange], tolerance: float) -> list[ContenderChange]:
    """Those that have fallen behind their peer by more than `tolerance` of what they were."""
    return [change for change in found if change.change is not None and change.change < 1 - tolerance]
