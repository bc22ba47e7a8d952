"""warmup(): compile, check and keep calls before they are made: the first real one costs what any other does."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from portattn import compiling, dispatch, monitoring, variantready
from portattn.config import Settings
from portattn.errors import ArgumentError, CompileWarning, PathUnavailable
from portattn.kept import Kept
from portattn.launch import Signature, kernel_calls, signature
from portattn.launch.kernelcall import TORCH_DTYPE
from portattn.ops import make_request
from portattn.pagetable import PageTable
from portattn.planned import Plan
from portattn.problem import OPS
from portattn.request import Keeping, Request
from portattn.target import Target
from portattn.worker.client import Worker

Spec = Mapping[str, Any]
Say = Callable[[str], None]
_NUMBERS = r"\s*(?:\d+\s*(?:,\s*\d+\s*)*,?\s*)?"
_TENSOR = re.compile(rf"(\w+)\[({_NUMBERS})\](?::({_NUMBERS}))?")
_DTYPES = TORCH_DTYPE | {"i32": torch.int32, "bool": torch.bool}
_PAIRS = ("window", "magicpig")  # arguments that are tuples, which JSON writes as lists
MOST_JOBS = 8


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one spec.

    spec      its place among the specs
    call      the problem, in words
    path      that it takes
    key       of its kernels' specialisation, as in plans and verdicts; empty on a vendor's or the reference path
    way       how it is launched from now on: "native" (C), "driver" (Python, through ctypes), "compiled" (Triton's
              launcher of the kept kernel), "triton" (Triton's own way); empty where no kernel of portattn's runs
    why       why it is not "native"
    compiled  whether a child process compiled something for it now; else it was compiled before, or in this process
    loaded    kernels that this process compiled or loaded from Triton's cache for it
    seconds   that it took here, after its compile in a child process
    kept      whether the next call like it finds everything done
    sizes     why a call of other sizes does not; empty where it does, as long as they are of the same class
    failed    why it could not be warmed up
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
    kept: bool = False
    sizes: str = ""
    failed: str = ""


class Warmup(msgspec.Struct, frozen=True, kw_only=True):
    """What `warmup` did. compile_seconds: of all compiles in child processes, side by side; seconds: in all."""

    specs: tuple[Warmed, ...]
    compile_seconds: float
    seconds: float

    @property
    def failed(self) -> tuple[Warmed, ...]:
        return tuple(one for one in self.specs if one.failed)


def warmup(
    specs: Sequence[Spec], *, device: str | torch.device | None = None, jobs: int | None = None, say: Say | None = None
) -> Warmup:
    """Prepare calls to come: compile and load their kernels, run canaries as set, and keep how they are launched.

    specs   one mapping a call: "op", and the operation's own arguments by name. A tensor is given as itself, as a meta
            tensor, or described: "bf16[8,32,1,128]", with strides "bf16[8,32,1,128]:4096,128,128,1"; types are fp16,
            bf16, fp32, i32 and bool. Tensors given as themselves are used as they are (nothing is written into them),
            so that a cache of keys and values that fills the device need not be there twice; what is described is
            allocated for the time of its own warm-up, holding zeros: sequences of no keys
    device  where described tensors would be; None for the current accelerator, or the CPU where there is none
    jobs    child processes that compile side by side; None for half of the cores, at most MOST_JOBS. They are used
            where a first compile is isolated (the setting `isolate`); else this process compiles
    say     is told what is being done

    After it a call of the same kind (other arguments, types, alignment to 16 bytes, settings) neither compiles nor
    waits for the device, and can be captured in a CUDA graph at its first time, where its sizes are of the same class
    as a spec's: its own shapes and strides are, and so are others for which the same kernels are launched in the same
    way (other lengths and batches mostly; not once keys are split, or strides lose a multiple of 16). Where `sizes` of
    the report is not empty its own alone are. The monitor is armed: a later compile warns (`portattn.monitor`).

    Each spec is run once here. A spec that no path can run, or whose tensors do not fit the device, is reported with
    `failed`, and warned about (CompileWarning); the others are warmed up. Raises ArgumentError on a spec that is none,
    before anything is compiled.
    """
    begun, say = time.perf_counter(), say or _nothing
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ArgumentError("warmup", "jobs", jobs, "must be None or an integer from 1 on")
    where = _here() if device is None else _device(device)
    made = [_Warming(place, spec, where) for place, spec in enumerate(specs)]
    with monitoring.silenced():
        for place, one in enumerate(made):
            say(f"planning {place + 1} of {len(made)}")
            one.plan()
        compile_seconds = _compile(made, jobs, say)
        for place, one in enumerate(made):
            say(f"running {place + 1} of {len(made)}: {one.call}")
            one.run()
    monitoring.arm()
    report = Warmup(
        specs=tuple(one.report() for one in made), compile_seconds=round(compile_seconds, 3),
        seconds=round(time.perf_counter() - begun, 3),
    )  # fmt: skip
    for failed in report.failed:
        text = f"warmup: specs[{failed.spec}] ({failed.call or made[failed.spec].op}): {failed.failed}"
        warnings.warn(text, CompileWarning, stacklevel=2)
    return report


class _Warming:
    """One spec on its way."""

    def __init__(self, place: int, spec: Any, device: torch.device) -> None:
        self.place, self.device = place, device
        name = f"specs[{place}]"
        if not isinstance(spec, Mapping):
            raise ArgumentError("warmup", name, spec, 'must be a mapping of "op" and the operation\'s arguments')
        self.op = spec.get("op")
        if self.op not in OPS:
            raise ArgumentError("warmup", f"{name}.op", self.op, f"must be one of {', '.join(OPS)}")
        self._given = {str(key): _argument(f"{name}.{key}", key, value) for key, value in spec.items() if key != "op"}
        self.call, self.failed, self.compiled, self.kept, self.seconds = "", "", False, False, 0.0
        self.loaded: tuple[str, ...] = ()
        self.made: Plan | None = None
        self.launches: list[Signature] = []
        self.settings: Settings | None = None
        self._kept: Any = None

    def _request(self) -> Request:
        """The request of a call with tensors on the device; allocates what is described."""
        arguments = {n: v.allocate(self.device) if isinstance(v, _Described) else v for n, v in self._given.items()}
        try:
            return make_request("warmup", self.op, (), arguments)
        except TypeError as error:  # an argument that the operation has not, or one that is missing
            raise ArgumentError("warmup", f"specs[{self.place}]", sorted(arguments), str(error)) from None

    def plan(self) -> None:
        """Find what it will run, and what must be compiled for that. Raises ArgumentError on a spec that is none."""
        with self._failures():
            request = self._request()
            call = request.build()
            self.call = str(call.problem)
            made = dispatch.plan_call(call, request.settings)
            self.made, self.settings = made, request.settings
            if made.path == "interpreter" or not made.key:
                return
            target = self.target
            variant = variantready.variant_of(made)
            if variant is not None:
                self.launches = variantready.seen(variant, made, call)
            else:
                self.launches = [signature(launch) for launch in kernel_calls(made, call, target.arch.cores)[0]]

    @property
    def target(self) -> Target:
        tensors = [t for t in self._given.values() if isinstance(t, torch.Tensor)]
        device = tensors[0].device if tensors else self.device
        return dispatch.detect_target(device.type, _index(device))[0]

    def run(self) -> None:
        """Run it once, as its caller would: whatever is left to do is done."""
        if self.failed:
            return
        begun = time.perf_counter()
        with self._failures(), monitoring.counting() as loaded:
            from portattn.request import perform

            request = self._request()
            perform(request)
            self._kept = _kept_of(request)
            self.kept, self.made = self._kept is not None, dispatch.last_plan()
            _synchronise(request.tensors["q"].device)
        self.seconds, self.loaded = time.perf_counter() - begun, tuple(loaded)

    @contextlib.contextmanager
    def _failures(self) -> Any:
        try:
            yield
        except ArgumentError as error:
            if error.op == "warmup":
                raise
            raise ArgumentError("warmup", f"specs[{self.place}].{error.argument}", error.value, error.limit) from error
        except PathUnavailable as error:
            self.failed = str(error)
        except torch.OutOfMemoryError as error:
            hint = "give tensors that are there already in place of described ones"
            self.failed = f"out of memory: {compiling.first_line(str(error))}; {hint}"

    def report(self) -> Warmed:
        kept = self._kept
        direct = None if kept is None else kept.direct
        return Warmed(
            spec=self.place, call=self.call, path=self.made.path if self.made else "",
            key=self.made.key if self.made else "",
            way="" if kept is None else "triton" if direct is None else direct.way,
            why="" if direct is None else direct.reason, compiled=self.compiled, loaded=self.loaded,
            seconds=round(self.seconds, 3), kept=self.kept, sizes="" if kept is None else kept.why_fixed,
            failed=self.failed,
        )  # fmt: skip


class _Described(msgspec.Struct, frozen=True):
    """A tensor in words."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Zeros on the device. Elements may share memory, as those of an expanded tensor do."""
        reached = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        elements = 0 if 0 in self.shape else reached + 1
        return torch.zeros(elements, dtype=self.dtype, device=device).as_strided(self.shape, self.strides)


