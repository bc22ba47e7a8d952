"""A functional model of AMD GPUs: executes amdgcn assembly text on a CPU, in numpy.

    program = Program.parse(text)                     # compiled.asm["amdgcn"] of Triton, for example
    memory = Memory()
    arguments = [memory.add(x), memory.add(y), len(x)]
    report = program.launch(grid=(4, 1, 1), arguments=arguments, memory=memory, lds_bytes=compiled.metadata.shared)

Modelled: gfx90a, gfx942, gfx950 (MFMA), gfx1100, gfx1201 (WMMA). While a kernel runs, Checks look for what would be
wrong on the chip; findings name the assembly line and the kernel's source line (errors.py). An instruction, operand or
modifier that the model does not know is an error, never a guess. It was never compared with hardware, and it has no
notion of time.

With torch and Triton installed, `with portattn.backends.rocm.emulator.amdgpu("gfx942"):` runs unmodified
`kernel[grid](cpu_tensors)` code in the model (triton_driver.py).
"""

import sys
import types
from typing import Any

from portattn.backends.rocm.emulator.amdgpu.checks import Checks
from portattn.backends.rocm.emulator.amdgpu.errors import (
    BadLaunch,
    BadProgram,
    BarrierMismatch,
    EmulationError,
    Finding,
    GlobalRace,
    LdsOutOfRange,
    LdsRace,
    MissingWait,
    OutOfBounds,
    Place,
    StepLimit,
    TruncatedText,
    Uninitialised,
    UnknownInstruction,
    UnknownOperand,
    WrongArch,
)
from portattn.backends.rocm.emulator.amdgpu.isa import ARCHES
from portattn.backends.rocm.emulator.amdgpu.memory import Memory
from portattn.backends.rocm.emulator.amdgpu.program import Program, Report

__all__ = [
    "ARCHES",
    "BadLaunch",
    "BadProgram",
    "BarrierMismatch",
    "Checks",
    "EmulationError",
    "Finding",
    "GlobalRace",
    "LdsOutOfRange",
    "LdsRace",
    "Memory",
    "MissingWait",
    "OutOfBounds",
    "Place",
    "Program",
    "Report",
    "StepLimit",
    "TruncatedText",
    "Uninitialised",
    "UnknownInstruction",
    "UnknownOperand",
    "WrongArch",
]


class _Callable(types.ModuleType):
    """This package is called as the context manager that runs Triton's kernels, and needs no Triton until then."""

    def __call__(self, arch: str, **options: Any) -> Any:
        """Run Triton kernels for `arch` in the model: see triton_driver.emulate."""
        from portattn.backends.rocm.emulator.amdgpu.triton_driver import emulate

        return emulate(arch, **options)


sys.modules[__name__].__class__ = _Callable
