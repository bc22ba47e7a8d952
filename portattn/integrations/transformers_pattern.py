"""What a mask function of transformers means: causality, a window, packed sequences.

transformers describes a mask as a function of positions, put together from closures of masking_utils. They are
recognised by what made them; what is not recognised has to be written out.
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
    packed        (B, T): a query sees keys of its own number only. None where rows are not packed
    whole         that is all there is to it; else the mask function hides some of these keys too
    """

    left: int | None = None
    right: int | None = None
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
            pattern.whole &= positions <= size and not remapped
        else:
            pattern.whole = False
    return pattern


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
