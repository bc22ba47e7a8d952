"""The report of a change of compiler, and its Markdown summary: losses first, each with its cause and remedy."""

import datetime
import html
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from portattn.errors import DataError
from portattn.testing.kernel_cases import KERNELS
from portattn.tools.compare import verdict
from portattn.tools.compare.changes import LOST, Cause, Change, Diff, Place
from portattn.tools.compare.registry_changes import Upgrade
from portattn.tools.compare.sides import CiRequest, SideRun, cautions
from portattn.tools.compare.verdict import COMPLAINTS, ExpectedFailure, RunFinding
from portattn.tools.display_text import names_or_count, plural, table


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    kinds: tuple[str, ...]  # of the findings
    what: str  # the event
    # targets, problems: places; no problems if the loss concerns a target as a whole
    targets: tuple[str, ...]
    problems: tuple[str, ...]
    cause: str  # the nearest cause; empty if `what` is the cause
    quirk: str  # id of the quirk that is the cause, if any
    todo: str  # the remedy, as a clause with commands in backticks


def together(
    findings: Sequence[RunFinding], changes: Sequence[Change], asked: CiRequest, after: SideRun
) -> Iterator[Loss]:
    by_place: dict[Place, Change] = {one.place: one for one in changes}
    places: dict[Place, list[RunFinding]] = {}
    for index, finding in enumerate(findings):  # findings about no cell stay apart
        places.setdefault((*finding.place[:2], finding.name or f"\0{index}"), []).append(finding)
    groups: dict[tuple[tuple[str, ...], str, Cause | None], list[RunFinding]] = {}
    for place, found in places.items():
        change = by_place.get(place)
        cause = change.causes[0] if change is not None and change.causes else None
        kinds, what = _once(one.kind for one in found), "; ".join(_once(one.text for one in found))
        groups.setdefault((kinds, what, cause), []).extend(found)
    for (kinds, what, cause), found in groups.items():
        targets = _once(one.target for one in found)
        yield Loss(
            kinds=kinds, what=what, targets=targets, problems=_once(one.name for one in found),
            cause=str(cause or ""), quirk=_quirk_of(cause, asked),
            todo=_todo(kinds, what, cause, targets, asked, after),
        )  # fmt: skip


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _quirk_of(cause: Cause | None, asked: CiRequest) -> str:
    if cause is None or cause.kind not in ("quirk", "conflict"):
        return ""
    names = cause.name.split()
    return next((name for name in names if name in asked.own), names[0])


def _todo(
    kinds: Sequence[str], what: str, cause: Cause | None, targets: Sequence[str], asked: CiRequest, after: SideRun
) -> str:
    new = asked.new
    file = f" --{asked.which} {shlex.quote(str(asked.file))}" if asked.file else ""
    shows = f"`portattn matrix run{file} --targets {','.join(targets[:1])} --toolchain {new}` shows the cells"
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
    if set(kinds) & {"core", "variant"}:
        return f"`portattn quirks why {' '.join(targets[:1])} --toolchain {new}` says more"
    if asked.which == KERNELS and set(kinds) & {"speed", "level", "red", "facts"} and " at " not in what:
        return (
            f"{shows}; other `options` (`on` for a target), or a quirk of your own (`--quirk-folder DIR`), may cure it"
        )
    if "speed" in kinds:
        return f"`portattn plan OP --bound {on}` says what its loop costs; report it to the compiler's project"
    if "spilled" in what or "spills" in what:
        return f"`portattn tune --set all {on} --compile-only` looks for tiles that fit"
    if set(kinds) & {"level", "red"}:
        return "`portattn quirks new --from-log FILE` drafts a quirk from the compiler's output"
    return shows


def _about_conflict(cause: Cause, asked: CiRequest, after: SideRun) -> str:
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


# Beside the kinds of changes and the statuses of cells, --fail-on takes what is less sure with the new compiler:
# unprobed   a quirk applies there to a target on which no probe has looked
# canaries   somebody has run a variant with the old compiler, and nobody with the new one
# schedules  a launch or a schedule was timed with the old compiler, and not with the new one
LESS_SURE = ("unprobed", "canaries", "schedules")
FAIL_ON = (*verdict.FAIL_ON, *LESS_SURE)
COMPILED = frozenset({"note", "not_run", "facts"})  # of these nothing is known where nothing is compiled


class CiReport(msgspec.Struct, frozen=True, kw_only=True):
    before: str
    after: str
    compiled: bool  # cells were compiled; else they are compared by their plans alone
    against: str  # the baseline's name; empty if both sides were made
    targets: tuple[str, ...]
    problems: tuple[str, ...]
    compared: int  # cells that both sides have
    red: tuple[str, ...]  # the kinds that count as lost
    findings: tuple[RunFinding, ...]
    losses: tuple[Loss, ...]  # the findings, grouped by cause; empty: nothing is lost
    changes: tuple[Change, ...]  # the matrix's comparison of the cells
    upgrade: Upgrade  # the comparison of both compilers' registries and plans
    expected: tuple[str, ...]  # ids of cells that fail as expected
    notes: tuple[str, ...]  # findings that deserve a look, and are no loss
    idle: tuple[str, ...] = ()  # reasons, if cells were to be compiled and no cell of the new side could be

    @property
    def cells_lost(self) -> int:
        return len({(one.target, one.name) for one in self.findings if one.name})

    @property
    def won(self) -> list[Change]:
        return [change for change in self.changes if "won" in change.kinds and not self.is_lost(change)]

    @property
    def changed(self) -> list[Change]:
        return [change for change in self.changes if "won" not in change.kinds and not self.is_lost(change)]

    def is_lost(self, change: Change) -> bool:
        return bool(set(self.red) & set(change.kinds))


