"""The second call: everything that the first call of its kind decided, found again by everything that decided it.

A hit does no validation of shapes, no planning and no argument building. There are two ways to it:

`find`   a dictionary, by a key made of everything that decides: at the first hit of a kind of call, and where the next
         way has forgotten it
`recent` the last kinds of call of each operation, compared one by one: values as they are, tensors by torch's own
         guards (one call into C++ for all of them). This is the hot path, of a few microseconds. An Entry's `hit`
         does the same as its `match` and `kept` in C, where native.c can be built

Only core paths and variants on accelerators are kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from portattn.config import Settings
from portattn.kept import Kept
from portattn.launch.guards import guard
from portattn.launch.kernelcall import POINTER_ALIGNMENT
from portattn.planned import Plan
from portattn.validate import wants_gradients

MAX_KEPT = 8192  # distinct call sites kept; past that all are forgotten and kept anew
RECENT = 8  # kinds of call of an operation that a call is compared with
_LOW_BITS = POINTER_ALIGNMENT - 1
_PLAIN = frozenset({type(None), bool, int, float, str})
_address = torch.Tensor.data_ptr
last_plan: ContextVar[Plan | None] = ContextVar("portattn_last_plan", default=None)  # as dispatch notes it


def key_of(op: str, tensors: Mapping[str, torch.Tensor | None], values: Mapping[str, Hashable]) -> Hashable:
    """What decides a call's plan and its kernels' specialisation. `values` are the call's other arguments."""
    given = tensors.values()
    return (
        op,
        *[
            # Alignment of each pointer is part of a kernel's specialisation and of what loads it may use.
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % POINTER_ALIGNMENT)
            for t in given
        ],
        wants_gradients(*given),
        tuple(values.values()),
        tuple(map(type, values.values())),  # 1 == True == 1.0, and validation tells them apart
    )


class Entry:
    """A kept call and what another call must have in common with it.

    tensors  of the call that it was kept from, in its operation's order, None for those that were not given
    values   all its other arguments, the path and the validation that it asked for included
    settings  in force around it, without what the call itself asked for
    """

    __slots__ = (
        "_absent",
        "_distinct",
        "_given",
        "_guard",
        "_kinds",
        "_nothing",
        "_residues",
        "_twins",
        "hit",
        "kept",
        "settings",
        "values",
    )

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], values: tuple[Any, ...], settings: Settings, kept: Kept
    ) -> None:
        self.values, self.settings, self.kept = values, settings, kept
        # Equal values of other types (1, True, 1.0) are other calls; None and strings equal only their own.
        self._kinds = [(i, type(v)) for i, v in enumerate(values) if v is not None and not isinstance(v, str)]
        present = [i for i, t in enumerate(tensors) if t is not None]
        given = [t for t in tensors if t is not None]
        first = {id(t): i for i, t in reversed(list(enumerate(given)))}
        # A tensor that is given twice: torch's guards want each once, and the same ones must be the same again.
        self._twins = [(i, first[id(t)]) for i, t in enumerate(given) if first[id(t)] != i]
        distinct = sorted(first.values())
        self._distinct = itemgetter(*distinct, distinct[0]) if self._twins else None
        absent = [i for i, t in enumerate(tensors) if t is None] or None
        self._given = itemgetter(*present)  # q, k and v at least: a tuple
        self._absent = None if absent is None else itemgetter(*absent, absent[0])  # of one item it gives no tuple
        self._nothing = (None,) * (len(absent) + 1 if absent else 0)
        self._guard = guard([given[i] for i in distinct])
        residues = [_address(t) & _LOW_BITS for t in given]
        self._residues = residues if any(residues) else None
        self.hit = kept.hit(
            last_plan, values=values, settings=settings, absent=tuple(absent or ()), given=tuple(present),
            twins=tuple(i for pair in self._twins for i in pair), distinct=tuple(distinct), guard=self._guard,
            residues=tuple(residues), low_bits=_LOW_BITS, address=_address, levels=vars(forward_ad),
            level_name="_current_level",
        )  # fmt: skip

    def match(
        self, tensors: tuple[Any, ...], values: tuple[Any, ...], settings: Settings
    ) -> tuple[tuple[torch.Tensor, ...], list[int]] | None:
        """What `kept` takes of a call, its tensors and their addresses; None where it is not a call like the kept one.

        tensors   by the operation's order, whatever was given in their places
        values    every other argument of the operation
        settings  in force
        """
        try:
            if values != self.values or (settings is not self.settings and settings != self.settings):
                return None
        except (TypeError, ValueError, RuntimeError):
            return None  # a value that does not compare, such as an array: validation will name it
        for index, kind in self._kinds:
            if values[index].__class__ is not kind:
                return None
        if self._absent is not None and self._absent(tensors) != self._nothing:
            return None
        given = self._given(tensors)
        if self._distinct is None:
            alike = self._guard(*given)
        else:
            alike = all(given[i] is given[j] for i, j in self._twins) and self._guard(*self._distinct(given)[:-1])
        if not alike or forward_ad._current_level >= 0:
            return None
        addresses = list(map(_address, given))
        if self._residues is None:
            for address in addresses:
                if address & _LOW_BITS:
                    return None
        elif [address & _LOW_BITS for address in addresses] != self._residues:
            return None
        return given, addresses


