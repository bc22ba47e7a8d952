"""Huawei Ascend NPUs: detection through torch_npu, CANN and driver versions, and torch_npu's fused attention.

`npu` is no torch device type before torch_npu is imported, and torch_npu needs CANN: nothing here imports it
before it is asked for.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from portattn.backends.ascend.vendor import NpuFusedInferAttentionScore, NpuFusionAttention
from portattn.backends.detection import first_line_matching, version_in
from portattn.planning.backend import Backend
from portattn.schema.target import Arch, Target

if TYPE_CHECKING:
    from portattn.testing.executor import Executor

# How triton-ascend's GPUTarget spells an arch (3.2.0, backends/ascend/utils.py, TRITON_ASCEND_ARCH).
# ascend910_93 is a family of spellings with one set of limits; the first chip of its title stands for it.
SPELLING = {
    "ascend910b1": "Ascend910B1",
    "ascend910b2": "Ascend910B2",
    "ascend910b3": "Ascend910B3",
    "ascend910b4": "Ascend910B4",
    "ascend910_93": "Ascend910_9382",
    "ascend310p": "Ascend310P3",
}

# Names that torch_npu gives a device, and the arch each is. 910B2C and 910B4-1 have 910B2's and 910B4's limits
# (AscendNPU-IR, NPUTargetSpec.td). `Ascend910B` without a number is a 910 of the first generation
# (triton-ascend issue 2115), and 910_95 and 950 are another architecture: no arch.
ARCH_OF_DEVICE = (
    (re.compile(r"Ascend910B([1-4])(?:C|-\d)?"), r"ascend910b\1"),
    (re.compile(r"Ascend910_93\d\d"), "ascend910_93"),
    (re.compile(r"Ascend310P\d?"), "ascend310p"),
)

DEFAULT_CANN_HOME = "/usr/local/Ascend/ascend-toolkit/latest"
DRIVER_VERSION_FILE = Path("/usr/local/Ascend/driver/version.info")


class AscendBackend(Backend):
    name = "ascend"
    device_type = "npu"
    folder = Path(__file__).parent
    compilers = ("triton-ascend", "flagtree")
    vendor = (NpuFusionAttention(), NpuFusedInferAttentionScore())

    def detect(self, index: int | None = None) -> str | None:
        """Arch of NPU `index`; None without one, without torch_npu or CANN, and for a chip with no arch here."""
        if importlib.util.find_spec("torch_npu") is None:
            return None
        try:
            import torch_npu

            if not torch_npu.npu.is_available():
                return None
            return arch_of(torch_npu.npu.get_device_name(index))
        except (ImportError, OSError, RuntimeError, AssertionError):
            # ImportError, OSError: torch_npu is there, but CANN's libraries are not. RuntimeError: the driver or
            # the device does not answer. AssertionError: there is no device of that number.
            return None

    def machine_components(self) -> dict[str, str]:
        """`cann` (the toolkit that the environment points to) and `driver`, where there are any."""
        homes = (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"), DEFAULT_CANN_HOME)
        home = next(h for h in homes if h)
        install = Path(home) / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
        found = {
            "cann": version_in(first_line_matching(install, r"^version=(\S+)")),
            "driver": version_in(first_line_matching(DRIVER_VERSION_FILE, r"^Version=(\S+)")),
        }
        return {name: version for name, version in found.items() if version}

    def triton_target(self, arch: Arch) -> tuple[str, str | int, int]:
        return "npu", SPELLING[arch.name], 0

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Executor, ...]:
        from portattn.backends.ascend.linalg.executor import LinalgExecutor

        return (LinalgExecutor(seconds),)


def arch_of(device_name: str) -> str | None:
    """The arch of a device by torch_npu's name for it (`Ascend910B4-1` is ascend910b4); None for others."""
    for pattern, arch in ARCH_OF_DEVICE:
        found = pattern.fullmatch(device_name.strip())
        if found:
            return found.expand(arch)
    return None
