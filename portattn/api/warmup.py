"""warmup(): compile, check and keep calls before they are made: the first real one costs what any other does."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from portattn.api import dispatch, monitor, writing
from portattn.api.call import perform
from portattn.api.candidate import candidate
from portattn.api.ops import make_request
from portattn.api.request import Request, inputs_of
from portattn.api.specs import Spec
from portattn.compile import compile_check
from portattn.config import Settings
from portattn.errors import ArgumentError, CompileWarning, PathUnavailable, warn_caller
from portattn.launch import Signature
from portattn.launch.cache import MAX_CLASSES, CallKey
from portattn.launch.device_api import synchronize
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.worker.client import Worker

Say = Callable[[str], None]
MOST_JOBS = 8
SAY_SECONDS = 1.0  # between two reports of how far a range of sizes has been looked at


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one spec.

    spec      its place among the specs; one whose sizes vary has a report for each class of them
    call      the problem, in words, and the sizes that vary
    path      that it takes
    key       of its kernels' specialisation, as in plans and records; empty on a vendor's or the reference path
    way       how it is launched from now on: "native" (C), "driver" (Python, through ctypes), "compiled" (Triton's
              launcher of the cached kernel), "triton" (Triton's own way); empty where no kernel of portattn's runs
    why       why it is not "native"
    compiled  whether a child process compiled something for it now; else it was compiled before, or in this process
    loaded    kernels that this process compiled or loaded from Triton's cache for it
    seconds   that it took here, after its compile in a child process
    cached    whether the next call like it finds everything done
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
    cached: bool = False
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
    specs: Sequence[Mapping[str, Any]],
    *,
    device: str | torch.device | None = None,
    jobs: int | None = None,
    say: Say | None = None,
) -> Warmup:
    """Prepare calls to come: compile and load their kernels, run canaries as set, and keep how they are launched.

    specs   one mapping a call: "op", and the operation's own arguments by name. A tensor is given as itself, as a meta
            tensor, or described: "bf16[8,32,1,128]", with strides "bf16[8,32,1,128]:4096,128,128,1"; types are fp16,
            bf16, fp32, i32, i64, bool, and formats of caches (e4m3, int8). Given tensors are used, never written (an
            operation that fills a cache gets no slot for its tokens), so that a cache that fills the device need not be
            there twice. Described tensors are allocated during their own warm-up, holding zeros: sequences of no keys.
            Their sizes can be names, for which "sizes" has a list, a range, or both ends of one: "k":
            "bf16[8,8,S,128]" with "sizes": {"S": "1..65536"}. An argument that is a length can be such a name, too
    device  of described tensors; None for the current accelerator, or else the CPU
    jobs    child processes that compile side by side; None for half of the cores, at most MOST_JOBS. They are used
            if a first compile is isolated (the setting `isolate`); else this process compiles
    say     called with a line of text about each step

    Afterwards a call with the same call key (arguments, types, alignment to 16 bytes, settings) and shape class neither
    compiles nor waits for the device, and can be captured in a CUDA graph at its first time. A shape class has the
    spec's shapes and strides and others that launch the same kernels in the same way (other lengths and batches mostly;
    not once keys are split, or strides lose a multiple of 16), or the spec's alone if `sizes` of the report is not
    empty. The monitor is armed: a later compile warns (`portattn.monitor`).

    Each spec is run once, or once for each of its shape classes (up to MAX_CLASSES), the largest sizes first. A class
    first met in serving would cost milliseconds, and seconds if a kernel is compiled. A spec that no path can run, or
    whose tensors do not fit the device, is reported with `failed`, with a CompileWarning; the others are warmed up.

    Returns a Warmup: for each spec and shape class the kernels compiled, loaded and cached, or the reason why not.

    Memory: described tensors of one spec at a time, at their largest sizes.

    Raises ArgumentError on a malformed spec, before anything is compiled.

    >>> import portattn
    >>> tensors = {"q": "fp32[B,8,1,64]", "k_cache": "fp32[B,2,S,64]", "v_cache": "fp32[B,2,S,64]"}
    >>> lengths = {"seqlens_k": "i32[B]", "sizes": {"B": [1, 2, 4, 8], "S": "1..512"}}
    >>> report = portattn.warmup([{"op": "decode_attention"} | tensors | lengths], device="cpu")
    >>> print(report.specs[0].call, report.specs[0].path)
    decode_attention q (8,8,1,64) kv (8,2,512,64) fp32 seqlens_k; B = 8, S = 512 sdpa
    >>> portattn.monitor(False)  # warmup arms it
    """
    begun, say = time.perf_counter(), say or _nothing
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ArgumentError("warmup", "jobs", jobs, "must be None or an integer from 1 on")
    where = _here() if device is None else _device(device)
    read = [Spec(place, spec) for place, spec in enumerate(specs)]
    made = [_Warming(spec, spec.largest, where) for spec in read]
    with monitor.silence():
        for place, one in enumerate(made):
            say(f"planning {place + 1} of {len(made)}")
            one.plan()
        compile_seconds = _compile(made, jobs, say)
        for place, one in enumerate(made):
            say(f"running {place + 1} of {len(made)}: {one.call}")
            one.run()
        made = [each for one in made for each in _classes(one, say)]
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
    """One spec at some sizes, on its way."""

    def __init__(self, spec: Spec, sizes: Mapping[str, int], device: torch.device) -> None:
        self.spec, self.sizes, self.device = spec, dict(sizes), device
        self.call, self.failed, self.why, self.compiled, self.cached, self.seconds = "", "", "", False, False, 0.0
        self.loaded: tuple[str, ...] = ()
        self.made: Plan | None = None
        self.launches: list[Signature] = []
        self.settings: Settings | None = None
        self.kind: CallKey | None = None
        self._cached: Any = None

    def request(self, device: torch.device, sizes: Mapping[str, int]) -> Request:
        """The request of a call with tensors on a device; allocates what is described."""
        arguments = self.spec.arguments(device, sizes)
        try:
            return make_request("warmup", self.spec.op, (), arguments)
        except TypeError as error:  # an argument that the operation has not, or one that is missing
            raise ArgumentError("warmup", f"specs[{self.spec.place}]", sorted(arguments), str(error)) from None

    def plan(self) -> None:
        """Plan the call and describe its launches. Raises ArgumentError on a malformed spec."""
        with self._failures():
            request = self.request(self.device, self.sizes)
            call = request.build()
            at = f"; {_words(self.sizes)}" if self.sizes else ""
            self.call = f"{call.problem}{at}"
            made = dispatch.plan_call(call, request.settings)
            self.made, self.settings = made, request.settings
            own = candidate(made, call, self.target)
            self.launches = [] if own is None else [compile_check.signature_of(launch) for launch in own.compiled()]

    @property
    def target(self) -> Target:
        given = self.spec.tensors
        device = given[0].device if given else self.device
        return dispatch.detect_target(device.type, _index(device))[0]

    def run(self) -> None:
        """Run it once, as its caller would: whatever is left to do is done."""
        if self.failed:
            return
        begun = time.perf_counter()
        with self._failures(), monitor.counting() as loaded:
            request = self.request(self.device, self.sizes)
            if ROWS[request.op].writes:
                writing.nowhere(request)
                writing.carry_out(request)
            else:
                perform(request)
            if request.cacheable():
                self.kind = request.kind()
                found = self.kind.find(inputs_of(request))
                self._cached = None if found is None else found[0]
            self.cached, self.made = self._cached is not None, dispatch.last_plan()
            synchronize(request.tensors["q"].device)
        self.seconds, self.loaded = time.perf_counter() - begun, tuple(loaded)

    def needs_compile(self) -> bool:
        """Return whether a child process must compile its launches first."""
        if not self.launches or self.made is None or self.settings is None:
            return False
        return compile_check.unseen(self.made, self.launches, self.settings)

    @property
    def why_not(self) -> str:
        """Why a call of other sizes is not launched by what was kept; empty where it is."""
        return "" if self._cached is None else self._cached.why_fixed

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
            self.failed = f"out of memory: {compile_check.first_line(str(error))}; {hint}"

    def report(self) -> Warmed:
        cached = self._cached
        direct = None if cached is None else cached.direct
        return Warmed(
            spec=self.spec.place, call=self.call, path=self.made.path if self.made else "",
            key=self.made.key if self.made else "",
            way="" if cached is None else "triton" if direct is None else direct.way,
            why="" if direct is None else direct.reason, compiled=self.compiled, loaded=self.loaded,
            seconds=round(self.seconds, 3), cached=self.cached, sizes=self.why or self.why_not,
            failed=self.failed,
        )  # fmt: skip


def _compile(made: Sequence[_Warming], jobs: int | None, say: Say) -> float:
    """Compile the missing kernels in child processes, side by side; return the seconds."""
    begun = time.perf_counter()
    wanted: dict[str, list[_Warming]] = {}
    for one in made:
        if one.needs_compile():
            assert one.made is not None
            wanted.setdefault(compile_check.code_key(one.made, one.launches), []).append(one)
    if not wanted:
        return 0.0
    count = min(jobs or min(max((os.cpu_count() or 2) // 2, 1), MOST_JOBS), len(wanted))
    say(f"compiling {len(wanted)} in {count} child processes")
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(compile_check.new_worker()) for _ in range(count)]
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
        compile_check.ahead(first.made, first.launches, first.target, first.settings, worker)
    finally:
        free.append(worker)
    return same


def _classes(first: _Warming, say: Say) -> list[_Warming]:
    """A spec at its largest sizes, which has run, and at sizes of every further class; runs those.

    Stops where sizes decide something else than a class: a call that fails, or is not cached (on a CPU, and on paths
    that are not portattn's own), and one that is cached for its own sizes alone.
    """
    made, kinds, spec = [first], [first.kind], first.spec
    meta, said = torch.device("meta"), time.monotonic()
    if not spec.sizes:
        return made
    for count, sizes in enumerate(spec.combinations()):
        last = made[-1]
        if last.failed or not last.cached or last.why_not:
            break
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            say(f"{first.spec.op}: {count} of {spec.count} sizes looked at, {len(made)} classes")
        inputs = inputs_of(first.request(meta, sizes))
        if any(kind is not None and kind.find(inputs) for kind in kinds):
            continue
        if len(made) == MAX_CLASSES:
            last.why = f"more than {MAX_CLASSES} classes of sizes: from {_words(sizes)} on they were not run"
            break
        one = _Warming(spec, sizes, first.device)
        made.append(one)
        try:
            one.plan()
        except ArgumentError as error:  # sizes that do not go together; what was run before it stays
            one.failed = str(error).removeprefix("warmup: ")
            break
        one.compiled = one.needs_compile()
        say(f"running {one.call}")
        one.run()
        if one.kind is not None and one.kind not in kinds:
            kinds.append(one.kind)
    return made


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _here() -> torch.device:
    """Return torch's current accelerator, or else the CPU."""
    from portattn.planning.registry import Registry

    for kind in dict.fromkeys(b.device_type for b in Registry.load().backends.values() if b.device_type != "cpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        limit = f"must be a device of torch's: {compile_check.first_line(str(error))}"
        raise ArgumentError("warmup", "device", device, limit) from error


def _index(device: torch.device) -> int | None:
    if device.type in ("cpu", "meta") or device.index is not None:
        return device.index
    index: int = getattr(torch, device.type).current_device()
    return index


def _nothing(text: str) -> None:
    """Where nobody is told."""
