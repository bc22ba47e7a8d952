"""`portattn bench`: time portattn beside the peers that this machine has, and make something of the figures."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from portattn.cli import benchreleases, benchreport
from portattn.cli.errors import INTERRUPTED, RED
from portattn.cli.output import emit_json, json_option
from portattn.errors import ArgumentError, PortattnError
from portattn.tools.number_ranges import SECONDS

if TYPE_CHECKING:
    from portattn.tools.bench.cases import Case
    from portattn.tools.bench.firstcall import FirstCall
    from portattn.tools.bench.results import Result, Row
    from portattn.tools.bench.run import BenchOptions


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@click.option("--set", "sets", multiple=True, default=("seed",), metavar="NAME", help="Problem set; can be repeated.")
@click.option("--only", metavar="TEXT", help="Only cases whose name holds this text.")
@click.option("--backend", default="auto", help="portattn's path: auto, triton, vendor, reference, or a path's name.")
@click.option("--core-only", "core", is_flag=True, help="The portable core alone as well, beside the plan's choice.")
@click.option("--host", "only_host", is_flag=True, help="Only the time that enqueuing a call takes the host.")
@click.option("--rounds", default=5, type=click.IntRange(1, 100), help="In which all take turns, at least.")
@click.option("--peer", "peers", multiple=True, metavar="NAME", help="Peer to time; can be repeated. [default: all]")
@click.option(
    "--peer-libs",
    "libraries",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of torch op libraries (*.so) of peers that are not installed.",
)
@click.option(
    "--peer-file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Python file that defines contenders(case, t): a peer by the file's name; can be repeated.",
)
@click.option("--budget", type=SECONDS, help="Seconds after which no further cell is begun.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Compile portattn's kernels first, in so many processes. [default: as each case comes]",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the results.")
@click.option(
    "--release",
    "releases",
    multiple=True,
    metavar="VERSION[=FOLDER]",
    help="Release of Triton to time, in a process of its own; can be repeated. [default: the installed one, here]",
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out: what it finished is kept.")
@click.option("--commit", default="", metavar="TEXT", help="The commit that is measured, where git cannot tell.")
@json_option
@click.pass_context
def bench(
    ctx: click.Context,
    sets: tuple[str, ...],
    only: str | None,
    backend: str,
    core: bool,
    only_host: bool,
    rounds: int,
    peers: tuple[str, ...],
    libraries: Path | None,
    files: tuple[Path, ...],
    budget: float | None,
    jobs: int | None,
    out: Path | None,
    releases: tuple[str, ...],
    resume: bool,
    commit: str,
    as_json: bool,
) -> None:
    """Time portattn and its peers: every contender is checked against float64 before it is timed.

    Sets: dense18, dense-gqa, dense-packed, dense-window, dense-short-q, dense-beyond, decode, paged, decode-quantised,
    paged-quantised, decode-nvfp4, sparse, mla, seed, small, host, cold-start, padded, prefill, backward18,
    backward_more, all. Peers, as far as this machine has them: sdpa, torch, flex, fa3, flashmla, flash_attn,
    flash_attn_interface, flashinfer, xformers, flag_gems, sage, unquantised, or none.

    Device times are medians over rounds in which all contenders take turns; times from a graph, and the time that
    enqueuing takes the host, are told apart. --out gets rows.jsonl line by line as cells are done, and bench.json and
    bench.csv at the end. With --budget cells are measured in an order that covers every set first; what --jobs
    compiles beforehand does not count, and takes half as long at most.

    With --release, portattn is timed with each of these releases of Triton: the installed one, the lab's, or FOLDER's
    (scripts/pack_triton.py). They and the peers take turns. --out gets releases.json and releases.md, which compare
    them, and a folder for each with its own results.

    Exit status 1 when portattn itself is wrong on a case or cannot run it, or the device was lost, or a release does
    not start; 2 without a CUDA or ROCm device; 130 after Ctrl-C, with all that was finished.
    """
    if ctx.invoked_subcommand is not None:
        return
    chosen = _chosen(sets, only)
    wanted = _wanted(peers)
    if resume and out is None:
        raise ArgumentError("bench", "--resume", True, "needs --out, the folder of the run to go on with")

    import torch

    from portattn.tools.bench.peers import PEERS, from_file

    others = dict(from_file(file) for file in files)
    for name in others:
        if name in PEERS:
            raise ArgumentError("bench", "--peer-file", name, "has the name of a peer that is known already")
    if not torch.cuda.is_available():
        raise PortattnError("bench: no CUDA or ROCm device is here to time anything on")

    from portattn.tools.bench.run import BenchOptions

    options = BenchOptions(rounds=rounds, backend=backend, wanted=wanted, others=others, core=core, only_host=only_host)
    if releases:
        from portattn.tools.bench.releases import named

        several = named.releases(releases)  # nobody is to make a folder for a machine that cannot time anything
        benchreleases.bench(several, chosen, options, libraries, budget, jobs, out, resume, commit, as_json)
        return
    result, ended = _measure(chosen, options, libraries, budget, jobs, out, resume, commit)
    written = benchreport.write(result, out) if out else []
    if as_json:
        from portattn.tools.bench.summary import document

        emit_json(document(result))
    else:
        benchreport.show(result, written)
    if ended:
        raise SystemExit(ended)
    if result.failed:
        raise SystemExit(RED)


bench.add_command(benchreport.report)
bench.add_command(benchreport.compare)
bench.add_command(benchreport.join)


def _chosen(sets: tuple[str, ...], only: str | None) -> dict[str, list[Case]]:
    """The sets' cases that are asked for."""
    from portattn.tools.bench.sets import SETS

    names = list(SETS) if "all" in sets else list(dict.fromkeys(sets))
    for name in names:
        if name not in SETS:
            raise ArgumentError("bench", "--set", name, f"must be one of {', '.join([*SETS, 'all'])}")
    chosen = {name: [case for case in SETS[name] if only is None or only in case.name] for name in names}
    if not any(chosen.values()):
        raise ArgumentError("bench", "--only", only, f"must match a case of {', '.join(names)}")
    return {name: cases for name, cases in chosen.items() if cases}


