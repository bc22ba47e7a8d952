"""A bundle: compiled launches with their memory, for a machine that has the chip, and its results, judged here.

A bundle is a folder of `manifest.json`, `launches.txt` (the same for the runner), code objects and their assembly, the
memory before the launches, and expected results in float64. A runner (Executor.runner) writes `results.bin` into it:

    portattn-results 1 BUNDLE
    author NAME <MAIL>
    date 2026-11-30T12:00:00Z
    device gfx942:sramecc+:xnack-
    chip AMD Instinct MI300X
    runtime 70100000
    model NAME                    of an emulator; empty on a chip
    cell ID BYTES                 each cell's memory after its launches, in bytes
    end
    …                             the memory of all cells, in their order
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import io
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from portattn.errors import DataError
from portattn.files import LARGEST_GIVEN, read_limited
from portattn.launch import KernelCall, has_rows, kernel_calls, signature
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.tensors import POINTER_ALIGNMENT
from portattn.testing.executor import Executor, reply_numerics
from portattn.testing.findings import Numerics
from portattn.testing.oracle import oracle
from portattn.testing.random_writing import expected_cache
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import call_of, gradients, judge, judge_gradients, plan_of
from portattn.worker.client import Reply, Worker

MANIFEST, LAUNCHES, RESULTS = "manifest.json", "launches.txt", "results.bin"
FORMAT = 1
AUTHOR = re.compile(r"[^<>\x00-\x1f]*[^<>\s\x00-\x1f] <[^<>@\s]+@[^<>@\s]+>")
_LINKED = b"\x03\x00"  # type of an ELF file that a loader takes: ET_DYN; a relocatable one is 1


class BundleTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor in the cell's memory: its buffer (-1: no bytes), byte offset, dtype, shape, and strides in elements."""

    buffer: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class BundleArgument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel's argument: Triton's type, and a tensor or a number."""

    name: str
    type: str
    tensor: BundleTensor | None = None
    value: int | float = 0


class BundleLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One launch. lds: bytes of dynamic scratchpad memory; threads: of a work-group."""

    function: str
    symbol: str
    code: str
    assembly: str
    grid: tuple[int, ...]
    threads: int
    waves: int
    lds: int
    arguments: tuple[BundleArgument, ...]


class BundleResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A result's place, the .npy file of its float64 reference, and the largest error that is allowed."""

    tensor: BundleTensor
    expected: str
    budget: float


class BundleCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    target: str
    toolchain: str
    request: dict[str, Any]  # of the small problem (testing/verdict.py)
    buffers: tuple[tuple[str, int], ...]  # file and bytes of each, as the launches find them
    launches: tuple[BundleLaunch, ...]
    results: dict[str, BundleResult]  # of chosen tokens and written logits there are none: `judge` alone knows them

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.buffers)


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """files: size and SHA-256 of every other file; id: a digest of these; run, records: lines of results.jsonl."""

    format: int = FORMAT
    id: str
    run: Any
    records: tuple[Any, ...]
    cells: tuple[BundleCell, ...]
    files: dict[str, tuple[int, str]]


class RunnerResults(NamedTuple):
    """The head of a runner's results, and each cell's memory."""

    author: str
    date: datetime.datetime
    device: str
    chip: str
    runtime: str
    model: str
    memory: dict[str, bytes]


class _Prepared(NamedTuple):
    call: Call
    launches: list[KernelCall]
    out: torch.Tensor
    lse: torch.Tensor | None
    storages: dict[int, torch.UntypedStorage]  # by address, in the order of the arguments


def _prepare(request: Mapping[str, Any], target: Target) -> _Prepared:
    with nan_filled_memory(), torch.no_grad():
        plan, call = plan_of(dict(request), target), call_of(dict(request))
        launches, out, lse = kernel_calls(plan, call, target.arch.cores)
    storages: dict[int, torch.UntypedStorage] = {}
    for launch in launches if has_rows(plan) else ():
        for value in launch.arguments.values():
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes():
                storages.setdefault(value.untyped_storage().data_ptr(), value.untyped_storage())
    return _Prepared(call, launches if has_rows(plan) else [], out, lse, storages)


def _bytes(storage: torch.UntypedStorage) -> np.ndarray[Any, Any]:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _place(tensor: torch.Tensor, storages: Mapping[int, torch.UntypedStorage]) -> BundleTensor:
    start = tensor.untyped_storage().data_ptr()
    return BundleTensor(
        buffer=list(storages).index(start) if start in storages else -1, offset=tensor.data_ptr() - start,
        dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), strides=tensor.stride(),
    )  # fmt: skip


