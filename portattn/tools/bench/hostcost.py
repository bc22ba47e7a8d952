"""What a call costs the host, as a serving loop pays it: the same call again, lengths never seen before, many shapes in
turn, other tiles and splits, and the first call of a class of shapes; and as a training loop does, with its backward.

    python -m portattn.tools.bench.hostcost --seconds 150 --out host.json --markdown host.md [--peer-libs FOLDER]

Each call is timed by itself, from before it to its return, with inputs that are there before. The device's queue is
emptied every few calls, outside of the times; Python's garbage collector rests meanwhile. Nothing is subtracted.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

import portattn
from portattn.api import dispatch
from portattn.errors import CompileWarning
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.bench import peers
from portattn.tools.bench.contenders import OURS, Contender, arguments
from portattn.tools.bench.gate import FAILURES, reason
from portattn.tools.bench.hostshapes import PARTS, WARM, CallSequence, CallSizes, workloads
from portattn.tools.bench.peers.libraries import load
from portattn.tools.bench.provenance import command
from portattn.tools.bench.tensors import Tensors
from portattn.tools.number_ranges import LONGEST, FiniteRange
from portattn.tools.source_commit import source_commit_text

QUEUE = 16  # calls until the host waits for the device: fewer than its queue takes
CALLS = 400  # timed calls of a line at most
LEAST_S = 0.3  # of a line, however little time is left
# Peers that are compared: torch's choice and its cuDNN and FlashAttention-2, FlashAttention's packages, vllm's build.
PEERS = ("sdpa", "torch", "fa3", "flash_attn", "flash_attn_interface")
LEFT_OUT = ("sdpa-math", "sdpa-efficient")
PREPARED = "portattn prepared"


class HostCost(msgspec.Struct, frozen=True, kw_only=True):
    """One line: microseconds of host time a call.

    part      a key of PARTS
    name      the workload
    contender who is called
    calls     how many were timed
    compiled  kernels that portattn compiled or loaded in them: 0, or the line is not what it says
    first_us  of the first timed call
    path      of portattn's own: the last plan's
    failed    why there are no figures
    """

    part: str
    name: str
    contender: str
    calls: int = 0
    median_us: float | None = None
    p99_us: float | None = None
    most_us: float | None = None
    first_us: float | None = None
    compiled: int = 0
    path: str = ""
    failed: str = ""


class HostRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run: where, when, and its lines. left_out: lines for which there was no time."""

    date: str
    command: str
    commit: str
    chip: str
    torch: str
    toolchain: str
    python: str
    seconds: float
    libraries: dict[str, str]
    lines: list[HostCost]
    left_out: list[str]


def measure(
    part: str, name: str, contender: str, prepare: Callable[[int], Callable[[], Any]], calls: int, seconds: float
) -> HostCost:
    """Time calls of a contender: `prepare(i)` makes the i-th, untimed. At least one, then until the time is over."""
    times: list[float] = []
    end = time.monotonic() + seconds
    with _resting_collector(), _compiles() as compiled:
        while len(times) < calls and (not times or time.monotonic() < end):
            call = prepare(len(times))
            if len(times) % QUEUE == 0:
                _wait()
            begun = time.perf_counter_ns()
            result = call()
            times.append((time.perf_counter_ns() - begun) / 1e3)
            del result, call
        _wait()
    made = portattn.last_plan()
    ordered = sorted(times)
    return HostCost(
        part=part, name=name, contender=contender, calls=len(times), median_us=round(statistics.median(times), 2),
        p99_us=round(ordered[math.ceil(0.99 * len(ordered)) - 1], 2), most_us=round(ordered[-1], 2),
        first_us=round(times[0], 2), compiled=len(compiled),
        path=made.path if made is not None and contender.startswith(OURS) else "",
    )  # fmt: skip