class Alike(msgspec.Struct, frozen=True, kw_only=True):
    targets: tuple[str, ...]
    problems: tuple[str, ...]
    what: str


def alike(changes: Iterable[Change]) -> list[Alike]:
    of_target: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        what = "; ".join(f"{kind}: {text}" for kind, text in change.told.items())
        of_target.setdefault((what, change.target), []).append(change.name)
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (what, target), names in of_target.items():
        found.setdefault((what, tuple(names)), []).append(target)
    return [Alike(targets=tuple(on), problems=names, what=what) for (what, names), on in found.items()]


def report(
    asked: CiRequest, diff: Diff, after: SideRun, upgrade: Upgrade, *, compiled: bool, fail_on: Collection[str] = (),
    expected: Sequence[ExpectedFailure] = (), today: datetime.date | None = None,
) -> CiReport:  # fmt: skip
    """Return the report on the new side; fail_on: further red kinds of FAIL_ON; expected: excused failures."""
    judged = verdict.of_run(
        after.run, after.cells, fail_on=fail_on, expected=expected, changes=diff, today=today, whole=False
    )
    red = LOST | set(fail_on)
    idle = compiled and all(cell.status == "NOT_RUN" for cell in after.cells)
    findings = (*_lost(judged.findings, diff, "red" in fail_on), *_less_sure(upgrade, red))
    careful = (text for side in dict.fromkeys((asked.old, asked.new)) for text in cautions(side))
    return CiReport(
        before=str(asked.old), after=str(asked.new), compiled=compiled,
        against=asked.baseline.shown if asked.baseline else "", targets=tuple(asked.targets),
        problems=tuple(named.name for named in asked.problems), compared=diff.compared, red=tuple(sorted(red)),
        findings=findings, losses=tuple(together(findings, diff.changes, asked, after)), changes=diff.changes,
        upgrade=upgrade, expected=tuple(judged.expected), notes=(*careful, *judged.notes),
        idle=tuple(dict.fromkeys(cell.reason for cell in after.cells)) if idle else (),
    )  # fmt: skip


def _lost(findings: Sequence[RunFinding], diff: Diff, every: bool) -> Iterator[RunFinding]:
    """Yield the findings without red cells that were as red before, unless `every` is set."""
    places = {change.place: change.kinds for change in diff.changes}
    for finding in findings:
        kinds = places.get(finding.place, ())
        if finding.kind != "red" or "new" in kinds or (every and "level" not in kinds):
            yield finding


def _less_sure(made: Upgrade, red: Collection[str]) -> Iterator[RunFinding]:
    old, new = made.before, made.after
    found = [
        ("unprobed", f"quirk {entry.id} applies with {new}, and no probe has looked there", target)
        for entry in made.entries
        for target in entry.unprobed
    ]
    run = "{} was run with {}; of {} no complete run is known"
    found += [("canaries", run.format(v.name, old, new), v.target) for v in made.variants if v.less_sure]
    timed = "{} was timed with {}, and not with {}"
    found += [("schedules", timed.format(s.kernel, old, new), s.target) for s in made.schedules if s.lost]
    for kind, text, target in found:
        if kind in red:
            yield RunFinding(kind=kind, text=text, target=target, toolchain=new)


LIMIT = 1024 * 1024  # bytes. Source: GitHub's limit of a step's summary
CUT = "\n\n**The summary is cut here: more than {} bytes. `portattn ci --json` has all of it.**\n"
_MARKS = re.compile(r"([\\`*\[\]~])")


def render(report: CiReport, limit: int = LIMIT) -> str:
    return cut("".join(_parts(report)), limit)


def verdict_line(report: CiReport) -> str:
    how = "compiled and compared" if report.compiled else "compared"
    against = f" with {report.against}" if report.against else ""
    only = "" if report.compiled else " by their plans; nothing was compiled, and spills were not looked at"
    cells = f"{plural(report.compared, 'cell')} of {plural(len(report.targets), 'target')} {how}{against}{only}"
    if report.idle and not report.losses:
        return f"Nothing could be compiled: {cells}"
    if not report.losses:
        return f"Nothing is lost: {cells}"
    inside = f" in {plural(report.cells_lost, 'cell')}" if report.cells_lost else ""
    return f"{plural(len(report.losses), 'loss', 'losses')}{inside}: {cells}"


