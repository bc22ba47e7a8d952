"""An argument that an operation does not have: what it is called here, where another library's name was written.

Python refuses an unknown keyword before a function runs, and knows no other library. So the operations take any keyword
(`**unknown`), and have defaults for what must be given: Python would complain about that first, and `page_table` is
what is missing where somebody wrote `block_table`. They also take any number of arguments by position (`*excess`:
excess_arguments.py). Signatures, for people and for type checkers, show none of it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from portattn.api.dynamo_disabled import leave_out, left_out
from portattn.api.other_libraries import TABLES
from portattn.errors import ArgumentError, SettingError, TracingError, UnknownArgument
from portattn.schema.ops import PUBLIC

F = TypeVar("F", bound=Callable[..., Any])
PAGE = "docs/coming-from.md"


class _Missing:
    """Stands for an argument that must be given and is not."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Any = _Missing()
OPERATIONS: dict[str, Callable[..., Any]] = {}  # the public functions by name
_signatures: dict[str, tuple[str, ...]] = {}
_by_keyword: dict[str, tuple[str, ...]] = {}
_required: dict[str, dict[str, tuple[str, ...]]] = {}  # by operation, and by what Python calls their kind


def operation(function: F) -> F:
    """A public operation, with defaults for what must be given, and a signature that does not show them."""
    signature = inspect.signature(function)
    hidden = [p.name for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    shown = [p for p in signature.parameters.values() if p.name not in hidden]
    required = [p for p in shown if p.default is p.empty]
    positional = tuple(p.name for p in required if p.kind is not p.KEYWORD_ONLY)
    keyword = tuple(p.name for p in required if p.kind is p.KEYWORD_ONLY)
    changed: Any = function
    changed.__defaults__ = (MISSING,) * len(positional) + (function.__defaults__ or ())
    changed.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(keyword, MISSING)}
    changed.__signature__ = signature.replace(parameters=shown)
    for name in hidden:
        changed.__annotations__.pop(name, None)
    OPERATIONS[function.__name__] = function
    _signatures[function.__name__] = tuple(p.name for p in shown)
    _by_keyword[function.__name__] = tuple(p.name for p in shown if p.kind is p.KEYWORD_ONLY)
    _required[function.__name__] = {"positional": positional, "keyword-only": keyword}
    return function


