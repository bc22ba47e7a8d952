"""What becomes of the figures: one row a case, and the files that hold them.

A row: case, op, budget, and by contender's name
  ms, tflops, host_us, error   of those that were timed
  tbs, copy_fraction   of ops that read a cache: bytes that must be read over the time, and that over the copy ceiling
  floor_fraction       the least time that the case can take on this card, over the time
  refused              why the others were not timed
and of portattn's own contenders, likewise
  ratio                time of the fastest peer over theirs
  graph_ms, no_graph   device time replayed from a graph, or why there is none
  extra_bytes          memory allocated at the peak of a call
Of the case: flops, read_bytes, floor_ms, limit ("gemm" or "copy": which one the floor is), best_peer, and peer_ms, in
which a library has the time of the fastest way in which it was called.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec

from portattn.bench.cases import Case
from portattn.bench.contenders import OURS, PREPARED
from portattn.bench.gate import Admitted
from portattn.bench.measure import Ceilings

SCHEMA = 2
# Figures of a row that each contender has, in the order of the CSV's columns.
BY_CONTENDER = (
    "ms", "tflops", "tbs", "copy_fraction", "floor_fraction", "ratio", "host_us", "graph_ms", "extra_bytes", "error",
    "refused",
)  # fmt: skip
OF_CASE = ("flops", "read_bytes", "floor_ms", "limit", "best_peer", "budget")


def row(case: Case, limits: Ceilings, admitted: Admitted, ms: dict[str, float]) -> dict[str, Any]:
    """A case's row with everything that follows from its times."""
    flops, read = case.flops(), case.read_bytes()
    floor, limit = limits.floor_ms(flops, read)
    tbs = {name: read / time / 1e9 for name, time in ms.items()} if case.reads_cache else {}
    peer_ms: dict[str, float] = {}
    for name, time in ms.items():
        if name not in (OURS, PREPARED):
            library = name.partition("/")[0]
            peer_ms[library] = min(time, peer_ms.get(library, time))
    best = min(peer_ms, key=peer_ms.__getitem__) if peer_ms else None
    return {
        "case": case.name,
        "op": case.op,
        "flops": flops,
        "read_bytes": read,
        "floor_ms": floor,
        "limit": limit,
        "budget": admitted.budget,
        "ms": ms,
        "tflops": {name: flops / time / 1e9 for name, time in ms.items()},
        "tbs": tbs,
        "copy_fraction": {name: rate / limits.copy_tbs for name, rate in tbs.items()},
        "floor_fraction": {name: floor / time for name, time in ms.items()},
        "peer_ms": peer_ms,
        "best_peer": best,
        "ratio": {name: peer_ms[best] / ms[name] for name in (OURS, PREPARED) if best and name in ms},
        "host_us": {},
        "graph_ms": {},
        "no_graph": {},
        "extra_bytes": {},
        "error": admitted.errors,
        "refused": admitted.refused,
        "plan": [],
    }


def names(found: dict[str, Any]) -> list[str]:
    """A row's contenders: those that were timed, then the others."""
    return [*found["ms"], *found["refused"]]


def ours_failed(result: dict[str, Any]) -> bool:
    """Whether portattn was wrong, or could not run, on any case."""
    return any(name in found["refused"] for found in result["rows"] for name in (OURS, PREPARED))


def write(result: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Write NAME.json and NAME.csv under the folder; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_csv = folder / f"{name}.json", folder / f"{name}.csv"
    as_json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    with as_csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "op", "contender", *BY_CONTENDER, *OF_CASE])
        for found in result["rows"]:
            for contender in names(found):
                figures = [found[figure].get(contender, "") for figure in BY_CONTENDER]
                of_case = ["" if found[key] is None else found[key] for key in OF_CASE]
                writer.writerow([found["case"], found["op"], contender, *figures, *of_case])
    return [as_json, as_csv]
