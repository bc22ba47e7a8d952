"""NVIDIA GPUs: detection, the versions of ptxas and of the driver, and SDPA as the vendor's path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from portattn.backends.cuda.hopper_backward.variant import BackwardVariant
from portattn.backends.cuda.hopper_forward.narrow_variant import NarrowVariant
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.backends.cuda.hopper_forward.whole_variant import WholeVariant
from portattn.backends.cuda.hopper_latent.variant import LatentVariant
from portattn.backends.cuda.ptxas import ptxas_version
from portattn.backends.detection import first_line_matching, torch_device_properties, version_in
from portattn.backends.sdpa import SdpaPath
from portattn.planning.backend import Backend
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain

if TYPE_CHECKING:
    from portattn.testing.executor import Executor
    from portattn.tools.tune.tunable import Tunable

DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


class CudaBackend(Backend):
    name = "cuda"
    title = "NVIDIA"
    device_type = "cuda"
    folder = Path(__file__).parent
    compiler_folders = ("backends/nvidia/",)
    compiler_words = ("ptxas",)
    compiler_says = ("Triton PTX codegen error",)
    # As nvidia-smi and torch print them; `1g.10gb` is a part of a chip (MIG).
    device_words = (
        "nvidia", "geforce", "tesla", "gpu", "laptop", "generation", "server", "workstation", "edition", "max", "q",
        "pcie", "nvl", "sxm", "sxm[0-9]", "mig", "[0-9]g.[0-9]*gb", "[0-9]*gb", "hbm[0-9]*", "gddr[0-9]*",
    )  # fmt: skip
    # launch_pdl: the kernel that merges a split is launched while the splitting one still runs, and waits for it.
    options = MappingProxyType({"maxnreg": int, "launch_pdl": bool, "enable_fp_fusion": bool})
    compilers = ("triton", "flagtree")
    vendor = (SdpaPath(),)
    variants = (ForwardVariant(), NarrowVariant(), WholeVariant(), BackwardVariant(), LatentVariant())

    def detect(self, index: int | None = None) -> str | None:
        """Arch of NVIDIA device `index`; None without one, and for a compute capability that has no arch here."""
        properties = torch_device_properties("cuda", index)
        return None if properties is None else self.arch_of(f"{properties.major}.{properties.minor}")

    def describe(self, index: int | None = None) -> str:
        properties = torch_device_properties("cuda", index)
        return "" if properties is None else f"compute capability {properties.major}.{properties.minor}"

    def components(self, arch: Arch, toolchain: Toolchain) -> dict[str, str]:
        """`ptxas`, where it is known: for releases of community Triton that ptxas.toml lists."""
        version = ptxas_version(_capability(arch), toolchain)
        return {} if version is None else {"ptxas": version}

    def machine_components(self) -> dict[str, str]:
        """`cuda` (what torch was built with) and `driver` (the kernel module), where there are any."""
        import torch

        driver = first_line_matching(DRIVER_VERSION_FILE, r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")
        found = {"cuda": version_in(torch.version.cuda), "driver": version_in(driver)}
        return {name: version for name, version in found.items() if version}

    def tunables(self, arch: str) -> tuple[Tunable, ...]:
        from portattn.backends.cuda.hopper_backward.tuning import BackwardTunable
        from portattn.backends.cuda.hopper_forward.tuning import ForwardTunable

        made: list[Tunable] = [ForwardTunable()] if arch in ForwardVariant.arches else []
        return (*made, *([BackwardTunable()] if arch in BackwardVariant.arches else []))

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Executor, ...]:
        from portattn.backends.cuda.ptx_compat.executor import PtxExecutor

        return (PtxExecutor(seconds, here),)


def _capability(arch: Arch) -> int:
    """90 for `sm_90`, as Triton's GPUTarget takes it."""
    assert arch.compiler_target is not None, "every file of arches/ has one"
    return int(arch.compiler_target[1])
