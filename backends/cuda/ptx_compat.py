"""Run Triton's code for an older NVIDIA GPU on this machine's newer one: "sm_80 code on sm_90".

The driver assembles PTX for later chips (PTX ISA, ".target"): that tests code, not sm_80's assembler or chip.
PtxExecutor runs in the parent; in a child, `compare` reads the PTX and launches it through the driver API by ctypes."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from portattn.compile.ensure_compiled import first_line, over_limit
from portattn.errors import PortattnError
from portattn.launch import KernelCall, has_rows, kernel_calls, load_kernels, signature
from portattn.launch.kernelcall import Signature
from portattn.planning.registry import Registry
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.executor import Executor, on_device
from portattn.testing.findings import Numerics, numerics
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import call_of, judge, plan_of
from portattn.worker.child import RUNS
from portattn.worker.client import Reply, Worker

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_VERSION = re.compile(r"^\s*\.version\s+(\d+\.\d+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(sm_(\d+)([a-z]?))\b", re.MULTILINE)
# An entry: its name, its parameters, and the directives before its body.
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
_PARAMETER = re.compile(r"\s*\.param\s+(?:\.align\s+\d+\s+)?\.([busf])(8|16|32|64)\b(.*)", re.DOTALL)
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+(?:\s*,\s*\d+)*)")


class BadPtx(PortattnError):
    """A PTX text that cannot be run here."""


class PtxParameter(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    floating: bool = False


class Ptx(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    target: str  # as written: sm_80, sm_90a
    capability: int
    portable: bool  # an `a` target is for one chip, an `f` target for one family
    entry: str
    parameters: tuple[PtxParameter, ...]
    threads: int  # of a block; 0 if the entry demands none


def read(text: str) -> Ptx:
    """Parse a module's directives. Raise BadPtx if they are missing, cut off, or of several entries."""
    bare = _COMMENT.sub("", text)
    version, target, entries = _VERSION.search(bare), _TARGET.search(bare), _ENTRY.findall(bare)
    for found, what in ((version, ".version"), (target, ".target sm_NN")):
        if found is None:
            raise BadPtx(f"the PTX text has no {what}; it begins {text[:60]!r}")
    assert version is not None
    assert target is not None
    if len(entries) != 1:
        names = ", ".join(name for name, _, _ in entries) or "none"
        raise BadPtx(f"the PTX text must have one whole .entry, and has {names}")
    name, parameters, directives = entries[0]
    threads = _THREADS.search(directives)
    return Ptx(
        version=version.group(1),
        target=target.group(1),
        capability=int(target.group(2)),
        portable=not target.group(3),
        entry=name,
        parameters=tuple(_parameter(part, name) for part in parameters.split(",") if part.strip()),
        threads=math.prod(int(number) for number in threads.group(1).split(",")) if threads else 0,
    )


