"""warmup(): compile, check and cache calls ahead, so that the first real call costs as much as any other."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from portattn.api import dispatch, monitor, signatures
from portattn.api.call import perform
from portattn.api.ops import make_request
from portattn.api.page_table import PageTable
from portattn.api.request import CacheWriter, Request, inputs_of
from portattn.api.shape_polymorphism import CallRecipe
from portattn.compile import ensure_compiled
from portattn.config import Settings, available_cores, current
from portattn.errors import ArgumentError, CompileWarning, PathUnavailable, warn_caller
from portattn.launch import Signature, preload
from portattn.launch.cache import MAX_CLASSES
from portattn.launch.cached_launch import ShapeClass
from portattn.launch.torch_compat import current_accelerator, synchronize
from portattn.schema.ops import PUBLIC, ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem_limits import MAX_SIZE
from portattn.schema.target import Target
from portattn.schema.tensors import CACHE_DTYPE, TORCH_DTYPE, TensorSpec
from portattn.validate.checks import check_dense
from portattn.worker.client import Worker

MOST_SIZES = 1 << 22  # combinations of a spec's sizes: a shape class takes up to a second to look at so many
_SIZE = r"(?:\d+|[A-Za-z_]\w*(?:\+\d+)?)"
_SIZES = rf"\s*(?:{_SIZE}\s*(?:,\s*{_SIZE}\s*)*,?\s*)?"
_NUMBERS = r"\s*(?:\d+\s*(?:,\s*\d+\s*)*,?\s*)?"
_TENSOR = re.compile(rf"(\w+)\[({_SIZES})\](?::({_NUMBERS}))?")
_RANGE = re.compile(r"(\d+)\s*\.\.\s*(\d+)")
_DTYPES = TORCH_DTYPE | {"i32": torch.int32, "i64": torch.int64, "bool": torch.bool} | CACHE_DTYPE
_PAIRS = ("window", "magicpig")  # arguments that are tuples, which JSON writes as lists


class Spec:
    """One spec: an operation and its arguments. Raises ArgumentError for a malformed spec."""

    def __init__(self, place: int, given: Any) -> None:
        self.place, name = place, f"specs[{place}]"
        if not isinstance(given, Mapping):
            raise ArgumentError("warmup", name, given, 'must be a mapping of "op" and the operation\'s arguments')
        self.op = given.get("op")
        if self.op not in PUBLIC:
            raise ArgumentError("warmup", f"{name}.op", self.op, f"must be one of {', '.join(PUBLIC)}")
        rest = {str(key): value for key, value in given.items() if key not in ("op", "sizes")}
        self.given = {key: _argument(f"{name}.{key}", key, value) for key, value in rest.items()}
        self.sizes = _all_sizes(f"{name}.sizes", given.get("sizes"))
        self.kept = {key: one.kept for key, one in self.given.items() if isinstance(one, TensorSpec)}
        self._check_names(name)

    def _check_names(self, name: str) -> None:
        used: set[str] = set()
        for key, value in self.given.items():
            if isinstance(value, str) and value in self.sizes:
                if key not in ROWS[str(self.op)].lengths:
                    raise ArgumentError("warmup", f"{name}.{key}", value, "must not vary: it is no size and no length")
                used.add(value)
            if isinstance(value, TensorSpec):
                used |= value.names
                if unknown := sorted(value.names - set(self.sizes)):
                    limit = "must be a number or one of the spec's sizes" + "".join(f", {size}" for size in self.sizes)
                    raise ArgumentError("warmup", f"{name}.{key}'s size", unknown[0], limit)
        unused = [size for size in self.sizes if size not in used]
        if unused:
            raise ArgumentError("warmup", f"{name}.sizes", unused[0], "must be the size of a tensor, or an argument")

    @functools.cached_property
    def points(self) -> torch.Tensor:
        """All combinations of sizes, (combinations, names) int64; of sizes given as tensors those in their order."""
        columns = [torch.as_tensor(values, dtype=torch.int64, device="cpu") for values in self.sizes.values()]
        listed = any(isinstance(values, torch.Tensor) for values in self.sizes.values())
        return torch.stack(columns, 1) if listed else torch.cartesian_prod(*columns).view(-1, len(columns))

    def at(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.sizes, values, strict=True))

    @property
    def largest(self) -> dict[str, int]:
        return self.at(self.points[-1].tolist()) if self.sizes else {}

    def arguments(self, device: torch.device, sizes: Mapping[str, int]) -> dict[str, Any]:
        found = {name: sizes.get(one, one) if isinstance(one, str) else one for name, one in self.given.items()}
        for name, value in self.given.items():
            if isinstance(value, TensorSpec):
                fill = (1.0,) if name in ("q_scale", "k_scale", "v_scale", "kv_scale") else ()  # a scale must not be 0
                found[name] = value.allocate(device, sizes, *fill)
        return found


def _argument(name: str, argument: str, value: Any) -> Any:
    check_dense("warmup", name, value)
    if argument == "out_dtype" and isinstance(value, str):
        if value not in TORCH_DTYPE:
            raise ArgumentError("warmup", name, value, f"must be one of {', '.join(TORCH_DTYPE)}")
        return TORCH_DTYPE[value]
    if isinstance(value, torch.Tensor) and value.is_meta:
        return TensorSpec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (torch.Tensor, PageTable)) or not isinstance(value, (str, list)):
        return value
    if isinstance(value, list):
        return tuple(_argument(name, argument, item) for item in value) if argument in _PAIRS else value
    found = _TENSOR.fullmatch(value.strip())
    if found is None:
        if "[" in value:
            raise ArgumentError("warmup", name, value, 'describes a tensor as "bf16[8,32,1,128]"')
        return value
    if found[1] not in _DTYPES:
        raise ArgumentError("warmup", name, value, f"must be of a type among {', '.join(_DTYPES)}")
    shape = tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^\s,]+", found[2]))
    strides = None if found[3] is None else tuple(map(int, re.findall(r"\d+", found[3])))
    if strides is not None and len(strides) != len(shape):
        raise ArgumentError("warmup", name, value, f"must have as many strides as its {len(shape)} axes")
    return TensorSpec(shape, strides, _DTYPES[found[1]])


def _all_sizes(name: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ArgumentError("warmup", name, given, 'must be a mapping of names to sizes, as {"S": "1..4096"}')
    for key in given:
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_]\w*", key):
            raise ArgumentError("warmup", f"{name}'s name", key, "must be a letter, or several with digits and _")
    if given and all(isinstance(value, torch.Tensor) for value in given.values()):
        return _combinations(name, given)
    found = {key: _values(f"{name}.{key}", value) for key, value in given.items()}
    count = math.prod(map(len, found.values()))
    if count > MOST_SIZES:
        limit = f"must be at most {MOST_SIZES} combinations: leave some out of a list, or make two specs"
        raise ArgumentError("warmup", name, count, limit)
    return found


def _combinations(name: str, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = next(iter(given.values()))
    for key, value in given.items():
        limit = ""
        if value.ndim != 1 or value.dtype not in (torch.int64, torch.int32) or value.is_meta:
            limit = "must be a vector of int64 or int32"
        elif bool((value < 0).any() | (value > MAX_SIZE).any()):
            limit = f"must have numbers in 0..{MAX_SIZE}"
        elif len(value) != len(first):
            limit = f"must be as long as the others, {len(first)}"
        if limit:
            raise ArgumentError("warmup", f"{name}.{key}", value, limit)
    return dict(given)


def _values(name: str, given: Any) -> tuple[int, ...]:
    if isinstance(given, str):
        bounds = _RANGE.fullmatch(given.strip())
        if bounds is None or not int(bounds[1]) <= int(bounds[2]) <= MAX_SIZE:
            raise ArgumentError("warmup", name, given, 'must be a range, as "1..4096", which has both ends')
        given = range(int(bounds[1]), int(bounds[2]) + 1)
    values = given if isinstance(given, (list, tuple, range)) else [None]
    if len(values) > MOST_SIZES:
        raise ArgumentError("warmup", name, given, f"must be at most {MOST_SIZES} sizes")
    if not values or any(type(value) is not int or not 0 <= value <= MAX_SIZE for value in values):
        limit = f'must be integers from 0 on, or a range, as "1..4096", up to {MAX_SIZE}'
        raise ArgumentError("warmup", name, given, limit)
    return tuple(sorted(set(values)))


Say = Callable[[str], None]
MOST_PLANS = 1024  # of a spec: at 50 ms each a minute
MOST_JOBS = 8


class WarmupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one spec, or of one of its shape classes.

    Attributes:
        spec: its place among the specs; a spec with varying sizes has a report for each shape class
        call: the problem, in words, and the sizes that vary
        path: the path that it takes
        key: of its kernels' specialisation, as in plans and records; empty on a vendor's or the reference path
        way: how it is launched from now on: "native" (C), "driver" (Python, through ctypes), "compiled" (Triton's
            launcher of the cached kernel), "triton" (Triton's own way); empty where no kernel of portattn's runs
        why: why it is not "native"
        compiled: whether a child process compiled a kernel now that it runs
        loaded: kernels that this process compiled or loaded from Triton's cache for it
        seconds: that it took here, after its compile in a child process
        cached: whether the launch cache holds the next call like it
        sizes: why it does not hold calls of other sizes of the same shape class; empty where it does
        failed: why it could not be warmed up
    """

    spec: int
    call: str = ""
    path: str = ""
    key: str = ""
    way: str = ""
    why: str = ""
    compiled: bool = False
    loaded: tuple[str, ...] = ()
    seconds: float = 0.0
    cached: bool = False
    sizes: str = ""
    failed: str = ""


