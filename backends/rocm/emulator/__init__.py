"""Functional models of absent chips, which execute a compiler's machine code; `amdgpu` models AMD GPUs."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "amdgpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not `from … import amdgpu`, which would ask this function again.
    import portattn.backends.rocm.emulator.amdgpu as model

    return model
