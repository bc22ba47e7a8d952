"""`portattn bench` of the sets of portattn/tools/bench/workloads.py: engines, models, process groups."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from portattn.cli import RED
from portattn.cli.output import emit_json, table
from portattn.errors import ArgumentError, PortattnError

if TYPE_CHECKING:
    from portattn.tools.bench.workloads import WorkloadResult

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


def run(
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
            raise PortattnError(
                f"bench: no CUDA or ROCm device is here to time {name} on; --tiny checks small sizes on a CPU"
            )
    found: list[WorkloadResult] = []
    end = math.inf if budget is None else time.monotonic() + budget
    for name in sorted(dict.fromkeys(sets), key=lambda name: not workloads.WORKLOADS[name].forks):
        loaded = {} if workloads.WORKLOADS[name].forks else load(libraries)
        measure = workloads.Measure(device, only, end=end, **how)
        one = workloads.run(name, measure, loaded, commit, out, lambda row: click.echo(workloads.line(row), err=True))
        found.append(one)
        if not as_json:
            show(one, [out / f"{name}.json"] if out else [])
    if as_json:
        emit_json(found[0] if len(found) == 1 else found)
    empty = [f"{one.set} ({'; '.join(one.absent.values()) or 'no case'})" for one in found if not one.rows]
    if empty:
        raise PortattnError(f"bench: nothing was measured of {', '.join(empty)}")
    if any(one.wrong for one in found):
        raise SystemExit(RED)


def show(found: WorkloadResult, written: list[Path]) -> None:
    from portattn.tools.bench import workloads

    click.echo(", ".join(str(found.run[name]) for name in ("chip", "toolchain", "torch", "date") if name in found.run))
    if found.rows:
        table(*workloads.shown_table(found.rows))
    for name, why in found.absent.items():
        click.echo(f"{name}: absent: {why}")
    for name in found.left:
        click.echo(f"no time was left for {name}")
    for text in found.wrong:
        click.echo(f"WRONG: {text}", err=True)
    for path in written:
        click.echo(f"written: {path}")
