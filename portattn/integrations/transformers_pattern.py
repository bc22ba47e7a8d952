"""What a mask function of transformers means: causality, a window, chunks, packed sequences.

transformers describes a mask as a function of positions, put together from closures of masking_utils. They are
recognised by what made them; what is not recognised has to be written out. Dynamo cannot look into a closure: while it
traces, a mask function is called with symbols for the positions, and its comparisons are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils


@dataclass(slots=True)
class Pattern:
    """The keys that a query may see at most, by position.

    left, right   keys before and after its own position; None for all. A right of 0 is a causal mask
    chunk         keys of a chunk, and (B,) the position that a sequence's chunks are counted from; None for no chunks
    packed        (B, T): a query sees keys of its own number only. None where rows are not packed
    whole         that is all there is to it; else the mask function hides some of these keys too
    """

    left: int | None = None
    right: int | None = None
    chunk: tuple[int, torch.Tensor] | None = None
    packed: torch.Tensor | None = None
    whole: bool = True

    def narrow(self, left: int | None, right: int | None) -> None:
        self.left, self.right = _least(self.left, left), _least(self.right, right)


def read_pattern(mask_function: Callable[..., Any], positions: int) -> Pattern:
    """The Pattern of a mask function over positions 0 to `positions` - 1. Parts that are not known can only hide more:
    they leave it less than whole."""
    pattern = Pattern()
    parts = list(_intersected(mask_function))
    packings = [part for part, _ in parts if _maker(part) == "packed_sequence_mask_function"]
    if len(packings) == 1:
        pattern.packed = _captured(packings[0])["packed_sequence_mask"]
    for part, remapped in parts:
        maker = _maker(part)
        if part in packings:
            pattern.whole &= len(packings) == 1
        elif remapped and pattern.packed is None:
            pattern.whole = False
        # Inside a packed sequence positions run on by ones: distances in it are distances in the row.
        elif part is masking_utils.causal_mask_function:
            pattern.narrow(None, 0)
        elif part is masking_utils.bidirectional_mask_function:
            pass
        elif maker == "sliding_window_overlay":
            # transformers counts the query's own position: a window of W keys reaches W - 1 back.
            pattern.narrow(_captured(part)["sliding_window"] - 1, None)
        elif maker == "sliding_window_bidirectional_overlay":
            window = _captured(part)["sliding_window"]
            pattern.narrow(window, window)
        elif maker == "chunked_overlay":
            size = _captured(part)["chunk_size"]
            pattern.narrow(size - 1, size - 1)
            # Chunks are counted from each sequence's start: one that holds every position hides nothing.
            if positions > size or remapped:
                pattern.whole &= pattern.chunk is None and not remapped
                pattern.chunk = size, _captured(part)["left_padding"]
        else:
            pattern.whole = False
    return pattern


def traced_pattern(mask_function: Callable[..., Any], plain: bool) -> Pattern:
    """The Pattern of a mask function in a graph that dynamo traces, where closures are shut.

    plain  the function looks nothing up by a query's or a key's position: no packed rows, no blocks of images and no
           part of somebody else's. Other functions are not called, and so are less than whole
    """
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if not plain:
        return Pattern(whole=False)
    found = mask_function(0, 0, _Position(1, 0), _Position(0, 1))
    pattern = Pattern(whole=found.known)
    for left, right in found.bounds:
        pattern.narrow(left, right)
    return pattern


class _Condition:
    """What a mask function answers for symbols: bounds (left, right) that hold together; not `known` if there is more
    to it."""

    device = None

    def __init__(self, bounds: tuple[tuple[int | None, int | None], ...] = (), known: bool = True) -> None:
        self.bounds, self.known = bounds, known

    def __and__(self, other: Any) -> _Condition:
        if isinstance(other, _Condition):
            return _Condition(self.bounds + other.bounds, self.known and other.known)
        return _Condition(self.bounds, False)

    def __or__(self, other: Any) -> _Condition:
        return _Condition(known=False)

    def to(self, device: Any) -> _Condition:
        return self


class _Position:
    """query · the query's position + key · the key's + plus. The operators are masking_utils'; a result of another form
    has query None."""

    def __init__(self, query: int | None, key: int, plus: int = 0) -> None:
        self.query, self.key, self.plus = query, key, plus

    def new_ones(self, *args: Any, **kwargs: Any) -> _Condition:
        return _Condition()

    def new_zeros(self, *args: Any, **kwargs: Any) -> _Condition:
        return _Condition(known=False)

    def __add__(self, other: Any) -> _Position:
        return self - -other if isinstance(other, int) else _Position(None, 0)

    def __sub__(self, other: Any) -> _Position:
        if self.query is None:
            return self
        if isinstance(other, int):
            return _Position(self.query, self.key, self.plus - other)
        if isinstance(other, _Position) and other.query is not None:
            return _Position(self.query - other.query, self.key - other.key, self.plus - other.plus)
        return _Position(None, 0)

    def __floordiv__(self, other: Any) -> _Position:
        return _Position(None, 0)

    def __abs__(self) -> _Distance | _Position:
        return _Distance() if (self.query, self.key, self.plus) in ((1, -1, 0), (-1, 1, 0)) else _Position(None, 0)

    def __eq__(self, other: object) -> Any:
        return _Condition(known=False)

    __hash__ = None  # type: ignore[assignment]

    def __ge__(self, other: Any) -> _Condition:
        # No position is negative.
        return _Condition(known=isinstance(other, int) and other == 0 and self.query is not None and self.plus == 0)

    def __le__(self, other: Any) -> _Condition:
        rest = self - other
        if (rest.query, rest.key) == (-1, 1):  # the key's is at most the query's and -plus
            return _Condition(((None, -rest.plus),))
        return _Condition(known=False)

    def __gt__(self, other: Any) -> _Condition:
        rest = self - other
        if (rest.query, rest.key) == (-1, 1):  # the query's is less than the key's and plus
            return _Condition(((rest.plus - 1, None),))
        return _Condition(known=False)


class _Distance:
    """How far a query and a key lie apart."""

    def __le__(self, other: Any) -> _Condition:
        return _Condition(((other, other),)) if isinstance(other, int) else _Condition(known=False)


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _maker(part: Any) -> str:
    """The function of masking_utils that made a mask function; "" for another module's."""
    inside = getattr(part, "__module__", "") == masking_utils.__name__
    return getattr(part, "__qualname__", "").partition(".")[0] if inside else ""


def _intersected(mask_function: Callable[..., Any], remapped: bool = False) -> Iterator[tuple[Any, bool]]:
    """The mask functions that masking_utils has joined by intersection, nested ones taken apart, and whether each is
    asked about positions inside packed sequences rather than in the row."""
    maker = _maker(mask_function)
    if maker == "and_masks":
        for part in _captured(mask_function)["mask_functions"]:
            yield from _intersected(part, remapped)
    elif maker == "remap_positions_for_packed_sequence":
        yield from _intersected(_captured(mask_function)["mask_function"], True)
    else:
        yield mask_function, remapped


def _captured(closure: Any) -> dict[str, Any]:
    cells = (cell.cell_contents for cell in closure.__closure__ or ())
    return dict(zip(closure.__code__.co_freevars, cells, strict=True))