class Warmup(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `warmup`. compile_seconds: of all compiles in child processes, side by side; seconds: in all."""

    specs: tuple[WarmupResult, ...]
    compile_seconds: float
    seconds: float

    @property
    def failed(self) -> tuple[WarmupResult, ...]:
        return tuple(one for one in self.specs if one.failed)


def warmup(
    specs: Sequence[Mapping[str, Any]],
    *,
    device: str | torch.device | None = None,
    jobs: int | None = None,
    say: Say | None = None,
) -> Warmup:
    """Prepare calls to come: compile and load their kernels, run canaries as set, and keep how they are launched.

    Args:
        specs: one mapping a call: "op", and the operation's own arguments by name. A tensor is given as itself, as a
            meta tensor, or described: "bf16[8,32,1,128]", with strides "bf16[8,32,1,128]:4096,128,128,1"; types are
            fp16, bf16, fp32, i32, i64, bool, and formats of caches (e4m3, int8). Given tensors are used, never written
            (an operation that fills a cache gets no slot for its tokens), so that a cache that fills the device need
            not be there twice. Described tensors are allocated during their own warm-up, holding zeros: sequences of no
            keys. Their sizes can be names, for which "sizes" has a list, a range, or both ends of one: "k":
            "bf16[8,8,S,128]" with "sizes": {"S": "1..65536"}. An argument that is a length can be such a name, too
        device: of described tensors; None for the current accelerator, or else the CPU
        jobs: child processes that compile side by side (setting `isolate`); None: half of the cores, up to MOST_JOBS
        say: called with a line of text about each step

    Afterwards a call with the same call key (arguments, types, alignment to 16 bytes, settings) and shape class neither
    compiles nor waits for the device, and can be captured in a CUDA graph at its first time. `sizes` of the report says
    why a class has the spec's shapes alone. The monitor is armed: a later compile warns (`portattn.monitor`).

    Each shape class of a spec is run once. A class that no path can run, or whose tensors do not fit the device, is
    reported with `failed`, with a CompileWarning.

    Returns:
        A Warmup: for each spec and shape class the kernels compiled, loaded and cached, or the reason why not.

    Raises:
        ArgumentError: A spec is malformed. Nothing is compiled.

    Examples:
        >>> import portattn
        >>> tensors = {"q": "fp32[B,8,1,64]", "k_cache": "fp32[B,2,S,64]", "v_cache": "fp32[B,2,S,64]"}
        >>> lengths = {"seqlens_k": "i32[B]", "sizes": {"B": [1, 2, 4, 8], "S": "1..512"}}
        >>> report = portattn.warmup([{"op": "decode_attention"} | tensors | lengths], device="cpu")
        >>> print(report.specs[0].call, report.specs[0].path)
        decode_attention q (8,8,1,64) kv (8,2,512,64) fp32 seqlens_k; B = 8, S = 512 sdpa
        >>> portattn.monitor(False)  # warmup armed it, and nothing was compiled since
        ()
    """
    begun, say = time.perf_counter(), say or (lambda text: None)
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ArgumentError("warmup", "jobs", jobs, "must be None or an integer from 1 on")
    if not isinstance(specs, Sequence) or isinstance(specs, str):
        raise ArgumentError("warmup", "specs", specs, "must be a list of mappings")
    where = current_accelerator() if device is None else _device(device)
    read = [Spec(place, spec) for place, spec in enumerate(specs)]
    made, loading = list[_Warming](), False
    with monitor.silence():
        with contextlib.ExitStack() as beside:
            for spec in read:
                say(f"planning {spec.place + 1} of {len(read)}")
                for one in _classes(list(made), spec, where, say):
                    made.append(one)
                    if one.launches and not loading:
                        beside.enter_context(preload.meanwhile(one.target.backend, current().cache_dir))
                        loading = True
        compile_seconds = _compile(made, jobs, say)
        loaded = monitor.specialisations()
        for place, one in enumerate(made):
            say(f"running {place + 1} of {len(made)}: {one.call}")
            one.run()
            before, loaded = loaded, monitor.specialisations()
            one.loaded = tuple(name for name, _ in sorted(loaded - before))
    monitor.arm()
    report = Warmup(
        specs=tuple(one.report() for one in made), compile_seconds=round(compile_seconds, 3),
        seconds=round(time.perf_counter() - begun, 3),
    )  # fmt: skip
    for failed in report.failed:
        text = f"warmup: specs[{failed.spec}] ({failed.call or read[failed.spec].op}): {failed.failed}"
        warn_caller(text, CompileWarning)
    return report


class _Warming:
    def __init__(self, spec: Spec, sizes: Mapping[str, int], device: torch.device) -> None:
        self.spec, self.sizes, self.device = spec, dict(sizes), device
        self.call, self.failed, self.why, self.compiled, self.cached, self.seconds = "", "", "", False, False, 0.0
        self.loaded: tuple[str, ...] = ()
        self.made: Plan | None = None
        self.launches: list[Signature] = []
        self.settings: Settings | None = None
        self.recipe: CallRecipe | None = None
        self.shape: ShapeClass | None = None
        self._layouts: list[TensorSpec | list[int]] = []
        self._cached: Any = None

    @property
    def words(self) -> str:
        return ", ".join(f"{name} = {size}" for name, size in self.sizes.items())

    def request(self) -> Request:
        arguments = self.spec.arguments(self.device, self.sizes)
        described = {id(arguments[name]): one for name, one in self.spec.given.items() if isinstance(one, TensorSpec)}
        try:
            made = make_request("warmup", self.spec.op, (), arguments)
        except TypeError as error:  # an unknown or a missing argument
            raise ArgumentError("warmup", f"specs[{self.spec.place}]", sorted(arguments), str(error)) from None
        distinct = {id(one): one for one in made.tensors.values() if isinstance(one, torch.Tensor)}.values()
        self._layouts = [described.get(id(one), [*one.shape, *one.stride()]) for one in distinct]
        return made

    def plan(self) -> None:
        """Plan the call and describe its launches. Raises ArgumentError on a malformed spec."""
        with self._failures():
            request = self.request()
            call = request.build()
            at = f"; {self.words}" if self.sizes else ""
            self.call, self.settings = f"{call.problem}{at}", request.settings
            caching = CacheWriter(request) if self.sizes and request.cacheable() else None
            self.made, launches, self.recipe, self.shape = dispatch.trace_call(call, request.settings, caching)
            self.launches = [ensure_compiled.signature_of(launch) for launch in launches]

    def covers(self, points: torch.Tensor, shape: ShapeClass | None = None) -> torch.Tensor:
        """Return which sizes (calls, names) are of its shape class, or of another spec's: a bool tensor."""
        shape = self.shape if shape is None else shape
        assert shape is not None
        sizes, columns = self.spec.at(points.unbind(1)), list[Any]()
        for layout in self._layouts:
            for numbers in layout.layout(sizes) if isinstance(layout, TensorSpec) else (layout,):
                columns += numbers
        lengths = [self.spec.given.get(name) for name in ROWS[str(self.spec.op)].lengths]
        columns += [sizes[one] if isinstance(one, str) else one for one in lengths if one is not None]
        found: torch.Tensor = shape.trace.program(()).holding(columns)
        return found

    @property
    def target(self) -> Target:
        device = next((one.device for one in self.spec.given.values() if isinstance(one, torch.Tensor)), self.device)
        known = device.type == "cpu" or device.index is not None
        index = device.index if known else int(getattr(torch, device.type).current_device())
        return dispatch.detect_target(device.type, index)[0]

    def run(self) -> None:
        if self.failed:
            return
        begun = time.perf_counter()
        with self._failures():
            request = self.request()
            request.known_trace = None if self.recipe is None or self.shape is None else (self.recipe, self.shape)
            if ROWS[request.op].writes:
                signatures.nowhere(request)
                signatures.carry_out(request)
            else:
                perform(request)
            if request.cacheable():
                inputs = tuple(inputs_of(request))
                self._cached = next((one for one in request.kind().classes if tuple(one.inputs) == inputs), None)
            self.cached, self.made = self._cached is not None, dispatch.last_plan()
            synchronize(request.tensors["q"].device)
        self.seconds = time.perf_counter() - begun

    def needs_compile(self) -> bool:
        made, settings = self.made, self.settings
        return made is not None and settings is not None and ensure_compiled.unseen(made, self.launches, settings)

    @property
    def code(self) -> str:
        """Return the key of its compile record."""
        return "" if self.made is None else ensure_compiled.code_key(self.made, self.launches)

    @contextlib.contextmanager
    def _failures(self) -> Any:
        try:
            yield
        except ArgumentError as error:
            if error.op == "warmup":
                raise
            name = f"specs[{self.spec.place}].{error.argument}"
            raise ArgumentError("warmup", name, error.value, error.limit) from error
        except PathUnavailable as error:
            self.failed = str(error)
        except torch.OutOfMemoryError as error:
            hint = "give tensors that are there already in place of described ones"
            self.failed = f"out of memory: {ensure_compiled.first_line(str(error))}; {hint}"

    def report(self) -> WarmupResult:
        cached = self._cached
        direct, key = None if cached is None else cached.direct, self.made.key if self.made else ""
        return WarmupResult(
            spec=self.spec.place, call=self.call, path=self.made.path if self.made else "", key=key,
            way="" if cached is None else "triton" if direct is None else direct.way,
            why="" if direct is None else direct.reason, compiled=self.compiled and bool(key), loaded=self.loaded,
            seconds=round(self.seconds, 3), cached=self.cached, failed=self.failed,
            sizes=self.why or ("" if cached is None else cached.why_fixed),
        )  # fmt: skip


def _compile(made: Sequence[_Warming], jobs: int | None, say: Say) -> float:
    begun, wanted = time.perf_counter(), dict[str, list[_Warming]]()
    for one in made:
        if one.launches and one.needs_compile():
            wanted.setdefault(one.code, []).append(one)
    if not wanted:
        return 0.0
    count = min(jobs or min(max(available_cores() // 2, 1), MOST_JOBS), len(wanted))
    say(f"compiling {len(wanted)} in {count} child processes")
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(ensure_compiled.new_worker()) for _ in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        for done, same in enumerate(pool.map(functools.partial(_compile_one, free), wanted.values())):
            say(f"compiled {done + 1} of {len(wanted)}: {same[0].call}")
            for one in same:
                one.compiled = True
    return time.perf_counter() - begun


def _compile_one(free: list[Worker], same: list[_Warming]) -> list[_Warming]:
    worker, first = free.pop(), same[0]
    try:
        assert first.made is not None
        assert first.settings is not None
        ensure_compiled.ahead(first.made, first.launches, first.target, first.settings, worker)
    finally:
        free.append(worker)
    return same


def _classes(before: Sequence[_Warming], spec: Spec, device: torch.device, say: Say) -> Iterator[_Warming]:
    """Plan a spec's shape classes; of classes beyond the launch cache's room, yield those with kernels of their own."""
    if spec.sizes and not len(spec.points):  # no combination
        return
    keys, count = set[str](), 0
    left, sizes = spec.points if spec.sizes else torch.zeros(0, 0), spec.largest
    while count == 0 or len(left):
        last, count = _Warming(spec, sizes, device), count + 1
        if count % MAX_CLASSES == 0:
            say(f"planned {count} classes of specs[{spec.place}]; {len(left)} sizes are left")
        try:
            last.plan()
        except ArgumentError as error:
            if count == 1:
                raise
            last.failed = str(error).removeprefix("warmup: ")  # sizes that do not go together
        if count > MAX_CLASSES:
            last.why = f"more than {MAX_CLASSES} classes of sizes: from {last.words} on they are forgotten"
        if count <= MAX_CLASSES or last.code not in keys:
            yield last
        keys.add(last.code)
        empty = last.shape is None and 0 in sizes.values()  # it launches nothing: further sizes can
        if last.failed or not len(left) or not (empty or (last.shape is not None and not last.shape.why)):
            return
        if count == MOST_PLANS:
            last.why = f"one of {MOST_PLANS} classes of sizes: {len(left)} further sizes are planned when they come"
            return
        left = left[(left != torch.tensor([*sizes.values()], device="cpu")).any(1)]  # whatever their class covers
        left = left if empty else left[~last.covers(left)]
        for it in before if count == 1 else ():
            if (it.recipe, it.spec.kept) == (last.recipe, spec.kept) and it.shape and not it.shape.why and len(left):
                left = left[~last.covers(left, it.shape)]
        sizes = spec.at(left[-1 if empty else 0].tolist()) if len(left) else {}


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
        limit = f"must be a device of torch's: {ensure_compiled.first_line(str(error))}"
        raise ArgumentError("warmup", "device", device, limit) from error
    if found.type == "meta":
        raise ArgumentError("warmup", "device", device, "must be a device that computes")
    return found