_kept: dict[tuple[Hashable, Settings], Kept] = {}
recent: dict[str, tuple[Entry, ...]] = {}  # of each operation, the latest first


def remember(
    op: str, tensors: Sequence[torch.Tensor | None], values: tuple[Any, ...], settings: Settings, kept: Kept
) -> None:
    """Let calls like this one be found among `recent`. Values of unusual types are not remembered."""
    for value in values:
        items = value if type(value) is tuple else (value,)
        if any(type(item) not in _PLAIN for item in items):
            return
    entry = Entry(tensors, values, settings, kept)
    recent[op] = (entry, *recent.get(op, ())[: RECENT - 1])


def find(key: Hashable, settings: Settings) -> Kept | None:
    """The kept call for a key under these settings; None when there is none."""
    try:
        return _kept.get((key, settings))
    except TypeError:
        return None  # an unhashable argument: validation will name it


def nearest(key: Hashable, settings: Settings, tensors: Sequence[str], values: Sequence[str]) -> list[str] | None:
    """In what a call differs from the kept one of its operation that differs in least; None where there is none.

    key      the call's, as key_of made it
    tensors, values  what its arguments are called, in its order
    """
    if not isinstance(key, tuple):
        return None
    found = None
    for other, under in list(_kept):
        if isinstance(other, tuple) and other[0] == key[0] and len(other) == len(key):
            differing = _differences(key, other, tensors, values)
            if settings != under:
                differing += [
                    f"the setting {name}: {getattr(settings, name)!r} instead of {getattr(under, name)!r}"
                    for name in settings.__struct_fields__
                    if getattr(settings, name) != getattr(under, name) and name != "monitor"
                ]
            if found is None or len(differing) < len(found):
                found = differing
    return found


_FACTS = ("shape", "strides", "type", "device", f"address modulo {POINTER_ALIGNMENT}")


def _differences(
    key: tuple[Any, ...], other: tuple[Any, ...], tensors: Sequence[str], values: Sequence[str]
) -> list[str]:
    """What key_of put into two keys of an operation, compared one by one."""
    found = []
    _, *mine, gradients, given, types = key
    _, *theirs, other_gradients, other_given, other_types = other
    for name, one, two in zip(tensors, mine, theirs, strict=True):
        if (one is None) != (two is None):
            found.append(f"{name} is {'not ' if one is None else ''}given")
        elif one is not None:
            found += [
                f"{name}'s {fact}: {_said(a)} instead of {_said(b)}"
                for fact, a, b in zip(_FACTS, one, two, strict=True)
                if a != b and not (fact == "strides" and one[0] != two[0])  # they mostly follow from the shape
            ]
    if gradients != other_gradients:
        found.append(f"gradients are {'' if gradients else 'not '}asked for")
    for name, a, b, kind, other_kind in zip(values, given, other_given, types, other_types, strict=True):
        if a != b or kind is not other_kind:
            found.append(f"{name}: {a!r} instead of {b!r}")
    return found


def _said(fact: Any) -> str:
    return str(tuple(fact)) if isinstance(fact, tuple) else str(fact)


def keep(key: Hashable, kept: Kept) -> None:
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    _kept[key, kept.settings] = kept


def forget() -> None:
    """Forget every kept call: verdicts or data have changed."""
    _kept.clear()
    recent.clear()
