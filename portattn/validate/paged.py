"""Calls of paged_attention, and checks that the other operations over pages share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.schema.call import Call
from portattn.schema.problem import check_groups
from portattn.schema.problem_limits import MAX_LENGTH, Op
from portattn.schema.symbolic_int import least
from portattn.validate import values
from portattn.validate.checks import (
    DTYPES,
    as_tensor,
    check_equal,
    check_int32,
    check_like,
    check_size,
    check_tensor,
    check_width,
)
from portattn.validate.dense import AXES, PACKED_AXES, beginnings, check_layout, packed
from portattn.validate.features import Features, Scores, build
from portattn.validate.quantized import ScaleShapes, StoredCache, as_stored, dtypes_of, format_of

OP: Op = "paged_attention"
PAGE_AXES = {"phd": ("pages", "page_size", "heads", "head_dim"), "hpd": ("pages", "heads", "page_size", "head_dim")}


_PAGE_LAYOUTS = {"nhd": "phd", "hnd": "hpd", **{layout: layout for layout in PAGE_AXES}}  # FlashInfer's names


def check_page_layout(op: str, page_layout: Any) -> None:
    if not isinstance(page_layout, str) or page_layout not in PAGE_AXES:
        meant = _PAGE_LAYOUTS.get(page_layout.lower(), "") if isinstance(page_layout, str) else ""
        hint = f" (hint: {page_layout} is page_layout={meant!r})" if meant else ""
        raise ArgumentError(op, "page_layout", page_layout, f"must be one of {', '.join(PAGE_AXES)}{hint}")


def _pages_of(name: str, cache: torch.Tensor, page_layout: str) -> str:
    """Return the expression for pages of a cache of slots (3 axes), or of one that holds keys and values (5 axes)."""
    if cache.ndim == 3:
        return (
            f"{name}[:, None] of slots, pages of one token" if page_layout == "phd" else f"{name}[:, :, None] of slots"
        )
    place = 0 if name.startswith("k") else 1
    return f"{name}[{place}] where the first axis holds keys and values, {name}[:, {place}] where the second does"


def check_pages(
    op: str,
    names: tuple[str, str],
    k: Any,
    v: Any,
    page_layout: Any,
    dtypes: Collection[torch.dtype] = DTYPES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two caches of pages as (P, Hk, page, D) views."""
    check_page_layout(op, page_layout)
    for name, pages in zip(names, (k, v), strict=True):
        if isinstance(pages, torch.Tensor) and pages.ndim in (3, 5):
            limit = f"must be 4: ({', '.join(PAGE_AXES[page_layout])}) (hint: {_pages_of(name, pages, page_layout)})"
            raise ArgumentError(op, f"{name}.ndim", pages.ndim, limit)
        check_tensor(op, name, pages, PAGE_AXES[page_layout], dtypes)
    if page_layout == "phd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    for axis, word in enumerate(("pages", "heads", "page_size")):
        check_equal(op, f"{names[1]}'s {word}", v.shape[axis], f"{names[0]}'s", k.shape[axis])
    if k.shape[2] < 1:
        raise ArgumentError(op, f"{names[0]}'s page_size", k.shape[2], "must be at least 1")
    return k, v


def check_page_groups(op: str, heads_q: int, k: torch.Tensor, page_layout: str) -> None:
    """Check heads_q against the heads of a (P, Hk, page, D) view; the error says if the other page_layout fits."""
    other = next(one for one in PAGE_AXES if one != page_layout)
    fits = 0 < k.shape[2] <= k.shape[1] and heads_q % k.shape[2] == 0  # a page rarely has fewer tokens than heads
    hint = f"; as ({', '.join(PAGE_AXES[other])}) the heads agree: give page_layout={other!r}" if fits else ""
    check_groups(op, heads_q, k.shape[1], hint)


