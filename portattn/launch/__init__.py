"""From a plan to kernel launches: what is launched with which arguments (KernelCall), and launching it."""

from portattn.launch.kernelcall import KernelCall, Signature, signature
from portattn.launch.meta import meta_call
from portattn.launch.run import has_rows, kernel_calls, launch_all, load_kernels, run_core

__all__ = [
    "KernelCall",
    "Signature",
    "has_rows",
    "kernel_calls",
    "launch_all",
    "load_kernels",
    "meta_call",
    "run_core",
    "signature",
]