@contextlib.contextmanager
def _resting_collector() -> Iterator[None]:
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def _compiles() -> Iterator[list[str]]:
    """The warnings of kernels that are compiled inside the block: the monitor tells."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        portattn.monitor()  # no setting: calls under another setting are other calls
        try:
            yield found
        finally:
            portattn.monitor(False)
    found += [str(one.message) for one in caught if issubclass(one.category, CompileWarning)]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def collected_once() -> Iterator[None]:
    """What is there already is no garbage of the lines inside, each of which collects its own before its times.

    To look through everything that is imported would take longer than a line's calls.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run(
    device: str, seconds: float, sizes: CallSizes, libraries: dict[str, str], calls: int = CALLS,
    warm: int = WARM, told: Callable[[str], None] = lambda line: None,
) -> HostRun:  # fmt: skip
    """Measure all parts within about so many seconds: a line gets its share of the rest; left_out names untimed lines.

    calls, warm  most timed calls of a line, and calls before them: at least as many as the workload needs
    """
    begun = time.monotonic()
    todo = list(_lines(workloads(device, sizes)))
    lines: list[HostCost] = []
    left_out: list[str] = []
    with collected_once():
        for index, (workload, contender) in enumerate(todo):
            left = seconds - (time.monotonic() - begun)
            if left <= 0:
                left_out.append(f"{workload.part} {workload.name}: {contender}")
                continue
            share = max(left / (len(todo) - index), LEAST_S)
            lines.append(_line(workload, contender, calls, warm, share))
            last = lines[-1]
            told(f"{last.part} {last.name:34} {last.contender:26} {last.failed or f'{last.median_us:9.1f} µs'}")
    return HostRun(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command(sys.argv).replace("portattn", "python -m portattn.tools.bench.hostcost", 1),
        commit=source_commit_text(Path(portattn.__file__).parent),
        chip=torch.cuda.get_device_name() if device == "cuda" else "CPU",
        torch=str(torch.__version__), toolchain=str(installed_toolchain()), python=sys.version.split()[0],
        seconds=round(time.monotonic() - begun, 1), libraries=libraries, lines=lines, left_out=left_out,
    )  # fmt: skip


def _lines(made: Sequence[CallSequence]) -> Iterator[tuple[CallSequence, str]]:
    """Ours first in all parts: a run that is short of time leaves out peers."""
    for workload in made:
        yield workload, OURS
    for workload in made:
        for name in _others(workload):
            yield workload, name


def _others(workload: CallSequence) -> list[str]:
    """Who else is timed: the same call by a handle, and the peers that are here; in part f those with gradients. Part e
    is about portattn alone."""
    case, t = workload.case(0), workload.tensors(0)
    if workload.part == "e":
        return []
    ours = [PREPARED] if workload.part == "a" else []
    wanted = [name for name in PEERS if name in peers.DIFFERENTIABLE] if workload.trains else PEERS
    builds = peers.contenders(case, t, wanted)
    names = [name for name in builds if name not in LEFT_OUT]
    if workload.trains:
        return names
    return ours + (names if workload.part in "ab" else [name for name in names if name == "sdpa" or "fa3" in name])


def _line(workload: CallSequence, contender: str, calls: int, warm: int, seconds: float) -> HostCost:
    """One contender's calls of a workload. A failure is its line's: the others are timed all the same."""
    begun = time.monotonic()
    around: Any = contextlib.nullcontext()
    try:
        if contender == OURS:
            prepare = _ours(workload)
        elif contender == PREPARED:
            prepare = _handle(workload)
        else:
            prepare = _peer(workload, contender)
            around = _built(workload, contender, 0).around()
        with around, torch.set_grad_enabled(workload.trains):
            for index in range(max(workload.needed, min(workload.warm_calls, warm))):
                if time.monotonic() - begun > seconds and index >= workload.needed:
                    break
                prepare(-1 - index)()
            _wait()
            left = max(seconds - (time.monotonic() - begun), LEAST_S)
            return measure(workload.part, workload.name, contender, prepare, min(calls, workload.most), left)
    except FAILURES as failure:
        return HostCost(part=workload.part, name=workload.name, contender=contender, failed=reason(failure))