def check_table(
    op: str, table: Any, seqlens_k: Any, batch: int, device: torch.device, cache: torch.Tensor, page_size: int
) -> int:
    """Check page_table (B, pages a sequence) and seqlens_k (B,); return the tokens that a sequence can have."""
    if not isinstance(table, torch.Tensor) or table.ndim != 2:
        shape = tuple(table.shape) if isinstance(table, torch.Tensor) else type(table).__name__
        limit = "must be an int32 torch.Tensor of shape (batch, pages a sequence), or a PageTable"
        if isinstance(table, torch.Tensor) and table.ndim == 1:
            limit += " (hint: page_table[None] of one sequence, PageTable.from_csr of several)"
        limit += as_tensor("page_table", table, ", dtype=torch.int32")
        raise ArgumentError(op, "page_table", shape, limit)
    check_int32(op, "page_table", table, (batch, table.shape[1]), "(batch, pages a sequence)", device, contiguous=False)
    if seqlens_k is not None:
        check_int32(op, "seqlens_k", seqlens_k, (batch,), "(batch,)", device)
    # Without a page there is nothing to read, whatever the table says.
    capacity = table.shape[1] * page_size if cache.shape[0] else 0
    if capacity > MAX_LENGTH:
        limit = f"pages of {page_size} tokens must hold at most {MAX_LENGTH} of a sequence, and these hold {capacity}"
        raise ArgumentError(op, "page_table.shape", tuple(table.shape), limit)
    return capacity


class Queries:
    """Checked queries over a cache, (B, H, S, D) or packed (T, H, D), as (1 or B, H, rows, D) views."""

    def __init__(
        self,
        op: str,
        named: dict[str, Any],
        layout: Any,
        cu_seqlens_q: torch.Tensor | None,
        max_seqlen_q: int | None,
        settings: Settings,
        listed: bool = False,  # packed queries, each of which has a list of keys: no sequence has several
    ) -> None:
        check_layout(op, layout)
        axes = PACKED_AXES if listed or cu_seqlens_q is not None else AXES[layout]
        for name, tensor in named.items():
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 3 and cu_seqlens_q is None and not listed:
                limit = f"must be 4: ({', '.join(axes)}); packed queries go with cu_seqlens_q"
                raise ArgumentError(op, f"{name}.ndim", 3, limit)
            if isinstance(tensor, torch.Tensor) and tensor.ndim == 4 and cu_seqlens_q is not None:
                limit = f"must be 3: ({', '.join(axes)}), packed as cu_seqlens_q says"
                raise ArgumentError(op, f"{name}.ndim", 4, limit)
            check_tensor(op, name, tensor, axes)
        first_name, first = next(iter(named.items()))
        for name, tensor in named.items():
            check_like(op, name, tensor, first_name, first)
            for axis, word in enumerate(axes[:-1]):
                check_equal(op, f"{name}'s {word}", tensor.shape[axis], f"{first_name}'s", first.shape[axis])
        self.problem: dict[str, Any] = {"layout": layout}
        self.call: dict[str, Any] = {}
        if listed:
            self.batch, self.rows = 1, first.shape[0]
            self.tensors = [packed(t) for t in named.values()]
            self.problem["total_q"] = self.rows
        elif cu_seqlens_q is None:
            if max_seqlen_q is not None:
                raise ArgumentError(op, "max_seqlen_q", max_seqlen_q, "goes with cu_seqlens_q, which is not given")
            swapped = layout == "bshd"
            self.tensors = [t.transpose(1, 2) if swapped else t for t in named.values()]
            self.batch, self.rows = self.tensors[0].shape[0], self.tensors[0].shape[2]
        else:
            self.batch = beginnings(op, "cu_seqlens_q", cu_seqlens_q, first.device)
            total = first.shape[0]
            self.rows = total if max_seqlen_q is None else least(check_size(op, "max_seqlen_q", max_seqlen_q), total)
            if values.reads(settings, first):
                values.cu_seqlens(op, "q", cu_seqlens_q, total, self.rows)
            self.tensors = [packed(t) for t in named.values()]
            self.problem["total_q"], self.call["cu_seqlens_q"] = total, cu_seqlens_q
        # rows: Sq, or the longest packed sequence's.
        self.problem |= {"batch": self.batch, "heads_q": self.tensors[0].shape[1], "seq_q": self.rows}
        self.is_packed, self.invariant = listed or cu_seqlens_q is not None, settings.invariant

    def seen_keys(self, problem: dict[str, Any], seqlens_k: torch.Tensor) -> values.Ranges:
        """Return the keys of each sequence that some of these queries see. Reads lengths back."""
        rows = [self.rows] * self.batch if not self.is_packed else self.call["cu_seqlens_q"].diff().tolist()
        return values.seen_keys(problem, rows, seqlens_k.tolist())

    def scores(self, capacity: int) -> Scores:
        heads = self.tensors[0].shape[1]
        reach, total, invariant = self.rows + capacity, self.problem.get("total_q", 0), self.invariant
        return Scores(self.batch, heads, self.rows, capacity, reach, self.is_packed, total, not invariant, invariant)


