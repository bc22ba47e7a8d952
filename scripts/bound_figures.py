"""Compare bounds (portattn/tools/bound.py) with the times of docs/performance, and write docs/performance/bound.json.

    python scripts/bound_figures.py [--only TEXT]

Times, all of an H200 and from 20 µs: the portable core of results.json and core-3.6.0-*.jsonl, by today's plan, and the
candidates of tuning/*.txt (dense and decode), by their own settings. The code is today's, compiled with Triton 3.6.0.
Cases with lengths of their own are left out, as a bound counts full ones; kernels without matrix instructions have no
bound."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import re
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from portattn.config import Settings
from portattn.errors import PortattnError
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.lowering import CHOICES
from portattn.tools import bound
from portattn.tools.bench.cases import Case
from portattn.tools.tune.classes import parse, workload
from portattn.tools.tune.core import plan_choice
from portattn.tools.tune.tunable import Choice
from portattn.worker.client import Reply, Worker

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "performance"
TARGET, TOOLCHAIN = "cuda:sm_90", "triton==3.6.0"
OF_VALUE = {value: name for name, values in CHOICES.items() for value in values}
CANDIDATE = re.compile(r"^((?:\w+_attention|attention) .*?)\s{2,}(\d+×\d+ w\d.*?)\s{2,}(.*)$")
TIMES = re.compile(r"^[\d.e+-]+\s+[\d.e+-]+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s+\d+")
SECONDS = 240.0
SHORTEST = 20.0  # µs: of a shorter call most is latency, which a bound does not count


def timed() -> Iterator[tuple[str, str, Case, Choice | None, float]]:
    """Yield (source, kernel, case, its choice or None for the plan's, microseconds)."""
    runs = [(row, "results.json") for row in json.loads((FOLDER / "results.json").read_text())["rows"]]
    runs += [(json.loads(line), path.name) for path in FOLDER.glob("core-3.6.0-*.jsonl") for line in path.open()]
    for row, source in runs:
        if row.get("type", "row") != "row":
            continue
        case = msgspec.convert(row["case"], Case)
        core = next(one for one in row["contenders"] if one["name"] == "portattn core")
        if not (case.lengths_q or case.lengths_k) or case.packed:
            yield source, "", case, None, 1e3 * core["ms"]
    for path in sorted((FOLDER / "tuning").glob("d*.txt")):
        kernel = ""
        for line in path.read_text().splitlines():
            kernel = line.split(":")[0] if re.match(r"^\w+: \S", line) else kernel
            found = CANDIDATE.match(line)
            times = TIMES.match(found[3]) if found else None
            if found and times and kernel in ("dense_forward", "decode_split"):
                yield path.name, kernel, parse(found[1]), choice(found[2]), float(times[1])


class KeepingWorker(Worker):
    """A child that keeps its answers: lengths share their code."""

    answers: ClassVar[dict[str, Reply]] = {}

    def request(self, task: str, seconds: float, **fields: Any) -> Reply:
        key = json.dumps(fields, sort_keys=True)
        if key not in self.answers:
            self.answers[key] = super().request(task, seconds, **fields)
        return self.answers[key]


def choice(text: str) -> Choice:
    tile, *words = text.split()
    rows, keys = tile.split("×")
    launch: dict[str, Any] = {"block_m": int(rows), "block_n": int(keys)}
    lowering, occupancy = {}, 1
    for word in words:
        name, equals, value = word.partition("=")
        if name == "occupancy":
            occupancy = int(value)
        elif equals:
            launch[name] = value == "True" if value in ("True", "False") else int(value)
        elif word in OF_VALUE:
            lowering[OF_VALUE[word]] = word
        else:
            launch["num_warps" if word[0] == "w" else "num_stages"] = int(word[1:])
    return Choice(launch=launch, lowering=lowering, occupancy=occupancy)


def row(item: tuple[str, str, Case, Choice | None, float], workers: threading.local) -> dict[str, Any]:
    source, kernel, case, asked, us = item
    target = parse_target(TARGET, TOOLCHAIN)
    problem = workload(case).problem
    said = {"source": source, "problem": case.name, "us": round(us, 2)}
    try:
        made = (
            plan_choice(kernel, problem, asked, target)
            if asked is not None
            else plan(problem, target, Registry.load(), settings=Settings(backend="triton"))
        )
        if not hasattr(workers, "one"):
            workers.one = KeepingWorker()
        found = bound.of_plan(made, target, workers.one, SECONDS)
    except PortattnError as error:
        return said | {"choice": str(asked or ""), "none": str(error)}
    launch = made.specialised[1]
    tile = f"{launch.block_m}×{launch.block_n} w{launch.num_warps} s{launch.num_stages}"
    share = {"bound": round(found.us, 2), "of_time": round(found.us / us, 3), "binding": found.binding}
    return said | {"choice": str(asked or tile)} | share


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    shares = sorted(one["of_time"] for one in rows)
    return {
        "rows": len(rows), "over_time": sum(share > 1.03 for share in shares), "highest": shares[-1],
        "median": round(statistics.median(shares), 3), "lowest": shares[0],
    }  # fmt: skip


def ranking(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, of each search, how much longer candidates of least bound take than the fastest, and the middle one."""
    searches: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in rows:
        if one["source"].endswith(".txt"):
            searches.setdefault((one["source"], one["problem"]), []).append(one)
    found = []
    for (source, problem), members in searches.items():
        if len(members) < 4:
            continue
        best, least = min(one["us"] for one in members), min(one["bound"] for one in members)
        # Bounds that differ by less than 1 % choose nothing among themselves.
        picked = statistics.median(one["us"] for one in members if one["bound"] <= 1.01 * least)
        middle = statistics.median(one["us"] for one in members)
        found.append(
            {"source": source, "problem": problem, "candidates": len(members),
             "picked": round(picked / best, 3), "middle": round(middle / best, 3)}
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose source holds this text; others are kept")
    only = parser.parse_args().only
    items = [item for item in timed() if item[4] >= SHORTEST and only in item[0]]
    workers = threading.local()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda item: row(item, workers), items))
    path = FOLDER / "bound.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    made = {(one["source"], one["problem"], one["choice"]): one for one in rows}
    before = (one for one in kept.get("checked", {}).get("rows", ()) if only and only not in one["source"])
    rows = [*(one for one in before if (one["source"], one["problem"], one["choice"]) not in made), *made.values()]
    known = [one for one in rows if "bound" in one]
    groups = {
        "memory": [one for one in known if one["binding"] == "memory"],
        "dense, from 1,024 keys": [one for one in known if one["binding"] != "memory" and one["us"] >= 100],
        "shorter than 100 µs": [one for one in known if one["binding"] != "memory" and one["us"] < 100],
    }
    kept["checked"] = {
        "target": TARGET, "toolchain": TOOLCHAIN, "chip": "NVIDIA H200", "kernels": kernel_source_digest(),
        "all": summary(known), **{name: summary(some) for name, some in groups.items() if some},
        "without_bound": len(rows) - len(known), "ranking": ranking(known), "rows": rows,
    }  # fmt: skip
    path.write_text(lines(kept) + "\n")
    print(json.dumps({name: value for name, value in kept["checked"].items() if name != "rows"}, indent=1))


def lines(value: Any, depth: int = 0) -> str:
    """Return JSON with each row on a line of its own."""
    pad = " " * (depth + 1)
    if isinstance(value, dict) and any(isinstance(one, dict | list) for one in value.values()):
        inner = (f"{pad}{json.dumps(name)}: {lines(one, depth + 1)}" for name, one in value.items())
        return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(pad + json.dumps(one, ensure_ascii=False) for one in value) + "\n" + " " * depth + "]"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
