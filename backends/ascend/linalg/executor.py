"""Runs triton-ascend's lowering on a CPU by MLIR: LinalgExecutor (lints too) in the parent, the rest in a child."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from portattn.backends.ascend.linalg.llvm_tools import LinalgError, missing_reason, need
from portattn.backends.ascend.linalg.mlir_text import (
    OWN_BUFFERS,
    Argument,
    footprint,
    kernel_of,
    lints,
    read,
    upstream,
    vendor_parts,
)
from portattn.launch import KernelCall, has_rows, kernel_calls, signature
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.ops import CAPTURED_GRADIENTS
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.tensors import spans
from portattn.testing.executor import Executor
from portattn.testing.findings import Facts, Lint, Numerics
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import call_of, judge, plan_of
from portattn.worker.client import Reply, Worker

TEXT = "linalg"  # the lowered text among a worker's facts


class LinalgExecutor(Executor):
    name = "lowered"
    level = "lowering-checked"
    task = "portattn.backends.ascend.linalg.executor:compare"
    code_task = "portattn.backends.ascend.linalg.executor:run_code"
    asks = "text"
    lowers_to = "linalg"
    evidence = "lowered code on the CPU"

    def lacks(self, target: Target) -> str:
        return self.declines(target) or missing_reason()

    def where(self, target: Target) -> str:
        return f"x86, as {target.toolchain} lowers it for {target.arch.name}"

    def piece(self, launch: KernelCall, reply: Reply) -> str:
        return str(reply.facts.get(TEXT, ""))

    def run(
        self,
        request: dict[str, Any],
        pieces: list[str],
        problem: Problem,
        target: Target,
        runner: Worker,
        where: str,
    ) -> Numerics:
        if parts := sorted(set().union(*map(vendor_parts, pieces))):
            reason = f"only the vendor's compiler has {', '.join(parts)}"
            return Numerics(outcome="not_run", where=where, problem=problem, reason=reason)
        return super().run(request, pieces, problem, target, runner, where)

    def analyze(self, reply: Reply, launch: KernelCall, target: Target) -> tuple[Facts, list[Lint]]:
        """Return facts and lints of one lowered launch; the reply's facts hold its text, the returned ones do not."""
        facts = dict(reply.facts)
        text = str(facts.pop(TEXT, ""))
        names = tuple(signature(launch).types)
        arch = target.arch
        # Double buffering, which is on unless it is switched off, takes the other half.
        room = arch.scratchpad_bytes if launch.launch.get("multibuffer") is False else arch.scratchpad_bytes // 2
        found = lints(text, launch.function, names, launch.grid, arch.max_programs, room)
        facts["tile_bytes"] = footprint(read(text))
        for lint in found:
            name = lint.name.replace("-", "_")
            facts[name] = int(facts.get(name, 0)) + lint.value
        return facts, found


RUNTIME = Path(__file__).with_name("runtime.c")
# Tensors become buffers, structured operations loops, and everything LLVM. What differs from triton-ascend's own list
# for CPUs: bf16 is expanded in integers, mathematics goes to libm, and memory comes from runtime.c.
PASSES = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm=use-generic-functions=true",
    "--convert-arith-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-func-to-llvm",
    "--lower-affine",  # lowering memrefs made more of both
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)


def build_runtime(programs: dict[str, str], folder: Path) -> Path:
    made = folder / "runtime.so"
    _run("cc", [programs["cc"], "-O2", "-fPIC", "-shared", str(RUNTIME), "-o", str(made), "-lm"])
    return made


def library(text: str, programs: dict[str, str], folder: Path) -> Path:
    """Compile a lowered kernel to a shared library; raise LinalgError with the refusing program's message."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]

    def at(suffix: str) -> str:
        return str(folder / f"{digest}{suffix}")

    Path(at(".mlir")).write_text(upstream(text))
    _run("mlir-opt", [programs["mlir-opt"], at(".mlir"), *PASSES, "-o", at(".llvm.mlir")])
    _run("mlir-translate", [programs["mlir-translate"], "--mlir-to-llvmir", at(".llvm.mlir"), "-o", at(".ll")])
    # The code runs on the machine that makes it. llc contracts and reorders nothing unless told to.
    native = ("-O2", "-mcpu=native", "-relocation-model=pic", "-filetype=obj")
    _run("llc", [programs["llc"], *native, at(".ll"), "-o", at(".o")])
    _run("cc", [programs["cc"], "-shared", at(".o"), "-o", at(".so"), "-lm"])
    return Path(at(".so"))


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        died = f"died of signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        raise LinalgError(f"{name}: {died}\n{done.stderr.strip()[-4000:]}")


MOST_FAULTS = 256  # as in runtime.c


class Stray(msgspec.Struct, frozen=True):
    """An access outside an argument's memory."""

    argument: str
    what: str  # "reads", "writes" or "touches"
    offset: int  # bytes from the argument's first element
    size: int  # bytes of the argument

    def __str__(self) -> str:
        if self.offset < 0:
            return f"{self.what} {self.argument} {-self.offset} bytes before its start"
        return f"{self.what} {self.argument} {self.offset - self.size} bytes after its end"