def paged_call(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_k: torch.Tensor | None,
    *,
    settings: Settings,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scale: torch.Tensor | None = None,
    v_block_scale: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    layout: str = "bhsd",
    page_layout: str = "phd",
    **asked: Any,
) -> Call:
    names = "k_pages", "v_pages"
    queries = Queries(OP, {"q": q}, layout, cu_seqlens_q, max_seqlen_q, settings)
    k, v = check_pages(OP, names, k_pages, v_pages, page_layout, dtypes_of(OP))
    blocks = k_block_scale, v_block_scale
    check_page_groups(OP, queries.tensors[0].shape[1], k, page_layout)
    kind = format_of(OP, k, q.shape[-1], blocks)
    cache = StoredCache(OP, names, (k_pages, v_pages), kind, page_layout == "phd", blocks)
    cache.check_like("q", q)
    differentiable = (q, k, v, k_scale, v_scale)  # as given: float8 is read as int8
    k, v = as_stored(k, kind), as_stored(v, kind)
    head_dim, page_size = q.shape[-1], k.shape[2]
    cache.check_width("k_pages", k, "q's", head_dim)
    check_width(OP, "q", head_dim)
    head_dim_v = cache.numbers(v)
    check_width(OP, "v_pages", head_dim_v)
    by_block = cache.block_scales()
    capacity = check_table(OP, page_table, seqlens_k, queries.batch, q.device, k, page_size)
    if seqlens_k is None:
        raise ArgumentError(OP, "seqlens_k", None, "must be an int32 torch.Tensor of shape (batch,)")
    axes = ", ".join(PAGE_AXES[page_layout][:3])
    shapes = ScaleShapes(queries.batch, k.shape[1], tuple(k_pages.shape[:3]), axes, page_layout == "phd")
    kv_scales, scales = cache.scales(k_scale, v_scale, shapes, q.device)
    found = Features(OP, q.device, q.dtype, asked, head_dim)
    found.check_numbers()
    found.check_scored(queries.scores(capacity))
    if values.reads(settings, q):
        values.lengths(OP, "k", seqlens_k, None, capacity)
        seen = queries.seen_keys(found.problem, seqlens_k)
        values.page_table(OP, page_table, seen, page_size, k.shape[0])
        tokens = values.Tokens(capacity, seqlens_k, None, page_table, seen)
        values.scales(OP, scales, tokens)
        values.block_scales(OP, by_block, tokens)
    return build(
        OP,
        {"q": queries.tensors[0], "k": k, "v": v},
        found,
        problem={
            "heads_k": k.shape[1],
            "seq_k": capacity,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "seqlens_k": True,
            "page_size": page_size,
            "page_layout": page_layout,
            "kv_format": kind,
            "kv_scales": kv_scales,
            **queries.problem,
        },
        call={"seqlens_k": seqlens_k, "page_table": page_table, **scales, **by_block, **queries.call},
        differentiable=differentiable,
    )