def _parameter(text: str, entry: str) -> PtxParameter:
    found = _PARAMETER.fullmatch(text)
    if found is None or "[" in found.group(3):  # an array: a struct by value, which Triton's kernels have none of
        raise BadPtx(f"{entry}: the parameter {' '.join(text.split())!r} is not a number or a pointer")
    return PtxParameter(size=int(found.group(2)) // 8, floating=found.group(1) == "f")


LIBRARY = "libcuda.so.1"
_LOG_BYTES = 16_384  # of the assembler's messages
# enum CUjit_option
_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6
# enum CUfunction_attribute
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
# enum CUdevice_attribute
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR, _MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 75, 76, 97
SHARED_WITHOUT_ASKING = 49_152  # bytes of shared memory that a block has unless its function asks for more
_TOO_NEW = 222  # CUDA_ERROR_UNSUPPORTED_PTX_VERSION


class CudaError(PortattnError):
    """A failed driver call: its name, the driver's message and the assembler's log; `code` is the CUresult."""

    def __init__(self, call: str, code: int, words: str, log: str = "") -> None:
        self.code = code
        super().__init__(f"{call}: CUDA error {code}, {words}" + (f": {log}" if log else ""))


class PtxTooNew(CudaError):
    """PTX of a version that this driver does not know."""


@functools.lru_cache(maxsize=1)
def library() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise PortattnError(f"the CUDA driver cannot be loaded: {error}") from None


class CudaDriver:
    """Functions of libcuda (or a stand-in), in the thread's current context, which torch makes."""

    def __init__(self, library: Any) -> None:
        self._cuda = library

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def capability(self) -> int:
        """Return the current device's compute capability: 90 for sm_90."""
        return 10 * self._attribute(_COMPUTE_CAPABILITY_MAJOR) + self._attribute(_COMPUTE_CAPABILITY_MINOR)

    def shared_memory(self) -> int:
        return self._attribute(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    def load(self, text: str, entry: str) -> Function:
        """Assemble a PTX text and return its entry. Raises PtxTooNew for a newer version, else CudaError."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        names = (ctypes.c_int * 2)(_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES)
        # An option's value is a pointer, or a number in a pointer's place.
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        image = ctypes.c_char_p(text.encode() + b"\0")  # the loader knows PTX by its text, which must end in NUL
        code = self._cuda.cuModuleLoadDataEx(ctypes.byref(module), image, ctypes.c_uint(2), names, values)
        if code:
            kind = PtxTooNew if code == _TOO_NEW else CudaError
            raise kind("cuModuleLoadDataEx", code, self._words(code), log.value.decode(errors="replace").strip())
        try:
            self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(entry.encode()))
        except CudaError:
            self._call("cuModuleUnload", module)
            raise
        return Function(self, module, function)

    def _attribute(self, attribute: int) -> int:
        device, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise CudaError(name, code, self._words(code))

    def _words(self, code: int) -> str:
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = getattr(self._cuda, name)(ctypes.c_int(code), ctypes.byref(text)) == 0
            words.append((text.value or b"").decode(errors="replace") if known else "")
        return ": ".join(filter(None, words)) or "which the driver has no name for"


class Function:
    """An entry of a loaded module. Close it when its launches have ended."""

    def __init__(self, driver: CudaDriver, module: ctypes.c_void_p, function: ctypes.c_void_p) -> None:
        self._driver, self._module, self._function = driver, module, function

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared: int, stream: int, arguments: Sequence[Any]
    ) -> None:
        """Launch with ctypes `arguments`, one per parameter, which the driver copies, and `shared` bytes per block."""
        if shared > SHARED_WITHOUT_ASKING:
            self._driver._call(
                "cuFuncSetAttribute", self._function, ctypes.c_int(_MAX_DYNAMIC_SHARED_SIZE_BYTES), ctypes.c_int(shared)
            )
        places = (ctypes.c_void_p * max(len(arguments), 1))(*(ctypes.addressof(argument) for argument in arguments))
        sizes = [ctypes.c_uint(size) for size in (*grid, threads, 1, 1, shared)]
        self._driver._call("cuLaunchKernel", self._function, *sizes, ctypes.c_void_p(stream), places, None)

    def close(self) -> None:
        self._driver._call("cuModuleUnload", self._module)


BACKEND = "cuda"
# How a child says that the driver here is too old for the text: no fault of the code's.
_NOT_HERE = ("PtxTooNew",)
# What is refused before anything is launched leaves the device's context, and the child, in order.
_UNHARMED = (*_NOT_HERE, "BadPtx")


class PtxExecutor(Executor):
    """Runs an older chip's code on this machine's newer GPU, one of the targets `here`."""

    name = "older"
    level = "runs"
    task = "portattn.backends.cuda.ptx_compat:compare"
    runs_on = "device"

    def __init__(self, seconds: float, here: Sequence[Target]) -> None:
        super().__init__(seconds)
        self.device = max((t for t in here if t.backend == BACKEND), key=_capability, default=None)

    def lacks(self, target: Target) -> str:
        """Return why this target's code cannot run here as an older chip's; empty if it can."""
        if target.backend != BACKEND:
            return f"{target.name} is no NVIDIA GPU, whose code a newer one runs"
        if self.device is None:
            return f"running {target.arch.name} code needs an NVIDIA GPU newer than {target.arch.name}; none is here"
        here = self.device.arch.name
        if _capability(target) >= _capability(self.device):
            return f"running {target.arch.name} code as an older chip's needs a GPU newer than it, and here is {here}"
        if declined := self.declines(target):  # Triton writes targets with a suffix, whose code runs on no other chip
            return f"{declined}, and here is {here}"
        if target.toolchain.distribution != "triton":
            return f"running an older chip's code was tried with community Triton's, and this is {target.toolchain}"
        return ""

    def where(self, target: Target) -> str:
        """Return the code and chip that really run: "sm_80 code on sm_90"; the target's name if it cannot."""
        if self.lacks(target) or self.device is None:
            return target.name
        return f"{target.arch.name} code on {self.device.arch.name}"

    def problems(self, plan: Plan) -> list[Problem]:
        return [on_device(plan.problem, BACKEND)]

    def exceeds(self, reply: Reply, target: Target) -> str:
        """Check the older chip's limits: this machine's may be larger."""
        return over_limit(reply, target)

    def refusal(self, function: str, reply: Reply) -> str:
        cause = f"{function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}"
        return f"{reply.outcome}: {reply.kind}: {cause}"[:500]

    def piece(self, launch: KernelCall, reply: Reply) -> dict[str, Any]:
        return {
            "text": str(reply.facts["ptx"]),
            "shared": int(reply.facts["scratchpad_bytes"]),
            "num_warps": int(reply.facts["num_warps"]),
            "scratch": int(reply.facts["scratch"]),
            "signature": msgspec.to_builtins(signature(launch)),
        }

    def run(
        self,
        request: dict[str, Any],
        pieces: list[Any],
        problem: Problem,
        target: Target,
        runner: Worker,
        where: str,
    ) -> Numerics:
        """Run each time: a device's result does not depend on the text alone."""
        assert self.device is not None, "check asks lacks first"
        needed, room = max(code["shared"] for code in pieces), self.device.arch.scratchpad_bytes
        if needed > room:
            reason = f"needs {needed} bytes of shared memory, {self.device.arch.name} has {room}"
            return Numerics(outcome="not_run", where=where, problem=problem, reason=reason)
        reply = runner.request(self.task, self.seconds, **request, texts=pieces)
        if reply.outcome == "error" and reply.kind not in _UNHARMED:
            runner.close()  # a fault ends the context: the process's next run would fail too
        if reply.kind in _NOT_HERE:
            return Numerics(outcome="not_run", where=where, problem=problem, reason=first_line(reply.message))
        return numerics(_staged(reply), where, problem)


def _staged(reply: Reply) -> Reply:
    """Add the stage to the message of a child that hung or crashed."""
    if reply.outcome not in ("hang", "crash") or not reply.stage:
        return reply
    return msgspec.structs.replace(reply, message=f"{first_line(reply.message)}, at stage {reply.stage!r}")


def _capability(target: Target) -> int:
    return int(Registry.load().backends[BACKEND].triton_target(target.arch)[1])


WARP = 32  # lanes
MOST_SCRATCH = 2  # pointers that a Triton appends: global scratch, and scratch of profiles
_CTYPES: Mapping[str, type[Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class PtxCode(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled launch from the compiler's child."""

    text: str
    shared: int  # bytes of shared memory of a block
    num_warps: int
    scratch: int  # bytes of Triton's scratch memory of a program
    signature: Signature


def run(launch: KernelCall, code: PtxCode, driver: CudaDriver, capability: int, stream: int) -> None:
    """Launch on the current device as code of sm_<capability>, and wait. Raise BadPtx or CudaError."""
    ptx = read(code.text)
    fits(ptx, code, driver, capability)
    if signature(launch) != code.signature:
        raise BadPtx(f"{launch.function}: compiled for {code.signature}, and the call here is {signature(launch)}")
    names = getattr(load_kernels(launch.module, interpreted=False), launch.function).arg_names
    types = {name: code.signature.types[name] for name in names if name in code.signature.types}
    given = arguments(ptx, types, launch.arguments)
    function = driver.load(code.text, ptx.entry)
    grid = (*launch.grid, 1, 1)[:3]
    function.launch((grid[0], grid[1], grid[2]), ptx.threads or WARP * code.num_warps, code.shared, stream, given)
    torch.cuda.synchronize()  # the module must outlive its launch, and a fault is this kernel's
    function.close()  # not after a fault: the context is gone then, and the parent ends this process


def fits(ptx: Ptx, code: PtxCode, driver: CudaDriver, capability: int) -> None:
    """Raise BadPtx unless it is portable code of sm_<capability>, and the current device newer and large enough."""
    here = driver.capability()
    if ptx.capability != capability:
        raise BadPtx(f"{ptx.entry}: compiled for {ptx.target}, and sm_{capability} was asked for")
    if not ptx.portable:
        raise BadPtx(f"{ptx.entry}: {ptx.target} code runs on no other chip; only targets without a suffix do")
    if ptx.capability >= here:
        raise BadPtx(f"{ptx.entry}: {ptx.target} code needs a newer device, and this one is sm_{here}")
    if code.shared > driver.shared_memory():
        room = driver.shared_memory()
        raise BadPtx(f"{ptx.entry}: needs {code.shared} bytes of shared memory, this device has {room} for a block")
    if code.scratch:
        raise BadPtx(f"{ptx.entry}: wants {code.scratch} bytes of Triton's scratch memory, which is not provided here")
    if ptx.threads not in (0, WARP * code.num_warps):
        raise BadPtx(f"{ptx.entry}: demands {ptx.threads} threads, and was compiled with {code.num_warps} warps")


def arguments(ptx: Ptx, types: Mapping[str, str], values: Mapping[str, Any]) -> list[Any]:
    """Return a ctypes number per parameter of the entry: run-time arguments by `types`, then null scratch memory."""
    extra = ptx.parameters[len(types) :]
    if len(ptx.parameters) < len(types) or len(extra) > MOST_SCRATCH or any(one.size != 8 for one in extra):
        raise BadPtx(
            f"{ptx.entry}: has {len(ptx.parameters)} parameters for {len(types)} arguments; "
            f"at most {MOST_SCRATCH} pointers may follow"
        )
    made: list[Any] = []
    for (name, kind), parameter in zip(types.items(), ptx.parameters, strict=False):
        number = _number(name, kind, values[name])
        if ctypes.sizeof(number) != parameter.size or parameter.floating != (kind == "fp32"):
            raise BadPtx(f"{ptx.entry}: argument {name} is {kind}, its parameter has {parameter.size} bytes")
        made.append(number)
    return made + [ctypes.c_void_p(None)] * len(extra)


def _number(name: str, kind: str, value: Any) -> Any:
    if kind.startswith("*"):
        return ctypes.c_void_p(value.data_ptr())
    if kind not in _CTYPES:
        raise BadPtx(f"argument {name}: type {kind} is not one that is passed here: {', '.join(_CTYPES)}, pointers")
    return _CTYPES[kind](value)


JUDGES = "oracle"  # the stage after the kernels have run


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Run launches here: verdict.judge's facts. `texts`: each launch's PtxCode; outputs and padding start as NaN."""
    target = Registry.load().target(request["target"])
    codes = [msgspec.convert(code, PtxCode) for code in request["texts"]]
    device = Registry.load().backends[target.backend].device_type
    _, capability, _ = Registry.load().backends[target.backend].triton_target(target.arch)
    enter(RUNS)
    with _one_thread():
        with nan_filled_memory(), torch.no_grad():
            plan, call = plan_of(request, target), call_of(request | {"device": device})
            driver = CudaDriver(library())  # in the context that torch made for the call's tensors
            launches, out, lse = kernel_calls(plan, call, target.arch.cores)
            if has_rows(plan):
                for launch, code in zip(launches, codes, strict=True):
                    enter(f"{RUNS} {launch.function}")
                    stream = torch.cuda.current_stream().cuda_stream
                    run(launch, code, driver, int(capability), stream)
        enter(JUDGES)
        precision = request.get("lowering", {}).get("dot_precision", "ieee")
        return {"facts": judge(call, out, lse, precision)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch's CPU oracle in one thread: children side by side with a thread per core would slow each other down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
