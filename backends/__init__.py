"""portattn's own backends. Other packages add theirs through the entry-point group `portattn.backends`."""

from portattn.backends.ascend import AscendBackend
from portattn.backends.cpu import CpuBackend
from portattn.backends.cuda import CudaBackend
from portattn.backends.rocm import RocmBackend
from portattn.planning.backend import ENTRY_POINT_GROUP, Backend, VendorPath

BUILTIN: tuple[Backend, ...] = (CudaBackend(), RocmBackend(), AscendBackend(), CpuBackend())

__all__ = ["BUILTIN", "ENTRY_POINT_GROUP", "Backend", "VendorPath"]
