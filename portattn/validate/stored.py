"""Caches whose numbers are narrower than q's: their format, and the scales that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.schema.problem_limits import INTEGERS, NV_BLOCK, NVFP4, PAIRED
from portattn.schema.tensors import BLOCK_SCALES, INT4, KV_FORMAT, KV_STORED, PACKED
from portattn.validate.checks import DTYPES, check_done, check_equal, check_like

# What operands' tensors may hold, and a cache's: numbers of q's dtype, or narrower ones.
OPERAND_DTYPES = (*DTYPES, *KV_FORMAT)
CACHE_DTYPES = (*OPERAND_DTYPES, PACKED)
STORED_AS = frozenset({*KV_FORMAT.values(), INT4, NVFP4})  # the formats of such caches
SCALES = ("k_scale", "v_scale")
BLOCKS = ("k_block_scale", "v_block_scale")
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def check_format(
    op: str,
    names: tuple[str, str],
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    whose: str = "q",
    blocks: tuple[Any, Any] = (None, None),
) -> str:
    """The cache's format (Problem.kv_format), K's and V's alike, that goes with q's dtype. Raises ArgumentError.

    whose   what messages call q
    blocks  k_block_scale and v_block_scale, as the caller gives them
    """
    kind = format_of(k, blocks)
    if kind not in STORED_AS:
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


def format_of(cache: torch.Tensor, blocks: tuple[Any, Any] = (None, None)) -> str:
    """The format that the dtype of a cache's tensor says. Bytes of rows that are no latent ones are nvfp4 where scales
    of blocks are given, else int4."""
    if cache.dtype is PACKED:
        return INT4 if all(scale is None for scale in blocks) else NVFP4
    return KV_FORMAT.get(cache.dtype, "as_q")


def check_blocks(
    op: str, kind: str, given: tuple[Any, Any], caches: tuple[torch.Tensor, torch.Tensor], swapped: bool
) -> dict[str, torch.Tensor]:
    """The scales of nvfp4's blocks as a Call has them, none of other formats. Raises ArgumentError.

    kind     the cache's format
    caches   K's and V's tensors as the caller has them
    swapped  tokens come before heads in them
    """
    found: dict[str, torch.Tensor] = {}
    for name, factors, other in zip(BLOCKS, given, reversed(BLOCKS), strict=True):
        if factors is None and kind != NVFP4:
            continue
        if factors is None:
            raise ArgumentError(op, name, None, f"must be a {BLOCK_SCALES} torch.Tensor, as {other} is")
        if not isinstance(factors, torch.Tensor):
            raise ArgumentError(op, name, type(factors).__name__, f"must be a {BLOCK_SCALES} torch.Tensor")
        if kind != NVFP4:
            limit = f"goes with a cache of {PACKED}, two {NVFP4} numbers a byte, and this one is of {caches[0].dtype}"
            raise ArgumentError(op, name, tuple(factors.shape), limit)
        if factors.dtype is not BLOCK_SCALES:
            raise ArgumentError(op, f"{name}.dtype", factors.dtype, f"must be {BLOCK_SCALES}")
        check_done(op, name, factors)
        cache = caches[name == BLOCKS[1]]
        if factors.device != cache.device:
            raise ArgumentError(op, f"{name}.device", str(factors.device), f"must be the cache's, {cache.device}")
        width = 2 * cache.shape[-1]
        if width % NV_BLOCK:
            limit = f"must be a multiple of {NV_BLOCK} with {NVFP4}, whose blocks share a scale"
            raise ArgumentError(op, "head_dim" if name == BLOCKS[0] else "head_dim_v", width, limit)
        shape = (*cache.shape[:3], width // NV_BLOCK)
        if tuple(factors.shape) != shape:
            limit = f"must be {shape}: the cache's, with a scale for each {NV_BLOCK} numbers of a row"
            raise ArgumentError(op, f"{name}.shape", tuple(factors.shape), limit)
        if factors.shape[-1] > 1 and factors.stride(-1) != 1:
            limit = "must be 1 in the last axis: a row's scales lie side by side"
            raise ArgumentError(op, f"{name}.stride()", factors.stride(), limit)
        stored = factors.view(KV_STORED)
        found[name] = stored.transpose(1, 2) if swapped else stored
    return found


def check_stored_width(op: str, name: str, cache: torch.Tensor, kind: str, whose: str, width: int) -> None:
    """The width of a cache's rows, for numbers as many as `whose`: of pairs half of it. Raises ArgumentError."""
    found = cache.shape[-1]
    if kind not in PAIRED:
        check_equal(op, f"{name}'s head_dim", found, whose, width)
        return
    if kind == NVFP4 and width % NV_BLOCK:
        limit = f"must be a multiple of {NV_BLOCK} with {NVFP4}, whose blocks share a scale"
        raise ArgumentError(op, f"{whose} head_dim", width, limit)
    if width % 2:
        raise ArgumentError(
            op, f"{whose} head_dim", width, f"must be even with a cache of {PACKED}, two numbers a byte"
        )
    if found != width // 2:
        limit = f"must be {width // 2} as {PACKED}: two {kind} numbers a byte, for {whose} head_dim of {width}"
        raise ArgumentError(op, f"{name}'s head_dim", found, limit)


