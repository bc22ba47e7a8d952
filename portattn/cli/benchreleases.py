"""`portattn bench --release …`: the same cases with several releases of Triton, which take turns."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from portattn.cli import benchcomparison, benchreport
from portattn.cli.errors import INTERRUPTED, RED
from portattn.cli.output import emit_json
from portattn.cli.progress import ProgressCounter
from portattn.errors import ArgumentError

if TYPE_CHECKING:
    from portattn.tools.bench.cases import Case
    from portattn.tools.bench.firstcall import FirstCall
    from portattn.tools.bench.releases.compared import Comparison
    from portattn.tools.bench.releases.named import Release
    from portattn.tools.bench.releases.process import ReleaseProcess
    from portattn.tools.bench.results import BenchRun, Result, Row
    from portattn.tools.bench.run import BenchOptions
    from portattn.tools.bench.store import Store


class ReleaseOutcomes(msgspec.Struct, kw_only=True):
    """What came of the releases, by name.

    results  of releases that started: each with a run
    earlier  of releases that did not start: the results that --resume finds in --out
    failed   why a release did not start
    """

    results: dict[str, Result] = msgspec.field(default_factory=dict)
    earlier: dict[str, Result] = msgspec.field(default_factory=dict)
    failed: dict[str, str] = msgspec.field(default_factory=dict)


def bench(
    releases: list[Release], chosen: dict[str, list[Case]], options: BenchOptions, libraries: Path | None,
    budget: float | None, jobs: int | None, out: Path | None, resume: bool, commit: str, as_json: bool,
) -> None:  # fmt: skip
    """Measure, write and show. Exit as `portattn bench` does; with status 1 also if a release did not start."""
    from portattn.tools.bench.releases import compared

    found = ReleaseOutcomes()
    ended = _measure(releases, chosen, options, libraries, budget, jobs, out, resume, commit, found)
    every = found.results | found.earlier
    whole = compared.comparison(every, found.failed)
    written = _write(whole, found.results, out) if out else []
    if as_json:
        emit_json(compared.with_results(whole, every))
    else:
        benchcomparison.show(whole, written)
    if ended:
        raise SystemExit(ended)
    if found.failed or any(result.failed for result in found.results.values()):
        raise SystemExit(RED)


def _measure(
    releases: list[Release], chosen: dict[str, list[Case]], options: BenchOptions, libraries: Path | None,
    budget: float | None, jobs: int | None, out: Path | None, resume: bool, commit: str, found: ReleaseOutcomes,
) -> int:  # fmt: skip
    """Measure into `found`; the exit status of an early end."""
    from portattn.tools.bench import peers, schedule
    from portattn.tools.bench.clock import DeviceClock
    from portattn.tools.bench.gate import DeviceLost
    from portattn.tools.bench.releases import measure

    cells = schedule.covering(chosen) if budget is not None else schedule.plain(chosen)
    loaded = peers.load(libraries)
    clock = DeviceClock()
    with ExitStack() as stack:
        limits = None if options.only_host else clock.ceilings()
        about = {
            "sets": tuple(chosen), "asked": tuple((name, case.name) for name, case in cells),
            "rounds": options.rounds, "backend": options.backend, "core": options.core, "only_host": options.only_host,
            "peers": peers.presence(options.wanted, options.others), "libraries": loaded, "commit": commit,
        }  # fmt: skip
        try:
            processes, runs = _started(releases, about, stack, found.failed)
            runs = {name: msgspec.structs.replace(run, ceilings=limits) for name, run in runs.items()}
            stores = _stores(out, runs, resume, found, stack)
            results = found.results
            done = set.intersection(*(result.done for result in results.values())) if results else set()
            left = [(name, case) for name, case in cells if (name, case.name) not in done]
            if not processes:
                return 0
            if jobs:
                _prime([process.release for process in processes.values()], left, options, jobs, budget)
            progress = stack.enter_context(ProgressCounter(len(cells), len(cells) - len(left), "bench"))

            def keep(items: Mapping[str, Row | FirstCall]) -> None:
                for name, item in items.items():
                    if stores:
                        stores[name].append(item)
                    results[name].add(item)
                progress.step(_outcome(items))

            indices = {name: len(result.runs) - 1 for name, result in results.items()}
            count = measure.run_cells(left, indices, processes, clock, limits, options, keep, budget)
        except KeyboardInterrupt:
            return INTERRUPTED
        except DeviceLost as lost:
            click.echo(f"portattn: {lost}; the same command with --resume goes on behind it", err=True)
            return RED
    if count < len(left):
        click.echo(f"the budget of {budget:g} s is spent: {len(left) - count} cells are left", err=True)
    return 0


def _started(
    releases: list[Release], about: dict[str, object], stack: ExitStack, failed: dict[str, str]
) -> tuple[dict[str, ReleaseProcess], dict[str, BenchRun]]:
    """The releases' processes and runs, by name; of one that does not start, why."""
    from portattn.tools.bench.provenance import command
    from portattn.tools.bench.releases.process import ReleaseProcess, ReleaseProcessError

    processes, runs = {}, {}
    for release in releases:
        process = stack.enter_context(ReleaseProcess(release))
        try:
            run = process.identify(about)
        except ReleaseProcessError as failure:
            failed[release.version] = str(failure)
            click.echo(f"triton=={release.version} does not start: {failure}", err=True)
            continue
        processes[release.version] = process
        runs[release.version] = msgspec.structs.replace(run, command=command(sys.argv))
    return processes, runs


