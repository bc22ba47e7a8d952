"""`portattn bench`: time portattn beside this machine's peers, with one release of Triton or several."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from portattn.cli import INTERRUPTED, RED, benchreport
from portattn.cli.output import BenchProgress, ProgressCounter, emit_json, json_option
from portattn.errors import ArgumentError, PortattnError
from portattn.files import write_whole
from portattn.tools.param_types import FLAG, SECONDS, check_known, options

if TYPE_CHECKING:
    from portattn.tools.bench.cases import Case, Cell
    from portattn.tools.bench.releases import Release, ReleaseProcess
    from portattn.tools.bench.results import BenchRun, Result, Store
    from portattn.tools.bench.run import BenchOptions, Item
    from portattn.tools.bench.workloads import WorkloadResult

FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@options(
    ("--set sets", {"multiple": True, "default": ("seed",), "metavar": "NAME"}, "Problem set; can be repeated."),
    ("--only", {"metavar": "TEXT"}, "Only cases whose name holds this text."),
    ("--backend", {"default": "auto"}, "portattn's path: auto, triton, vendor, reference, or a path's name."),
    ("--core-only core", FLAG, "The portable core alone as well, beside the plan's choice."),
    ("--host only_host", FLAG, "Only the time that enqueuing a call takes the host."),
    ("--rounds", {"default": 5, "type": click.IntRange(1, 100)}, "In which all take turns, at least."),
    ("--peer peers", {"multiple": True, "metavar": "NAME"}, "Peer to time; can be repeated. [default: all]"),
    ("--peer-libs libraries", {"type": FOLDER}, "Folder of torch op libraries (*.so) of peers that are not installed."),
    ("--peer-file files", {"multiple": True, "type": click.Path(path_type=Path, exists=True, dir_okay=False)},
     "Python file that defines contenders(case, t): a peer by the file's name; can be repeated."),
    ("--budget", {"type": SECONDS}, "Seconds after which no further cell is begun."),
    ("--jobs", {"type": click.IntRange(min=1)},
     "Compile portattn's kernels first, in so many processes. [default: as each case comes]"),
    ("--out", {"type": click.Path(path_type=Path, file_okay=False)}, "Folder for the results."),
    ("--release releases", {"multiple": True, "metavar": "VERSION[=FOLDER]"},
     "Release of Triton to time, in a process of its own; can be repeated. [default: the installed one, here]"),
    ("--resume", FLAG, "Go on with the run in --out: what it finished is kept."),
    ("--commit", {"default": "", "metavar": "TEXT"}, "The commit that is measured, where git cannot tell."),
    ("--tiny", FLAG, "Small sizes, on a CPU too; of sets from scripts/bench_sets/."),
    ("--check", FLAG, "Check results and time nothing; of the same sets."),
    ("--against", {"type": FOLDER}, "Another checkout of portattn, which takes turns with this one; of the same sets."),
    ("--ranks", {"type": click.IntRange(min=2), "default": 2}, "GPUs of the set context-parallel."),
)  # fmt: skip
@json_option
@click.pass_context
def bench(
    ctx: click.Context, sets: tuple[str, ...], only: str | None, backend: str, core: bool, only_host: bool, rounds: int,
    peers: tuple[str, ...], libraries: Path | None, files: tuple[Path, ...], budget: float | None, jobs: int | None,
    out: Path | None, releases: tuple[str, ...], resume: bool, commit: str, tiny: bool, check: bool,
    against: Path | None, ranks: int, as_json: bool,
) -> None:  # fmt: skip
    """Time portattn and its peers: every contender is checked against float64 before it is timed.

    Sets: dense18, dense-gqa, dense-packed, dense-window, dense-short-q, dense-beyond, dense-wide, decode, paged,
    decode-quantised, paged-quantised, decode-nvfp4, sparse, mla, seed, small, host, cold-start, padded, prefill,
    backward18, backward_more, all. Peers, as far as this machine has them: sdpa, torch, flex, fa3, flashmla,
    flash_attn, flash_attn_interface, fa4, cudnn-frontend, flashinfer, unquantised, or none.

    Times are medians over rounds in which all contenders take turns. --out gets rows.jsonl line by line as cells
    are done, and bench.json at the end. With --budget cells are measured in an order that covers every set first;
    what --jobs compiles beforehand does not count, and takes half as long at most.

    With --release, portattn is timed with each of these releases of Triton: the installed one, the lab's, or FOLDER's
    (scripts/pack_triton.py). They and the peers take turns. --out gets releases.json and releases.md, which compare
    them, and a folder for each with its own results.

    A checkout has more sets, of calls that are no such cases (scripts/bench_sets/): engines, fp8-forward, cache-write,
    sparse-latent, transformers, training-step, host-cost, cpu, host-without-gpu, context-parallel. Contenders take
    turns and are checked as well; --out gets SET.json, for `portattn bench report`. They are not part of `all`.

    Exit status 1 when portattn itself is wrong on a case or cannot run it, or the device was lost, or a release does
    not start; 2 without a CUDA or ROCm device; 130 after Ctrl-C, with all that was finished."""
    if ctx.invoked_subcommand is not None:
        return
    if are_workloads(ctx, sets):
        given = ctx.get_parameter_source("rounds") == ParameterSource.COMMANDLINE
        limits = {"rounds": rounds if given else None, "tiny": tiny, "check": check, "against": against, "ranks": ranks}
        run_workloads(sets, only or "", libraries, budget, out, commit, as_json, **limits)
        return
    chosen = _chosen(sets, only)
    wanted = _wanted(peers)
    if resume and out is None:
        raise ArgumentError("bench", "--resume", True, "needs --out, the folder of the run to go on with")

    from portattn.launch.torch_compat import timed_device
    from portattn.tools.bench import peers as bench_peers
    from portattn.tools.bench import releases as bench_releases
    from portattn.tools.bench.report import document
    from portattn.tools.bench.run import BenchOptions

    others = dict(bench_peers.from_file(file) for file in files)
    for name in others:
        if name in bench_peers.PEERS:
            raise ArgumentError("bench", "--peer-file", name, "has the name of a peer that is known already")
    device = timed_device()
    if device is None:
        raise PortattnError("bench: no device with events is here to time anything on")

    several = bench_releases.releases(releases)  # nobody is to make a folder for a machine that cannot time anything
    options = BenchOptions(rounds=rounds, backend=backend, wanted=wanted, others=others, core=core, only_host=only_host)
    job = BenchJob(chosen, options, several, libraries, budget, jobs, out, resume, commit, device.type)
    found = BenchOutcome()
    ended = _measure(job, found)
    if several:
        _show_releases(found, out, as_json)
    elif "" in found.results:
        result = found.results[""]
        written = benchreport.write(result, out) if out else []
        if as_json:
            emit_json(document(result))
        else:
            benchreport.show(result, written)
    if ended:
        raise SystemExit(ended)
    if found.failed or any(result.failed for result in found.results.values()):
        raise SystemExit(RED)


for command in (benchreport.report, benchreport.compare, benchreport.join):
    bench.add_command(command)


def _chosen(sets: tuple[str, ...], only: str | None) -> dict[str, list[Case]]:
    from portattn.tools.bench.cases import SETS

    names = list(SETS) if "all" in sets else list(dict.fromkeys(sets))
    check_known("bench", "--set", names, [*SETS, "all"])
    chosen = {name: [case for case in SETS[name] if only is None or only in case.name] for name in names}
    if not any(chosen.values()):
        raise ArgumentError("bench", "--only", only, f"must match a case of {', '.join(names)}")
    return {name: cases for name, cases in chosen.items() if cases}


def _wanted(peers: tuple[str, ...]) -> tuple[str, ...]:
    from portattn.tools.bench.peers import PEERS

    check_known("bench", "--peer", peers, [*PEERS, "none"])
    return tuple(name for name in peers if name != "none") if peers else tuple(PEERS)


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One call of `portattn bench`; without releases, portattn is timed in this process."""

    chosen: Mapping[str, Sequence[Case]]
    options: BenchOptions
    releases: Sequence[Release]
    libraries: Path | None
    budget: float | None
    jobs: int | None
    out: Path | None
    resume: bool
    commit: str
    device_type: str


