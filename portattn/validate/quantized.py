"""Checks of quantised tensors and scales: caches, queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portattn.errors import ArgumentError
from portattn.schema.problem_limits import FORMATS, CacheFormat, cache_format, formats_of
from portattn.schema.tensors import BLOCK_SCALES, CACHE_DTYPE, KV_FORMAT, KV_STORED
from portattn.validate.checks import DTYPES, check_done, check_equal, check_like, other_dtype, shape_or_value

SCALES = ("k_scale", "v_scale")
BLOCKS = ("k_block_scale", "v_block_scale")
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@functools.cache
def dtypes_of(op: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes of an operation's caches, or of q, k and v: unquantised ones, then its formats'."""
    return tuple(dict.fromkeys((*DTYPES, *(CACHE_DTYPE[name] for name in formats_of(op)))))


@functools.cache
def _formats(op: str, dtype: torch.dtype, by_block: bool) -> tuple[str, ...]:
    found = [name for name in formats_of(op) if CACHE_DTYPE[name] is dtype]
    return tuple(name for name in found if bool(FORMATS[name].block) is by_block) or tuple(found)


def format_of(op: str, cache: torch.Tensor, width: int, blocks: tuple[Any, Any] = (None, None)) -> str:
    """Return the format (Problem.kv_format) of a cache for rows of `width` numbers: its dtype decides, then whether
    scales of blocks are given, then how many numbers a byte holds."""
    found = _formats(op, cache.dtype, any(scale is not None for scale in blocks))
    if len(found) > 1:
        found = tuple(name for name in found if cache.shape[-1] * FORMATS[name].per_byte == width) or found
    return found[0] if found else "as_q"


