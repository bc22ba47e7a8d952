"""Launch options that only some backends' compilers know, as the backends declare them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from portattn.schema import lowering
from portattn.schema.lowering import BackendOptions

_OWN = "portattn.backends"  # by name, as the registry has it: a plan needs their data, and no chip's code


KINDS = (bool, int, str)  # types that an option's values may have

_brought: list[BackendOptions] = [{}]  # replaced whole: other threads may be planning


@functools.lru_cache(maxsize=1)
def own() -> BackendOptions:
    """Return Backend.options of portattn's own backends, by backend."""
    return {backend.name: backend.options for backend in importlib.import_module(_OWN).BUILTIN}


def bring(found: BackendOptions) -> None:
    """Set the options that backends of other packages declare (planning/plugins.py)."""
    _brought[0] = dict(found)


def backend_options() -> BackendOptions:
    """Return Backend.options by backend: portattn's own, and packages' once the registry has looked for them."""
    return {**own(), **_brought[0]}


def declared_wrongly(given: Any, earlier: BackendOptions) -> str:
    """Return the fault of a backend's options, or an empty string: an option has one type in all backends' files."""
    if not isinstance(given, Mapping):
        return f"is {given!r}, but must map names to types"
    for name, kind in given.items():
        if not isinstance(name, str) or not name.isidentifier() or kind not in KINDS:
            return f"has {name!r}: {kind!r}, but must map names to bool, int or str"
        if name in lowering.LAUNCH_FIELDS or name in lowering.CHOICES:
            return f"has {name!r}, which every launch has"
        for other, options in earlier.items():
            if options.get(name, kind) is not kind:
                return f"has {name!r} of type {kind.__name__}, and {other} has it of type {options[name].__name__}"
    return ""


def options() -> dict[str, type]:
    return {name: kind for own in backend_options().values() for name, kind in own.items()}


def check_option(name: str, backend: str | None) -> None:
    """Raise ValueError if the backend (None: every backend) does not know the compiler option `name`."""
    lowering.check_option(name, backend, backend_options())


def check_launch_values(values: dict[str, Any], backend: str | None, rows: bool = False) -> None:
    """Raise ValueError on an unknown name, another backend's option or a bad value; `rows`: of kernels of gradients."""
    lowering.check_launch_values(values, backend, backend_options(), rows)
