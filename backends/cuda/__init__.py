"""NVIDIA GPUs: detection, the versions of ptxas and of the driver, and SDPA as the vendor's path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.backends.cuda.hopper_latent.variant import LatentVariant
from portattn.backends.cuda.ptxas import ptxas_version
from portattn.backends.detection import first_line_matching, torch_device_properties, version_in
from portattn.backends.sdpa import SdpaPath
from portattn.planning.backend import Backend
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain

if TYPE_CHECKING:
    from portattn.testing.executor import Executor

WARP_SIZE = 32
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")

# Compute capability -> arch. The second group has no table of its own and takes a known arch's, of the same
# family: its limits are no smaller (NVIDIA/cccl, arch_traits.h), and it has that arch's matrix instructions.
#   8.7 (Orin), 8.8   run sm_86's code; 8.7 has more shared memory, so tiles that fit sm_86 fit here
#   10.3 (B300)       sm_100's limits, and one family with it: `sm_100f` code runs on both
#   12.1 (GB10)       sm_120's limits, and one family with it: `sm_120f` code runs on both
# 10.1 and 11.0 (Thor) have tcgen05 but are another family, and older than 8.0 lacks bf16 products: no arch.
ARCH_OF_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90",
    (10, 0): "sm_100",
    (12, 0): "sm_120",
    # no table of their own
    (8, 7): "sm_86",
    (8, 8): "sm_86",
    (10, 3): "sm_100",
    (12, 1): "sm_120",
}


class CudaBackend(Backend):
    name = "cuda"
    device_type = "cuda"
    folder = Path(__file__).parent
    compilers = ("triton", "flagtree")
    vendor = (SdpaPath(),)
    variants = (ForwardVariant(), LatentVariant())

    def detect(self, index: int | None = None) -> str | None:
        """Arch of NVIDIA device `index`; None without one, and for a compute capability that has no arch here."""
        properties = torch_device_properties("cuda", index)
        return None if properties is None else ARCH_OF_CAPABILITY.get((properties.major, properties.minor))

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

    def triton_target(self, arch: Arch) -> tuple[str, str | int, int]:
        return "cuda", _capability(arch), WARP_SIZE

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Executor, ...]:
        from portattn.backends.cuda.ptx_compat.executor import PtxExecutor

        return (PtxExecutor(seconds, here),)


def _capability(arch: Arch) -> int:
    """90 for `sm_90`: the number in the arch's name, as Triton's GPUTarget takes it."""
    return int(arch.name.removeprefix("sm_"))