def export(
    executor: Executor, plan: Plan, target: Target, compiler: Worker, name: str
) -> tuple[BundleCell, dict[str, bytes]] | str:
    """Compile a core plan's small problem; return its cell and files, whose names begin with `name`, or a refusal."""
    made = executor.compiled(plan, executor.problems(plan)[0], target, compiler, "object")
    if isinstance(made, Numerics):
        return made.reason
    request, pieces = made
    ready, files, launches = _prepare(request, target), dict[str, bytes](), []
    if not ready.launches:
        return "nothing is launched: the small problem has no rows"
    if any(address % POINTER_ALIGNMENT for address in ready.storages):
        return f"a tensor's memory does not begin at a multiple of {POINTER_ALIGNMENT} bytes"
    for number, (launch, piece) in enumerate(zip(ready.launches, pieces, strict=True)):
        code = base64.b64decode(piece["object"])
        if code[16:18] != _LINKED:
            return f"{target.toolchain} did not link the code object of {launch.function}"
        stem, types = f"{name}-{number}-{launch.function}", signature(launch).types
        files |= {f"{stem}.co": code, f"{stem}.s": piece["text"].encode()}
        launches.append(BundleLaunch(
            function=launch.function, symbol=piece["symbol"], code=f"{stem}.co", assembly=f"{stem}.s",
            grid=(*launch.grid, 1, 1)[:3], threads=piece["waves"] * target.arch.warp_size, waves=piece["waves"],
            lds=piece["lds"], arguments=tuple(_argument(launch, n, types[n], ready.storages) for n in types),
        ))  # fmt: skip
    buffers = {f"{name}-{i}.in": _bytes(storage).tobytes() for i, storage in enumerate(ready.storages.values())}
    results = {}
    for result, (tensor, expected, budget) in _expected(ready, request).items():
        file = f"{name}-{result}.npy"
        np.save(array := io.BytesIO(), expected.double().numpy())
        files[file] = array.getvalue()
        results[result] = BundleResult(tensor=_place(tensor, ready.storages), expected=file, budget=budget)
    cell = BundleCell(
        id=name, target=target.name, toolchain=str(target.toolchain), request=request, launches=tuple(launches),
        buffers=tuple((file, len(data)) for file, data in buffers.items()), results=results,
    )  # fmt: skip
    return cell, files | buffers


def _argument(launch: KernelCall, name: str, kind: str, storages: Mapping[int, torch.UntypedStorage]) -> BundleArgument:
    value = launch.arguments[name]
    if isinstance(value, torch.Tensor):
        return BundleArgument(name=name, type=kind, tensor=_place(value, storages))
    return BundleArgument(name=name, type=kind, value=value)


def _precision(request: Mapping[str, Any]) -> str:
    return str(request["lowering"].get("dot_precision", "ieee"))


