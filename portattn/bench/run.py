"""Running a problem set: gate, then time, then one row a case."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import portattn
from portattn.bench import measure
from portattn.bench.cases import Case
from portattn.bench.contenders import PEERS, Run, Tensors, ours
from portattn.errors import PortattnError
from portattn.toolchain import installed

SCHEMA = 1


def provenance() -> dict[str, Any]:
    """Chip, toolchain and date: what a figure means nothing without."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "chip": torch.cuda.get_device_name(),
        "portattn": portattn.__version__,
        "toolchain": str(installed()),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def run_case(case: Case, rounds: int, backend: str = "auto") -> dict[str, Any]:
    """Gate and time one case. A contender that is wrong, or cannot run it, has a reason instead of a time."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = Tensors.random(case, device)
    gate = measure.Gate(case, tensors)
    row: dict[str, Any] = {"case": case.name, "budget": gate.budget, "ms": {}, "error": {}, "refused": {}}
    runs: dict[str, Run] = {}
    for name, prepare in {"portattn": lambda c, t: ours(c, t, backend), **PEERS}.items():
        try:
            run = prepare(case, tensors)
            if run is None:
                row["refused"][name] = "cannot express this problem"
                continue
            error = gate.check(run)
        except (RuntimeError, PortattnError) as failure:
            row["refused"][name] = str(failure).strip().splitlines()[0][:200]
            continue
        row["error"][name] = error
        if error <= gate.budget:
            runs[name] = run
        else:
            row["refused"][name] = f"error {error:.2e} is over the budget {gate.budget:.2e}: not timed"
    row["ms"] = measure.interleaved_ms(runs, rounds)
    if "portattn" in runs:
        mine = runs["portattn"]
        row["plan"] = measure.plan_of(case, tensors).explain().splitlines()
        row["host_us"] = measure.host_us(mine)
        row["graph_ms"] = measure.graph_ms(mine)
        row["extra_bytes"] = measure.peak_extra_bytes(mine)
        peers = {name: ms for name, ms in row["ms"].items() if name != "portattn"}
        if peers:
            best = min(peers, key=peers.__getitem__)
            row["best_peer"], row["ratio"] = best, peers[best] / row["ms"]["portattn"]
    row["tflops"] = {name: case.flops() / ms / 1e9 for name, ms in row["ms"].items()}
    if case.op == "decode_attention":
        row["tbs"] = {name: case.cache_bytes() / ms / 1e9 for name, ms in row["ms"].items()}
    return row


def run_set(
    cases: Sequence[Case], rounds: int, report: Callable[[dict[str, Any]], None], backend: str = "auto"
) -> dict[str, Any]:
    """Time every case; `report(row)` is called as each is done."""
    rows = []
    for case in cases:
        row = run_case(case, rounds, backend)
        torch.cuda.empty_cache()
        rows.append(row)
        report(row)
    return {**provenance(), "ceilings": measure.ceilings(), "rows": rows}


def write(result: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Write NAME.json and NAME.csv under the folder; the paths."""
    import csv

    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_csv = folder / f"{name}.json", folder / f"{name}.csv"
    as_json.write_text(json.dumps(result, indent=1, default=str) + "\n")
    with as_csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "contender", "ms", "tflops", "tbs", "error", "budget", "refused"])
        for row in result["rows"]:
            for contender in {**row["ms"], **row["refused"]}:
                writer.writerow(
                    [
                        row["case"],
                        contender,
                        row["ms"].get(contender, ""),
                        row["tflops"].get(contender, ""),
                        row.get("tbs", {}).get(contender, ""),
                        row["error"].get(contender, ""),
                        row["budget"],
                        row["refused"].get(contender, ""),
                    ]
                )
    return [as_json, as_csv]
