"""Whether a package is here, and why not."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata as metadata
import importlib.util
from types import ModuleType

import torch

from portattn.tools.bench.gate import reason


@functools.cache
def missing(package: str) -> str:
    """Why a package cannot be used here; an empty text where it can. Imports it."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return f"no package {package.partition('.')[0]} is installed"
    try:
        importlib.import_module(package)
    except Exception as failure:  # noqa: BLE001  # whatever a package raises on import: it cannot be used, and this is why
        return f"import {package}: {type(failure).__name__}: {reason(failure)}"
    return ""


def module(package: str) -> ModuleType:
    return importlib.import_module(package)


def version(distribution: str) -> str:
    """A distribution's version, or "here" for a module that has none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "here"


def has_op(namespace: str, op: str) -> bool:
    """Whether torch.ops has this op, which a loaded library registers."""
    return hasattr(getattr(torch.ops, namespace), op)
