"""The CPU: torch's SDPA, the reference path, and the core kernels under Triton's interpreter when asked for by name."""

from __future__ import annotations

from pathlib import Path

from portattn.backends.cpu.sdpa import CpuSdpaPath
from portattn.planning.backend import Backend
from portattn.schema.target import Arch


class CpuBackend(Backend):
    name = "cpu"
    title = "CPU"
    device_type = "cpu"
    folder = Path(__file__).parent
    core_path = "interpreter"
    vendor = (CpuSdpaPath(),)

    def detect(self, index: int | None = None) -> str:
        return "generic"

    def triton_target(self, arch: Arch) -> tuple[str, str | int, int]:
        raise NotImplementedError("Triton has no CPU target here; the interpreter runs the kernels' Python")
