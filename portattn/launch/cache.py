"""Launch cache: finds the compiled launches of a call like an earlier one, which is neither validated nor planned.

A call key (`CallKey`) holds all of a call but its sizes; each of its shape classes (`CachedLaunch`) holds launches and
the guards under which they are right. `CallKey.hit` does all of it in C if native.c could be built, `CallKey.match` and
`CallKey.find` do it in Python. A vendor's plain calls on a CPU are cached for single sizes (api/execute.py).
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
from portattn.launch import cudadriver, torch_compat
from portattn.launch.cached_launch import CachedLaunch
from portattn.launch.native import reader
from portattn.launch.symbolic_tensor import TensorKind
from portattn.launch.torch_compat import guard, in_mode, mode_depth, recording
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
    """All of a call but its sizes, with its shape classes. `only`, if given, are the sizes that it is restricted to."""

    __slots__ = (
        "_absent", "_distinct", "_guard", "_lengths", "_natives", "_only", "_present", "_recording",
        "_residues", "_twins", "_types", "classes", "hit", "kinds", "lengths", "names", "op", "places", "record",
        "settings", "value_names", "values",
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
        record: Any = None,
    ) -> None:
        """Make a key. record: a training.TrainingNode, which makes results a node of autograd's graph."""
        self.op, self.values, self.settings, self.record = op, values, settings, record
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
        self._guard, self._recording = guard([given[i] for i in self._distinct]), recording(given)
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
        """Return (tensors, addresses, sizes) for a shape class; None if the call has another key."""
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
        if self._recording not in (None, torch.is_grad_enabled()) or not self._guard(*distinct):
            return None
        addresses = list(map(_address, given))
        # 0: its memory was freed, or it has no element.
        if 0 in addresses or [address & _LOW_BITS for address in addresses] != self._residues:
            return None
        return None if self._only is not None and inputs != self._only else (given, addresses, inputs)

    def find(self, inputs: Sequence[int]) -> tuple[CachedLaunch, list[int]] | None:
        """Return the shape class of these sizes and the numbers for its launches, or None."""
        for cached in self.classes:
            sizes = cached.program(inputs)
            if sizes is not None:
                return cached, sizes
        return None

    def add(self, cached: CachedLaunch) -> None:
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
                record=self.record, apply=getattr(self.record, "apply", None), recorded=torch.is_grad_enabled,
                recording=self._recording, noted=last_plan, refused=cudadriver.refuse, low_bits=_LOW_BITS,
                reader=reader(), absent=self._absent, given=self._present, distinct=tuple(self._distinct),
                twins=tuple(i for pair in self._twins for i in pair), residues=tuple(self._residues),
            )  # fmt: skip
        except (TypeError, ValueError):  # more tensors than it has room for
            return None


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    found: list[int] = []
    for tensor in tensors:
        found += tensor.shape
        found += tensor.stride()
    return found


def identical(a: Any, b: Any) -> bool:
    """Return whether arguments are equal and of the same types, inside tuples too (1 is not True); arrays never are."""
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
    """Return whether arguments are numbers, strings, dtypes, None, or tuples of them: others may hold data."""
    return all(isinstance(item, _PLAIN) for value in values for item in (value if type(value) is tuple else (value,)))


_lock = threading.RLock()
# By operation and values: of equal ones that are not identical each kind says which it is.
_kinds: dict[str, dict[tuple[Any, ...], tuple[CallKey, ...]]] = {}
_order: dict[int, CallKey] = {}  # by identity, the oldest first
_ends: float | None = None  # by the monotonic clock: when something that is kept holds no longer; None where all lasts


# native.c's way through `kinds` and their `hit`, once there is one: finder(op, tensors, values, lengths, place) gives
# the results; None where nothing is known of such a call; NotImplemented where it must go by Python.
finder: Callable[..., Any] | None = None
_native: Any = None  # native.c's module, of which the finder is


def _let_find(module: Any) -> None:
    global finder, _native
    if finder is None:
        _native = module
        finder = module.Finder(
            table=_kinds, block=BLOCK, outside=environment_settings, state=globals(), ends="_ends", hit="hit"
        )


def native_backward(device_type: str, **parts: Any) -> Callable[..., Any] | None:
    """Return native.c's function of a cached backward pass, or None if it cannot be used yet. parts: its fields."""
    reads = reader()
    if finder is None or reads is None:
        return None
    made: Callable[..., Any] = _native.Backward(
        finder=finder, modes=mode_depth, empty=torch_compat.runtime(device_type).empty, empty_like=torch.empty_like,
        dtype="dtype", reader=reads, **parts,
    )  # fmt: skip
    return made


def kinds(op: str, values: tuple[Any, ...]) -> tuple[CallKey, ...]:
    if _ends is not None and time.monotonic() >= _ends:
        forget()
    try:
        return _kinds[op].get(values, ())
    except (KeyError, TypeError):  # none of the operation; an unhashable argument, which validation will name
        return ()


def every_kind() -> list[CallKey]:
    return list(_order.values())


def remember(kind: CallKey, seconds: float = math.inf) -> None:
    """Let calls of this key be found. After `seconds` the whole cache is forgotten, and calls are planned anew."""
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
