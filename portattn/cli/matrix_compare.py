"""`portattn matrix diff|merge|export|baseline|check|log|site`, and options and output shared with other commands.

Runs of the matrix compared, joined, kept and shown; a run's page, its verdict and exit status."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from portattn.cli import INTERRUPTED, RED, require_some
from portattn.cli.output import emit_json, json_option, plural
from portattn.errors import ArgumentError, DataError
from portattn.files import replace_folder, write_named
from portattn.tools import param_types
from portattn.tools.param_types import FILE, FLAG, PATH, options

if TYPE_CHECKING:
    from portattn.tools.compare.changes import Diff
    from portattn.tools.compare.verdict import ExpectedFailure, Verdict
    from portattn.tools.matrix.cells import Cell, Run, Snapshot, SnapshotCell
    from portattn.tools.matrix.problems import SetName
    from portattn.tools.matrix.results import Conflict, MergedRun
    from portattn.tools.matrix.site import History

PAGE = "index.html"
F = TypeVar("F", bound=Callable[..., Any])
MANY: dict[str, Any] = {"multiple": True, "metavar": "GLOB"}
TARGETS = MANY | {"type": param_types.TARGETS}
SHOWN: dict[str, Any] = {"show_default": True}


def write_page(made: Run, cells: list[Cell], path: Path) -> None:
    from portattn.tools.matrix.site import render

    try:
        write_named(path, render(made, cells).encode())
    except OSError as error:
        raise ArgumentError("matrix", "page", str(path), f"cannot be written: {error.strerror}") from None


def write_run(folder: Path, op: str, made: Run, cells: list[Cell]) -> None:
    from portattn.tools.matrix.results import Results

    with Results(folder, op) as file:
        if kept := file.replace(made, cells):
            click.echo(f"the results that were there are now {kept}", err=True)
        write_page(made, cells, folder / PAGE)


def tell_conflicts(conflicts: Sequence[Conflict]) -> None:
    for conflict in conflicts:
        click.echo(f"{click.style('CONFLICT ', fg='red')}{conflict}")


def counts(cells: Sequence[Cell], said: Callable[[Cell], str] | None = None) -> str:
    """Return `12 runs, 3 runs (sm_80 code on sm_90), 5 NOTE`: passing cells by level, the others by status."""
    from portattn.tools.matrix.cells import word

    found = Counter(map(said or word, cells))
    return ", ".join(f"{number} {text}" for text, number in found.most_common() if text) or "none"


def tell_cells(made: Run, cells: Sequence[Cell], of: str = "", more: str = "") -> None:
    from portattn.tools.matrix.cell_text import gaps, witness

    click.echo(f"{plural(len(cells), 'cell')}{of}: {counts(cells)}{more}")
    click.echo(f"evidence: {counts(cells, lambda cell: witness(cell, made))}")
    for gap in gaps(made, cells):
        where = f" ({', '.join(gap.targets)})" if gap.targets else ""
        click.echo(f"{plural(gap.cells, 'cell')} {gap.why.word}{where}: {gap.why.short}")
        click.echo(f"  first: {gap.why.needs}; then: {gap.command}" if gap.why.needs else f"  fill: {gap.command}")


def command_line(name: str) -> str:
    """Return the command of this process for the record, or `portattn NAME` in a process of another name."""
    ours = Path(sys.argv[0]).name in ("portattn", "__main__.py")
    return shlex.join(["portattn", *sys.argv[1:]]) if ours else f"portattn {name}"


def _kinds() -> Iterable[str]:
    from portattn.tools.compare.verdict import FAIL_ON

    return FAIL_ON


KINDS = param_types.CompletionType("words", param_types.words(_kinds), listed=True)


def fail_on_option(words: str) -> Callable[[F], F]:
    text = f"Further changes that are red: {words}; repeat it, or use commas."
    return options(("--fail-on", {"multiple": True, "type": KINDS, "metavar": "WORDS"}, text))


# Options of making cells.
cell_options = options(
    ("--problems --ops problems", MANY, "Ops, or names of problems; repeat it, or use commas."),
    ("--jobs", SHOWN | {"type": click.IntRange(1, 64), "default": 2}, "Cells made at a time."),
    ("--seconds", SHOWN | {"type": param_types.SECONDS, "default": 120.0},
     "Limit of each compile and each numerical check."),
    ("--emulate/--no-emulate", {"default": True}, "Run AMD's machine code in a model of the chip."),
)  # fmt: skip
today_option = options(
    ("--today", {"type": click.DateTime(["%Y-%m-%d"])}, "The day that expiry dates are compared with.")
)
_expected_option = options(("--expected", FILE, "The expected failures (docs/ci.md)."))


def verdict_options(function: F) -> F:
    changes = "note, not_run; and, of changes since the baseline, new, facts, quirks, won"
    return fail_on_option(changes)(_expected_option(function))


set_options = options(
    ("--quick", FLAG, "The quick set of problems (the default)."),
    ("--full", FLAG, "The full set, every dtype × head_dim × mask and each feature: hours of compiling."),
    ("--shapes", FILE, "Problems of your own, of a file (docs/ci.md), in place of a set."),
    ("--kernels", FILE, "Kernels of other packages, of a file (docs/ci.md), in place of problems."),
)


def one_set(op: str, **given: bool | Path | None) -> SetName | None:
    """Return the set, named by the one option of `set_options` that is given; None: by none. Raises ArgumentError."""
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        value = given[names[0]]
        raise ArgumentError(op, f"--{names[0]}", "on" if value is True else str(value), f"goes without --{names[1]}")
    return cast("SetName", names[0]) if names else None


def red_kinds(texts: Sequence[str], op: str, compared: bool) -> frozenset[str]:
    """Return the words of --fail-on. Raises ArgumentError, also on a kind of change without a comparison."""
    from portattn.tools.compare.verdict import FAIL_ON, STATUSES, words

    found = words(texts, op, FAIL_ON)
    changes = sorted(found - STATUSES.keys())
    if changes and not compared:
        raise ArgumentError(op, "--fail-on", changes[0], "is a change, and needs --baseline to compare with")
    return found


def expected_of(path: Path | None) -> tuple[ExpectedFailure, ...]:
    from portattn.tools.compare import verdict

    return verdict.read(path) if path else ()


def show(verdict: Verdict) -> None:
    for finding in verdict.findings:
        click.echo(click.style(f"{finding.kind.upper():<15} ", fg="red") + str(finding))
        for cause in finding.causes:
            click.echo(f"{'':16}cause: {cause}")
    if verdict.expected:
        click.echo(f"{plural(len(verdict.expected), 'cell')} failed as expected")
    for note in verdict.notes:
        click.echo(note, err=True)
    if verdict.findings:
        kinds = Counter(finding.kind for finding in verdict.findings)
        click.echo(f"red: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")


def show_noted(cells: Sequence[Cell], verdict: Verdict) -> None:
    told = {finding.cell for finding in verdict.findings if finding.kind == "note"}
    for cell in cells:
        if cell.status == "NOTE" and cell.id not in told and cell.id not in verdict.expected:
            click.echo(click.style(f"{'NOTE':<15} ", fg="yellow") + f"{'  '.join(cell.place)}: {cell.reason}")


def document(verdict: Verdict) -> dict[str, Any]:
    return {"findings": verdict.findings, "expected": verdict.expected, "notes": verdict.notes}


def leave(verdict: Verdict, cells: Sequence[Cell], compared: int = 0) -> None:
    if verdict.findings:
        raise click.exceptions.Exit(RED)
    ran = sum(cell.status != "NOT_RUN" for cell in cells)
    require_some(ran + compared, "run", [cell.reason for cell in cells] or ["the run has no cells"])


def show_diff(diff: Diff, red: frozenset[str]) -> None:
    for change in sorted(diff.changes, key=lambda change: (not red & set(change.kinds), not change.lost)):
        lost = bool(red & set(change.kinds))
        word, colour = ("LOST", "red") if lost else ("won", "green") if "won" in change.kinds else ("changed", None)
        word = "new" if change.kinds == ("new",) and not lost else word
        click.echo(click.style(f"{word:<8} ", fg=colour) + str(change))
        lines = [f"{kind}: {text}" for kind, text in change.told.items()]
        lines += [f"reason: {change.reason}"] if change.reason and lost else []
        for line in [*lines, *(f"cause: {cause}" for cause in change.causes if lost)]:
            click.echo(f"{'':9}{line}")
    counts = Counter(kind for change in diff.changes for kind in change.kinds)
    said = ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "nothing changed"
    apart = f"; {plural(diff.apart, 'cell')} not asked for" if diff.apart else ""
    click.echo(f"{plural(diff.compared, 'cell')} compared: {said}{apart}")
    first = Counter(str(change.causes[0]) for change in diff.changes if red & set(change.kinds) and change.causes)
    for text, count in first.most_common():
        click.echo(f"  {plural(count, 'cell')} lost: {text}")


def add_to(group: click.Group) -> None:
    for command in (diff, merge, export, baseline, check, log, site):
        group.add_command(command)


@click.command()
@click.argument("old", metavar="OLD", **PATH)
@click.argument("new", metavar="NEW", **PATH)
@options(("--partial", FLAG, "NEW is of some targets and problems: what it lacks is not gone."))
@fail_on_option("new, facts, quirks, won")
@json_option
def diff(old: Path, new: Path, partial: bool, fail_on: tuple[str, ...], as_json: bool) -> None:
    """Compare two runs: what was lost and won, cell by cell, and why.

    OLD and NEW are folders of `matrix run` or `matrix merge`, files of results, or baselines.

    Exit status 1: a cell is gone, or has lost its level, the core path, its variant, interpreted numbers or speed; or
    what --fail-on names has happened. 2: a run cannot be read. 3: the runs share no cell."""
    from portattn.tools.compare.changes import KINDS, LOST, compare
    from portattn.tools.compare.verdict import words
    from portattn.tools.matrix import results

    red = LOST | words(fail_on, "matrix diff", KINDS)
    before, after = results.read_snapshot(old), results.read_snapshot(new)
    if before.missing:
        lacks = f"it lacks {plural(before.missing, 'cell')}, and none can be missed"
        click.echo(f"{old} was interrupted: {lacks}", err=True)
    if partial and after.missing:
        limit = f"lacks {plural(after.missing, 'cell')}: which they are is not known; go on with it by --resume"
        raise ArgumentError("matrix diff", "NEW", str(new), f"was interrupted, and {limit}")
    found = compare(before, after, _counts("matrix diff", "OLD", before, after, partial))
    lost = [change for change in found.changes if red & set(change.kinds)]
    if as_json:
        said = {name: getattr(found, name) for name in ("old", "new", "compared", "apart")}
        emit_json(said | {"lost": len(lost), "red": sorted(red), "changes": found.changes})
    else:
        show_diff(found, red)
    if lost:
        raise click.exceptions.Exit(RED)
    require_some(found.compared, "compared", ["the runs share no cell"])


def _counts(op: str, argument: str, before: Snapshot, after: Snapshot, partial: bool) -> Callable[[SnapshotCell], bool]:
    """Return a predicate of OLD's cells that count. Raises ArgumentError if a partial NEW has none of them."""
    from portattn.tools.compare.changes import part_of
    from portattn.tools.compare.sides import must_compare

    if not partial:
        return lambda _: True
    counts = part_of(before, after)
    must_compare(op, argument, before, counts)
    return counts