def _ours(workload: CallSequence) -> Callable[[int], Callable[[], Any]]:
    """Calls as a user writes them. Nothing is planned for them before."""

    def prepare(index: int) -> Callable[[], Any]:
        case, t = workload.case(index), workload.tensors(index)
        if workload.trains:
            t = t.leaves()
        op, (args, options) = getattr(portattn, case.op), arguments(case, t)
        if workload.forgets:
            dispatch.forget_plans()

        def forward() -> Any:
            return op(*args, **options)

        return _training(t, forward, like=t.q) if workload.trains else forward

    return prepare


def _handle(workload: CallSequence) -> Callable[[int], Callable[[], Any]]:
    case, t = workload.case(0), workload.tensors(0)
    args, options = arguments(case, t)
    handle = portattn.prepare(case.op, *args, **options)
    out = torch.empty_like(getattr(portattn, case.op)(*args, **options))
    return lambda index: lambda: handle.run(*args, out=out, **options)


def _peer(workload: CallSequence, contender: str) -> Callable[[int], Callable[[], Any]]:
    if not workload.trains:
        return lambda index: _built(workload, contender, index).run

    def prepare(index: int) -> Callable[[], Any]:
        t = workload.tensors(index).leaves()
        built = peers.contenders(workload.case(index), t, PEERS)[contender]()
        return _training(t, lambda: built.shaped(built.run()), like=t.q)

    return prepare


def _training(t: Tensors, forward: Callable[[], Any], like: torch.Tensor) -> Callable[[], Any]:
    """A forward and the gradients of q, k and v. like: of its result's shape."""
    grad_out = torch.ones_like(like)

    def call() -> Any:
        return torch.autograd.grad(forward(), (t.q, t.k, t.v), grad_out)

    return call


def _built(workload: CallSequence, contender: str, index: int) -> Contender:
    return peers.contenders(workload.case(index), workload.tensors(index), PEERS)[contender]()


def markdown(found: HostRun) -> str:
    """The run as tables, a part each."""
    where = (found.chip, f"torch {found.torch}", found.toolchain, f"Python {found.python}", found.date)
    lines = [f"Host time a call, µs. {', '.join(where)}, commit {found.commit[:12]}. `{found.command}`"]
    for part, title in PARTS.items():
        rows = [line for line in found.lines if line.part == part]
        if not rows:
            continue
        lines += ["", f"### {title}", "", "| call | contender | median | p99 | first | calls | compiled | path |"]
        lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for row in sorted(rows, key=lambda row: [r.name for r in rows].index(row.name)):
            if row.median_us is None:
                lines.append(f"| {row.name} | {row.contender} | {row.failed} | | | | | |")
                continue
            figures = f"{row.median_us:.1f} | {row.p99_us:.1f} | {row.first_us:.1f}"
            lines.append(f"| {row.name} | {row.contender} | {figures} | {row.calls} | {row.compiled} | {row.path} |")
    if found.left_out:
        lines += ["", "No time was left for: " + "; ".join(found.left_out)]
    return "\n".join(lines) + "\n"


@click.command()
@click.option(
    "--seconds", type=FiniteRange(min=1, max=LONGEST), default=150, show_default=True, help="for all, compiles included"
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--peer-libs", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", type=click.Path(path_type=Path), help="JSON")
@click.option("--markdown", "table", type=click.Path(path_type=Path))
def main(seconds: float, device: str, folder: Path | None, out: Path | None, table: Path | None) -> None:
    """Time what calls cost the host. Exit status 1: a call of portattn's own failed."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_grad_enabled(False)
    sizes = CallSizes() if device == "cuda" else CallSizes.small()
    found = run(device, seconds, sizes, load(folder), told=lambda line: click.echo(line, err=True))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    if table is not None:
        table.write_text(markdown(found))
    click.echo(markdown(found))
    sys.exit(any(line.failed for line in found.lines if line.contender.startswith(OURS)))


if __name__ == "__main__":
    main()