def _wanted(peers: tuple[str, ...]) -> tuple[str, ...]:
    """The peers to look for; all when none is named."""
    from portattn.tools.bench.peers import PEERS

    for name in peers:
        if name not in PEERS and name != "none":
            raise ArgumentError("bench", "--peer", name, f"must be one of {', '.join([*PEERS, 'none'])}")
    return tuple(name for name in peers if name != "none") if peers else tuple(PEERS)


def _measure(
    chosen: dict[str, list[Case]],
    options: BenchOptions,
    libraries: Path | None,
    budget: float | None,
    jobs: int | None,
    out: Path | None,
    resume: bool,
    commit: str,
) -> tuple[Result, int]:
    """Measure what is not measured yet; the result, and the exit status if the run ended before its end."""
    from portattn.cli.benchprogress import BenchProgress
    from portattn.tools.bench import peers, schedule
    from portattn.tools.bench.clock import DeviceClock
    from portattn.tools.bench.firstcall import COLD_START
    from portattn.tools.bench.gate import DeviceLost
    from portattn.tools.bench.provenance import this_run
    from portattn.tools.bench.results import Result
    from portattn.tools.bench.run import run_cells
    from portattn.tools.bench.store import Store

    cells = schedule.covering(chosen) if budget is not None else schedule.plain(chosen)
    loaded = peers.load(libraries)
    clock = DeviceClock()
    with ExitStack() as stack:
        store = stack.enter_context(Store(out)) if out else None
        limits = None if options.only_host else clock.ceilings()
        asked = tuple((name, case.name) for name, case in cells)
        run = this_run(
            sets=tuple(chosen), asked=asked, rounds=options.rounds, backend=options.backend, core=options.core,
            only_host=options.only_host, peers=peers.presence(options.wanted, options.others), libraries=loaded,
            ceilings=limits, commit=commit,
        )  # fmt: skip
        result = Result(runs=[], rows=[])
        if store and resume:
            result = store.resume(run)
        elif store and (kept := store.start()):
            click.echo(f"the rows that were there are now {kept}", err=True)
        result.runs.append(run)
        if store:
            store.append(run)
        done = result.done
        left = [(name, case) for name, case in cells if (name, case.name) not in done]
        try:
            if jobs:
                _prime([case for name, case in left if name != COLD_START], options, jobs, budget)
            progress = stack.enter_context(BenchProgress(len(cells), len(cells) - len(left)))

            def keep(item: Row | FirstCall) -> None:
                if store:
                    store.append(item)
                result.add(item)
                progress.cell(item)

            count = run_cells(left, len(result.runs) - 1, clock, limits, options, keep, budget, say=progress.doing)
        except KeyboardInterrupt:
            return result, INTERRUPTED
        except DeviceLost as lost:
            click.echo(f"portattn: {lost}; the same command with --resume goes on behind it", err=True)
            return result, RED
    if count < len(left):
        click.echo(f"the budget of {budget:g} s is spent: {len(left) - count} cells are left", err=True)
    return result, 0


def _prime(cases: list[Case], options: BenchOptions, jobs: int, budget: float | None) -> None:
    """Compile what the cases need of portattn, side by side, and say so. Takes half of the budget at most."""
    import math

    import torch

    from portattn.cli.progress import ProgressCounter
    from portattn.tools.bench.precompile import prime_all

    device = torch.device("cuda", torch.cuda.current_device())
    with ProgressCounter(len(cases), 0, "compiling") as progress:

        def done(case: Case, failure: str) -> None:
            progress.step(f"{case.name}: {failure or 'compiled'}")

        seconds = math.inf if budget is None else budget / 2
        complete = prime_all(cases, options.backend, options.core, device, jobs, done, seconds=seconds)
    if not complete:
        click.echo(
            "not all was compiled: a process died, or its time was over; the rest is compiled as it comes", err=True
        )
