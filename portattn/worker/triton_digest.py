"""The digest of Triton's own files (0.4 GB), part of every key in its cache. Triton computes it once a process."""

from __future__ import annotations

import importlib
from collections.abc import Callable


def digest() -> Callable[[], object] | None:
    """Triton's function that computes and keeps it; None where this Triton has none. Imports Triton."""
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # 3.5 and later; before
        found: Callable[[], object] | None = getattr(importlib.import_module(place), "triton_key", None)
        if found is not None:
            return found
    return None
