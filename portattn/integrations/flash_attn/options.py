"""flash_attn's arguments as portattn's operations have them."""

from __future__ import annotations

from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.validate import wants_gradients
from portattn.validate.checks import check_dense, check_number

Window = tuple[int | None, int | None]


def check_bool(op: str, name: str, value: Any) -> bool:
    """A flag. An integer counts, as in flash_attn; a word such as "top_left" would be taken for True there."""
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ArgumentError(op, name, value, "must be True or False")
    return bool(value)


def window_of(op: str, window_size: Any, causal: bool) -> Window | None:
    """(left, right) with None for no limit, which every negative number is; None where neither side has one."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentError(op, "window_size", window_size, "must be two integers (left, right); negative for no limit")
    left, right = (_side(op, window_size, side) for side in window_size)
    if causal:
        right = None  # the mask has that side
    return None if left is None and right is None else (left, right)


def _side(op: str, window_size: Any, side: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, (bool, float)) or not hasattr(side, "__index__"):
        raise ArgumentError(op, "window_size", window_size, "must be two integers (left, right); negative for no limit")
    return None if side < 0 else side


def softcap_of(op: str, softcap: Any) -> float | None:
    """None for no cap, which every number up to 0 is."""
    value = 0.0 if softcap is None else check_number(op, "softcap", softcap)
    return value if value > 0.0 else None


def splits_of(op: str, num_splits: Any) -> int | None:
    """None for what the plan chooses, which every number up to 0 is."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise ArgumentError(op, "num_splits", num_splits, "must be an integer; up to 0 for what fits the chip best")
    return num_splits if num_splits > 0 else None


def check_deterministic(op: str, deterministic: Any, *tensors: torch.Tensor | None) -> None:
    """Refuse what one call cannot ask for: a backward pass that repeats its bits, on whatever path it runs."""
    asked = check_bool(op, "deterministic", deterministic)
    if asked and wants_gradients(*tensors) and not torch.are_deterministic_algorithms_enabled():
        limit = "goes with torch.use_deterministic_algorithms(True), which decides it for all operators, and it is off"
        raise ArgumentError(op, "deterministic", deterministic, limit)


def check_tensors(op: str, **tensors: Any) -> None:
    """What must be tensors, before they are asked for their device or gradients."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")


def check_packed(op: str, name: str, tensor: Any, axis: int, size: int, axes: str) -> None:
    """One tensor that holds several, along an axis."""
    check_dense(op, name, tensor)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")
    if tensor.ndim != axes.count(",") + 1 or tensor.shape[axis] != size:
        raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be ({axes})")


def infinite(lse: torch.Tensor) -> torch.Tensor:
    """FlashAttention-2's LSE: +inf, not -inf, where a row has nothing to attend."""
    return torch.where(torch.isneginf(lse), torch.inf, lse)
