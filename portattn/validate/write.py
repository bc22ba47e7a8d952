"""Calls of append_kv and write_pages, which fill a cache in place: every error comes before a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_LENGTH, Rotary
from portattn.validate import values
from portattn.validate.checks import (
    DTYPES,
    check_apart,
    check_done,
    check_equal,
    check_int32,
    check_like,
    check_place,
    check_tensor,
    check_width,
    is_large,
    refuse_gradients_of_writes,
    rows_aligned,
)
from portattn.validate.dense import AXES, PACKED_AXES, check_layout, packed
from portattn.validate.paged import PAGE_AXES, check_pages
from portattn.validate.quantized import SCALES, ScaleShapes, StoredCache, as_stored, dtypes_of, format_of

ROTARIES = tuple(word for word in get_args(Rotary) if word != "none")
_INTEGERS = (torch.int32, torch.int64)


def append_call(**given: Any) -> Call:
    return _by_the_caller_s_names(_append, given)


def pages_call(**given: Any) -> Call:
    return _by_the_caller_s_names(_pages, given)


def _by_the_caller_s_names(make: Callable[..., Call], given: dict[str, Any]) -> Call:
    """Make the Call; errors that compare with q elsewhere compare with the new keys."""
    try:
        return make(**given)
    except ArgumentError as error:
        raise ArgumentError(error.op, error.argument, error.value, error.limit.replace("q's", "k's")) from None


def _append(
    *, k: Any, v: Any, k_cache: Any, v_cache: Any, seqlens_k: Any, k_scale: Any, v_scale: Any,
    k_block_scale: Any, v_block_scale: Any, cos: Any, sin: Any,
    rotary: Any, layout: Any, settings: Settings,
) -> Call:  # fmt: skip
    op, names = "append_kv", ("k_cache", "v_cache")
    check_layout(op, layout)
    _check_new(op, k, v, AXES[layout])
    for name, cache in zip(names, (k_cache, v_cache), strict=True):
        check_tensor(op, name, cache, AXES[layout], dtypes_of(op))
    swapped = layout == "bshd"
    blocks = k_block_scale, v_block_scale
    tokens = tuple(k_cache.shape[:3])
    new = [tensor.transpose(1, 2) if swapped else tensor for tensor in (k, v)]
    cache = [tensor.transpose(1, 2) if swapped else tensor for tensor in (k_cache, v_cache)]
    for name, tensor in zip(names, cache, strict=True):
        check_equal(op, f"{name}'s batch", tensor.shape[0], "k's", new[0].shape[0])
    check_equal(op, "v_cache's seq", cache[1].shape[2], "k_cache's", cache[0].shape[2])
    batch, capacity = new[0].shape[0], cache[0].shape[2]
    check_int32(op, "seqlens_k", seqlens_k, (batch,), "(batch,)", k.device)
    shapes = ScaleShapes(batch, cache[0].shape[1], tokens, ", ".join(AXES[layout][:3]), swapped)
    kind = format_of(op, k_cache, k.shape[-1], blocks)
    stored = StoredCache(op, names, (k_cache, v_cache), kind, swapped, blocks)
    made = _Writing(stored, settings, new, cache, (k_scale, v_scale), shapes, (cos, sin), rotary)
    if made.reads:
        for index, first in enumerate(seqlens_k.tolist()):
            room = capacity - new[0].shape[2]
            if first > room:
                limit = f"must be at most {room}, for {new[0].shape[2]} more rows of {capacity} (negative: none)"
                raise ArgumentError(op, f"seqlens_k[{index}]", first, limit)
            last = first + new[0].shape[2] - 1
            if first >= 0 and made.angles is not None and last >= made.angles:
                limit = f"must leave positions in 0..{made.angles - 1}, the rows of cos, and the last is {last}"
                raise ArgumentError(op, f"seqlens_k[{index}]", first, limit)
    return made.call(seq_k=capacity, call={"seqlens_k": seqlens_k}, layout=layout, seqlens_k=True)


def _pages(
    *, k: Any, v: Any, k_pages: Any, v_pages: Any, slot_mapping: Any, k_scale: Any, v_scale: Any,
    k_block_scale: Any, v_block_scale: Any, cos: Any, sin: Any,
    positions: Any, rotary: Any, page_layout: Any, settings: Settings,
) -> Call:  # fmt: skip
    op, names = "write_pages", ("k_pages", "v_pages")
    _check_new(op, k, v, PACKED_AXES)
    cache = check_pages(op, names, k_pages, v_pages, page_layout, dtypes_of(op))
    tokens, page_size = k.shape[0], cache[0].shape[2]
    slots = cache[0].shape[0] * page_size
    if slots > MAX_LENGTH:
        limit = f"pages of {page_size} tokens must hold at most {MAX_LENGTH} together, and these hold {slots}"
        raise ArgumentError(op, "k_pages.shape", tuple(k_pages.shape), limit)
    _check_integers(op, "slot_mapping", slot_mapping, tokens, k.device)
    if positions is not None and cos is None:
        raise ArgumentError(op, "positions", tuple(positions.shape), "goes with cos and sin, which are not given")
    if cos is not None:
        _check_integers(op, "positions", positions, tokens, k.device)
    axes = ", ".join(PAGE_AXES[page_layout][:3])
    shapes = ScaleShapes(1, cache[0].shape[1], tuple(k_pages.shape[:3]), axes, page_layout == "phd")
    new = [packed(k), packed(v)]
    blocks = k_block_scale, v_block_scale
    kind = format_of(op, k_pages, k.shape[-1], blocks)
    stored = StoredCache(op, names, (k_pages, v_pages), kind, page_layout == "phd", blocks)
    made = _Writing(stored, settings, new, cache, (k_scale, v_scale), shapes, (cos, sin), rotary)
    if made.reads:
        wanted = slot_mapping.tolist()
        for index, slot in enumerate(wanted):
            if slot >= slots:
                limit = f"must be in 0..{slots - 1}, the slots of the cache, or negative for none"
                raise ArgumentError(op, f"slot_mapping[{index}]", slot, limit)
        if made.angles is not None:
            for index, (slot, position) in enumerate(zip(wanted, positions.tolist(), strict=True)):
                if slot >= 0 and not 0 <= position < made.angles:
                    limit = f"must be in 0..{made.angles - 1}, the rows of cos"
                    raise ArgumentError(op, f"positions[{index}]", position, limit)
    return made.call(
        seq_k=slots,
        call={"slots": slot_mapping, "positions": positions},
        page_size=page_size,
        page_layout=page_layout,
    )


def _check_new(op: str, k: Any, v: Any, axes: tuple[str, ...]) -> None:
    check_tensor(op, "k", k, axes)
    check_tensor(op, "v", v, axes)
    check_like(op, "v", v, "k", k)
    for axis, word in enumerate(axes[:-1]):
        check_equal(op, f"v's {word}", v.shape[axis], "k's", k.shape[axis])


def _check_integers(op: str, name: str, tensor: Any, count: int, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        limit = "must be an int32 or int64 torch.Tensor of shape (tokens,)"
        raise ArgumentError(op, name, type(tensor).__name__, limit)
    if tensor.dtype not in _INTEGERS:
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, f"must be {' or '.join(map(str, _INTEGERS))}")
    if tuple(tensor.shape) != (count,):
        raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be (tokens,), ({count},)")
    check_place(op, name, tensor, device, contiguous=True)


class _Writing:
    """The common part of both operations: (B, Hk, S, D) views, the cache with its scales, and the rotary embedding."""

    def __init__(
        self, stored: StoredCache, settings: Settings, new: Any, cache: Any, scales: tuple[Any, Any],
        shapes: ScaleShapes, tables: tuple[Any, Any], rotary: Any,
    ) -> None:  # fmt: skip
        op, names, kind, (k, v), (k_cache, v_cache) = stored.op, stored.names, stored.kind, new, cache
        self.op, self.kind = op, kind
        check_like(op, names[1], v_cache, names[0], k_cache)
        for name, tensor in zip(("k", "v", *names), (k, v, k_cache, v_cache), strict=True):
            check_done(op, name, tensor)
            if tensor.device != k.device:
                raise ArgumentError(op, f"{name}.device", str(tensor.device), f"must be k's, {k.device}")
        for name, tensor, like, other in ((names[0], k_cache, k, "k's"), (names[1], v_cache, v, "v's")):
            check_equal(op, f"{name}'s heads", tensor.shape[1], other, like.shape[1])
            stored.check_width(name, tensor, other, like.shape[3])
            check_width(op, name, like.shape[3])
            _check_own_memory(op, name, tensor)
        check_apart(op, names, (k_cache, v_cache))
        by_block = stored.block_scales()
        for name, tensor in by_block.items():
            _check_own_memory(op, name, tensor)
        self.scales, found = stored.scales(*scales, shapes, k.device)
        self.tensors: dict[str, Any] = {"q": k, "new_v": v, **found, **by_block}
        self.tensors |= {"k": as_stored(k_cache, kind), "v": as_stored(v_cache, kind)}
        self.reads = values.reads(settings, k)
        if self.scales == "token":
            for name in SCALES:
                _check_own_memory(op, name, found[name])
            check_apart(op, SCALES, tuple(found[name] for name in SCALES))
        elif self.reads:
            values.scales(op, found, values.Tokens(0, None, None))
        self._rotary(k, *tables, rotary)
        asked = (k, v, k_cache, v_cache, *scales, *tables)
        refuse_gradients_of_writes(op, *asked)

    def _rotary(self, k: torch.Tensor, cos: Any, sin: Any, rotary: Any) -> None:
        op = self.op
        if not isinstance(rotary, str) or rotary not in ROTARIES:
            raise ArgumentError(op, "rotary", rotary, f"must be one of {', '.join(ROTARIES)}")
        self.rotary, self.angles, self.rotary_dim = "none", None, 0  # angles: rows of cos and sin
        if cos is None and sin is None:
            return
        for name, table in (("cos", cos), ("sin", sin)):
            check_tensor(op, name, table, ("positions", "rotary_dim / 2"), (torch.float32, k.dtype))
            check_place(op, name, table, k.device, contiguous=False)
        check_like(op, "sin", sin, "cos", cos)
        if tuple(sin.shape) != tuple(cos.shape):
            raise ArgumentError(op, "sin.shape", tuple(sin.shape), f"must be cos's, {tuple(cos.shape)}")
        if cos.shape[0] < 1 or cos.shape[1] < 1 or 2 * cos.shape[1] > k.shape[3]:
            limit = (
                f"must be (positions, rotary_dim / 2), neither 0, with rotary_dim at most k's head_dim, {k.shape[3]}"
            )
            raise ArgumentError(op, "cos.shape", tuple(cos.shape), limit)
        self.rotary, self.angles, self.rotary_dim = rotary, cos.shape[0], 2 * cos.shape[1]
        self.tensors |= {"cos": cos, "sin": sin}

    def call(self, *, seq_k: int, call: dict[str, Any], **problem: Any) -> Call:
        k, columns = self.tensors["q"], [self.tensors[name] for name in ("q", "new_v", "k", "v")]
        made = Problem(
            op=self.op,  # type: ignore[arg-type]
            batch=k.shape[0],
            heads_q=k.shape[1],
            heads_k=k.shape[1],
            seq_q=k.shape[2],
            seq_k=seq_k,
            head_dim=k.shape[3],
            head_dim_v=self.tensors["new_v"].shape[3],
            dtype=DTYPES[k.dtype],  # type: ignore[arg-type]
            kv_format=self.kind,  # type: ignore[arg-type]
            kv_scales=self.scales,  # type: ignore[arg-type]
            rotary=self.rotary,  # type: ignore[arg-type]
            rotary_dim=self.rotary_dim,
            aligned=all(rows_aligned(tensor) for tensor in columns),
            large=is_large(*columns),
            **problem,
        )
        return Call(problem=made, scale=1.0, **self.tensors, **call)


def _check_own_memory(op: str, name: str, tensor: torch.Tensor) -> None:
    """Check that a written tensor has no two elements in one place, as an expanded view has."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(op, f"{name}.stride()", tensor.stride(), "must not be 0: each number is written")
