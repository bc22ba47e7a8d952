"""What a change of compiler loses, changes and wins: the matrix's comparison, beside what the registry says."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from portattn.tools.ci import regressions
from portattn.tools.ci.cells import SideRun
from portattn.tools.ci.regressions import Loss
from portattn.tools.ci.request import CiRequest
from portattn.tools.matrix import verdict
from portattn.tools.matrix.diff import LOST, Change, Diff
from portattn.tools.matrix.expected import ExpectedFailure
from portattn.tools.matrix.verdict import RunFinding
from portattn.tools.upgrade.compare import Upgrade
from portattn.tools.upgrade.compilers import cautions

# Beside the kinds of changes and the statuses of cells, --fail-on takes what is less sure with the new compiler:
# unprobed   a quirk applies there to a target on which no probe has looked
# canaries   somebody has run a variant with the old compiler, and nobody with the new one
# schedules  a launch or a schedule was timed with the old compiler, and not with the new one
# figures    published figures were measured with the old compiler
LESS_SURE = ("unprobed", "canaries", "schedules", "figures")
FAIL_ON = (*verdict.FAIL_ON, *LESS_SURE)
COMPILED = frozenset({"note", "not_run", "facts"})  # of these nothing is known where nothing is compiled


class CiReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer.

    compiled  whether cells were compiled; else they are compared by their plans alone
    against   the baseline's name; empty if both sides were made
    compared  cells that both sides have
    red       the kinds that count as lost
    losses    the findings, grouped by cause; empty: nothing is lost
    changes   the matrix's comparison of the cells
    upgrade   the comparison of both compilers' registries and plans
    expected  ids of cells that fail as expected
    notes     findings that deserve a look, and are no loss
    idle      reasons, if cells were to be compiled and no cell of the new side could be; empty otherwise
    """

    before: str
    after: str
    compiled: bool
    against: str
    targets: tuple[str, ...]
    problems: tuple[str, ...]
    compared: int
    red: tuple[str, ...]
    findings: tuple[RunFinding, ...]
    losses: tuple[Loss, ...]
    changes: tuple[Change, ...]
    upgrade: Upgrade
    expected: tuple[str, ...]
    notes: tuple[str, ...]
    idle: tuple[str, ...] = ()

    @property
    def cells_lost(self) -> int:
        return len({(one.target, one.name) for one in self.findings if one.name})

    @property
    def won(self) -> list[Change]:
        return [change for change in self.changes if "won" in change.kinds and not self.is_lost(change)]

    @property
    def changed(self) -> list[Change]:
        """Cells that changed, and neither lost nor won anything."""
        return [change for change in self.changes if "won" not in change.kinds and not self.is_lost(change)]

    def is_lost(self, change: Change) -> bool:
        return bool(set(self.red) & set(change.kinds))


class Alike(msgspec.Struct, frozen=True, kw_only=True):
    """Cells that changed in the same way."""

    targets: tuple[str, ...]
    problems: tuple[str, ...]
    what: str


def alike(changes: Iterable[Change]) -> list[Alike]:
    """The changes, cells of one kind of change together where the same problems changed on several targets."""
    of_target: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        what = "; ".join(f"{kind}: {text}" for kind, text in change.told.items())
        of_target.setdefault((what, change.target), []).append(change.name)
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (what, target), names in of_target.items():
        found.setdefault((what, tuple(names)), []).append(target)
    return [Alike(targets=tuple(on), problems=names, what=what) for (what, names), on in found.items()]


def report(
    asked: CiRequest,
    diff: Diff,
    after: SideRun,
    upgrade: Upgrade,
    *,
    compiled: bool,
    fail_on: Collection[str] = (),
    expected: Sequence[ExpectedFailure] = (),
    today: datetime.date | None = None,
) -> CiReport:
    """The report on the new side.

    fail_on   what is red beside losses: names of FAIL_ON
    expected  failures of cells that are excused (portattn.tools.matrix.expected)
    """
    judged = verdict.of_run(
        after.run, after.cells, fail_on=fail_on, expected=expected, changes=diff, today=today, whole=False
    )
    red = LOST | set(fail_on)
    idle = compiled and all(cell.status == "NOT_RUN" for cell in after.cells)
    findings = (*_lost(judged.findings, diff, "red" in fail_on), *_less_sure(upgrade, red))
    return CiReport(
        before=str(asked.old),
        after=str(asked.new),
        compiled=compiled,
        against=asked.baseline.shown if asked.baseline else "",
        targets=tuple(asked.targets),
        problems=tuple(named.name for named in asked.problems),
        compared=diff.compared,
        red=tuple(sorted(red)),
        findings=findings,
        losses=tuple(regressions.together(findings, diff.changes, asked, after)),
        changes=diff.changes,
        upgrade=upgrade,
        expected=tuple(judged.expected),
        notes=(*(text for side in dict.fromkeys((asked.old, asked.new)) for text in cautions(side)), *judged.notes),
        idle=tuple(dict.fromkeys(cell.reason for cell in after.cells)) if idle else (),
    )


def _lost(findings: Sequence[RunFinding], diff: Diff, every: bool) -> Iterator[RunFinding]:
    """The findings but for red cells that were as red before: the change of compiler has not lost them.

    every  red cells count whatever they were before
    """
    places = {(change.target, change.toolchain, change.name): change for change in diff.changes}
    for finding in findings:
        change = places.get((finding.target, finding.toolchain, finding.name))
        kinds = change.kinds if change is not None else ()
        if finding.kind != "red" or "new" in kinds or (every and "level" not in kinds):
            yield finding


def _less_sure(made: Upgrade, red: Collection[str]) -> Iterator[RunFinding]:
    """What is less sure with the new compiler, of the kinds that are red."""
    found: list[tuple[str, str, Sequence[str]]] = [
        *(
            ("unprobed", f"quirk {one.id} applies with {made.after}, and no probe has looked there", one.unprobed)
            for one in made.entries
        ),
        *(
            ("canaries", f"{one.name} was run with {made.before}; of {made.after} no complete run is known",
             [one.target])
            for one in made.variants
            if one.less_sure
        ),
        *(
            ("schedules", f"{one.kernel} was timed with {made.before}, and not with {made.after}", [one.target])
            for one in made.schedules
            if one.lost
        ),
        *(
            ("figures", f"{one.page} was measured with {one.measured_with}", [one.target])
            for one in made.figures
            if one.lost
        ),
    ]  # fmt: skip
    for kind, text, targets in found:
        if kind in red:
            for target in targets:
                yield RunFinding(kind=kind, text=text, target=target, toolchain=made.after)