class _Fault(ctypes.Structure):
    _fields_ = (("buffer", ctypes.c_int32), ("wrote", ctypes.c_int32), ("offset", ctypes.c_int64))


_runtime: ctypes.CDLL | None = None


def load_runtime(make: Callable[[], Path]) -> ctypes.CDLL:
    """Load runtime.c's functions once a process and install its signal handler; `make` compiles the library."""
    global _runtime
    if _runtime is None:
        loaded = ctypes.CDLL(str(make()), mode=ctypes.RTLD_GLOBAL)
        loaded.guard_buffer.restype = ctypes.c_void_p
        loaded.guard_buffer.argtypes = (ctypes.c_size_t,)
        if loaded.guard_install():
            raise LinalgError("the handler of stray accesses cannot be installed")
        _runtime = loaded
    return _runtime


class GuardedBuffers:
    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._held: list[tuple[str, int, torch.Tensor]] = []  # name, address, tensor

    def add(self, name: str, tensor: torch.Tensor) -> int:
        """Copy the storage that the tensor spans and return the copy's address. Raise LinalgError without memory."""
        size = spans(tensor)
        address = self._runtime.guard_buffer(size)
        if not address:
            raise LinalgError(f"no guarded memory for the {size} bytes of {name}")
        ctypes.memmove(address, tensor.data_ptr(), size)
        self._held.append((name, address, tensor))
        return int(address)

    def strays(self) -> list[Stray]:
        """Return the stray accesses so far: per argument the nearest to its memory, reads and writes apart."""
        faults = (_Fault * MOST_FAULTS)()
        count = min(self._runtime.guard_faults(faults, MOST_FAULTS), MOST_FAULTS)
        found: dict[tuple[str, str, bool], Stray] = {}
        words = {1: "writes", 0: "reads", -1: "touches"}
        for fault in faults[:count]:
            name, _, tensor = self._held[fault.buffer]
            stray = Stray(name, words[fault.wrote], fault.offset, spans(tensor))
            key = (name, stray.what, fault.offset < 0)
            if key not in found or abs(fault.offset) < abs(found[key].offset):
                found[key] = stray
        for index, (name, _, tensor) in enumerate(self._held):
            if self._runtime.guard_broken(index):
                found.setdefault((name, "writes", True), Stray(name, "writes", -1, spans(tensor)))
        return list(found.values())

    def changed(self) -> list[str]:
        names = []
        for name, address, tensor in self._held:
            size = spans(tensor)
            if ctypes.string_at(address, size) != ctypes.string_at(tensor.data_ptr(), size):
                names.append(name)
        return names

    def give_back(self, names: tuple[str, ...]) -> None:
        """Copy these arguments' memory back into their tensors."""
        for name, address, tensor in self._held:
            if name in names:
                ctypes.memmove(tensor.data_ptr(), address, spans(tensor))


@contextmanager
def guard_buffers(runtime: ctypes.CDLL) -> Iterator[GuardedBuffers]:
    try:
        yield GuardedBuffers(runtime)
    finally:
        runtime.guard_release()


# Types of a pointer's elements, as the text spells them.
ELEMENT_OF = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i8", torch.int8: "i8",
}  # fmt: skip
NUMBER_OF = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
WORKSPACE = 1 << 16  # bytes for the lock and the workspace that the adapter adds; kernels without atomics use neither
# Arguments that a kernel may write, by the names that all core kernels have for them.
OUTPUTS = (
    "out", "lse", "delta", "grad_q", "grad_k", "grad_v", "grad_bias", "grad_slopes", "grad_parts", *CAPTURED_GRADIENTS,
)  # fmt: skip


class LaunchReport(msgspec.Struct, frozen=True):
    strays: tuple[Stray, ...]
    wrote_inputs: tuple[str, ...]