def _expected(ready: _Prepared, request: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Return each result's tensor, its float64 reference and its error budget."""
    call, precision = ready.call, _precision(request)
    if call.problem.writes:
        cache = {} if call.result is not None else expected_cache(call)
        return {name: (getattr(call, name), expected, 0.0) for name, expected in cache.items()}
    if call.problem.backward:
        assert call.grad_out is not None
        exact = gradients(call, call.grad_out, call.grad_lse)
        found = {name: getattr(call, f"grad_{name}") for name in ("q", "k", "v")}
        facts = judge_gradients(call, found, call.grad_out, call.grad_lse, precision)
        return {f"grad_{n}": (found[n], exact[n], facts[f"budget_{n}"]) for n in found}
    facts = judge(call, ready.out, ready.lse, precision)
    out, lse = oracle(call)
    both = {"out": (ready.out, out, facts["budget"])}
    return both if ready.lse is None else both | {"lse": (ready.lse, lse, facts["lse_budget"])}


def files(
    run: Any, records: tuple[Any, ...], cells: tuple[BundleCell, ...], data: Mapping[str, bytes], runner: Path
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and bytes of every file of a bundle, the manifest last."""
    data = {**data, runner.name: runner.read_bytes()}
    listed = {name: (len(data[name]), hashlib.sha256(data[name]).hexdigest()) for name in sorted(data)}
    digest = _digest(cells, listed)
    text = "\n".join((f"bundle {digest}", *(line for cell in cells for line in _lines(cell)), "end\n")).encode()
    listed[LAUNCHES] = len(text), hashlib.sha256(text).hexdigest()
    yield from data.items()
    yield LAUNCHES, text
    manifest = BundleManifest(id=digest, run=run, records=records, cells=cells, files=listed)
    yield MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def _digest(cells: tuple[BundleCell, ...], listed: Mapping[str, tuple[int, str]]) -> str:
    named = {name: value for name, value in listed.items() if name != LAUNCHES}  # which holds the digest
    return hashlib.sha256(msgspec.json.encode([cells, named], order="sorted")).hexdigest()[:16]


def _lines(cell: BundleCell) -> Iterator[str]:
    """Yield a cell's lines for the runner: buffers, and launches with an argument a line (p: pointer, v: 8 bytes)."""
    yield f"cell {cell.id} {cell.target.partition(':')[2]} {cell.bytes}"
    yield from (f"buffer {file} {size}" for file, size in cell.buffers)
    for launch in cell.launches:
        grid = " ".join(map(str, launch.grid))
        yield f"launch {launch.code} {launch.symbol} {grid} {launch.threads} {launch.lds} {len(launch.arguments)}"
        for argument in launch.arguments:
            if argument.tensor is not None:
                yield f"p {argument.tensor.buffer} {argument.tensor.offset}"
            else:
                packed = struct.pack("<f" if argument.type.startswith("f") else "<q", argument.value)
                yield f"v {int.from_bytes(packed, 'little')} 0"
    yield "run"


def read(folder: Path) -> BundleManifest:
    """Read a bundle's manifest, and check every file against it. Raises DataError."""
    path = folder / MANIFEST
    try:
        found = msgspec.json.decode(read_limited(path, LARGEST_GIVEN), type=BundleManifest)
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(path, None, f"is not a bundle's manifest: {error}") from None
    if found.format != FORMAT:
        raise DataError(path, None, f"format {found.format}; this portattn reads format {FORMAT}")
    for name, (size, digest) in found.files.items():
        file = folder / name
        try:
            data = read_limited(file, LARGEST_GIVEN) if Path(name).name == name else b""
        except OSError as error:
            raise DataError(file, None, f"cannot be read, and the bundle has it: {error.strerror}") from None
        if len(data) != size:
            raise DataError(file, None, f"has {len(data)} bytes, and {size} when the bundle was made")
        if hashlib.sha256(data).hexdigest() != digest:
            raise DataError(file, None, "is not as the bundle was made: its SHA-256 differs")
    if found.id != _digest(found.cells, found.files):
        raise DataError(path, None, "is not as the bundle was made: its id is not that of its cells and files")
    return found


def read_results(path: Path, bundle: BundleManifest) -> RunnerResults:
    """Read a runner's results of a bundle. Raises DataError: of another bundle, unsigned, cut, or of another chip."""
    try:
        head, _, data = read_limited(path, LARGEST_GIVEN).partition(b"\nend\n")
        lines = [line.partition(" ") for line in head.decode().splitlines()]
        said = {key: value.strip() for key, _, value in lines}
        date = datetime.datetime.fromisoformat(said["date"].replace("Z", "+00:00"))
        sizes = dict(value.split() for key, _, value in lines if key == "cell")
        head_of = [said[name] for name in ("author", "device", "chip", "runtime", "model")]
    except OSError as error:
        raise DataError(path, None, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError) as error:
        raise DataError(path, None, f"is not a runner's results: {error}") from None
    author, device, chip, runtime, model = head_of
    if said.get("portattn-results") != f"{FORMAT} {bundle.id}":
        raise DataError(path, 1, f"is of bundle {said.get('portattn-results')!r}, not of '{FORMAT} {bundle.id}'")
    if not AUTHOR.fullmatch(author):
        raise DataError(path, None, f"author {author!r} must be `Name <mail>`")
    wanted = {cell.id: str(cell.bytes) for cell in bundle.cells}
    if sizes != {name: wanted.get(name) for name in sizes} or len(data) != sum(map(int, sizes.values())):
        limit = f"has {len(data)} bytes of memory; {sum(map(int, wanted.values()))} are all cells'"
        raise DataError(path, None, f"{limit}, and its head lists {len(sizes)} of {len(wanted)} cells")
    chips = {cell.target.partition(":")[2] for cell in bundle.cells if cell.id in sizes}
    if not sizes or chips != {device.partition(":")[0]}:
        raise DataError(path, None, f"ran on {device!r}, and its cells are of {', '.join(sorted(chips)) or 'no chip'}")
    memory, begin = {}, 0
    for name, size in sizes.items():
        memory[name] = data[begin : begin + int(size)]
        begin += int(size)
    return RunnerResults(author, date, device, chip, runtime, model, memory)


def judge_results(cell: BundleCell, memory: bytes, folder: Path, where: str) -> Numerics:
    """Judge a cell's memory after its launches like an executor's run. Raises DataError if inputs cannot be remade."""
    ready = _prepare(cell.request, Registry.load().target(cell.target, cell.toolchain))
    begin = 0
    for (file, size), storage in zip(cell.buffers, ready.storages.values(), strict=True):
        own = _bytes(storage)
        if own.tobytes() != (folder / file).read_bytes():
            text = "the call's random numbers differ here: judge it with the torch of the machine that exported it"
            raise DataError(folder / file, None, text)
        own[:] = np.frombuffer(memory, np.uint8, size, begin)
        begin += size
    facts = judge(ready.call, ready.out, ready.lse, _precision(cell.request))
    problem = msgspec.convert(cell.request["problem"], Problem)
    return reply_numerics(Reply(outcome="ok", facts=dict(facts)), where, problem)