@dataclass(slots=True)
class BenchOutcome:
    """Results by release; this process's is ""."""

    results: dict[str, Result] = field(default_factory=dict)  # of releases that started: each with a run
    failed: dict[str, str] = field(default_factory=dict)  # why a release did not start


def _measure(job: BenchJob, found: BenchOutcome) -> int:
    """Measure the missing cells into `found`; return the exit status of an early end."""
    from portattn.tools.bench import cases as bench_cases
    from portattn.tools.bench import peers, rounds
    from portattn.tools.bench import run as bench_run
    from portattn.tools.bench.gate import DeviceLost
    from portattn.tools.bench.peers.packages import load
    from portattn.tools.bench.releases import TurnsClock
    from portattn.tools.bench.results import this_run

    options = job.options
    cells = bench_cases.covering(job.chosen) if job.budget is not None else bench_cases.plain(job.chosen)
    loaded = load(job.libraries)
    here = rounds.DeviceClock(job.device_type)
    with ExitStack() as stack:
        limits = None if options.only_host else here.ceilings()
        about: dict[str, Any] = {
            "sets": tuple(job.chosen), "asked": tuple((name, case.name) for name, case in cells),
            "rounds": options.rounds, "backend": options.backend, "core": options.core, "only_host": options.only_host,
            "peers": peers.presence(options.wanted, options.others), "libraries": loaded, "commit": job.commit,
        }  # fmt: skip
        try:
            processes: dict[str, ReleaseProcess] = {}
            if job.releases:
                processes, runs = _started(job.releases, about, stack, found.failed)
            else:
                runs = {"": this_run(**about, ceilings=None)}
            runs = {name: msgspec.structs.replace(run, ceilings=limits) for name, run in runs.items()}
            stores = _stores(job, runs, found, stack)
            if not runs:
                return 0
            done = set.intersection(*(result.done for result in found.results.values()))
            left = [(name, case) for name, case in cells if (name, case.name) not in done]
            if job.jobs:
                _prime(job, left, job.jobs)
            progress = stack.enter_context(BenchProgress(len(cells), len(cells) - len(left)))

            def keep(items: Mapping[str, Item]) -> None:
                for name, item in items.items():
                    if stores:
                        stores[name].append(item)
                    found.results[name].add(item)
                progress.cell(items)

            indices = {name: len(result.runs) - 1 for name, result in found.results.items()}
            clock = TurnsClock(here) if processes else here
            count = bench_run.run_cells(
                left, indices, clock, limits, options, keep, job.budget, say=progress.doing, processes=processes
            )
        except KeyboardInterrupt:
            return INTERRUPTED
        except DeviceLost as lost:
            click.echo(f"portattn: {lost}; the same command with --resume goes on behind it", err=True)
            return RED
    if count < len(left):
        click.echo(f"the budget of {job.budget:g} s is spent: {len(left) - count} cells are left", err=True)
    return 0