class Programs:
    """Kernels made executable in this process, each text once."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[ctypes.CDLL, Any]] = {}

    def launch(
        self, text: str, grid: tuple[int, ...], arguments: dict[str, Any], outputs: tuple[str, ...] = OUTPUTS
    ) -> LaunchReport:
        """Run every program of a launch; `arguments`: run-time ones in the kernel's order. Raises LinalgError."""
        kernel = kernel_of(text)
        if text not in self._loaded:
            self._loaded[text] = _load(text, kernel.name)
        runtime, function = self._loaded[text]
        if len(kernel.arguments) != len(arguments):
            given = f"{len(arguments)} of {', '.join(arguments)}"
            raise LinalgError(f"{kernel.name} takes {len(kernel.arguments)} arguments, not the {given}")
        own = ctypes.create_string_buffer(WORKSPACE)
        sizes = (*grid, 1, 1)[:3]
        with guard_buffers(runtime) as buffers:
            passed: list[Any] = [*_memref(ctypes.addressof(own), WORKSPACE) * OWN_BUFFERS]
            for (name, value), kind in zip(arguments.items(), kernel.arguments, strict=True):
                _check(kernel.name, name, value, kind)
                if isinstance(value, torch.Tensor):
                    passed += _memref(buffers.add(name, value), value.numel())
                else:
                    passed.append(NUMBER_OF[kind.kind](value))
            passed += [ctypes.c_int32(size) for size in sizes]
            for place in itertools.product(*map(range, sizes)):
                runtime.scratch_reset()
                function(*passed, *(ctypes.c_int32(i) for i in place))
            wrote = tuple(name for name in buffers.changed() if name not in outputs)
            buffers.give_back(outputs)
            return LaunchReport(tuple(buffers.strays()), wrote)


def _load(text: str, name: str) -> tuple[ctypes.CDLL, Any]:
    """Return the runtime's library and a kernel's function. Their files are deleted: the code may end this process."""
    programs = need()
    with tempfile.TemporaryDirectory(prefix="portattn-linalg-") as made:
        runtime = load_runtime(lambda: build_runtime(programs, Path(made)))
        path = library(text, programs, Path(made))
        try:
            return runtime, getattr(ctypes.CDLL(str(path)), name)
        except (OSError, AttributeError) as error:
            raise LinalgError(f"{name}: the compiled code cannot be loaded: {error}") from None


def _memref(address: int, elements: int) -> list[Any]:
    """Return a one-dimensional memref's descriptor: allocated and aligned pointer, offset, size, stride."""
    pointer = ctypes.c_void_p(address)
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(elements), ctypes.c_int64(1)]


def _check(kernel: str, name: str, value: Any, kind: Argument) -> None:
    if isinstance(value, torch.Tensor):
        given = ELEMENT_OF.get(value.dtype, str(value.dtype))
        fits = kind.pointer and kind.kind == given
    else:
        given = "f32" if isinstance(value, float) else "i32"
        fits = not kind.pointer and (kind.kind == given or (given == "i32" and kind.kind == "i64"))
    if not fits:
        wants = f"a pointer to {kind.kind}" if kind.pointer else kind.kind
        raise LinalgError(f"{kernel}: {name} is {given}, and the lowered kernel takes {wants} there")
    if not kind.pointer and kind.kind not in NUMBER_OF:
        raise LinalgError(f"{kernel}: {name} has the type {kind.kind}, which no core kernel has")


_programs: Programs | None = None


def compare(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Execute lowered `texts`: verdict.judge's facts, and `strays`. Outputs start as NaN. Raises LinalgError."""
    global _programs
    _programs = _programs or Programs()
    target = Registry.load().target(request["target"])
    with nan_filled_memory(), torch.no_grad():
        plan, call = plan_of(request, target), call_of(request)
        launches, out, lse = kernel_calls(plan, call, target.arch.cores)
        found: list[str] = []
        if has_rows(plan):
            for launch, text in zip(launches, request["texts"], strict=True):
                enter(f"execute {launch.function}")
                seen = _programs.launch(text, launch.grid, arguments_of(launch), outputs_of(call))
                found += complaints(launch.function, seen)
    enter("judge")
    return {"facts": judge(call, out, lse) | {"strays": "; ".join(found)}}


def arguments_of(launch: KernelCall) -> dict[str, Any]:
    """Return the run-time arguments that the compiled kernel still takes."""
    taken = signature(launch).types
    return {name: value for name, value in launch.arguments.items() if name in taken}


def outputs_of(call: Call) -> tuple[str, ...]:
    """Return the arguments that kernels may write to: an operation that fills a cache writes it and its scales."""
    if not call.problem.writes:
        return OUTPUTS
    if call.result is not None:
        return ("result", "candidates")
    return ("k", "v", "k_scale", "v_scale") if call.problem.kv_scales == "token" else ("k", "v")


def complaints(function: str, seen: LaunchReport) -> list[str]:
    """Describe a launch's accesses to memory that is not its own, a sentence each."""
    inputs = [f"{function} writes its input {name}" for name in seen.wrote_inputs]
    return [*(f"{function} {stray}" for stray in seen.strays), *inputs]


def run_code(request: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Execute a probe's kernel (testing/executor.py)."""
    lacking = missing_reason()
    if parts := sorted(vendor_parts(request["texts"]["linalg"])):
        lacking = f"only the vendor's compiler has {', '.join(parts)}"
    if lacking:
        return {"missing": lacking}
    seen = Programs().launch(request["texts"]["linalg"], tuple(request["grid"]), arguments, tuple(request["outputs"]))
    return {"strays": [*map(str, seen.strays), *(f"writes its input {name}" for name in seen.wrote_inputs)]}