def _stores(
    out: Path | None, runs: Mapping[str, BenchRun], resume: bool, found: ReleaseOutcomes, stack: ExitStack
) -> dict[str, Store]:
    """The releases' folders in --out, with their runs; `found` gets what each one holds.

    A cell counts as measured where every release that started has it: what an interrupt left of one is measured anew.
    With a release that has no rows yet that is every cell: the others' rows are then kept under their date.
    An interrupt in here leaves `found` without any of them: there is nothing new to write then.
    """
    from portattn.tools.bench.results import Result
    from portattn.tools.bench.store import ROWS, Store

    stores = {name: stack.enter_context(Store(out / name)) for name in runs} if out else {}
    if resume and stores and not any(store.path.exists() for store in stores.values()):
        those = " of those that start" if found.failed else ""
        raise ArgumentError("bench", "--resume", str(out), f"holds no release's {ROWS} to go on with{those}")
    results = {name: Result(runs=[], rows=[]) for name in runs}
    new = [name for name, store in stores.items() if not store.path.exists()]
    for name, store in stores.items():
        if resume and store.path.exists():
            results[name] = store.resume(runs[name])
        elif kept := store.start():
            click.echo(f"the rows that were there are now {kept}", err=True)
    common = set.intersection(*(result.done for result in results.values())) if results else set()
    for name, run in runs.items():
        result = results[name]
        if result.done - common:
            if new and (kept := stores[name].rotate()):
                click.echo(f"triton=={', '.join(new)} begins: triton=={name}'s rows are now {kept}", err=True)
            _keep_only(result, common)
            stores[name].replace(result)
        result.runs.append(run)
        if stores:
            stores[name].append(run)
    found.results.update(results)
    if resume and out:
        found.earlier.update(_earlier(out, found, common))
    return stores


def _keep_only(result: Result, cells: Set[tuple[str, str]]) -> None:
    result.rows = [row for row in result.rows if (row.set, row.name) in cells]
    result.first_calls = [call for call in result.first_calls if (call.set, call.case) in cells]


def _earlier(out: Path, found: ReleaseOutcomes, common: Set[tuple[str, str]]) -> dict[str, Result]:
    """What --out holds of releases that did not start, of the cells that all the others had when the run went on.

    Those were measured in turns with theirs. The files stay as they are: the next run may start these releases again.
    """
    from portattn.tools.bench import store

    now = next((result.runs[-1] for result in found.results.values()), None)
    kept = {}
    for name in found.failed if now else ():
        if not (out / name / store.ROWS).exists():
            continue
        result = store.read(out / name)
        if any(getattr(result.runs[0], one) != getattr(now, one) for one in store.SAME if one != "toolchain"):
            click.echo(f"triton=={name}: what {out / name} holds is of other code or options: left out", err=True)
            continue
        _keep_only(result, common)
        if result.done:
            kept[name] = result
    return kept


def _prime(
    releases: list[Release], left: list[tuple[str, Case]], options: BenchOptions, jobs: int, budget: float | None
) -> None:
    """Compile what the cells need with every release, and say so. Takes half of the budget at most."""
    from portattn.tools.bench.firstcall import COLD_START
    from portattn.tools.bench.releases.prime import prime_all

    cases = [case for name, case in left if name != COLD_START]
    with ProgressCounter(len(cases) * len(releases), 0, "compiling") as progress:

        def done(release: Release, case: Case, failure: str) -> None:
            progress.step(f"{release.version}  {case.name}: {failure or 'compiled'}")

        seconds = math.inf if budget is None else budget / 2
        complete = prime_all(releases, cases, options.backend, options.core, jobs, done, seconds)
    if not complete:
        click.echo("not all was compiled in time: the rest is compiled as it comes", err=True)


def _outcome(items: Mapping[str, Row | FirstCall]) -> str:
    """A cell in one line."""
    from portattn.cli.benchprogress import outcome

    first = next(iter(items.values()))
    return f"{first.set}  " + " | ".join(f"{name}: {outcome(item)}" for name, item in items.items())


def _write(whole: Comparison, results: Mapping[str, Result], out: Path) -> list[Path]:
    """releases.json and releases.md, and the own files of each release that started, in its folder; their paths.

    Without a figure nothing is written over what an earlier run has left.
    """
    from portattn.files import write_whole
    from portattn.tools.bench.releases import reading, tables

    as_json, as_text = out / reading.NAME, out / "releases.md"
    if not results or (as_json.exists() and not any(result.done for result in results.values())):
        return []
    written = [path for name, result in results.items() for path in benchreport.write(result, out / name)]
    write_whole(as_json, msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    write_whole(as_text, tables.as_markdown(whole).encode())
    return [as_json, as_text, *written]
