"""A Triton driver that runs unmodified `kernel[grid](cpu_tensors)` code in the model, without a GPU.

    with portattn.backends.rocm.emulator.amdgpu("gfx942") as gpu:
        kernel[(4,)](x, y, n, BLOCK=1024)
    print(gpu.launches[-1].report.instructions)

Triton compiles with its AMD backend. Needs torch and Triton 3.4 to 3.9; kernels defined without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from portattn.backends.rocm.emulator.amdgpu.assembly import ARCHES, AmdArch
from portattn.backends.rocm.emulator.amdgpu.errors import Checks, EmulationError, WrongArch
from portattn.backends.rocm.emulator.amdgpu.machine import STEP_LIMIT, Program, Report
from portattn.backends.rocm.emulator.amdgpu.memory import Memory, share, value_of

_THREADS = 1024  # of a work-group at most
# Triton caches compiled kernels by device number, for all drivers: an arch gets its own, past real devices.
_DEVICES = {name: 1000 + number for number, name in enumerate(ARCHES)}
_one_launch = threading.Lock()
_blocks: list[int] = []  # threads that are inside a block, the innermost last


@dataclass
class EmulatedLaunch:
    """One emulated kernel launch; `seconds` is the model's time, not the chip's."""

    name: str
    grid: tuple[int, int, int]
    report: Report
    seconds: float


@dataclass
class Emulation:
    """The value of emulate's block; `checks` and `step_limit` may be set at any time."""

    arch: str
    checks: Checks = field(default_factory=Checks)
    step_limit: int = STEP_LIMIT
    launches: list[EmulatedLaunch] = field(default_factory=list)


@contextmanager
def emulate(arch: str, *, checks: Checks | None = None, step_limit: int = STEP_LIMIT) -> Iterator[Emulation]:
    """Have Triton compile for `arch` and run kernels in the model, until the block ends.

    Blocks nest, and any thread may launch inside one; Triton has one driver for all threads, so only one thread can be
    inside a block at a time: another raises EmulationError. Raises WrongArch for an arch that is not modelled."""
    if arch not in ARCHES:
        raise WrongArch(f"{arch!r} is not modelled; modelled are {', '.join(ARCHES)}")
    if _blocks and _blocks[-1] != threading.get_ident():
        raise EmulationError("another thread emulates a chip now, and Triton has one driver for all threads")
    emulation = Emulation(arch, checks or Checks(), step_limit)
    _link_without_rocm()
    slot = "_active" if hasattr(driver, "_active") else "active"  # a plain attribute before Triton 3.5
    before, original = getattr(driver, slot), CompiledKernel._init_handles
    active = Driver(ARCHES[arch], emulation)

    def init_handles(kernel: Any) -> Any:
        # load_binary gets the linked code only; the model executes the text beside it.
        active.utils.loading.text = kernel.asm["amdgcn"]
        return original(kernel)

    _blocks.append(threading.get_ident())
    driver.set_active(active)
    CompiledKernel._init_handles = init_handles
    try:
        yield emulation
        if not emulation.launches and os.environ.get("TRITON_INTERPRET") == "1":
            warnings.warn(
                "nothing was emulated; with TRITON_INTERPRET=1 kernels run in Triton's interpreter", stacklevel=3
            )
    finally:
        CompiledKernel._init_handles = original
        setattr(driver, slot, before)
        _blocks.pop()


class Driver:
    def __init__(self, arch: AmdArch, emulation: Emulation) -> None:
        self.arch, self.emulation = arch, emulation
        self.utils = Utilities(arch)

    def launcher_cls(self, source: Any, metadata: Any) -> Launcher:
        return Launcher(source, metadata)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch.name, self.arch.wave)

    def get_current_device(self) -> int:
        return _DEVICES[self.arch.name]

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass

    def get_benchmarker(self) -> Any:
        """Return an autotuner's benchmark that runs each candidate once, without times."""

        def benchmark(function: Any, quantiles: Sequence[float] | None = None, **_: Any) -> Any:
            function()
            return [1.0] * len(quantiles) if quantiles else 1.0

        return benchmark


class Utilities:
    """Device properties, and loading: a "function" is a Program."""

    def __init__(self, arch: AmdArch) -> None:
        self.arch, self.loading = arch, threading.local()
        self._programs: dict[str, Program] = {}

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return {
            "max_shared_mem": self.arch.lds_bytes, "arch": self.arch.name, "warpSize": self.arch.wave,
            "multiprocessor_count": 4, "max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }  # fmt: skip

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[None, Program, int, int, int]:
        text = self.loading.text
        if text not in self._programs:
            self._programs[text] = Program.parse(text, name)
        return None, self._programs[text], 0, 0, _THREADS


class Launcher:
    """Called with grid, stream, function, three or more values of Triton's own, and the kernel's arguments."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.types = list(source.signature.values())
        self.metadata = metadata

    def __call__(self, x: int, y: int, z: int, stream: int, program: Program, *rest: Any) -> None:
        if min(x, y, z) < 1:
            return  # Triton's own drivers launch nothing then
        # Triton keeps compiled kernels, and this launcher with them, beyond the block that compiled them.
        emulation: Emulation = driver.active.emulation
        arguments = [
            pair for pair in _flatten(self.types, rest[len(rest) - len(self.types) :]) if pair[0] != "constexpr"
        ]
        # A launch works on copies of the tensors: of two at once, the later one would undo the other's stores.
        with _one_launch:
            memory = Memory()
            share((argument for _, argument in arguments), memory)
            values = [value_of(kind, argument, memory) for kind, argument in arguments]
            begin = time.perf_counter()
            report = program.launch(
                (x, y, z), values, memory, lds_bytes=self.metadata.shared, waves=self.metadata.num_warps,
                checks=emulation.checks, step_limit=emulation.step_limit,
            )  # fmt: skip
            seconds = time.perf_counter() - begin
            emulation.launches.append(EmulatedLaunch(program.name, (x, y, z), report, seconds))


def _flatten(types: Sequence[Any], arguments: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for kind, argument in zip(types, arguments, strict=True):
        if isinstance(kind, (tuple, list)):
            yield from _flatten(kind, argument)
        else:
            yield kind, argument


def _link_without_rocm() -> None:
    """Skip ROCm's linker, the last stage before 3.5: the model reads the text."""
    from triton.backends import backends

    compiler: Any = backends["amd"].compiler
    if not hasattr(compiler, "path_to_rocm_lld"):
        return
    try:
        compiler.path_to_rocm_lld()
    except Exception:  # noqa: BLE001 - versions differ in what they raise where no ROCm is installed
        from triton._C.libtriton import amd

        compiler.make_hsaco = staticmethod(lambda src, metadata, options: amd.assemble_amdgcn(src, options.arch, ""))
        compiler.hash = lambda self: f"unlinked-{self.target}"
