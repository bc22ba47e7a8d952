"""The arguments of a public operation by name, as Python binds them: for prepare, plan, explain, warmup and handles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from portattn.api.excess_arguments import wrong_arguments
from portattn.api.unknown_arguments import MISSING, OPERATIONS
from portattn.schema.ops import ROWS

Binder = Callable[..., dict[str, Any]]


Parts = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


@functools.lru_cache(maxsize=64)
def named_arguments(op: str) -> Binder:
    """A function with the operation's own signature that returns its arguments by name, defaults included.

    It raises the TypeError or UnknownArgument that a call of the operation raises. `inspect.Signature.bind` does the
    same in some ten microseconds, which is more than all else that a run of a prepared call costs: so the function is
    made once, by `exec` of its signature, as dataclasses are.
    """
    found: Binder = _made(op, "locals()")
    return found


@functools.lru_cache(maxsize=64)
def arguments_as_parts(op: str) -> Callable[..., Parts]:
    """As named_arguments, with the arguments in the order in which an earlier call is looked for: (tensors, values,
    lengths). A dict of them would be made and read at each run: 2 µs, of 4.

    What stands for several tensors (a PageTable) is left in its place, and of those tensors what is no parameter is
    None: no kind of calls has such a thing among its tensors, so that whoever gives one is asked more closely.
    """
    row = ROWS[op]
    parameters = inspect.signature(OPERATIONS[op]).parameters

    def listed(names: Iterable[str]) -> str:
        return "(" + "".join(f"{name if name in parameters else None}, " for name in names) + ")"

    groups = listed(row.parameters), listed((*row.fixed, "backend", "validate")), listed(row.lengths)
    found: Callable[..., Parts] = _made(op, ", ".join(groups))
    return found


def _made(op: str, result: str) -> Any:
    """A function with an operation's signature that returns an expression of its arguments."""
    function = OPERATIONS[op]
    parameters = inspect.signature(function).parameters.values()
    # What must be given has a default too, which request_of refuses: a wrong name is said before a missing one.
    defaults = {p.name: MISSING if p.default is p.empty else p.default for p in parameters}
    words: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*excess" not in words:
            words.append("*excess")
        words.append(f"{p.name}=_defaults['{p.name}']")
    made: dict[str, Any] = {"_defaults": defaults, "_wrong": wrong_arguments}
    body = f"    if excess or unknown: raise _wrong({op!r}, excess, unknown)\n    return {result}"
    exec(f"def {op}({', '.join([*words, '**unknown'])}):\n{body}", made)
    return made[op]
