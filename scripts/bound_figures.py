"""Compare bounds (portattn/testing/bound.py) with times of docs/performance, and write docs/performance/bound.json.

    python scripts/bound_figures.py [TEXT]

TEXT: only rows whose source holds it; the others' rows are kept. Times, of an H200 and from 20 µs: the portable core of
results.json and core-3.6.0-*.jsonl, by today's plan, and the candidates of tuning/d*.txt, by their own settings. The
code is today's, compiled with Triton 3.6.0. Cases with lengths of their own are left out: a bound counts full ones."""

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from portattn.config import Settings
from portattn.errors import PortattnError
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.lowering import CHOICES
from portattn.testing import bound
from portattn.tools.bench.cases import Case
from portattn.tools.tune.classes import parse, workload
from portattn.tools.tune.core import plan_choice
from portattn.tools.tune.tunable import Choice
from portattn.worker.client import Reply, Worker

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "performance"
TARGET = parse_target("cuda:sm_90", "triton==3.6.0")
OF_VALUE = {value: name for name, values in CHOICES.items() for value in values}
ROW = re.compile(r"^(\w*attention .*?)\s{2,}(\d+)×(\d+) w(\d+) s(\d+)(.*?)\s{2,}[-\d.e]+ +[-\d.e]+ +[\d.]+ +([\d.]+) ")
SHORTEST = 20.0  # µs: of a shorter call most is latency, which a bound does not count
SLACK = 1.01  # bounds that differ by less choose nothing among themselves


class KeepingWorker(Worker):
    """A child whose answers are kept: lengths share their code."""

    answers: dict[str, Reply] = {}  # noqa: RUF012 - one for all

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        key = json.dumps(fields, sort_keys=True)
        if key not in self.answers:
            self.answers[key] = super().request(task, seconds, **fields)
        return self.answers[key]


def timed() -> Iterator[tuple[str, str, Case, Choice | None, float]]:
    """Yield (source, kernel, case, its choice or None for the plan's, microseconds)."""
    runs = [(row, "results.json") for row in json.loads((FOLDER / "results.json").read_text())["rows"]]
    for path in FOLDER.glob("core-3.6.0-*.jsonl"):
        runs += [(row, path.name) for row in map(json.loads, path.open()) if row["type"] == "row"]
    for row, source in runs:
        case = msgspec.convert(row["case"], Case)
        core = next(one for one in row["contenders"] if one["name"] == "portattn core")
        if case.packed or not (case.lengths_q or case.lengths_k):
            yield source, "", case, None, 1e3 * core["ms"]
    for path in sorted((FOLDER / "tuning").glob("d*.txt")):
        kernel = "decode_split" if "decode" in path.name else "dense_forward"
        for found in filter(None, map(ROW.match, path.read_text().splitlines())):
            names = ("block_m", "block_n", "num_warps", "num_stages")
            launch: dict[str, Any] = {name: int(found[place]) for place, name in enumerate(names, 2)}
            launch |= {"launch_pdl": True} if "launch_pdl=True" in found[6] else {}
            lowering = {OF_VALUE[word]: word for word in found[6].split() if word in OF_VALUE}
            yield path.name, kernel, parse(found[1]), Choice(launch=launch, lowering=lowering), float(found[7])


def row(worker: Worker, source: str, kernel: str, case: Case, asked: Choice | None, us: float) -> dict[str, Any]:
    problem, said = workload(case).problem, {"source": source, "problem": case.name, "us": round(us, 2)}
    try:
        made = (
            plan_choice(kernel, problem, asked, TARGET)
            if asked is not None
            else plan(problem, TARGET, Registry.load(), settings=Settings(backend="triton"))
        )
        found = bound.of_plan(made, TARGET, worker, 240.0)
    except PortattnError as error:
        return said | {"choice": str(asked or ""), "none": str(error)}
    one = made.specialised[1]
    tile = str(asked or f"{one.block_m}×{one.block_n} w{one.num_warps} s{one.num_stages}")
    share = round(found.us / us, 3)
    return said | {"choice": tile, "bound": round(found.us, 2), "of_time": share, "binding": found.binding}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    shares = sorted(one["of_time"] for one in rows) or [0.0]
    median = round(statistics.median(shares), 3)
    return {"rows": len(rows), "highest": shares[-1], "median": median, "lowest": shares[0]}


def searches(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the median times of a search's candidates, and of those of least bound, over the fastest one's."""
    for source, problem in dict.fromkeys((one["source"], one["problem"]) for one in rows if ".txt" in one["source"]):
        own = [one for one in rows if (one["source"], one["problem"]) == (source, problem)]
        best, least = min(one["us"] for one in own), SLACK * min(one["bound"] for one in own)
        picked, every = (
            round(statistics.median(one["us"] for one in own if one["bound"] <= most) / best, 3)
            for most in (least, float("inf"))
        )
        yield {"source": source, "problem": problem, "candidates": len(own), "picked": picked, "median": every}


def main(only: str) -> None:
    path, worker = FOLDER / "bound.json", KeepingWorker()
    kept = json.loads(path.read_text()) if path.exists() else {}
    rows = [one for one in kept.get("rows", ()) if only not in one["source"]]
    rows += [row(worker, *item) for item in timed() if only in item[0] and item[-1] >= SHORTEST]
    known = [one for one in rows if "bound" in one]
    memory, rest = ([one for one in known if (one["binding"] == "memory") is flag] for flag in (True, False))
    kept |= {"target": str(TARGET), "chip": "NVIDIA H200", "kernels": kernel_source_digest(), "all": summary(known)}
    kept |= {"memory binds": summary(memory), "else": summary(rest), "without a bound": len(rows) - len(known)}
    kept |= {"searches": list(searches(known)), "rows": rows}
    text = json.dumps(kept, ensure_ascii=False)  # a row on a line
    path.write_text(text.replace("}, {", "},\n{").replace(": [{", ": [\n{") + "\n")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
