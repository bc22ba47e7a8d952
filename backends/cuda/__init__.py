"""NVIDIA GPUs: detection, versions of ptxas and driver, and SDPA as the vendor's path."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from portattn.backends.cuda.hopper_backward.variant import BackwardVariant
from portattn.backends.cuda.hopper_forward.other_variants import Fp8Variant, Int8Variant, WideVariant
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.backends.cuda.hopper_indexer.variant import IndexerVariant
from portattn.backends.cuda.hopper_latent.variant import LatentVariant
from portattn.backends.detection import first_line_matching, torch_device_properties, version_in
from portattn.backends.sdpa import SdpaPath
from portattn.planning.backend import Backend
from portattn.schema import toml_reader
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain

if TYPE_CHECKING:
    from portattn.testing.executor import Executor
    from portattn.tools.tune.tunable import Tunable


TABLE = Path(__file__).parent / "ptxas.toml"
PTXAS_ENV = "TRITON_PTXAS_PATH"
VERSION_SECONDS = 10  # a ptxas that has not printed its version by then is taken for one that does not run


class ReleaseAssemblers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    triton: str
    ptxas: str
    blackwell: str = ""
    blackwell_from: int = 0
    blackwell_env: str = ""
    source: str


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    release: tuple[ReleaseAssemblers, ...]


@functools.lru_cache(maxsize=1)
def releases() -> tuple[ReleaseAssemblers, ...]:
    """Return every listed release. Raise DataError (file, line, key) on anything outside the schema."""
    data, text = toml_reader.read(TABLE)
    return toml_reader.convert(data, _Table, TABLE, text).release


def ptxas_version(capability: int, toolchain: Toolchain) -> str | None:
    """Return the version of the ptxas for sm_<capability>, if known: an installed Triton's may be TRITON_PTXAS_PATH."""
    release = next((r for r in releases() if toolchain.within("triton", r.triton)), None)
    if release is None:
        return None
    blackwell = bool(release.blackwell) and capability >= release.blackwell_from
    variable = release.blackwell_env if blackwell else PTXAS_ENV
    named = os.environ.get(variable, "") if toolchain.path and variable else ""
    replaced = version_of(named) if named else None
    return replaced or (release.blackwell if blackwell else release.ptxas)


@functools.lru_cache(maxsize=8)
def version_of(program: str) -> str | None:
    """Return the version that `program --version` prints, such as `12.8.93`; None if it fails."""
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        # Not there, not executable, failed or hung: Triton passes over such a program too.
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", answer.stdout)
    return found.group(1) if found else None


DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


class CudaBackend(Backend):
    name = "cuda"
    title = "NVIDIA"
    device_type = "cuda"
    folder = Path(__file__).parent
    compiler_folders = ("backends/nvidia/", "third_party/nvidia/")
    compiler_words = ("ptxas",)
    compiler_says = (
        "Triton PTX codegen error", "llvm.nvvm.", "Triton Error [CUDA]", "TritonNvidiaGPU", "NvidiaMma", "nvidia_mma",
        "triton-nvidia-", "'fp8e4b15'", "CUDA arch <", "CUDA: Error-", "nvvm.", " ttng.",
    )  # fmt: skip
    # As nvidia-smi and torch print them; `1g.10gb` is a part of a chip (MIG).
    device_words = (
        "nvidia", "geforce", "tesla", "gpu", "laptop", "generation", "server", "workstation", "edition", "max", "q",
        "pcie", "nvl", "sxm", "sxm[0-9]", "mig", "[0-9]g.[0-9]*gb", "[0-9]*gb", "hbm[0-9]*", "gddr[0-9]*",
    )  # fmt: skip
    # launch_pdl: the kernel that merges a split is launched while the splitting one still runs, and waits for it.
    options = MappingProxyType({"maxnreg": int, "launch_pdl": bool, "enable_fp_fusion": bool})
    compilers = ("triton", "flagtree")
    vendor = (SdpaPath(),)
    variants = (
        ForwardVariant(), WideVariant(), Fp8Variant(), Int8Variant(), BackwardVariant(), LatentVariant(),
        IndexerVariant(),
    )  # fmt: skip

    def detect(self, index: int | None = None) -> str | None:
        """Return the arch of NVIDIA device `index`; None without one, or without an arch for its compute capability."""
        properties = torch_device_properties("cuda", index)
        return None if properties is None else self.arch_of(f"{properties.major}.{properties.minor}")

    def describe(self, index: int | None = None) -> str:
        properties = torch_device_properties("cuda", index)
        return "" if properties is None else f"compute capability {properties.major}.{properties.minor}"

    def components(self, arch: Arch, toolchain: Toolchain) -> dict[str, str]:
        """Return `ptxas`' version for releases of community Triton that ptxas.toml lists."""
        version = ptxas_version(_capability(arch), toolchain)
        return {} if version is None else {"ptxas": version}

    def machine_components(self) -> dict[str, str]:
        """Return the versions `cuda` (torch's build) and `driver` (the kernel module), if present."""
        import torch

        driver = first_line_matching(DRIVER_VERSION_FILE, r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")
        found = {"cuda": version_in(torch.version.cuda), "driver": version_in(driver)}
        return {name: version for name, version in found.items() if version}

    def tunables(self, arch: str) -> tuple[Tunable, ...]:
        from portattn.backends.cuda.schedule_tunables import BackwardTunable, ForwardTunable

        made: list[Tunable] = [ForwardTunable()] if arch in ForwardVariant.arches else []
        return (*made, *([BackwardTunable()] if arch in BackwardVariant.arches else []))

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Executor, ...]:
        from portattn.backends.cuda.ptx_compat import PtxExecutor

        return (PtxExecutor(seconds, here),)


def _capability(arch: Arch) -> int:
    assert arch.compiler_target is not None, "every file of arches/ has one"
    return int(arch.compiler_target[1])
