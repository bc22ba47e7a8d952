"""The command line: `PYTHONPATH=tests python -m fuzz values|shapes`, or `make fuzz ARGS="values --seconds 600"`."""

import functools
import importlib
import math
import os
import sys
import tempfile
from pathlib import Path

import click
import msgspec


@click.command()
@click.argument("mode", type=click.Choice(["values", "shapes"]))
@click.option("--seconds", type=click.FloatRange(min=1), default=60, show_default=True,
    help="of work, start not counted")  # fmt: skip
@click.option("--cases", type=click.IntRange(min=1), help="values: end after so many cases, however long they take")
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True, help="each has its own seed")
@click.option("--seed", type=int, default=0, show_default=True, help="of the first process; the others count on")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--case", type=int, help="values: this case of the seed alone, in this process")
@click.option("--turns", help="shapes: these turns (JSON, as a failure tells them), and the last one alone")
@click.option("--json", "report_path", type=click.Path(path_type=Path), help="write the report there")
def main(mode: str, seconds: float, cases: int | None, processes: int, seed: int, device: str, case: int | None,
        turns: str | None, report_path: Path | None) -> None:  # fmt: skip
    """Fuzz the public operations. Exit status 1: a case failed, or none ran; 130: interrupted, and none failed."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if mode == "values" and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # decided as Triton is imported; processes inherit it
    if case is not None:
        _one(seed, case, device)
    from . import running

    with tempfile.TemporaryDirectory(prefix="portattn-fuzz-") as folder:
        if mode == "shapes" and device == "cpu":
            from .recorded import environment

            os.environ.update(environment(Path(folder)))  # for the processes, as they are started
        if cases is not None and mode != "values":
            raise click.UsageError("--cases goes with values")
        if turns is None:
            work = importlib.import_module(f"fuzz.{mode}").work
        else:
            work, processes = functools.partial(importlib.import_module("fuzz.shapes").again, text=turns), 1
        if cases is not None:
            work, seconds = functools.partial(work, most=-(-cases // processes)), math.inf
        report = running.run(mode, work, seed, device, seconds, processes)
    if report_path is not None:
        report_path.parent.mkdir(parents=True, exist_ok=True)
        report_path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    print(f"{report.cases} cases in {report.seconds} s ({report.ended}), {len(report.failures)} failures")
    for name, number in sorted(report.counts.items(), key=lambda item: -item[1]):
        print(f"  {number:8d}  {name}")
    sys.exit(0 if report.green and report.ended != "interrupt" else 130 if report.green else 1)


def _one(seed: int, number: int, device: str) -> None:
    from . import values
    from .drawing import draw
    from .reducing import snippet

    case = draw(seed, number, device)
    with values.prepared(device):
        outcome = values.run(case, device)
    print(snippet(case, device), outcome, sep="\n")
    sys.exit(1 if outcome.failure else 0)


if __name__ == "__main__":
    main()
