"""Results and their provenance: a BenchRun is one process, a Row one case of one set, a Figures one contender there."""

import datetime
import math
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

import portattn
from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.launch.torch_compat import chip_name, timed_device
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.registry import this_target
from portattn.schema.toolchain import installed_toolchain
from portattn.source_tree import source_commit_text
from portattn.tools import run_log
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import MINE
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.peers import PEERS, REFERENCES, UNQUANTISED, library
from portattn.tools.bench.peers.packages import version
from portattn.tools.bench.rounds import Ceilings, Spread, ratio
from portattn.tools.run_log import UNREADABLE, RunLog, encode_record, lines

SCHEMA = 3
PROPERTIES = {"multi_processors": "multi_processor_count", "memory_bytes": "total_memory", "l2_bytes": "L2_cache_size"}
T = TypeVar("T")


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks in MHz, power in W, temperature in °C, at one moment; None: cannot be read here."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


class BenchRun(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """One process that measured: chip, toolchain, code, date and command."""

    schema: int = SCHEMA
    date: str
    command: str
    commit: str
    portattn: str
    kernels: str
    chip: str
    target: str
    toolchain: str
    device: dict[str, Any]
    versions: dict[str, str]  # of torch, cuDNN, CUDA or ROCm, the driver, Python and the installed peers
    peers: dict[str, str]  # of each peer "here", or why it is absent
    libraries: dict[str, str]  # op libraries by their files' names: "loaded", or why not
    sets: tuple[str, ...]
    cells: int
    # sets and names of the requested cells, including cells that an earlier run has measured
    asked: tuple[tuple[str, str], ...] = ()
    rounds: int
    backend: str
    core: bool
    only_host: bool
    ceilings: Ceilings | None = None  # None if only enqueuing was timed
    state: DeviceState | None = None  # after the ceilings were measured: a warm card


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str = ""  # of portattn's own: the plan's path
    refused: str = ""  # why it was not timed, or ""
    # its largest error against float64; None if infinite or unknown. Of a backward: the largest part of the budget,
    # over the result and the three gradients
    error: float | None = None
    admit_s: float | None = None  # seconds to make it, which compiles it, and to check it
    # device time of one call, round by round, in milliseconds; graph_ms: replayed from a graph
    rounds_ms: tuple[float, ...] = ()
    graph_ms: tuple[float, ...] = ()
    no_graph: str = ""  # why there is no graph
    host_us: Spread | None = None  # time to enqueue one call, in microseconds
    # memory allocated at the peak of a call, of our own only; of a backward, of all, beyond the gradients
    extra_bytes: int | None = None
    # ms, tflops, tbs: median of rounds_ms, and rates from it; tbs of ops that read a cache
    ms: float | None = None
    tflops: float | None = None
    tbs: float | None = None
    # the card's least time for the case over the time; a peer that reads a quantised case's numbers in 16 bits has tbs
    # and of_floor of those
    of_floor: float | None = None
    ratio: float | None = None  # the best peer's time over this one's, of the same round: the median (of our own only)
    graph_ratio: float | None = None  # the same of graphs; the best peer is that of graphs

    @property
    def library(self) -> str:
        return library(self.name)

    @property
    def peer(self) -> bool:
        return self.name not in MINE and self.name not in REFERENCES

    @property
    def graph(self) -> float | None:
        return statistics.median(self.graph_ms) if self.graph_ms else None

    @property
    def spread(self) -> float | None:
        return max(self.rounds_ms) / min(self.rounds_ms) - 1 if self.rounds_ms else None


class Row(msgspec.Struct, frozen=True, kw_only=True, tag="row"):
    set: str
    case: Case
    run: int  # index among the result's runs
    flops: int
    read_bytes: int
    # the larger of flops over the GEMM ceiling and read_bytes over the copy ceiling; limit: its name
    floor_ms: float | None
    limit: str
    budget: float | None  # the largest allowed error; 1 of a backward, whose errors are parts of their budgets
    contenders: tuple[Figures, ...]
    best_peer: str = ""  # the fastest peer's contender; best_graph: of graphs
    best_graph: str = ""
    plan: tuple[str, ...] = ()  # portattn's plan in words
    state: DeviceState | None = None  # the device's state during the rounds
    checked: str = ""  # part of each contender's result compared with float64; all of it is checked to be finite
    seconds: float = 0.0  # of the whole row; reference_s, timing_s: shares of the float64 results and of timing
    reference_s: float | None = None
    timing_s: float | None = None

    @property
    def name(self) -> str:
        return self.case.name

    def figures(self, name: str) -> Figures | None:
        return next((f for f in self.contenders if f.name == name), None)

    @property
    def failed(self) -> bool:
        return any(f.refused for f in self.contenders if f.name in MINE)


def fastest(contenders: Iterable[Figures], graphs: bool = False) -> Figures | None:
    """Return the fastest timed peer, by medians of device time."""
    timed = [f for f in contenders if f.peer and (f.graph_ms if graphs else f.rounds_ms)]
    return min(timed, key=lambda f: statistics.median(f.graph_ms if graphs else f.rounds_ms), default=None)


def row(
    set_: str, case: Case, run: int, limits: Ceilings | None, budget: float | None, measured: Mapping[str, Figures],
    **others: Any,
) -> Row:  # fmt: skip
    """Return a Row with all fields derived from the measured ones; others: further fields of the Row."""
    flops, read = case.flops(), case.read_bytes()
    floor, limit = limits.floor_ms(flops, read) if limits else (None, "")
    wide = case.unquantised().read_bytes()
    wide_floor = limits.floor_ms(flops, wide)[0] if limits else None
    best, best_graph = (fastest(measured.values(), graphs) for graphs in (False, True))
    made = []
    for figures in measured.values():
        derived: dict[str, float] = {}
        its_read, its_floor = (wide, wide_floor) if figures.library in UNQUANTISED else (read, floor)
        if figures.rounds_ms:
            ms = statistics.median(figures.rounds_ms)
            derived = {"ms": ms, "tflops": flops / ms / 1e9}
            if case.reads_cache:
                derived["tbs"] = its_read / ms / 1e9
            if its_floor:
                derived["of_floor"] = its_floor / ms
            if best and figures.name in MINE:
                derived["ratio"] = ratio(best.rounds_ms, figures.rounds_ms)
        if figures.graph_ms and best_graph and figures.name in MINE:
            derived["graph_ratio"] = ratio(best_graph.graph_ms, figures.graph_ms)
        if figures.error is not None and not math.isfinite(figures.error):
            figures = msgspec.structs.replace(figures, error=None)
        made.append(msgspec.structs.replace(figures, **derived))
    return Row(
        set=set_, case=case, run=run, flops=flops, read_bytes=read, floor_ms=floor, limit=limit, budget=budget,
        contenders=tuple(made), best_peer=best.name if best else "", best_graph=best_graph.name if best_graph else "",
        **others,
    )  # fmt: skip


class Result(msgspec.Struct, kw_only=True):
    """The content of rows.jsonl, in the order of measurement."""

    runs: list[BenchRun]
    rows: list[Row]
    first_calls: list[FirstCall] = msgspec.field(default_factory=list)

    def add(self, item: BenchRun | Row | FirstCall) -> None:
        if isinstance(item, BenchRun):
            self.runs.append(item)
        elif isinstance(item, Row):
            self.rows.append(item)
        else:
            self.first_calls.append(item)

    @property
    def sets(self) -> list[str]:
        named = dict.fromkeys(name for run in self.runs for name in run.sets)
        there = {r.set for r in self.rows} | {c.set for c in self.first_calls}
        return [name for name in named if name in there]

    def of(self, set_: str) -> list[Row]:
        return [r for r in self.rows if r.set == set_]

    @property
    def done(self) -> set[tuple[str, str]]:
        """Return (set, case's name) of each measured cell."""
        return {(r.set, r.name) for r in self.rows} | {(c.set, c.case) for c in self.first_calls}

    @property
    def left(self) -> list[tuple[str, str]]:
        """Return (set, case's name) of each cell that the last run was asked for and that has no measurement."""
        asked = self.runs[-1].asked if self.runs else ()
        return [cell for cell in asked if cell not in self.done]

    @property
    def failed(self) -> bool:
        return any(r.failed for r in self.rows) or any(c.failed for c in self.first_calls)


ROWS = "rows.jsonl"
# A run goes on with another's rows only where these agree: else the rows would not be of one thing.
SAME = ("portattn", "kernels", "chip", "toolchain", "commit", "backend", "core", "only_host", "rounds")
_lines = msgspec.json.Decoder(BenchRun | Row | FirstCall)


class _Versioned(msgspec.Struct):
    schema: int


class Store(RunLog):
    """The folder of a run; a context that holds its lock. Raises ArgumentError if it is locked or cannot be written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / ROWS, folder / ".lock", op="bench", option="--out", shown=folder)
        self.folder = folder

    def start(self) -> Path | None:
        """Begin without rows; move existing rows to a dated file and return its path."""
        kept = self.rotate()
        self.path.touch()
        return kept

    def resume(self, run: BenchRun) -> Result:
        """Return the folder's rows without a truncated line. Raises ArgumentError without rows of this run (SAME)."""
        if not self.path.exists():
            raise ArgumentError("bench", "--resume", str(self.path), "there is no such file to go on with")
        found = read(self.path, resumed=True)
        for name in SAME:
            before, now = getattr(found.runs[0], name), getattr(run, name)
            if before != now:
                raise ArgumentError(
                    "bench", "--resume", str(self.path), f"its {name} is {before!r} and this run's is {now!r}"
                )
        whole = self.path.read_bytes()
        if not whole.endswith(b"\n"):
            write_whole(self.path, whole[: whole.rfind(b"\n") + 1])
        return found

    def replace(self, result: Result) -> None:
        """Write these runs, rows and first calls and no others. The old file stays if the disk is full."""
        items = (*result.runs, *result.rows, *result.first_calls)
        write_whole(self.path, b"".join(encode_record(item) for item in items))


def read(path: Path, resumed: bool = False) -> Result:
    """Read a rows.jsonl, a bench.json or a folder with either; `resumed`: see `run_log.lines`. Raises DataError."""
    if path.is_dir():
        path = path / ROWS if (path / ROWS).exists() else path / "bench.json"
    data = run_log.read(path)
    if path.suffix != ".jsonl":
        return decode(path, data, Result, SCHEMA, "results of portattn bench")
    result = Result(runs=[], rows=[])
    for number, line in lines(path, data, resumed):
        try:
            item = _lines.decode(line)
        except UNREADABLE as error:
            raise DataError(path, number, f"not a line of bench results: {error}") from None
        if isinstance(item, BenchRun):
            _check(path, number, item.schema)
        result.add(item)
    if not result.runs:
        raise DataError(path, None, "holds no run")
    return result


def decode(path: Path, data: bytes, kind: type[T], schema: int, what: str) -> T:
    """Return a JSON document of a schema version. Raises DataError for another version, and for other files."""
    try:
        _check(path, None, msgspec.json.decode(data, type=_Versioned).schema, schema)
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise DataError(path, None, f"no {what}: {error}") from None


def _check(path: Path, line: int | None, version: int, schema: int = SCHEMA) -> None:
    if version != schema:
        raise DataError(path, line, f"schema version {version}; this portattn reads version {schema}")


def merge_results(parts: Mapping[Path, Result]) -> Result:
    """Merge parts, the last run with all requests. Raises ArgumentError if two differ in SAME or share a case."""
    (first, base), *_ = parts.items()
    found = Result(runs=[], rows=[])
    places: dict[tuple[str, str], Path] = {}
    asked: dict[tuple[str, str], None] = {}
    for path, part in parts.items():
        for name in SAME:
            ours, theirs = getattr(base.runs[0], name), getattr(part.runs[0], name)
            if ours != theirs:
                said = f"its {name} is {theirs!r} and that of {first} is {ours!r}"
                raise ArgumentError("bench join", "RESULTS", str(path), said)
        for set_, case in part.done:
            if (set_, case) in places:
                said = f"it has measured {case!r} of the set {set_!r}, and so has {places[set_, case]}"
                raise ArgumentError("bench join", "RESULTS", str(path), said)
            places[set_, case] = path
        before = len(found.runs)
        found.runs += part.runs
        found.rows += [msgspec.structs.replace(row, run=row.run + before) for row in part.rows]
        found.first_calls += [msgspec.structs.replace(call, run=call.run + before) for call in part.first_calls]
        asked |= dict.fromkeys(part.runs[-1].asked)
    found.runs[-1] = msgspec.structs.replace(found.runs[-1], asked=tuple(asked))
    return found


_QUERY = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"


def provenance(device: str, program: str = "portattn") -> dict[str, str]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv, program), "commit": source_commit_text(Path(portattn.__file__).parent),
        "chip": "CPU" if device == "cpu" else chip_name(torch.device(device)), "torch": str(torch.__version__),
        "toolchain": str(installed_toolchain()), "python": platform.python_version(),
    }  # fmt: skip