def require(op: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError, in Python's words, where something that must be given is not."""
    if not any(value is MISSING for value in given.values()):
        return
    for kind, required in _required[op].items():
        names = [name for name in required if given[name] is MISSING]
        if names:
            plural = "s" if len(names) > 1 else ""
            raise TypeError(f"{op}() missing {len(names)} required {kind} argument{plural}: {_listed(names)}")


class ShortTraceback:
    """A block whose errors about the caller's arguments show the caller and the block's own line, and no frame below.

    Other errors keep all frames: they may be faults of portattn. Dynamo traces no such block, so an operation enters it
    where its call is neither cached nor traced.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if frames is not None and (
            isinstance(error, (ArgumentError, SettingError, TracingError)) or _ends_in_require(frames)
        ):
            frames.tb_next = None


short_traceback = ShortTraceback()


def _ends_in_require(frames: TracebackType) -> bool:
    """Whether the error is the TypeError of `require`."""
    while frames.tb_next is not None:
        frames = frames.tb_next
    return frames.tb_frame.f_code is require.__code__


def _listed(names: list[str]) -> str:
    """As Python lists them: 'a', 'a' and 'b', or 'a', 'b', and 'c'."""
    *most, last = map(repr, names)
    return f"{', '.join(most)}{',' * (len(most) > 1)} and {last}" if most else last


def names_of(op: str) -> tuple[str, ...]:
    """The arguments of an operation, in order."""
    return _signatures[op]


def keywords_of(op: str) -> tuple[str, ...]:
    """The arguments of an operation that are given by name alone, in order."""
    return _by_keyword[op]


def positional_of(op: str) -> tuple[str, ...]:
    """The arguments of an operation that may be given by position, in order."""
    return tuple(name for name in _signatures[op] if name not in _by_keyword[op])


def unknown_argument(op: str, names: Iterable[str], more: tuple[str, ...] = ()) -> UnknownArgument:
    """The error about keywords that an operation does not have.

    more  arguments that are taken beside the operation's own (`out` of a handle's run)
    """
    if torch.compiler.is_dynamo_compiling():  # it cannot trace the lines below
        left_out["unknown"](op, list(names), more)
    for module in ("ops", "merge_states"):  # each operation of them is known then, whatever was imported before
        importlib.import_module(f"portattn.api.{module}")
    first, *others = names
    hints: dict[str, list[str]] = {}
    for name in (first, *others):
        hints.setdefault(_hint(op, name, more), []).append(name)
    (hint, (_, *same)), *rest = hints.items()
    text = (f"{''.join(f', {name!r}' for name in same[:-1])} or {same[-1]!r}" if same else "") + hint
    text += "".join(f". Nor has it {', '.join(map(repr, several))}{about}" for about, several in rest)
    return UnknownArgument(op, first, text)


def _raise(op: str, names: Iterable[str], more: tuple[str, ...]) -> NoReturn:
    raise unknown_argument(op, names, more)


leave_out("unknown", _raise, "portattn's operation has no such argument: call it eagerly to see which is meant")


def _hint(op: str, name: str, more: tuple[str, ...]) -> str:
    """What follows "OP has no argument NAME": beginning with its punctuation, without a full stop."""
    own = (*_signatures[op], *more)
    sides = [_other_operations(op, name), _from_other_libraries(op, name)]
    if not any(sides):
        close = _nearest(name, own)
        sides = [f"did you mean {close}?" if close else f"it takes {', '.join(own)}"]
    return ": " + "; ".join(filter(None, sides))


def _other_operations(op: str, name: str) -> str:
    having = [other for other in _known() if name in _signatures[other]]
    if having:
        return f"it is an argument of {', '.join(having)}"
    if name in ("out", "lse"):
        return f"a handle's run takes it: portattn.prepare({op!r}, ...).run(..., {name}={name})"
    return ""


def _known() -> list[str]:
    """The operations in the order of their table, whatever was imported first; then what is in none."""
    return [*(op for op in PUBLIC if op in _signatures), *(op for op in _signatures if op not in PUBLIC)]


def _from_other_libraries(op: str, name: str) -> str:
    own = _signatures[op]
    found = [(table, row) for table in TABLES for row in table.rows if name in row.names]
    # What the library that has this operation means by it; else what any means.
    found = [(t, r) for t, r in found if op in t.ops] or found
    # What is called the same is not what is unknown, except in operations that have no such argument.
    found = [(t, r) for t, r in found if not r.ours.startswith("the same")]
    if not found:
        return ""
    libraries = dict.fromkeys(table.library.partition(":")[0] for table, _ in found)
    text = f"from {' and '.join(libraries)}: {'; '.join(dict.fromkeys(str(row) for _, row in found))}"
    arguments = dict.fromkeys(name for _, row in found for name in row.arguments if name not in _signatures)
    known = [one for one in arguments if one in own]
    if not known and arguments:
        owners: dict[str, list[str]] = {}
        for one in arguments:
            has = (other for other in _known() if one in _signatures[other])
            owners.setdefault(", ".join(has), []).append(one)
        for having, several in owners.items():
            are = "are arguments" if len(several) > 1 else "is an argument"
            text += f"; {' and '.join(several)} {are} of {having}, not of {op}" if having else ""
    elif not arguments and (longer := _longer(name, own)):
        text += f"; or did you mean {longer[0]}?"
    return f"{text} ({PAGE})"


def _nearest(name: str, own: tuple[str, ...]) -> str:
    close = _longer(name, own) or difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    return close[0] if close else ""


def _longer(name: str, own: tuple[str, ...]) -> list[str]:
    return [one for one in own if one.startswith(f"{name}_") or one.endswith(f"_{name}")]
