"""`portattn bench`: time portattn beside the peers that this machine has, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from portattn.cli.output import emit_json, json_option, table
from portattn.errors import ArgumentError, PortattnError

LAUNCH_BOUND_MS = 0.1  # device times below which the time from a graph is shown as well


@click.command(context_settings={"show_default": True})
@click.option("--set", "sets", multiple=True, default=("seed",), metavar="NAME", help="Problem set; can be repeated.")
@click.option("--only", metavar="TEXT", help="Only cases whose name holds this text.")
@click.option("--backend", default="auto", help="portattn's path: auto, triton, vendor, reference.")
@click.option("--rounds", default=3, type=click.IntRange(1, 100), help="Rounds in which all contenders take turns.")
@click.option("--peer", "peers", multiple=True, metavar="NAME", help="Peer to time; can be repeated. [default: all]")
@click.option(
    "--peer-libs",
    "libraries",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of torch op libraries (*.so) of peers that are not installed.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for bench.json and bench.csv.")
@json_option
def bench(
    sets: tuple[str, ...],
    only: str | None,
    backend: str,
    rounds: int,
    peers: tuple[str, ...],
    libraries: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time portattn and its peers: every contender is checked against float64 before it is timed.

    Sets: seed, dense, decode, small, paged, padded, packed, mla, sparse, window, prefill, all. Peers, as far as this
    machine has them: sdpa, torch, flex, fa3, flashmla, or none. Times are medians of device time with a cold L2, all
    contenders taking turns. Files under --out are written anew after each case. Exit status 1 when portattn itself is
    wrong on a case or cannot run it, 2 without a CUDA or ROCm device.
    """
    from portattn.bench.sets import SETS

    chosen = list(SETS) if "all" in sets else list(dict.fromkeys(sets))
    for name in chosen:
        if name not in SETS:
            raise ArgumentError("bench", "--set", name, f"must be one of {', '.join([*SETS, 'all'])}")
    cases = [case for name in chosen for case in SETS[name] if only is None or only in case.name]
    if not cases:
        raise ArgumentError("bench", "--only", only, f"must match a case of {', '.join(chosen)}")
    wanted = _wanted(peers)

    import torch

    if not torch.cuda.is_available():
        raise PortattnError("bench: no CUDA or ROCm device is here to time anything on")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from portattn.bench import results, run

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    written: list[Path] = []
    with progress:
        task = progress.add_task("bench", total=len(cases))

        def done(result: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=result["rows"][-1]["case"])
            if out:
                written[:] = results.write(result, out, "bench")

        result = run.run_set(cases, rounds, done, backend, wanted, libraries)
    if as_json:
        emit_json(result)
    else:
        _show(result, written)
    if results.ours_failed(result):
        raise SystemExit(1)


def _wanted(peers: tuple[str, ...]) -> tuple[str, ...]:
    """The peers to look for; all when none is named."""
    from portattn.bench.peers import PEERS

    for name in peers:
        if name not in PEERS and name != "none":
            raise ArgumentError("bench", "--peer", name, f"must be one of {', '.join([*PEERS, 'none'])}")
    return tuple(name for name in peers if name != "none") if peers else tuple(PEERS)


def _show(result: dict[str, Any], written: list[Path]) -> None:
    from portattn.bench.results import names

    limits = result["ceilings"]
    click.echo(
        f"{result['chip']}, {result['toolchain']}, torch {result['torch']}, {result['date']}; "
        f"this run's ceilings: GEMM {limits.gemm_tflops:.0f} TFLOP/s, copy {limits.copy_tbs:.2f} TB/s"
    )
    for file, state in result["libraries"].items():
        click.echo(f"{file}: {state}")
    rows = []
    for row in result["rows"]:
        for name in names(row):
            if name in row["refused"]:
                rows.append((row["case"], name, "", "", "", "", row["refused"][name]))
                continue
            rows.append(
                (
                    row["case"],
                    name,
                    f"{row['ms'][name] * 1e3:.1f}",
                    f"{row['tbs'][name]:.2f} TB/s"
                    if row["limit"] == "copy" and row["tbs"]
                    else f"{row['tflops'][name]:.0f} TFLOP/s",
                    f"{row['floor_fraction'][name]:.0%} {row['limit']}",
                    f"{row['error'][name]:.1e}",
                    _notes(row, name),
                )
            )
    table(("case", "contender", "µs", "rate", "of limit", "error", "notes"), rows)
    for path in written:
        click.echo(f"written: {path}")


def _notes(row: dict[str, Any], name: str) -> str:
    """What else is known of a contender."""
    notes = []
    if name in row["ratio"]:
        notes.append(f"{row['ratio'][name]:.2f}× {row['best_peer']}")
    if name in row["no_graph"]:
        notes.append(f"no graph: {row['no_graph'][name]}")
    elif row["graph_ms"].get(name, LAUNCH_BOUND_MS) < LAUNCH_BOUND_MS:
        notes.append(f"graph {row['graph_ms'][name] * 1e3:.1f} µs")
    if name in row["host_us"]:
        notes.append(f"host {row['host_us'][name]:.1f} µs")
    if name in row["extra_bytes"]:
        notes.append(f"+{row['extra_bytes'][name] / 2**20:.1f} MiB")
    return "; ".join(notes)
