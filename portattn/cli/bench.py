"""`portattn bench`: time portattn beside the peers that this machine has, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from portattn.cli.output import emit_json, json_option, table
from portattn.errors import ArgumentError, PortattnError


@click.command(context_settings={"show_default": True})
@click.option("--set", "sets", multiple=True, default=("seed",), metavar="NAME", help="Problem set; can be repeated.")
@click.option("--only", metavar="TEXT", help="Only cases whose name holds this text.")
@click.option("--backend", default="auto", help="portattn's path: auto, triton, vendor, reference.")
@click.option("--rounds", default=3, type=click.IntRange(1, 100), help="Rounds in which all contenders take turns.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for bench.json and bench.csv.")
@json_option
def bench(sets: tuple[str, ...], only: str | None, backend: str, rounds: int, out: Path | None, as_json: bool) -> None:
    """Time portattn and its peers: every contender is checked against float64 before it is timed.

    Sets: seed, dense, decode, small, all. Times are medians of device time with a cold L2, all contenders taking
    turns. Exit status 1 when portattn itself is wrong on a case, 2 without a CUDA device.
    """
    from portattn.bench.cases import SETS

    chosen = list(SETS) if "all" in sets else list(sets)
    for name in chosen:
        if name not in SETS:
            raise ArgumentError("bench", "--set", name, f"must be one of {', '.join([*SETS, 'all'])}")
    cases = [case for name in chosen for case in SETS[name] if only is None or only in case.name]
    if not cases:
        raise ArgumentError("bench", "--only", only, f"must match a case of {', '.join(chosen)}")

    import torch

    if not torch.cuda.is_available():
        raise PortattnError("bench: no CUDA or ROCm device is here to time anything on")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from portattn.bench import run

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        task = progress.add_task("bench", total=len(cases))

        def done(row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=row["case"])

        result = run.run_set(cases, rounds, done, backend)
    written = run.write(result, out, "bench") if out else []
    if as_json:
        emit_json(result)
    else:
        _show(result, written)
    if any("portattn" not in row["ms"] for row in result["rows"]):
        raise SystemExit(1)


def _show(result: dict[str, Any], written: list[Path]) -> None:
    limits = result["ceilings"]
    click.echo(
        f"{result['chip']}, {result['toolchain']}, torch {result['torch']}, {result['date']}; "
        f"this run's ceilings: GEMM {limits['gemm_tflops']:.0f} TFLOP/s, copy {limits['copy_tbs']:.2f} TB/s"
    )
    rows = []
    for row in result["rows"]:
        for name in {**row["ms"], **row["refused"]}:
            if name in row["refused"]:
                rows.append((row["case"], name, "", "", "", row["refused"][name]))
                continue
            rate = f"{row['tbs'][name]:.2f} TB/s" if "tbs" in row else f"{row['tflops'][name]:.0f} TFLOP/s"
            note = ""
            if name == "portattn":
                ratio = f"{row['ratio']:.2f}× {row['best_peer']}; " if "ratio" in row else ""
                graph = f"graph {row['graph_ms'] * 1e3:.1f} µs; " if row["graph_ms"] < 0.1 else ""
                note = f"{ratio}{graph}host {row['host_us']:.1f} µs; +{row['extra_bytes'] / 2**20:.1f} MiB"
            rows.append((row["case"], name, f"{row['ms'][name] * 1e3:.1f}", rate, f"{row['error'][name]:.1e}", note))
    table(("case", "contender", "µs", "rate", "error", "notes"), rows)
    for path in written:
        click.echo(f"written: {path}")
