"""Options of launches that only some backends' compilers know, as those backends declare them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from portattn.schema import lowering
from portattn.schema.lowering import BackendOptions

_OWN = "portattn.backends"  # by name, as the registry has it: a plan needs their data, and no chip's code


@functools.lru_cache(maxsize=1)
def backend_options() -> BackendOptions:
    """Backend.options of portattn's own backends, by backend. Those of other packages launch no kernel of portattn's
    with an option that portattn does not have."""
    return {backend.name: backend.options for backend in importlib.import_module(_OWN).BUILTIN}


@functools.lru_cache(maxsize=1)
def options() -> dict[str, type]:
    """Every option of any backend, and its type."""
    return {name: kind for own in backend_options().values() for name, kind in own.items()}


def check_option(name: str, backend: str | None) -> None:
    """Raise ValueError where `name` is a compiler option that the backend (None: every backend) does not know."""
    lowering.check_option(name, backend, backend_options())


def check_launch_values(values: dict[str, Any], backend: str | None, rows: bool = False) -> None:
    """Raise ValueError on an unknown launch name, another backend's option, or a value of the wrong kind or range.

    rows  whether the values are of kernels of gradients, one of which may have values of its own
    """
    lowering.check_launch_values(values, backend, backend_options(), rows)