def this_run(
    *, sets: tuple[str, ...], asked: tuple[tuple[str, str], ...], rounds: int, backend: str, core: bool,
    only_host: bool, peers: Mapping[str, str], libraries: Mapping[str, str], ceilings: Ceilings | None,
    commit: str = "",
) -> BenchRun:  # fmt: skip
    """Return the BenchRun of this process; an empty `commit` is replaced by git's."""
    where = timed_device() or torch.device("cpu")
    found, module = provenance(where.type), getattr(torch, where.type)
    properties = module.get_device_properties(where.index) if hasattr(module, "get_device_properties") else None
    state, driver = DeviceProbe().read()
    versions = {
        "python": found["python"], "torch": found["torch"], "cuda": str(torch.version.cuda or ""),
        "rocm": str(torch.version.hip or ""), "cudnn": str(torch.backends.cudnn.version() or ""), "driver": driver,
    } | {n: version(p.distribution) for n, p in PEERS.items() if p.distribution and peers.get(n) == "here"}  # fmt: skip
    device = {
        **{name: getattr(properties, field, None) for name, field in PROPERTIES.items()},
        "host": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
    return BenchRun(
        date=found["date"], command=found["command"], commit=commit or found["commit"], portattn=portattn.__version__,
        kernels=kernel_source_digest(), chip=found["chip"], target=str(this_target()), toolchain=found["toolchain"],
        device=device, versions={name: text for name, text in versions.items() if text}, peers=dict(peers),
        libraries=dict(libraries), sets=sets, cells=len(asked), asked=asked, rounds=rounds, backend=backend, core=core,
        only_host=only_host, ceilings=ceilings, state=state,
    )  # fmt: skip


def command(argv: list[str], program: str = "portattn") -> str:
    """Return the command line with absolute paths reduced to file names: results are read elsewhere."""
    shown = [Path(word).name if word.startswith("/") else word for word in argv[1:]]
    return shlex.join([*program.split(), *shown])


class DeviceProbe:
    """Ask nvidia-smi in a process of its own: a probe begun before the rounds tells clocks and power during them."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        tool = shutil.which("nvidia-smi")
        if tool and torch.version.cuda:
            uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
            which = ["-i", f"GPU-{uuid}"] if uuid else []
            try:
                self._child = subprocess.Popen(
                    [tool, *which, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                )  # fmt: skip
            except OSError:
                self._child = None

    def read(self) -> tuple[DeviceState | None, str]:
        if self._child is None:
            return None, ""
        try:
            text, _ = self._child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return None, ""
        return parse_device_state(text) or (None, "")


def parse_device_state(text: str) -> tuple[DeviceState, str] | None:
    """Parse nvidia-smi's answer, in which a missing figure is [N/A]."""
    lines = text.strip().splitlines()
    words = [word.strip() for word in lines[0].split(",")] if lines else []
    if len(words) != len(_QUERY.split(",")):
        return None
    sm, memory, power, limit, temperature = (_number(word) for word in words[:-1])
    return (
        DeviceState(sm_mhz=sm, memory_mhz=memory, power_w=power, power_limit_w=limit, temperature_c=temperature),
        words[-1],
    )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
