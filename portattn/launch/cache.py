"""The second call: everything that an earlier call of its kind decided, found again by what decided it.

A *kind* of call is everything about it but its sizes: the operation, its other arguments, which tensors it has, their
types, devices and alignment, and the settings. Calls of a kind differ in lengths, batches and strides. For those a kind
has *classes of sizes* (`CachedLaunch`), each with the conditions under which its launches are right. A call whose kind
is known, and whose sizes are of a class that is known, is neither validated nor planned: its kind compares it, its
class computes what its launches take of its sizes, and launches.

`Kind.hit` does all of that in C, where native.c can be built; `Kind.match` and `Kind.find` do the same in Python.

Core paths and variants on accelerators are cached, and plain calls of a vendor's path on a CPU (api/execute.py),
whose classes are single sizes.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import forward_ad

from portattn.config import BLOCK, Settings, environment_settings
from portattn.launch import cudadriver
from portattn.launch.cached_launch import CachedLaunch
from portattn.launch.guards import guard, in_mode, mode_depth
from portattn.launch.symbolic_tensor import TensorKind
from portattn.launch.tensor_memory import reader
from portattn.schema.tensors import POINTER_ALIGNMENT

MAX_KINDS = 1024  # kept; past that the oldest is forgotten
MAX_CLASSES = 64  # of sizes in a kind; past that the one that was used least lately is forgotten
_LOW_BITS = POINTER_ALIGNMENT - 1
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_address = torch.Tensor.data_ptr
_strides = torch.Tensor.stride
# As dispatch notes it: the last call's plan, or what makes it and the sizes that it is made of.
last_plan: ContextVar[Any] = ContextVar("portattn_last_plan", default=None)


class CallKey:
    """A kind of call.

    op        its operation
    tensors   of the first call, by the names that its Request has them under, None for those that were not given
    values    all its other arguments but lengths, the path and the validation that it asked for included
    lengths   arguments that are sizes, by name: integers, or None where they were not given
    settings  in force around it, without what the call itself asked for
    only      sizes and strides, and lengths, to which the kind is restricted; None for all
    value_names  what `values` are called, for people

    classes   of sizes, that launch calls of this kind
    """

    __slots__ = (
        "_absent", "_distinct", "_guard", "_lengths", "_natives", "_only", "_present",
        "_residues", "_twins", "_types", "classes", "hit", "kinds", "lengths", "names", "op", "places", "settings",
        "value_names", "values",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        tensors: Mapping[str, torch.Tensor | None],
        values: tuple[Any, ...],
        lengths: Mapping[str, int | None],
        settings: Settings,
        only: Sequence[int] | None = None,
        value_names: Sequence[str] = (),
    ) -> None:
        self.op, self.values, self.settings = op, values, settings
        self.lengths, self.value_names = dict(lengths), tuple(value_names)
        self.names, self._lengths = tuple(tensors), tuple(lengths.values())
        every = list(tensors.values())
        present = [i for i, t in enumerate(every) if t is not None]
        given = [t for t in every if t is not None]
        first = {id(t): i for i, t in reversed(list(enumerate(given)))}
        # A tensor that is given twice: torch's guards want each once, and the same ones must be the same again.
        self._twins = [(i, first[id(t)]) for i, t in enumerate(given) if first[id(t)] != i]
        self._distinct = sorted(first.values())
        absent = [i for i, t in enumerate(every) if t is None]
        self._present, self._absent = tuple(present), tuple(absent)
        self._types = tuple(type(given[i]) for i in self._distinct)
        self._guard = guard([given[i] for i in self._distinct])
        self._residues = [_address(t) & _LOW_BITS for t in given]
        self.kinds = tuple(TensorKind.of(given[i]) for i in self._distinct)
        whose = {place: self._distinct.index(first[id(t)]) for place, t in zip(present, given, strict=True)}
        self.places = {name: whose.get(place) for place, name in enumerate(self.names)}
        self._only = None if only is None else list(only)
        self.classes: tuple[CachedLaunch, ...] = ()
        self._natives: list[Any] = []
        self.hit: Any = None

    def match(
        self, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...], settings: Settings
    ) -> tuple[tuple[torch.Tensor, ...], list[int], list[int]] | None:
        """What a class takes of a call: its tensors, their addresses, and its sizes; None where it is of another kind.

        tensors   by the operation's order, whatever was given in their places
        """
        # Most are the very same objects, which costs less to see than that they are equal.
        same = len(values) == len(self.values) and all(map(operator.is_, values, self.values))
        if not (same or identical(values, self.values)) or (
            settings is not self.settings and settings != self.settings
        ):
            return None
        if len(lengths) != len(self._lengths) or any(
            type(length) is not type(own) for length, own in zip(lengths, self._lengths, strict=True)
        ):
            return None
        if len(tensors) != len(self.names) or any(tensors[i] is not None for i in self._absent):
            return None
        given = tuple([tensors[i] for i in self._present])
        if not all(given[i] is given[j] for i, j in self._twins):
            return None
        distinct = [given[i] for i in self._distinct]
        if tuple(map(type, distinct)) != self._types or forward_ad._current_level >= 0 or in_mode():
            return None
        try:
            inputs = sizes_of(distinct) + [length for length in lengths if length is not None]
        except RuntimeError:  # nested and sparse tensors: torch's guards end the process at one without sizes
            return None
        if not self._guard(*distinct):
            return None
        addresses = list(map(_address, given))
        # 0: its memory was freed, or it has no element.
        if 0 in addresses or [address & _LOW_BITS for address in addresses] != self._residues:
            return None
        return None if self._only is not None and inputs != self._only else (given, addresses, inputs)

    def find(self, inputs: Sequence[int]) -> tuple[CachedLaunch, list[int]] | None:
        """The class of these sizes, and what its launches take of them; None where none is known."""
        for cached in self.classes:
            sizes = cached.program(inputs)
            if sizes is not None:
                return cached, sizes
        return None

    def add(self, cached: CachedLaunch) -> None:
        """Let calls whose sizes are of this class be launched by it."""
        with _lock:
            native = cached.native()
            self.classes = (cached, *self.classes[: MAX_CLASSES - 1])
            if native is None:
                return
            del self._natives[MAX_CLASSES - 1 :]  # native.c keeps the latest used first
            self._natives.insert(0, native)
            if self.hit is None:
                self.hit = self._native(cached)

    def _native(self, cached: CachedLaunch) -> Any:
        direct, at = cached.direct, cached._runtime
        assert direct is not None
        _let_find(direct.native)
        try:
            return direct.native.Kind(
                values=self.values, settings=self.settings, guard=self._guard, levels=vars(forward_ad),
                level_name="_current_level", modes=mode_depth, index=cached._index, current=at.current,
                stream=at.stream, empty=at.empty, take=at.take, give=at.give, hooked=direct.hooked, address=_address,
                types=self._types, shape="shape", strides=_strides, lengths=self._lengths,
                classes=self._natives, fixed=None if self._only is None else array("q", self._only).tobytes(),
                noted=last_plan, refused=cudadriver.refuse, low_bits=_LOW_BITS, reader=reader(),
                absent=self._absent, given=self._present, twins=tuple(i for pair in self._twins for i in pair),
                distinct=tuple(self._distinct), residues=tuple(self._residues),
            )  # fmt: skip
        except (TypeError, ValueError):  # more tensors than it has room for
            return None


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Sizes and strides, tensor by tensor."""
    found: list[int] = []
    for tensor in tensors:
        found += tensor.shape
        found += tensor.stride()
    return found