@click.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, **PATH)
@options(("--out", PATH | {"required": True, "metavar": "DIR"}, "Folder of the merged run."))
@json_option
def merge(runs: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Make one run of several machines' runs, and its page.

    RUN may also be a signed file of `portattn report`, or a bundle of `matrix export` with its results.bin. Of several
    results of a cell the one with most evidence is kept, a red one before any other; the others stay in the record.
    Runs of different kernels, code or data are refused.

    Exit status 1: two runs differ in a cell though all that it depends on is the same. 2: runs that cannot be merged.
    """
    merged = _merged(runs, out)
    write_run(out, "matrix merge", merged.run, merged.cells)
    several = sum(bool(cell.others) for cell in merged.cells)
    if as_json:
        said = {"out": str(out), "page": str(out / PAGE), "runs": len(runs), "cells": len(merged.cells)}
        emit_json(said | {"planned": len(merged.run.cells), "several": several, "conflicts": merged.conflicts})
    else:
        tell_conflicts(merged.conflicts)
        tell_cells(merged.run, merged.cells, f" of {plural(len(runs), 'run')}")
        click.echo(f"{plural(several, 'cell')} made by several; page: {out / PAGE}")
    if merged.conflicts:
        raise click.exceptions.Exit(RED)


def _merged(runs: Sequence[Path], out: Path | None = None) -> MergedRun:
    from portattn.tools.matrix import results

    command = ["portattn", "matrix", "merge", *(path.name for path in runs), *(["--out", out.name] if out else [])]
    return results.merge([results.read_cells(path) for path in runs], [str(p) for p in runs], shlex.join(command))


@click.command()
@click.argument("run", metavar="RUN", **PATH)
@options(
    ("--out", PATH | {"required": True, "metavar": "DIR"}, "Folder of the bundle; an earlier bundle is replaced."),
    ("--seconds", SHOWN | {"type": param_types.SECONDS, "default": 120.0}, "Limit of each compile."),
)
@json_option
def export(run: Path, out: Path, seconds: float, as_json: bool) -> None:
    """Write RUN's AMD cells as a bundle, with a program that runs them on the chip or in an emulator (docs/matrix.md).

    The program's results.bin, put into DIR, makes DIR a run for `matrix merge` and `site`. Exit status 2: RUN cannot be
    read, or DIR holds what is not a bundle's. 3: no cell of RUN can be exported."""
    from portattn.cli.output import ProgressCounter
    from portattn.testing import bundle
    from portattn.tools.matrix import provenance, results
    from portattn.tools.matrix.run import Options
    from portattn.tools.matrix.run import export as exported

    if out.exists() and not (out / bundle.MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArgumentError("matrix export", "--out", str(out), "is not written over: it is not empty, and no bundle")
    made, cells = results.read_cells(run)
    provenance.must_be_of_this_code(made, cells, run)
    with ProgressCounter(len(cells), 0, "cells") as progress:
        found, data, left_out, runner = exported(cells, Options(seconds=seconds), progress.step)
    if runner is not None:
        kept = tuple(cell for cell in cells if cell.id not in left_out)
        listed = msgspec.structs.replace(made, cells=tuple(cell.id for cell in kept))
        replace_folder(out, bundle.files(listed, kept, found, data, runner))
    if as_json:
        emit_json({"out": str(out), "cells": sorted(cell.id for cell in found), "left_out": left_out})
    elif found:
        click.echo(f"{out}: {plural(len(found), 'cell')}, {len(left_out)} left out; runner: {runner and runner.name}")
    require_some(len(found), "exported", left_out.values())


@click.command()
@click.argument("run", metavar="RUN", **PATH)
@click.argument("file", **FILE)
@json_option
def baseline(run: Path, file: Path, as_json: bool) -> None:
    """Keep a run as a baseline: a sorted text FILE, a line a cell, to be reviewed and committed.

    `matrix run --baseline FILE` and `matrix check` compare with it.

    Exit status 2: RUN cannot be read or was interrupted, or FILE cannot be written."""
    from portattn.tools.matrix import results

    if file.suffix != results.BASELINE_SUFFIX:
        limit = f"must end with {results.BASELINE_SUFFIX}: it is TOML"
        raise ArgumentError("matrix baseline", "FILE", str(file), limit)
    made = results.whole(run, "matrix baseline", "RUN")
    results.write_data(file, results.write_baseline(made).encode())
    red = sum(entry.red for entry in made.entries)
    dirty = sorted({identity.commit[:10] for identity in made.identities.values() if identity.dirty})
    if as_json:
        emit_json({"file": str(file), "cells": len(made.entries), "red": red, "dirty": dirty})
        return
    click.echo(f"{file}: {plural(len(made.entries), 'cell')}" + (f", {red} of them red" if red else ""))
    if dirty:
        click.echo(f"made of a tree with changes that commit {', '.join(dirty)} lacks", err=True)


@click.command()
@click.argument("run", metavar="RUN", **PATH)
@options(
    ("--baseline against", PATH | {"metavar": "FILE"}, "The baseline, or a run, to compare with."),
    ("--partial", FLAG, "RUN is of some targets and problems: what it lacks is not gone."),
)
@today_option
@verdict_options
@json_option
def check(
    run: Path, against: Path | None, partial: bool, today: datetime.datetime | None, fail_on: tuple[str, ...],
    expected: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Say whether a finished run is all right: red cells, expected failures, and what was lost since a baseline.

    Exit status 1: a cell is red and not expected to be, an expected failure passes, fails for another reason or has
    expired, cells are missing, something was lost since the baseline, or what --fail-on names is there. 2: bad input.
    3: no cell of the run was run, nor compared."""
    from portattn.tools.compare.changes import compare
    from portattn.tools.compare.verdict import of_run
    from portattn.tools.matrix import results
    from portattn.tools.matrix.cells import snapshot

    op = "matrix check"
    red = red_kinds(fail_on, op, against is not None)
    listed = expected_of(expected)
    before = results.whole(against, op, "--baseline") if against else None
    made, cells = results.read_cells(run)
    changes = None
    if before is not None:
        after = snapshot(made, cells, str(run))
        changes = compare(before, after, _counts(op, "--baseline", before, after, partial))
    day = today.date() if today else None
    verdict = of_run(made, cells, fail_on=red, expected=listed, changes=changes, today=day)
    if as_json:
        emit_json({"cells": len(cells), "planned": len(made.cells)} | document(verdict))
    else:
        show(verdict)
        compared = f"; {plural(changes.compared, 'cell')} compared with {changes.old}" if changes else ""
        tell_cells(made, cells, more=compared)
    leave(verdict, cells, changes.compared if changes else 0)


@click.command()
@click.argument("cell", metavar="CELL")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, **PATH)
@json_option
def log(cell: str, runs: tuple[Path, ...], as_json: bool) -> None:
    """A cell's history over runs: its level, its path, and what changed it.

    CELL is a glob on a problem's name, on `TARGET NAME` or on `TARGET TOOLCHAIN NAME`. Of a folder its earlier results
    are read, too. Runs are shown by their dates.

    Exit status 2: a run cannot be read, or none has such a cell."""
    from portattn.tools.compare.changes import history
    from portattn.tools.matrix import results

    snapshots = [results.read_snapshot(file) for path in runs for file in results.earlier(path)]
    seen = history(snapshots, cell)
    if not seen:
        known = sorted({f"{entry.target} {entry.name}" for run in snapshots for entry in run.entries})
        shown = ", ".join(known[:3]) or "none"
        raise ArgumentError("matrix log", "CELL", cell, f"no run has such a cell; the first that there are: {shown}")
    if as_json:
        emit_json({"cell": cell, "seen": seen})
        return
    last = None
    for one in seen:
        if (one.target, one.name) != last:
            last = (one.target, one.name)
            click.secho(f"{one.target}  {one.name}", bold=True)
        where = f"{one.commit}  {one.host}".strip()
        click.echo(f"  {one.date:%Y-%m-%d %H:%M}  {one.word:<16}  {one.path:<10}  {one.toolchain}  {where}")
        for kind, text in one.changed.items():
            click.secho(f"{'':20}{kind}: {text}", fg="red" if one.lost else None)
        for cause in one.causes if one.changed else ():
            click.echo(f"{'':20}cause: {cause}")


@click.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, **PATH)
@options(("--out", PATH | {"required": True, "metavar": "DIR"}, "Folder of the site; an earlier site is replaced."))
@json_option
def site(runs: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Write a static site: the table with filters, a page for each cell and each quirk, and a badge.

    RUN is a folder of `matrix run` or `matrix merge`, or a file of results; several are merged as `matrix merge` does.
    A folder's earlier results are a cell's history. The site needs no server and no network.

    Exit status 0 whatever the cells say. 1: two runs differ in a cell though all that it depends on is the same; the
    site is written. 2: a run cannot be read, runs cannot be merged, or DIR holds what is not a site's."""
    from portattn.cli.output import ProgressCounter
    from portattn.tools.matrix import results
    from portattn.tools.matrix import site as pages

    if why := pages.foreign(out):
        raise ArgumentError(pages.OP, "--out", str(out), f"is not written over: {why}")
    if len(runs) > 1:
        merged = _merged(runs)
        run, cells, conflicts = merged.run, merged.cells, merged.conflicts
    else:
        run, cells = results.read_cells(runs[0])
        conflicts = results.conflicts(cells)  # of a run that was merged before
    history = _history(runs)
    try:
        with ProgressCounter(pages.count(cells), 0, "files") as progress:
            files = replace_folder(out, progress.counted(pages.pages(run, cells, history)))
    except OSError as error:
        limit = f"cannot be written: {error.strerror or error}"
        raise ArgumentError(pages.OP, "--out", str(out), limit) from None
    except KeyboardInterrupt:
        click.echo("interrupted: no site was written, and an earlier one is as it was", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    counted = pages.counts(run, cells)
    if as_json:
        said = {"out": str(out), "page": str(out / PAGE), "runs": len(runs), "cells": len(cells), "files": files}
        emit_json(said | {"badge": msgspec.structs.asdict(counted), "conflicts": conflicts})
    else:
        tell_conflicts(conflicts)
        tell_cells(run, cells, f" of {plural(len(runs), 'run')}")
        click.echo(f"{plural(files, 'file')}; page: {out / PAGE}; badge: {pages.endpoint(counted)['message']}")
    if conflicts:
        raise click.exceptions.Exit(RED)


def _history(runs: Sequence[Path]) -> History:
    from portattn.tools.compare.changes import HistoryEntry, history
    from portattn.tools.matrix import results

    found = []
    for file in dict.fromkeys(file for path in runs for file in results.earlier(path)):
        try:
            found.append(results.read_snapshot(file))
        except DataError as error:
            click.echo(f"left out of the history: {error}", err=True)
    seen: dict[tuple[str, str], list[HistoryEntry]] = {}
    for one in history(found, "*"):
        seen.setdefault((one.target, one.name), []).append(one)
    return seen
