"""Caches whose numbers are narrower than q's: their format, and the scales that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.schema.tensors import KV_FORMAT, KV_STORED
from portattn.validate.checks import DTYPES, check_done, check_like

# What a cache's tensors may hold: numbers of q's dtype, or narrower ones.
CACHE_DTYPES = (*DTYPES, *KV_FORMAT)
SCALES = ("k_scale", "v_scale")
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def check_format(
    op: str, names: tuple[str, str], k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, whose: str = "q"
) -> str:
    """The cache's format (Problem.kv_format), K's and V's alike, that goes with q's dtype. Raises ArgumentError.

    whose  what messages call q
    """
    kind = KV_FORMAT.get(k.dtype)
    if kind is None:
        for name, tensor in zip(names, (k, v), strict=True):
            check_like(op, name, tensor, whose, q)
        return "as_q"
    check_like(op, names[1], v, names[0], k)
    if k.device != q.device:
        raise ArgumentError(op, f"{names[0]}.device", str(k.device), f"must be {whose}'s, {q.device}")
    if q.dtype not in _SIXTEEN_BITS:
        limit = f"must be {' or '.join(map(str, _SIXTEEN_BITS))} with a cache of {k.dtype}"
        raise ArgumentError(op, f"{whose}.dtype", q.dtype, limit)
    return kind


def as_stored(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor as a Call has it: float8 numbers as their bytes."""
    return tensor if kind == "as_q" or tensor.dtype is KV_STORED else tensor.view(KV_STORED)


@dataclass(frozen=True, slots=True)
class ScaleShapes:
    """The shapes that scales may have.

    batch, heads  of the cache: sequences, and key/value heads
    tokens        the cache's shape without its last axis, as the caller has it
    axes          those of `tokens` in words
    swapped       tokens come before heads in it
    packed        `tokens` are (tokens, heads) of packed rows, which all sequences share
    """

    batch: int
    heads: int
    tokens: tuple[int, ...]
    axes: str
    swapped: bool
    packed: bool = False

    def view(self, op: str, name: str, scale: torch.Tensor) -> torch.Tensor:
        """(B, Hk), or a scale for each token and head with heads first. Raises ArgumentError."""
        shape, by_head = tuple(scale.shape), (self.batch, self.heads)
        if shape in ((), (1,), (self.heads,), by_head):
            return scale.expand(by_head)
        if shape == self.tokens:
            scale = scale[None] if self.packed else scale
            return scale.transpose(1, 2) if self.swapped else scale
        limit = (
            f"must be (), (1,), (heads_k,), (batch, heads_k) or ({self.axes}): (), (1,), ({self.heads},), {by_head} "
        )
        raise ArgumentError(op, f"{name}.shape", shape, limit + f"or {self.tokens}")


def check_scale(op: str, kind: str, name: str, scale: Any, device: torch.device) -> None:
    """One tensor of scales, but for its shape. Raises ArgumentError.

    kind  the cache's format
    """
    if not isinstance(scale, torch.Tensor):
        raise ArgumentError(op, name, type(scale).__name__, "must be a float32 torch.Tensor")
    if kind == "as_q":
        formats = ", ".join(map(str, KV_FORMAT))
        raise ArgumentError(op, name, tuple(scale.shape), f"goes with a cache of one of {formats}")
    if scale.dtype != torch.float32:
        raise ArgumentError(op, f"{name}.dtype", scale.dtype, "must be torch.float32")
    check_done(op, name, scale)
    if scale.device != device:
        raise ArgumentError(op, f"{name}.device", str(scale.device), f"must be q's, {device}")


def check_scales(
    op: str, kind: str, k_scale: Any, v_scale: Any, shapes: ScaleShapes, device: torch.device
) -> tuple[str, dict[str, Any]]:
    """What the scales belong to (Problem.kv_scales), and both as the Call has them. Raises ArgumentError.

    kind  the cache's format
    """
    given = dict(zip(SCALES, (k_scale, v_scale), strict=True))
    if k_scale is None and v_scale is None:
        if kind == "int8":
            raise ArgumentError(op, "k_scale", None, "must be a float32 torch.Tensor with a cache of torch.int8")
        return "none", {}
    views = {}
    for name, scale in given.items():
        other = SCALES[name == SCALES[0]]
        if scale is None:
            raise ArgumentError(op, name, None, f"must be a float32 torch.Tensor, as {other} is")
        check_scale(op, kind, name, scale, device)
        views[name] = shapes.view(op, name, scale)
    ranks = [view.ndim for view in views.values()]
    if ranks[0] != ranks[1]:
        limit = f"must have a scale for each token, as one of the two has: {shapes.tokens}"
        name = SCALES[ranks[1] == 2]
        raise ArgumentError(op, f"{name}.shape", tuple(given[name].shape), limit)
    return "head" if ranks[0] == 2 else "token", views
