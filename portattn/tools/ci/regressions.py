"""Findings by their causes: what is lost where, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from portattn.tools.ci.cells import SideRun
from portattn.tools.ci.request import CiRequest
from portattn.tools.matrix.attribution import Cause
from portattn.tools.matrix.diff import Change
from portattn.tools.matrix.verdict import COMPLAINTS, RunFinding

_Place = tuple[str, str, str]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Cells lost in the same way for the same reason.

    kinds     of the findings
    what      the event
    targets, problems  places; no problems if the loss concerns a target as a whole
    cause     the nearest cause; empty if `what` is the cause
    quirk     id of the quirk that is the cause, if any
    todo      the remedy, as a clause with commands in backticks
    """

    kinds: tuple[str, ...]
    what: str
    targets: tuple[str, ...]
    problems: tuple[str, ...]
    cause: str
    quirk: str
    todo: str


def together(
    findings: Sequence[RunFinding], changes: Sequence[Change], asked: CiRequest, after: SideRun
) -> Iterator[Loss]:
    """The findings, those of one kind and one cause as one loss, in the findings' order."""
    by_place: dict[_Place, Change] = {(one.target, one.toolchain, one.name): one for one in changes}
    places: dict[_Place, list[RunFinding]] = {}
    for index, finding in enumerate(findings):
        # Findings about no cell stay apart.
        name = finding.name or f"\0{index}"
        places.setdefault((finding.target, finding.toolchain, name), []).append(finding)
    groups: dict[tuple[tuple[str, ...], str, Cause | None], list[RunFinding]] = {}
    for place, found in places.items():
        change = by_place.get(place)
        cause = change.causes[0] if change is not None and change.causes else None
        kinds = tuple(dict.fromkeys(one.kind for one in found))
        what = "; ".join(dict.fromkeys(one.text for one in found))
        groups.setdefault((kinds, what, cause), []).extend(found)
    for (kinds, what, cause), found in groups.items():
        targets = tuple(dict.fromkeys(one.target for one in found if one.target))
        quirk = _quirk_of(cause, asked)
        yield Loss(
            kinds=kinds,
            what=what,
            targets=targets,
            problems=tuple(dict.fromkeys(one.name for one in found if one.name)),
            cause=str(cause) if cause is not None else "",
            quirk=quirk,
            todo=_todo(kinds, what, cause, targets, asked, after),
        )


def _quirk_of(cause: Cause | None, asked: CiRequest) -> str:
    """The id of the quirk that is the cause; of two that contradict each other the user's own."""
    if cause is None or cause.kind not in ("quirk", "conflict"):
        return ""
    names = cause.name.split()
    return next((name for name in names if name in asked.own), names[0])


def _todo(
    kinds: Sequence[str], what: str, cause: Cause | None, targets: Sequence[str], asked: CiRequest, after: SideRun
) -> str:
    """What helps against a loss; the commands are of its first target."""
    new = asked.new
    on = f"--target {targets[0]} --toolchain {new}" if targets else f"--toolchain {new}"
    if cause is not None and cause.kind == "conflict":
        return _about_conflict(cause, asked, after)
    if "no plan: " in what:
        return "two quirks contradict each other: narrow one, or switch it off by `PORTATTN_QUIRKS=-ID`"
    if set(kinds) & set(COMPLAINTS):
        return "mend the entry in the list of expected failures"
    if set(kinds) & {"gone", "new"}:
        return "where that is meant, write the baseline anew"
    if cause is not None and cause.kind == "quirk":
        return _about_quirk(cause, on, asked, after)
    kind = kinds[0]
    if kind == "unprobed":
        return f"`portattn quirks probe {what.split()[1]} {on}`"
    if kind == "canaries":
        return "run the tests on the chip; until then canaries decide before the first call"
    if kind == "schedules":
        return f"`portattn tune --set all {on}` on the chip: this concerns speed alone"
    if kind == "figures":
        return "measure again with `portattn bench` before the figures are quoted"
    if set(kinds) & {"core", "variant"}:
        return f"`portattn quirks why {' '.join(targets[:1])} --toolchain {new}` says more"
    if "spilled" in what or "spills" in what:
        return f"`portattn tune --set all {on} --compile-only` looks for tiles that fit"
    if set(kinds) & {"level", "red"}:
        return "`portattn quirks new --from-log FILE` drafts a quirk of what the compiler printed"
    return f"`portattn matrix run --targets {','.join(targets[:1])} --toolchain {new}` shows the cells"


def _about_conflict(cause: Cause, asked: CiRequest, after: SideRun) -> str:
    """What helps where two quirks contradict each other: first the user's own entries, which can be changed."""
    names = cause.name.split()
    files = [str(after.registry.quirks[name].file) for name in names if name in asked.own]
    if files:
        return f"narrow `[when]` of {' or '.join(files)}, or take the entry out"
    return f"two quirks contradict each other: narrow one, or `PORTATTN_QUIRKS=-{names[0]}` switches it off"


def _about_quirk(cause: Cause, on: str, asked: CiRequest, after: SideRun) -> str:
    name = cause.name
    if name in asked.own:
        return f"narrow `[when]` of {after.registry.quirks[name].file}, or take the entry out"
    if name not in after.registry.quirks:
        return f"quirk {name} is no more in the registry"
    return f"`portattn quirks show {name}`; `portattn quirks probe {name} {on}` says whether the bug is there"
