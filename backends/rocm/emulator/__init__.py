"""Functional models of chips that are not here: they execute the very machine code that a compiler made.

`portattn.backends.rocm.emulator.amdgpu` models AMD GPUs.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "amdgpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("portattn.backends.rocm.emulator.amdgpu")
