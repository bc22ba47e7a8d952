"""Running cases: gate, then time, then one row a case."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import portattn
from portattn.bench import measure, peers, results
from portattn.bench.cases import Case
from portattn.bench.contenders import OURS, PREPARED, own, plan_of
from portattn.bench.gate import FAILURES, Admitted, admit, reason
from portattn.bench.tensors import Tensors
from portattn.toolchain import installed


def provenance() -> dict[str, Any]:
    """Chip, toolchain and date: what a figure means nothing without."""
    return {
        "schema": results.SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "chip": torch.cuda.get_device_name(),
        "portattn": portattn.__version__,
        "toolchain": str(installed()),
        "torch": str(torch.__version__),
        "cudnn": torch.backends.cudnn.version(),
    }


def run_case(
    case: Case,
    device: torch.device,
    rounds: int,
    limits: measure.Ceilings,
    backend: str = "auto",
    wanted: Sequence[str] = tuple(peers.PEERS),
) -> dict[str, Any]:
    """Gate and time one case; its row (see results.py). Who is wrong, or cannot run it, has a reason instead of a time.

    wanted  names of the peers to time, if they are here
    """
    try:
        tensors = Tensors.random(case, device)
        admitted = admit(case, tensors, own(case, tensors, backend) | peers.contenders(case, tensors, wanted))
    except torch.OutOfMemoryError as failure:
        return results.row(case, limits, Admitted(0.0, refused={OURS: reason(failure)}), {})
    runs = {name: contender.run for name, contender in admitted.contenders.items()}
    row = results.row(case, limits, admitted, measure.interleaved_ms(runs, rounds))
    row["host_us"] = {name: measure.host_us(run) for name, run in runs.items()}
    for name in (OURS, PREPARED):
        if name not in runs:
            continue
        row["extra_bytes"][name] = measure.peak_extra_bytes(runs[name])
        try:
            row["graph_ms"][name] = measure.graph_ms(runs[name])
        except FAILURES as failure:  # a path that waits for the device cannot be captured
            row["no_graph"][name] = reason(failure)
    if OURS in runs:
        row["plan"] = plan_of(case, tensors, backend).explain().splitlines()
    return row


def run_set(
    cases: Sequence[Case],
    rounds: int,
    report: Callable[[dict[str, Any]], None],
    backend: str = "auto",
    wanted: Sequence[str] = tuple(peers.PEERS),
    libraries: Path | None = None,
) -> dict[str, Any]:
    """Time every case. `report(result)` is called as each is done, with what there is by then.

    libraries  a folder of peers' op libraries to load
    """
    result: dict[str, Any] = {**provenance(), "libraries": peers.load(libraries)}
    limits, device = measure.ceilings(), torch.device("cuda", torch.cuda.current_device())
    result |= {"ceilings": limits, "rows": []}
    for case in cases:
        result["rows"].append(run_case(case, device, rounds, limits, backend, wanted))
        torch.cuda.empty_cache()
        report(result)
    return result
