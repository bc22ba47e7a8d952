"""A functional model of AMD GPUs: executes amdgcn assembly text on a CPU, in numpy.

    program = Program.parse(text)                     # compiled.asm["amdgcn"] of Triton, for example
    memory = Memory()
    arguments = [memory.add(x), memory.add(y), len(x)]
    report = program.launch(grid=(4, 1, 1), arguments=arguments, memory=memory, lds_bytes=compiled.metadata.shared)

Modelled: gfx90a, gfx942, gfx950 (MFMA), gfx1100, gfx1201 (WMMA). Checks report errors of the chip with assembly and
source line (errors.py). An unknown instruction, operand or modifier is an error, never a guess. The model has no notion
of time and was never compared with hardware.

With torch and Triton installed, `with portattn.backends.rocm.emulator.amdgpu("gfx942"):` runs unmodified
`kernel[grid](cpu_tensors)` code in the model (triton_driver.py).
"""

import sys
import types
from typing import Any

from portattn.backends.rocm.emulator.amdgpu.assembly import ARCHES
from portattn.backends.rocm.emulator.amdgpu.errors import (
    BadLaunch,
    BadProgram,
    BarrierMismatch,
    Checks,
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
    UninitialisedValue,
    UnknownInstruction,
    UnknownOperand,
    WrongArch,
)
from portattn.backends.rocm.emulator.amdgpu.machine import Program, Report
from portattn.backends.rocm.emulator.amdgpu.memory import Memory

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
    "UninitialisedValue",
    "UnknownInstruction",
    "UnknownOperand",
    "WrongArch",
]


class _Callable(types.ModuleType):
    """The package as a context manager that runs Triton's kernels, and needs no Triton until then."""

    def __call__(self, arch: str, **options: Any) -> Any:
        """Run Triton kernels for `arch` in the model: see triton_driver.emulate."""
        from portattn.backends.rocm.emulator.amdgpu.triton_driver import emulate

        return emulate(arch, **options)


sys.modules[__name__].__class__ = _Callable