def _prime(job: BenchJob, left: Sequence[Cell], jobs: int) -> None:
    """Compile the cells' kernels side by side, within half of the budget."""
    from portattn.tools.bench.firstcall import COLD_START
    from portattn.tools.bench.releases import Release, prime_releases

    cases = [case for name, case in left if name != COLD_START]
    releases = job.releases or [Release.installed()]
    seconds = math.inf if job.budget is None else job.budget / 2
    with ProgressCounter(len(cases) * len(releases), 0, "compiling") as progress:

        def done(release: Release, case: Case, failure: str) -> None:
            of = f"{release.version}  " if job.releases else ""
            progress.step(f"{of}{case.name}: {failure or 'compiled'}")

        complete = prime_releases(releases, cases, job.options.backend, job.options.core, jobs, done, seconds)
    if not complete:
        click.echo("not all was compiled in time: the rest is compiled as it comes", err=True)


def _started(
    releases: Sequence[Release], about: dict[str, Any], stack: ExitStack, failed: dict[str, str]
) -> tuple[dict[str, ReleaseProcess], dict[str, BenchRun]]:
    """Return the releases' processes and runs, by name, and why others did not start."""
    from portattn.tools.bench.releases import ReleaseProcess, ReleaseProcessError
    from portattn.tools.bench.results import command

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


def _stores(job: BenchJob, runs: Mapping[str, BenchRun], found: BenchOutcome, stack: ExitStack) -> dict[str, Store]:
    """Return the folders in --out with their runs; a cell is measured only if every started release has it.

    Other rows are kept under their date. An interrupt in here leaves `found` empty, with nothing new to write."""
    from portattn.tools.bench.results import ROWS, Result, Store

    out, resume = job.out, job.resume
    stores = {name: stack.enter_context(Store(out / name)) for name in runs} if out else {}
    if resume and job.releases and stores and not any(store.path.exists() for store in stores.values()):
        started = " among the started releases" if found.failed else ""
        raise ArgumentError("bench", "--resume", str(out), f"holds no release's {ROWS} to go on with{started}")
    results = {name: Result(runs=[], rows=[]) for name in runs}
    new = [name for name, store in stores.items() if not store.path.exists()]
    for name, store in stores.items():
        if resume and (not job.releases or store.path.exists()):
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
    return stores