def identical(a: Any, b: Any) -> bool:
    """Whether two arguments are equal and of the same types, also inside tuples. 1 == True == 1.0, and validation tells
    them apart. What cannot be compared (an array) is not identical: validation names it."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(identical, a, b))
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def plain_values(values: Sequence[Any]) -> bool:
    """Whether arguments can be cached: numbers, strings, dtypes, None, and tuples of them. Others may hold data, or
    change."""
    return all(isinstance(item, _PLAIN) for value in values for item in (value if type(value) is tuple else (value,)))


_lock = threading.RLock()
# By operation and values: of equal ones that are not identical each kind says which it is.
_kinds: dict[str, dict[tuple[Any, ...], tuple[CallKey, ...]]] = {}
_order: dict[int, CallKey] = {}  # by identity, the oldest first
_ends: float | None = None  # by the monotonic clock: when something that is kept holds no longer; None where all lasts


# native.c's way through `kinds` and their `hit`, once there is one: finder(op, tensors, values, lengths, place) gives
# the results; None where nothing is known of such a call; NotImplemented where it must go by Python.
finder: Callable[..., Any] | None = None


def _let_find(module: Any) -> None:
    global finder
    if finder is None:
        finder = module.Finder(
            table=_kinds, block=BLOCK, outside=environment_settings, state=globals(), ends="_ends", hit="hit"
        )


def kinds(op: str, values: tuple[Any, ...]) -> tuple[CallKey, ...]:
    """The kinds of calls of an operation with such values."""
    if _ends is not None and time.monotonic() >= _ends:
        forget()
    try:
        return _kinds[op].get(values, ())
    except (KeyError, TypeError):  # none of the operation; an unhashable argument, which validation will name
        return ()


def every_kind() -> list[CallKey]:
    return list(_order.values())


def remember(kind: CallKey, seconds: float = math.inf) -> None:
    """Let calls of this kind be found. After `seconds` everything is forgotten, and planned anew."""
    global _ends
    with _lock:
        if seconds < math.inf:
            _ends = min(math.inf if _ends is None else _ends, time.monotonic() + seconds)
        if id(kind) in _order:
            return
        while len(_order) >= MAX_KINDS:
            _drop(_order.pop(next(iter(_order))))
        _order[id(kind)] = kind
        table = _kinds.setdefault(kind.op, {})
        table[kind.values] = (kind, *table.get(kind.values, ()))


def _drop(kind: CallKey) -> None:
    table = _kinds[kind.op]
    left = tuple(other for other in table[kind.values] if other is not kind)
    if left:
        table[kind.values] = left
    else:
        del table[kind.values]


def forget() -> None:
    """Forget every cached call: records or data have changed."""
    global _ends
    with _lock:
        _ends = None
        _kinds.clear()
        _order.clear()
