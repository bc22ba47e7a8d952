"""Sets of calls that are no `Case`, such as an engine's step: functions in scripts/bench_sets/ that yield rows."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.testing.tolerance import budget, largest
from portattn.tools import run_log
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.report import table
from portattn.tools.bench.results import provenance
from portattn.tools.bench.rounds import DeviceClock, interleaved, ratio
from portattn.worker.own_kernels import load

# Rows have medians of rounds: `ms`, `graph_ms`, `cold_ms` (L2 overwritten), `host_us`; `of_peer`: peer's over row's.
ROUNDS = 7
Runs = dict[str, Callable[[], Any]]
Row = dict[str, Any]
Judge = Callable[[], Row]


class Absent(Exception):
    """An engine or a library is absent; the text names it."""


@dataclass
class Measure:
    device: str
    only: str = ""  # text that a case's name must hold
    check: bool = False  # check results, and time nothing
    tiny: bool = False  # small sizes
    end: float = float("inf")  # time.monotonic() after which no case begins
    rounds: int | None = None  # None for the set's own number
    against: Path | None = None  # another checkout, which takes turns with this one
    ranks: int = 2  # of the sets that use several GPUs
    part: str = ""  # before the names of cases
    left: list[str] = field(default_factory=list)  # cases that the time was too short for
    absent: dict[str, str] = field(default_factory=dict)  # parts that could not run, and why
    clock: DeviceClock = field(default_factory=DeviceClock)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def wanted(self, case: str) -> bool:
        if self.only not in self.part + case:
            return False
        if time.monotonic() < self.end:
            return True
        self.left.append(self.part + case)
        return False

    def shares(self, names: Sequence[str]) -> Iterator[tuple[str, float]]:
        """Yield each wanted name with its rounds' end time: equal parts of the time left when it begins."""
        chosen = [name for name in names if self.only in name]
        for place, name in enumerate(chosen):
            if self.wanted(name):
                now = time.monotonic()
                yield name, now + (self.end - now) / (len(chosen) - place)

    def replayed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return the replay of `run` captured in a graph; without a GPU, `run` itself."""
        return run if self.device == "cpu" else self.clock.graphed(Contender(run))

    def replay_note(self, right: bool) -> str:
        """Return the note on the result of `replayed`; without a GPU no graph was captured."""
        done = "called again, without a graph," if self.device == "cpu" else "replayed"
        return f"{done} with other lengths: {'right' if right else 'WRONG'}"

    def rows(
        self, case: str, runs: Runs, judges: Mapping[str, Judge], host: Mapping[str, Runs] | None = None,
        graphs: bool = True, cold: bool = False, peer: str = "",
    ) -> Iterator[Row]:  # fmt: skip
        """Yield a row for each contender; one that fails or is wrong is not timed.

        judges: checks of a result (error, budget, right, path …); host: contender -> {name: call for the host's clock};
        peer: the contender that of_peer compares with"""
        found: dict[str, Row] = {name: {"case": self.part + case, "contender": name} for name in runs}
        for name, run in runs.items():
            try:
                run()
                self.synchronize()
                found[name] |= judges[name]() if name in judges else {}
            except Exception as error:  # noqa: BLE001  # the others are still measured, and this one is reported
                found[name] |= failure(error)
        able = {n: run for n, run in runs.items() if "failed" not in found[n] and found[n].get("right", True)}
        if not self.check and self.device == "cuda" and able:
            self._time(able, found, graphs, cold, peer)
            for name, run in able.items():
                expected = found[name].get("ms", 0.0)
                for what, call in {"host_us": run, **(host or {}).get(name, {})}.items() if expected else ():
                    found[name][what] = self.clock.host_us(call, expected).median
        yield from found.values()

    def _time(self, able: Runs, found: dict[str, Row], graphs: bool, cold: bool, peer: str) -> None:
        contenders, replays = {name: Contender(run) for name, run in able.items()}, {}
        for name, one in contenders.items() if graphs else ():
            try:
                replays[name] = Contender(self.clock.graphed(one))
            except Exception as error:  # noqa: BLE001  # a call that cannot be captured is timed without
                found[name]["graph_failed"] = failure(error)["failed"]
        kinds = [("", contenders, "hot"), ("graph_", replays, "hot")] + [("cold_", contenders, "cold")] * cold
        for key, taking_part, timing in kinds:
            turns = interleaved(taking_part, self.clock, timing, self.rounds or ROUNDS)  # type: ignore[arg-type]
            for name, why in turns.failed.items():
                found[name] |= {"graph_failed": why} if key == "graph_" else {"failed": why, "note": f"FAILED {why}"}
            for name, times in turns.ms.items():
                found[name][f"{key}ms"] = statistics.median(times)
                if peer in turns.ms and name != peer:
                    found[name][f"{key}of_peer"] = ratio(turns.ms[peer], times)


def failure(error: Exception) -> Row:
    text = f"{type(error).__name__}: {error}"[:600]
    return {"failed": text, "note": f"FAILED {text}"[:200]}


def judge_result(out: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> Row:
    """Judge a result. same: torch's own, in the result's dtype."""
    error, most = largest(out.double() - exact), budget(out.dtype, exact, same)
    right = out.shape == exact.shape and bool(torch.isfinite(out).all()) and error <= most
    return {"error": error, "budget": most, "right": right}


def judge_attention(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> Row:
    """Judge one sequence's result, (Sq, Hq, D), by `attend`."""
    return judge_result(out, *(attend(q, k, v, dtype, **mask) for dtype in (torch.float64, torch.bfloat16)))


def worst(all_of: list[Row]) -> Row:
    return max(all_of, key=lambda one: (not one["right"], one["error"] / max(one["budget"], 1e-30)))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, causal: bool = True,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention, bottom-right aligned: q (Sq, Hq, D), k and v (Sk, Hk, D), mask `seen` bool (Sq, Sk)."""
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    found = []
    for head in range(k.shape[0]):
        scores = q[head * group : (head + 1) * group] @ k[head].mT * q.shape[-1] ** -0.5
        rows, keys = scores.shape[-2:]
        if causal and rows > 1:
            hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        found.append(scores.softmax(-1) @ v[head])
    return torch.cat(found).transpose(0, 1)


SCHEMA = 1
FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "bench_sets"


@dataclass(frozen=True, slots=True)
class Workload:
    file: str
    function: str
    device: bool = True  # it needs a GPU, or small sizes
    forks: bool = False  # its ranks are forked: this process must not start CUDA before


WORKLOADS = {
    "engines": Workload("engines.py", "engines"), "fp8-forward": Workload("operators.py", "fp8_forward"),
    "cache-write": Workload("operators.py", "cache_write"), "sparse-latent": Workload("operators.py", "sparse_latent"),
    "transformers": Workload("models.py", "transformers"), "training-step": Workload("models.py", "training_step"),
    "host-cost": Workload("host_cost.py", "host_cost"),
    "cpu": Workload("checkouts.py", "cpu", device=False),
    "host-without-gpu": Workload("checkouts.py", "host_without_gpu", device=False),
    "context-parallel": Workload("context_parallel.py", "context_parallel", forks=True),
}  # fmt: skip
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


def run(
    set_: str, measure: Measure, libraries: dict[str, str], commit: str, out: Path | None,
    told: Callable[[Row], None] = lambda row: None,
) -> WorkloadResult:  # fmt: skip
    """Run a set; --out gets SET.json after each row. Raises ArgumentError outside of a checkout."""
    one = WORKLOADS[set_]
    path = FOLDER / one.file
    if not path.exists():
        raise ArgumentError("bench", "--set", set_, "needs a checkout of portattn, whose scripts/bench_sets/ has it")
    about: dict[str, Any] = provenance("cpu" if one.forks else measure.device) | {"libraries": libraries}
    about["commit"] = commit or about["commit"]
    about["ranks"] = measure.ranks
    found = WorkloadResult(set=set_, run=about, absent=measure.absent, left=measure.left)
    begun = time.monotonic()
    for row in getattr(load(str(path)), one.function)(measure):
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


def write(found: WorkloadResult, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{found.set}.json", msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def read(path: Path) -> WorkloadResult | None:
    """Return the result in a set's JSON file; None if the file is no such result."""
    if path.is_dir() or path.suffix == ".jsonl":
        return None
    data = run_log.read(path)
    try:
        found = msgspec.json.decode(data, type=WorkloadResult)
    except run_log.UNREADABLE:
        return None
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
    return table(*shown_table(found.rows)) + "\n"
