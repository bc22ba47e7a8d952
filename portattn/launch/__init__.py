"""Launches of a plan: kernel calls as data, and running them. Imported lazily: backends need no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portattn.launch.kernelcall import KernelCall, Signature, meta_call, signature
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
_IN_KERNELCALL = ("KernelCall", "Signature", "meta_call", "signature")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "kernelcall" if name in _IN_KERNELCALL else "run"
    found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = found
    return found
