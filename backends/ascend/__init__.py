"""Huawei Ascend NPUs: detection through torch_npu, and versions of CANN and driver."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from portattn.backends.ascend.vendor import NpuFusedInferAttentionScore, NpuFusionAttention
from portattn.backends.detection import first_line_matching, version_in
from portattn.planning.backend import Backend
from portattn.schema.target import Target

if TYPE_CHECKING:
    from portattn.testing.executor import Executor

DEFAULT_CANN_HOME = "/usr/local/Ascend/ascend-toolkit/latest"
DRIVER_VERSION_FILE = Path("/usr/local/Ascend/driver/version.info")


@functools.cache
def _import_error() -> str:
    """Return the error of torch_npu's first import, or an empty string: a second import fails by the first's halves."""
    try:
        import torch_npu as torch_npu
    except Exception as error:  # noqa: BLE001 - as in `_device_name`
        return f"{type(error).__name__}: {error}"
    return ""


def _device_name(index: int | None) -> tuple[str, str]:
    """Return the SoC name of NPU `index`, or the error that torch_npu raised instead; both empty without an NPU."""
    step = "import torch_npu"
    try:
        if importlib.util.find_spec("torch_npu") is None:
            return "", ""
        if trouble := _import_error():
            return "", f"{step} raised {trouble}"
        import torch_npu

        step = "torch_npu.npu.is_available()"
        if not torch_npu.npu.is_available():
            return "", ""
        step = f"torch_npu.npu.get_device_name({'' if index is None else index})"
        return torch_npu.npu.get_device_name(index).strip(), ""
    except Exception as error:  # noqa: BLE001 - where CANN or the driver is half configured, torch_npu raises anything
        return "", f"{step} raised {type(error).__name__}: {error}"


class AscendBackend(Backend):
    name = "ascend"
    title = "Huawei Ascend"
    device_type = "npu"
    default_toolchain = "triton-ascend==3.2.0"
    folder = Path(__file__).parent
    compiler_folders = ("backends/ascend/",)
    compiler_words = ("triton-ascend",)
    compiler_says = (
        "[ConvertTritonIRToLinalgIR]",
        "[ConvertLinalgRToBinary]",
        "[ConvertLinalgIRToBinary]",
        "BiShengHIR",
    )
    device_words = ("huawei", "npu", "[0-9]*gb")
    options = MappingProxyType({"multibuffer": bool, "enable_fp_fusion": bool})
    compilers = ("triton-ascend", "flagtree")
    adapter = "portattn.worker.ascend:compile_kernel"
    vendor = (NpuFusedInferAttentionScore(), NpuFusionAttention())

    def detect(self, index: int | None = None) -> str | None:
        """Return the arch of NPU `index`; None without an NPU, torch_npu or CANN, and for a chip without an arch."""
        name = _device_name(index)[0]
        return self.arch_of(name) if name else None

    def describe(self, index: int | None = None) -> str:
        return _device_name(index)[0]

    def trouble(self, index: int | None = None) -> str:
        return _device_name(index)[1]

    def machine_components(self) -> dict[str, str]:
        homes = (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"), DEFAULT_CANN_HOME)
        home = next(h for h in homes if h)
        install = Path(home) / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
        found = {
            "cann": version_in(first_line_matching(install, r"^version=(\S+)")),
            "driver": version_in(first_line_matching(DRIVER_VERSION_FILE, r"^Version=(\S+)")),
        }
        return {name: version for name, version in found.items() if version}

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Executor, ...]:
        from portattn.backends.ascend.linalg.executor import LinalgExecutor

        return (LinalgExecutor(seconds),)