def numbers_of(cache: torch.Tensor, kind: str) -> int:
    """How many numbers a row of a cache holds: a byte of int4 and of nvfp4 two."""
    return cache.shape[-1] * 2 if kind in PAIRED else cache.shape[-1]


def as_stored(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor as a Call has it: float8 numbers, and pairs of int4 or nvfp4, as their bytes."""
    return tensor if kind == "as_q" or tensor.dtype is KV_STORED else tensor.view(KV_STORED)


@dataclass(frozen=True, slots=True)
class ScaleShapes:
    """The allowed shapes of scales.

    batch, heads  of the cache: sequences, and key/value heads
    tokens        the cache's shape without its last axis, as the caller has it
    axes          the axes of `tokens` in words
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
            return self.of_tokens(scale)
        limit = (
            f"must be (), (1,), (heads_k,), (batch, heads_k) or ({self.axes}): (), (1,), ({self.heads},), {by_head} "
        )
        raise ArgumentError(op, f"{name}.shape", shape, limit + f"or {self.tokens}")

    def of_tokens(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale for each token and head, heads first."""
        scale = scale[None] if self.packed else scale
        return scale.transpose(1, 2) if self.swapped else scale


def check_scale(op: str, kind: str, name: str, scale: Any, device: torch.device) -> None:
    """One tensor of scales, but for its shape. Raises ArgumentError.

    kind  the cache's format
    """
    if not isinstance(scale, torch.Tensor):
        raise ArgumentError(op, name, type(scale).__name__, "must be a float32 torch.Tensor")
    if kind == "as_q":
        formats = ", ".join(map(str, (*KV_FORMAT, PACKED)))
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
        if kind in INTEGERS:
            dtype = PACKED if kind == INT4 else torch.int8
            raise ArgumentError(op, "k_scale", None, f"must be a float32 torch.Tensor with a cache of {dtype}")
        return "none", {}
    views = {}
    for name, scale in given.items():
        other = SCALES[name == SCALES[0]]
        if scale is None:
            raise ArgumentError(op, name, None, f"must be a float32 torch.Tensor, as {other} is")
        check_scale(op, kind, name, scale, device)
        views[name] = shapes.view(op, name, scale)
        if kind == NVFP4 and views[name].ndim > 2:
            limit = f"must be (), (1,), (heads_k,) or (batch, heads_k) with {NVFP4}, beside the scales of its blocks"
            raise ArgumentError(op, f"{name}.shape", tuple(scale.shape), limit)
    ranks = [view.ndim for view in views.values()]
    if ranks[0] != ranks[1]:
        limit = f"must have a scale for each token, as one of the two has: {shapes.tokens}"
        name = SCALES[ranks[1] == 2]
        raise ArgumentError(op, f"{name}.shape", tuple(given[name].shape), limit)
    return "head" if ranks[0] == 2 else "token", views