def value_width(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return how many numbers a row of v holds, whose format is k's."""
    return v.shape[-1] * cache_format(format_of(op, k, q.shape[-1])).per_byte


def as_stored(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the tensor as a Call has it: float8 numbers, and several numbers of a byte, as their bytes."""
    return tensor if kind == "as_q" or tensor.dtype is KV_STORED else tensor.view(KV_STORED)


@dataclass(frozen=True, slots=True)
class StoredCache:
    """A cache of keys and values, and the checks that its format decides."""

    op: str
    names: tuple[str, str]  # of both tensors, in messages
    tensors: tuple[torch.Tensor, torch.Tensor]  # as given
    kind: str  # Problem.kv_format
    swapped: bool = False  # tokens come before heads
    blocks: tuple[Any, Any] = (None, None)  # k_block_scale and v_block_scale as given

    @property
    def row(self) -> CacheFormat:
        return cache_format(self.kind)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def check_like(self, whose: str, q: torch.Tensor) -> None:
        """Check that the cache, alike for K and V, goes with q's dtype; `whose` is q's name in messages."""
        op, names, (k, v) = self.op, self.names, self.tensors
        if self.kind == "as_q":
            for name, tensor in zip(names, (k, v), strict=True):
                check_like(op, name, tensor, whose, q)
            return
        check_like(op, names[1], v, names[0], k)
        if k.device != q.device:
            raise ArgumentError(op, f"{names[0]}.device", str(k.device), f"must be {whose}'s, {q.device}")
        if q.dtype not in SIXTEEN_BITS:
            limit = f"must be {_either(SIXTEEN_BITS)} with a cache of {k.dtype}"
            raise ArgumentError(op, f"{whose}.dtype", q.dtype, limit)

    def numbers(self, cache: torch.Tensor) -> int:
        return cache.shape[-1] * self.row.per_byte

    def check_width(self, name: str, cache: torch.Tensor, whose: str, width: int) -> None:
        """Check the width of a cache's rows of `width` numbers, which are fewer bytes for some formats."""
        op, row, found, per_byte = self.op, self.row, cache.shape[-1], self.row.per_byte
        if per_byte == 1:
            check_equal(op, f"{name}'s head_dim", found, whose, width)
            return
        if width % row.row_multiple:
            limit = row.width_limit(self.kind if row.block else f"a cache of {self.dtype}")
            raise ArgumentError(op, f"{whose} head_dim", width, limit)
        if found != width // per_byte:
            limit = f"must be {width // per_byte} as {self.dtype}: {row.count} {self.kind} numbers a byte, "
            raise ArgumentError(op, f"{name}'s head_dim", found, limit + f"for {whose} head_dim of {width}")

    def block_scales(self) -> dict[str, torch.Tensor]:
        """Return the scales of blocks as a Call has them, {} for a format without."""
        op, block = self.op, self.row.block
        found: dict[str, torch.Tensor] = {}
        for name, factors, other in zip(BLOCKS, self.blocks, reversed(BLOCKS), strict=True):
            if factors is None and not block:
                continue
            if factors is None:
                raise ArgumentError(op, name, None, f"must be a {BLOCK_SCALES} torch.Tensor, as {other} is")
            if not isinstance(factors, torch.Tensor):
                raise ArgumentError(op, name, type(factors).__name__, f"must be a {BLOCK_SCALES} torch.Tensor")
            if not block:
                kinds = [
                    f"{CACHE_DTYPE[kind]}, {row.count} {kind} numbers a byte"
                    for kind, row in FORMATS.items()
                    if row.block
                ]
                limit = f"goes with a cache of {' or '.join(kinds)}, and this one is of {self.dtype}"
                raise ArgumentError(op, name, tuple(factors.shape), limit)
            if factors.dtype is not BLOCK_SCALES:
                raise ArgumentError(op, f"{name}.dtype", factors.dtype, f"must be {BLOCK_SCALES}")
            check_done(op, name, factors)
            cache = self.tensors[name == BLOCKS[1]]
            if factors.device != cache.device:
                raise ArgumentError(op, f"{name}.device", str(factors.device), f"must be the cache's, {cache.device}")
            width = self.numbers(cache)
            if width % block:
                which = "head_dim" if name == BLOCKS[0] else "head_dim_v"
                raise ArgumentError(op, which, width, self.row.width_limit(self.kind))
            shape = (*cache.shape[:3], width // block)
            if tuple(factors.shape) != shape:
                limit = f"must be {shape}: the cache's, with a scale for each {block} numbers of a row"
                raise ArgumentError(op, f"{name}.shape", tuple(factors.shape), limit)
            if factors.shape[-1] > 1 and factors.stride(-1) != 1:
                limit = "must be 1 in the last axis: a row's scales lie side by side"
                raise ArgumentError(op, f"{name}.stride()", factors.stride(), limit)
            stored = factors.view(KV_STORED)
            found[name] = stored.transpose(1, 2) if self.swapped else stored
        return found

    def scales(
        self, k_scale: Any, v_scale: Any, shapes: ScaleShapes, device: torch.device
    ) -> tuple[str, dict[str, Any]]:
        """Return the scales' unit (Problem.kv_scales), and both as the Call has them."""
        op, kind = self.op, self.kind
        given = dict(zip(SCALES, (k_scale, v_scale), strict=True))
        if k_scale is None and v_scale is None:
            if "none" not in self.row.scales:
                limit = f"must be a float32 torch.Tensor with a cache of {self.dtype}"
                raise ArgumentError(op, "k_scale", None, limit)
            return "none", {}
        views = {}
        for name, scale in given.items():
            other = SCALES[name == SCALES[0]]
            if scale is None:
                raise ArgumentError(op, name, None, f"must be a float32 torch.Tensor, as {other} is")
            check_scale(op, kind, name, scale, device)
            views[name] = shapes.view(op, name, scale)
            if "token" not in self.row.scales and views[name].ndim > 2:
                limit = f"must be (), (1,), (heads_k,) or (batch, heads_k) with {kind}, beside the scales of its blocks"
                raise ArgumentError(op, f"{name}.shape", tuple(scale.shape), limit)
        ranks = [view.ndim for view in views.values()]
        if ranks[0] != ranks[1]:
            limit = f"must have a scale for each token, as one of the two has: {shapes.tokens}"
            name = SCALES[ranks[1] == 2]
            raise ArgumentError(op, f"{name}.shape", tuple(given[name].shape), limit)
        return "head" if ranks[0] == 2 else "token", views


@dataclass(frozen=True, slots=True)
class ScaleShapes:
    """The allowed shapes of scales."""

    batch: int
    heads: int
    tokens: tuple[int, ...]  # the cache's shape, as given, without its last axis
    axes: str  # of `tokens`, in words
    swapped: bool  # tokens come before heads
    packed: bool = False  # `tokens` are (tokens, heads) of packed rows, which all sequences share

    def view(self, op: str, name: str, scale: torch.Tensor) -> torch.Tensor:
        """Return the scale as (B, Hk), or one for each token and head with heads first."""
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
        """Return a scale for each token and head, heads first."""
        scale = scale[None] if self.packed else scale
        return scale.transpose(1, 2) if self.swapped else scale


def check_scale(op: str, kind: str, name: str, scale: Any, device: torch.device) -> None:
    """Check a tensor of scales, except its shape; `kind` is the cache's format."""
    if not isinstance(scale, torch.Tensor):
        raise ArgumentError(op, name, type(scale).__name__, "must be a float32 torch.Tensor")
    if kind == "as_q":
        formats = ", ".join(map(str, dict.fromkeys(CACHE_DTYPE.values())))
        raise ArgumentError(op, name, tuple(scale.shape), f"goes with a cache of one of {formats}")
    if scale.dtype != torch.float32:
        raise ArgumentError(op, f"{name}.dtype", scale.dtype, "must be torch.float32")
    check_done(op, name, scale)
    if scale.device != device:
        raise ArgumentError(op, f"{name}.device", str(scale.device), f"must be q's, {device}")


FLOAT8_RESULTS = torch.bfloat16  # of float8 operands, where the caller names no dtype


def result_dtype(q: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the results' dtype: q's, or for quantized q the caller's, v's (int8), or bfloat16 (float8)."""
    kind = KV_FORMAT.get(q.dtype)
    if kind is None:
        return q.dtype
    return out_dtype or (v.dtype if kind == "int8" else FLOAT8_RESULTS)


class Operands:
    """A call's checked q, k and v: all of q's dtype, of one float8 format, or int8 with values of 16 bits."""

    def __init__(self, op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_dtype: Any) -> None:
        self.op, self.device = op, q.device
        if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
            raise ArgumentError(op, "out_dtype", out_dtype, "must be a torch.dtype, or None")
        self.kind = KV_FORMAT.get(q.dtype, "as_q")  # Problem.kv_format
        _like(op, "k", k, q)
        if self.kind == "int8" and v.dtype not in SIXTEEN_BITS:
            limit = f"must be {_either(SIXTEEN_BITS)} with q and k of torch.int8"
            raise ArgumentError(op, "v.dtype", v.dtype, limit)
        if self.kind != "int8":
            _like(op, "v", v, q)
        elif v.device != q.device:
            raise ArgumentError(op, "v.device", str(v.device), f"must be q's, {q.device}")
        self.dtype = result_dtype(q, v, out_dtype)
        allowed = {"as_q": (q.dtype,), "int8": (v.dtype,)}.get(self.kind, SIXTEEN_BITS)
        if out_dtype is not None and out_dtype not in allowed:
            whose = {"as_q": "q's, ", "int8": "v's, "}.get(self.kind, "")
            raise ArgumentError(op, "out_dtype", out_dtype, f"must be {whose}{_either(allowed)} with q of {q.dtype}")

    def stored(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors as a Call has them: float8 numbers as their bytes."""
        return as_stored(q, self.kind), as_stored(k, self.kind), v if self.kind == "int8" else as_stored(v, self.kind)

    def scales(
        self, given: Mapping[str, Any], shapes: Mapping[str, ScaleShapes]
    ) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the scales' unit (Problem.kv_scales), and each scale as the Call has it, by its name there."""
        op, scaled = self.op, ("q", "k") if self.kind == "int8" else ("q", "k", "v")
        present = [f"{name}_scale" for name, scale in given.items() if scale is not None]
        if not present and self.kind != "int8":
            return "none", {}
        if self.kind == "as_q":
            limit = f"goes with q and k of one of {', '.join(map(str, KV_FORMAT))}"
            raise ArgumentError(op, present[0], shape_or_value(given[present[0][0]]), limit)
        if self.kind == "int8" and given["v"] is not None:
            limit = "must be None with q and k of torch.int8, whose values are of 16 bits"
            raise ArgumentError(op, "v_scale", shape_or_value(given["v"]), limit)
        views = {}
        by_token = self._by_token([(given[name], shapes[name]) for name in scaled if name in shapes])
        for name in scaled:
            scale = given[name]
            if not isinstance(scale, torch.Tensor):
                why = "with q and k of torch.int8" if self.kind == "int8" else f"as {present[0]} is given"
                limit = f"must be a float32 torch.Tensor, {why}"
                shown = None if scale is None else type(scale).__name__
                raise ArgumentError(op, f"{name}_scale", shown, limit)
            if scale.dtype != torch.float32:
                raise ArgumentError(op, f"{name}_scale.dtype", scale.dtype, "must be torch.float32")
            check_done(op, f"{name}_scale", scale)
            if scale.device != self.device:
                raise ArgumentError(op, f"{name}_scale.device", str(scale.device), f"must be q's, {self.device}")
            of = shapes["q" if name == "q" else "k"]
            views[f"{name}_scale"] = of.of_tokens(scale) if by_token else self._view(f"{name}_scale", scale, of)
        ranks = {view.ndim for view in views.values()}
        if len(ranks) > 1:
            name = next(name for name, view in views.items() if view.ndim == 2)
            tokens = shapes[name[0]].tokens
            limit = f"must have a scale for each token, as the other has: {tokens}"
            raise ArgumentError(op, f"{name}.shape", tuple(given[name[0]].shape), limit)
        return "head" if ranks == {2} else "token", views

    def _by_token(self, scales: Sequence[tuple[Any, ScaleShapes]]) -> bool:
        """Return whether packed rows' scales are for tokens: q's and k's both have such a shape."""
        if self.kind != "int8" or not all(shapes.packed for _, shapes in scales):
            return False
        # The shape may be (B, Hk) too, with as many tokens as sequences: tokens win, as `quantize` scales int8 rows.
        return all(isinstance(one, torch.Tensor) and tuple(one.shape) == shapes.tokens for one, shapes in scales)

    def _view(self, name: str, scale: torch.Tensor, shapes: ScaleShapes) -> torch.Tensor:
        by_head = (shapes.batch, shapes.heads)
        shape = tuple(scale.shape)
        if self.kind != "int8" and shape not in ((), (1,), (shapes.heads,), by_head):
            limit = f"must be (), (1,), (heads_k,) or (batch, heads_k): (), (1,), ({shapes.heads},) or {by_head}"
            raise ArgumentError(self.op, f"{name}.shape", shape, limit)
        return shapes.view(self.op, name, scale)


def _like(op: str, name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    if tensor.dtype != q.dtype and q.dtype not in KV_FORMAT:
        limit = f"must be q's, {q.dtype}" + other_dtype(tensor.dtype, ())
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, limit)
    check_like(op, name, tensor, "q", q)


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
