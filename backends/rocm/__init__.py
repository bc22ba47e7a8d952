"""AMD GPUs: detection, ROCm and driver versions, SDPA and AITER as vendor paths. torch calls them `cuda`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from portattn.backends.detection import first_line_matching, torch_device_properties, version_in
from portattn.backends.rocm.aiter import AiterPath
from portattn.backends.sdpa import SdpaPath
from portattn.planning.backend import Backend
from portattn.schema.target import Target

if TYPE_CHECKING:
    from portattn.schema.toolchain import Toolchain
    from portattn.testing.executor import Executor


class CompilerOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An option of Triton's AMD back end: the releases that have it, and its default by ranges of releases."""

    name: str
    triton: str
    default: Mapping[str, bool | int | str]
    acts: str = ""  # the releases that do something with it; empty: all that have it


@functools.cache
def compiler_options() -> dict[str, CompilerOption]:
    """Return the rows of triton_options.toml by name."""
    from portattn.schema import toml_reader

    path = Path(__file__).with_name("triton_options.toml")
    data, text = toml_reader.read(path)
    rows = toml_reader.convert(data["option"], tuple[CompilerOption, ...], path, text, "option")
    return {row.name: row for row in rows}


DRIVER_VERSION_FILE = Path("/sys/module/amdgpu/version")


class RocmBackend(Backend):
    name = "rocm"
    title = "AMD"
    device_type = "cuda"
    folder = Path(__file__).parent
    compiler_folders = ("backends/amd/", "third_party/amd/")
    compiler_words = ("llvm-amdgpu",)
    compiler_says = (
        "AMDGPU DAG->DAG", "%llvm.amdgcn.", "TritonAMD", "Triton Error [HIP]", "AMDMfma", "AMDWmma", "amd_mfma",
        "amd_wmma", "triton-rocm", "amdgcn-amd-amdhsa", "tritonamdgpu-", "rocdl.", "triton_amd",
    )  # fmt: skip
    device_words = (
        "amd", "instinct", "radeon", "tm", "r", "gpu", "graphics", "accelerator", "oam", "vf", "[0-9]*gb",
        "hbm[0-9]*",
    )  # fmt: skip
    options = MappingProxyType(
        {
            "waves_per_eu": int, "matrix_instr_nonkdim": int, "kpack": int, "schedule_hint": str,
            "enable_fp_fusion": bool, "llvm_fn_attrs": str, "wgp_cu_mode": str,
        }
    )  # fmt: skip
    compilers = ("triton", "flagtree")
    vendor = (SdpaPath(), AiterPath())  # no evidence puts AITER before the core, or before what torch tests

    def detect(self, index: int | None = None) -> str | None:
        """Return the arch of AMD device `index`, or None. AMD's code objects run on their own processor only."""
        properties = torch_device_properties("hip", index)
        if properties is None:
            return None
        # Feature suffixes (`gfx942:sramecc+:xnack-`) say how memory is run, not which instructions there are.
        return self.arch_of(properties.gcnArchName.split(":")[0])

    def describe(self, index: int | None = None) -> str:
        properties = torch_device_properties("hip", index)
        return "" if properties is None else f"processor {properties.gcnArchName.split(':')[0]}"

    def lacks_option(self, name: str, toolchain: Toolchain) -> str:
        row = compiler_options().get(name)
        if row is None:
            return ""
        if toolchain.within("triton", row.triton) is False:
            return f"{toolchain} lacks it (triton {row.triton} has it)"
        if row.acts and toolchain.within("triton", row.acts) is False:
            return f"{toolchain} does nothing with it (triton {row.acts} does)"
        return ""

    def machine_components(self) -> dict[str, str]:
        """Return the versions `rocm` (the HIP of torch's build) and `driver` (amdgpu-dkms), if present."""
        import torch

        # The amdgpu module of a distribution's own kernel has no version file: then the driver is not known.
        driver = first_line_matching(DRIVER_VERSION_FILE, r"^(\d+(?:\.\d+)+)")
        found = {"rocm": version_in(torch.version.hip), "driver": version_in(driver)}
        return {name: version for name, version in found.items() if version}

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Executor, ...]:
        from portattn.backends.rocm.emulator.executor import EmulatorExecutor

        return (EmulatorExecutor(seconds),)
