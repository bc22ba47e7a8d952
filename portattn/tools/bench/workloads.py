"""Sets of calls that are no `Case`, such as an engine's step: functions in scripts/bench_sets/ that yield rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.tools import run_log
from portattn.tools.bench.measure import Measure, Row
from portattn.tools.bench.report import csv_text, table
from portattn.tools.bench.results import provenance
from portattn.worker.own_kernels import load

SCHEMA = 1
FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "bench_sets"


@dataclass(frozen=True, slots=True)
class Workload:
    file: str
    function: str
    device: bool = True  # it needs a GPU, or small sizes
    forks: bool = False  # its ranks are forked: this process must not start CUDA before
    tables: bool = False  # its file has `tables(rows, run)`, in Markdown


WORKLOADS = {
    "engines": Workload("engines.py", "engines"),
    "fp8-forward": Workload("operators.py", "fp8_forward"),
    "cache-write": Workload("operators.py", "cache_write"),
    "transformers": Workload("models.py", "transformers"),
    "training-step": Workload("models.py", "training_step"),
    "host-cost": Workload("host_cost.py", "host_cost", tables=True),
    "cpu": Workload("checkouts.py", "cpu", device=False),
    "host-without-gpu": Workload("checkouts.py", "host_without_gpu", device=False),
    "context-parallel": Workload("context_parallel.py", "context_parallel", forks=True, tables=True),
}
# Columns of the tables; a table has the columns for which a row has a value.
SHOWN = (
    "case", "contender", "ms", "of_peer", "graph_ms", "graph_of_peer", "cold_ms", "host_us", "median_us", "p99_us",
    "first_us", "calls", "compiled", "tflops", "gb_s", "bytes", "error", "path", "note",
)  # fmt: skip


class WorkloadResult(msgspec.Struct, kw_only=True):
    """The content of SET.json: one run of a set."""

    schema: int = SCHEMA
    set: str
    run: dict[str, Any]  # date, command, commit, chip, versions, op libraries
    rows: list[Row] = msgspec.field(default_factory=list)
    absent: dict[str, str] = msgspec.field(default_factory=dict)  # parts that could not run, and why
    left: list[str] = msgspec.field(default_factory=list)  # cases that the time was too short for

    @property
    def wrong(self) -> list[str]:
        """Return what makes the exit status 1: each wrong or failing contender, in words."""
        found = []
        for row in self.rows:
            name = f"{row['case']}, {row['contender']}" if row.get("contender") else row["case"]
            if row.get("failed"):
                found.append(f"{name}: {row['failed']}")
            elif not row.get("right", True):
                why = row.get("note") or f"error {row.get('error', 0):.2g} of {row.get('budget', 0):.2g}"
                found.append(f"{name}: {why}")
        return found


def _older(data: bytes) -> WorkloadResult | None:
    """Return the content of a file of before these sets: context-parallel.json or host-cost.json; None of others."""
    try:
        run = msgspec.json.decode(data, type=dict[str, Any])
        if "lines" in run:
            rows = [{"case": f"{r['part']} {r['name']}", **r, "note": r["failed"]} for r in run.pop("lines")]
            return WorkloadResult(set="host-cost", left=run.pop("left_out"), run=run, rows=rows)
        rows = [{"case": part, "right": part not in run["wrong"], **one} for part, one in run["parts"].items()]
        about = {"torch": run["torch"], "ranks": run["ranks"]}
        return WorkloadResult(set="context-parallel", run=about, rows=rows, left=run.get("left out", []))
    except (KeyError, TypeError, AttributeError, *run_log.UNREADABLE):
        return None


def run(
    set_: str, measure: Measure, libraries: dict[str, str], commit: str, out: Path | None,
    told: Callable[[Row], None] = lambda row: None,
) -> WorkloadResult:  # fmt: skip
    """Run a set; --out gets SET.json after each row. Raises ArgumentError outside of a checkout."""
    one = WORKLOADS[set_]
    about: dict[str, Any] = provenance("cpu" if one.forks else measure.device) | {"libraries": libraries}
    about["commit"] = commit or about["commit"]
    about["ranks"] = measure.ranks
    found = WorkloadResult(set=set_, run=about, absent=measure.absent, left=measure.left)
    measure.folder = out
    begun = time.monotonic()
    for row in getattr(_module(set_), one.function)(measure):
        found.rows.append(row)
        told(row)
        about["seconds"] = round(time.monotonic() - begun, 1)
        if out is not None:
            write(found, out)
    if one.forks and measure.device == "cuda":
        about["chip"] = torch.cuda.get_device_name()
    if out is not None:
        write(found, out)
    return found


def _module(set_: str) -> Any:
    path = FOLDER / WORKLOADS[set_].file
    if not path.exists():
        raise ArgumentError("bench", "--set", set_, "needs a checkout of portattn, whose scripts/bench_sets/ has it")
    return load(str(path))


def write(found: WorkloadResult, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{found.set}.json", msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def read(path: Path) -> WorkloadResult | None:
    """Return the result in a set's JSON file, also of an older form; None if the file is no such result."""
    if path.is_dir() or path.suffix == ".jsonl":
        return None
    data = run_log.read(path)
    try:
        found = msgspec.json.decode(data, type=WorkloadResult)
    except run_log.UNREADABLE:
        return _older(data)
    if found.schema != SCHEMA:
        raise DataError(path, None, f"schema version {found.schema}; this portattn reads version {SCHEMA}")
    return found


def shown_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    columns = [name for name in SHOWN if any(row.get(name, "") != "" for row in rows)]
    return columns, [[_cell(row, name) for name in columns] for row in rows]


def line(row: Row) -> str:
    return " | ".join(filter(None, (_cell(row, name) for name in SHOWN)))


def _cell(row: Row, name: str) -> str:
    value = row.get(name, "")
    if name == "error" and value != "":
        return f"{value:.2g} of {row['budget']:.2g}" + ("" if row.get("right", True) else " WRONG")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def as_markdown(found: WorkloadResult) -> str:
    if found.set in WORKLOADS and WORKLOADS[found.set].tables:
        return str(_module(found.set).tables(found.rows, found.run | {"left": found.left}))
    return table(*shown_table(found.rows)) + "\n"


def as_csv(found: WorkloadResult) -> str:
    columns = list(dict.fromkeys(name for row in found.rows for name, value in row.items() if _scalar(value)))
    return csv_text(columns, [[row.get(name) for name in columns] for row in found.rows])


def _scalar(value: object) -> bool:
    return not isinstance(value, (dict, list))