def _argument(name: str, argument: str, value: Any) -> Any:
    """An argument of a spec, with tensors that are not there as _Described."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return _Described(tuple(value.shape), value.stride(), value.dtype)
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
    shape = _numbers(found[2])
    strides = torch.empty(shape, device="meta").stride() if found[3] is None else _numbers(found[3])
    if len(strides) != len(shape):
        raise ArgumentError("warmup", name, value, f"must have as many strides as its {len(shape)} axes")
    return _Described(shape, tuple(strides), _DTYPES[found[1]])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _compile(made: Sequence[_Warming], jobs: int | None, say: Say) -> float:
    """Compile in child processes, side by side, what nobody has compiled; the seconds that it took."""
    begun = time.perf_counter()
    wanted: dict[str, list[_Warming]] = {}
    for one in made:
        if not one.launches or one.made is None or one.settings is None:
            continue
        if compiling.unseen(one.made, one.launches, one.settings):
            wanted.setdefault(compiling.code_key(one.made, one.launches), []).append(one)
    if not wanted:
        return 0.0
    count = min(jobs or min(max((os.cpu_count() or 2) // 2, 1), MOST_JOBS), len(wanted))
    say(f"compiling {len(wanted)} in {count} child processes")
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(compiling.new_worker()) for _ in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        for done, same in enumerate(pool.map(functools.partial(_compile_one, free), wanted.values())):
            say(f"compiled {done + 1} of {len(wanted)}: {same[0].call}")
            for one in same:
                one.compiled = True
    return time.perf_counter() - begun


def _compile_one(free: list[Worker], same: list[_Warming]) -> list[_Warming]:
    """Compile what several specs have in common, in a worker that is free: there are as many as threads."""
    worker, first = free.pop(), same[0]
    try:
        assert first.made is not None
        assert first.settings is not None
        compiling.ahead(first.made, first.launches, first.target, first.settings, worker)
    finally:
        free.append(worker)
    return same


def _kept_of(request: Request) -> Kept | None:
    """What launches the next call like a request's; None where none is kept."""
    if not request.keepable():
        return None
    found = request.kind().find(Keeping(request).inputs)
    return None if found is None else found[0]


def _here() -> torch.device:
    """The current accelerator, as torch sees it; the CPU where there is none."""
    from portattn.registry import Registry

    for kind in dict.fromkeys(b.device_type for b in Registry.load().backends.values() if b.device_type != "cpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        limit = f"must be a device of torch's: {compiling.first_line(str(error))}"
        raise ArgumentError("warmup", "device", device, limit) from error


def _index(device: torch.device) -> int | None:
    if device.type in ("cpu", "meta") or device.index is not None:
        return device.index
    index: int = getattr(torch, device.type).current_device()
    return index


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def _nothing(text: str) -> None:
    """Where nobody is told."""
