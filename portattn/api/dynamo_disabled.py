"""Functions that dynamo does not trace: it ends its graph there, calls them, and begins another.

torch.compiler.disable imports dynamo, which takes a second. So a function is only registered here, and disabled once
somebody else has imported dynamo (after_import.py). It is called by its name: `left_out["run"](...)`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

left_out: dict[str, Callable[..., Any]] = {}
_reasons: dict[str, str] = {}
_disabled: set[str] = set()
_constant: list[Callable[..., Any]] = []
F = TypeVar("F", bound=Callable[..., Any])


def leave_out(name: str, function: Callable[..., Any], reason: str) -> None:
    """Have dynamo leave a function alone. reason: what its error says where it may not end its graph."""
    left_out[name], _reasons[name] = function, reason
    _apply_if_dynamo_is_here()


def called_while_traced(function: F) -> F:
    """Have dynamo call a function while it traces, and put what it returns into the graph (assume_constant_result)."""
    _constant.append(function)
    _apply_if_dynamo_is_here()
    return function


def _apply_if_dynamo_is_here() -> None:
    module = sys.modules.get("torch._dynamo")
    if module is not None and hasattr(module, "disable"):
        apply_all()


def apply_all() -> None:
    """To be called once dynamo is imported."""
    from torch._dynamo import assume_constant_result, disable

    while _constant:
        assume_constant_result(_constant.pop())

    takes_reason = "reason" in inspect.signature(disable).parameters  # since torch 2.8
    for name in _reasons.keys() - _disabled:
        left_out[name] = disable(left_out[name], **({"reason": _reasons[name]} if takes_reason else {}))
        _disabled.add(name)