def _keep_only(result: Result, cells: Set[tuple[str, str]]) -> None:
    result.rows = [row for row in result.rows if (row.set, row.name) in cells]
    result.first_calls = [call for call in result.first_calls if (call.set, call.case) in cells]


def _show_releases(found: BenchOutcome, out: Path | None, as_json: bool) -> None:
    """Write releases.json, releases.md and releases' own files; without a figure no earlier file is overwritten."""
    from portattn.tools.bench import comparison

    whole = comparison.comparison(found.results, found.failed)
    written: list[Path] = []
    if out is not None:
        as_file, as_text = out / comparison.NAME, out / "releases.md"
        if found.results and not (as_file.exists() and not any(r.done for r in found.results.values())):
            own = [path for name, result in found.results.items() for path in benchreport.write(result, out / name)]
            write_whole(as_file, msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
            write_whole(as_text, comparison.as_markdown(whole).encode())
            written = [as_file, as_text, *own]
    if as_json:
        emit_json(comparison.with_results(whole, found.results))
    else:
        benchreport.show_comparison(whole, written)


OF_CASES = ("backend", "core", "only_host", "peers", "files", "jobs", "releases", "resume")
OF_WORKLOADS = ("tiny", "check", "against", "ranks")


def are_workloads(ctx: click.Context, sets: Sequence[str]) -> bool:
    """Return whether the sets are workloads. Raises ArgumentError for a mixture, or for an option of the other kind."""
    from portattn.tools.bench.workloads import WORKLOADS

    mine = [name for name in sets if name in WORKLOADS]
    if mine and len(mine) < len(sets):
        limit = f"must not be one of {', '.join(WORKLOADS)} beside a set of cases"
        raise ArgumentError("bench", "--set", mine[0], limit)
    wrong = f"does not go with --set {mine[0]}" if mine else f"goes with these sets alone: {', '.join(WORKLOADS)}"
    for param in ctx.command.params:
        name = param.name or ""
        given = ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if given and name in (OF_CASES if mine else OF_WORKLOADS):
            raise ArgumentError("bench", param.opts[0], ctx.params[name], wrong)
    return bool(mine)


def run_workloads(
    sets: Sequence[str], only: str, libraries: Path | None, budget: float | None, out: Path | None, commit: str,
    as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Run the sets and show them. Exit status 1 if a contender is wrong or fails, 2 if a set measured nothing."""
    import torch

    from portattn.tools.bench import workloads
    from portattn.tools.bench.peers.packages import load

    forked = any(workloads.WORKLOADS[name].forks for name in sets)
    if forked:  # asking for GPUs must not start CUDA in this process
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in sets:
        if workloads.WORKLOADS[name].device and device == "cpu" and not how["tiny"]:
            limit = "no CUDA or ROCm device is here to time"
            raise PortattnError(f"bench: {limit} {name} on; --tiny checks small sizes on a CPU")
    found: list[WorkloadResult] = []
    end = math.inf if budget is None else time.monotonic() + budget
    for name in sorted(dict.fromkeys(sets), key=lambda name: not workloads.WORKLOADS[name].forks):
        loaded = {} if workloads.WORKLOADS[name].forks else load(libraries)
        measure = workloads.Measure(device, only, end=end, **how)
        one = workloads.run(name, measure, loaded, commit, out, lambda row: click.echo(workloads.line(row), err=True))
        found.append(one)
        if not as_json:
            benchreport.show_workload(one, [out / f"{name}.json"] if out else [])
    if as_json:
        emit_json(found[0] if len(found) == 1 else found)
    empty = [f"{one.set} ({'; '.join(one.absent.values()) or 'no case'})" for one in found if not one.rows]
    if empty:
        raise PortattnError(f"bench: nothing was measured of {', '.join(empty)}")
    if any(one.wrong for one in found):
        raise SystemExit(RED)