def cut(text: str, limit: int) -> str:
    """Return the first lines that fit, with a note if there are more; an open fold is closed."""
    if len(text.encode()) <= limit:
        return text
    note, end = CUT.format(limit), "\n</details>\n"
    room, kept, folded = limit - len((note + end).encode()), [], 0
    for line in text.splitlines(keepends=True):
        room -= len(line.encode())
        if room < 0:
            break
        kept.append(line)
        folded += line.count("<details>") - line.count("</details>")
    return "".join(kept) + (end if folded else "") + note


def plain(text: str) -> str:
    return _MARKS.sub(r"\\\1", html.escape(text, quote=False))


def _parts(report: CiReport) -> Iterator[str]:
    yield f"## portattn ci: {plain(report.before)} → {plain(report.after)}\n\n"
    yield f"**{plain(verdict_line(report))}.**\n"
    if report.losses:
        columns = ("lost", "targets", "problems", "cause", "what to do")
        rows = ((f"**{', '.join(one.kinds)}**: {plain(one.what)}", *_where(one), plain(one.cause), one.todo)
                for one in report.losses)  # fmt: skip
        yield "\n" + table(columns, rows)
    for note in report.notes:
        yield f"\n- {plain(note)}"
    yield "\n" if report.notes else ""
    if report.expected:
        yield f"\n{plural(len(report.expected), 'cell')} failed as expected.\n"
    for title, changes in (("Won", report.won), ("Changed, nothing lost", report.changed)):
        cells = ((*_where(one), plain(one.what)) for one in alike(changes))
        yield from _folded(title, ("targets", "problems", "what"), cells)
    made = report.upgrade
    quirks = (
        (plain(one.id), one.change, _named(one.targets, "target"), plain(", ".join(one.verified)) or "no",
         plain("; ".join(filter(None, (one.title, one.note)))))
        for one in made.entries if one.change != "stays" or one.unprobed
    )  # fmt: skip
    title = "Quirks that fall away, newly apply, or were not probed there on every target"
    yield from _folded(title, ("quirk", "change", "targets", "probed there", "what"), quirks)
    moved = ((plain(one.problem), _named(one.targets, "target"), plain("; ".join(one.differs)))
             for one in made.moved if one.before == one.after)  # fmt: skip
    yield from _folded("Plans that take the same path in another way", ("problem", "targets", "what"), moved)
    variants = ((plain(one.name), one.target, plain("; ".join((one.said, *dict.fromkeys(one.refuses.values())))))
                for one in made.variants if one.said != "carries over")  # fmt: skip
    yield from _folded("Variants that do not simply carry over", ("variant", "target", "what"), variants)
    timed = ((plain(one.kernel), one.target, plain(one.timed_with), _named(one.problems, "problem"))
             for one in made.schedules if one.timed_with and not one.carries)  # fmt: skip
    title = f"Schedules that were not timed with {plain(made.after)} (this concerns speed alone)"
    yield from _folded(title, ("kernel", "target", "timed with", "problems"), timed)


def _folded(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    if found := list(rows):
        yield f"\n<details><summary>{title}: {len(found)}</summary>\n\n{table(columns, found)}\n</details>\n"


def _where(cells: Loss | Alike) -> tuple[str, str]:
    return _named(cells.targets, "target"), _named(cells.problems, "problem")


def _named(names: Sequence[str], noun: str) -> str:
    return plain(names_or_count(names, noun))


ACTIONS = "GITHUB_ACTIONS"  # "true" on a runner
SUMMARY = "GITHUB_STEP_SUMMARY"  # the file that a step appends its summary to
SHOWN = 10  # annotations of a kind that a step shows
LEAST = 512  # bytes without which a summary says nothing


def append(path: Path, report: CiReport) -> bool:
    """Append the summary to the step's; return False if the step's limit is reached. Raises DataError if unwritable."""
    try:
        room = LIMIT - (path.stat().st_size if path.exists() else 0)
        if room < LEAST:
            return False
        data = render(report, room).encode()
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise DataError(path, None, f"the summary cannot be written: {error.strerror}") from None
    return True


def annotation_lines(report: CiReport) -> Iterator[str]:
    title = f"portattn ci: {report.before} to {report.after}"
    errors = []
    for loss in report.losses:
        where = ", ".join(loss.targets[:SHOWN]) + (" and more" if len(loss.targets) > SHOWN else "")
        count = f"{len(loss.problems)} problems" if len(loss.problems) > 1 else "".join(loss.problems)
        parts = (f"{', '.join(loss.kinds)}: {loss.what}", where, count, loss.cause, loss.todo)
        errors.append("\n".join(filter(None, parts)))
    yield from _lines("error", title, errors)
    yield from _lines("warning", title, list(report.notes))


def _lines(word: str, title: str, texts: list[str]) -> Iterator[str]:
    shown = texts if len(texts) <= SHOWN else texts[: SHOWN - 1]
    for text in shown:
        yield command(word, title, text)
    if len(texts) > len(shown):
        yield command(word, title, f"{len(texts) - len(shown)} more: the job's summary has them")


def command(word: str, title: str, text: str) -> str:
    found = [one.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A") for one in (title, text)]
    return f"::{word} title={found[0].replace(':', '%3A').replace(',', '%2C')}::{found[1]}"
