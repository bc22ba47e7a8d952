"""From a plan to kernel launches: what is launched with which arguments (KernelCall), and launching it.

Names are looked up when they are first asked for: backends are imported where there is no torch, and their variants
describe launches by `portattn.schema.kernel_step`, which needs none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portattn.launch.kernelcall import KernelCall, Signature, signature
    from portattn.launch.meta_tensors import meta_call
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
_WHERE = {"KernelCall": "kernelcall", "Signature": "kernelcall", "signature": "kernelcall", "meta_call": "meta_tensors"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_WHERE.get(name, 'run')}"), name)
    globals()[name] = found
    return found
