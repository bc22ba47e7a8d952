"""What an error about shapes that do not go together says where they do in the other order of axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from portattn.errors import ArgumentError

AXES = {"bhsd": ("batch", "heads", "seq", "head_dim"), "bshd": ("batch", "seq", "heads", "head_dim")}
_SHAPES = ("batch", "head_dim", "heads", "seq", "heads_q")  # what errors about them end with
_LAYOUT = "layout='{}'"
# Which of q, k and v are transposed, the likeliest first; all three are the other layout.
_MISTAKEN = ((0, 1, 2), (0,), (1, 2), (1,), (2,), (0, 1), (0, 2))


def with_advice(
    error: ArgumentError, layout: str, names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> ArgumentError:
    """The error, with what to do where shapes that do not go together do once tensors are transposed."""
    if error.argument.split(" ")[-1] not in _SHAPES or layout not in AXES:
        return error
    if not all(isinstance(one, torch.Tensor) and one.ndim == 4 for one in tensors):
        return error
    shapes = [_bhsd(one, layout) for one in tensors]
    if _agree(shapes):
        return error
    for several in _MISTAKEN:
        turned = [_swapped(one) if index in several else one for index, one in enumerate(shapes)]
        if _agree(turned) and _likelier(turned, shapes, len(several) == len(shapes)):
            other = next(one for one in AXES if one != layout)
            if len(several) == len(shapes):
                advice = f"as ({', '.join(AXES[other])}) the shapes agree: give {_LAYOUT.format(other)}"
            else:
                which = [names[index] for index in several]
                advice = f"with {' and '.join(which)} as ({', '.join(AXES[other])}) the shapes agree: give "
                advice += _turned(which)
            return ArgumentError(error.op, error.argument, error.value, f"{error.limit}; {advice}")
    return error


def without_layout(limit: str, names: Sequence[str]) -> str:
    """An error's limit for a function that has no argument `layout`: its tensors transposed, by their names there."""
    for layout in AXES:
        limit = limit.replace(f"give {_LAYOUT.format(layout)}", f"give {_turned(names)}")
    return limit


def _turned(names: Sequence[str]) -> str:
    return ", ".join(f"{name}.transpose(1, 2)" for name in names)


def _bhsd(tensor: torch.Tensor, layout: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return shape if layout == "bhsd" else _swapped(shape)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], shape[3])


def _likelier(turned: Sequence[tuple[int, ...]], given: Sequence[tuple[int, ...]], every: bool) -> bool:
    """Return whether the caller probably meant the transposed shapes.

    8 query heads over 3 key heads of 16 rows each also agree as 16 heads of 8 and 3 rows. So transposed keys have no
    more heads than rows; a transposed q or k alone does not have as many rows as the other.
    """
    if turned[1] != given[1] and turned[1][1] > turned[1][2]:
        return False
    return every or not given[0][2] == given[1][2] == given[2][2]


def _agree(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether these are a call's q, k and v, each (B, H, S, D)."""
    q, k, v = shapes
    return q[0] == k[0] and k[:3] == v[:3] and q[3] == k[3] and k[1] > 0 and q[1] % k[1] == 0
