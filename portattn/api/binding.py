"""The arguments of a public operation by name, as Python binds them: for prepare, plan, explain, warmup and handles."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from portattn.api.excess_arguments import wrong_arguments
from portattn.api.unknown_arguments import MISSING

Binder = Callable[..., dict[str, Any]]


@functools.lru_cache(maxsize=64)
def named_arguments(op: str) -> Binder:
    """A function with the operation's own signature that returns its arguments by name, defaults included.

    It raises the TypeError or UnknownArgument that a call of the operation raises. `inspect.Signature.bind` does the
    same in some ten microseconds, which is more than all else that a run of a prepared call costs: so the function is
    made once, by `exec` of its signature, as dataclasses are.
    """
    function = getattr(importlib.import_module("portattn.api.ops"), op)
    parameters = inspect.signature(function).parameters.values()
    # What must be given has a default too, which request_of refuses: a wrong name is said before a missing one.
    defaults = {p.name: MISSING if p.default is p.empty else p.default for p in parameters}
    words: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*excess" not in words:
            words.append("*excess")
        words.append(f"{p.name}=_defaults['{p.name}']")
    made: dict[str, Any] = {"_defaults": defaults, "_wrong": wrong_arguments}
    body = f"    if excess or unknown: raise _wrong({op!r}, excess, unknown)\n    return locals()"
    exec(f"def {op}({', '.join([*words, '**unknown'])}):\n{body}", made)
    found: Binder = made[op]
    return found
