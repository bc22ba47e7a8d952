"""One rank's part of a call over a sharded cache: the operation over the keys that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from portattn.api import ops
from portattn.distributed.cache_shard import CacheShard
from portattn.distributed.partials import Heads
from portattn.errors import ArgumentError
from portattn.validate import wants_gradients
from portattn.validate.checks import shape_or_value

UNLIMITED = -1


class CausalWindow(NamedTuple):
    """How far queries see: a causal mask, if any, and a window.

    causal  "none", "bottom_right" or "top_left": also how queries are aligned
    left, right  keys before and after a query's own position; UNLIMITED
    """

    causal: str
    left: int
    right: int

    @property
    def limited(self) -> bool:
        return self.left >= 0 or self.right >= 0


def reach_of(op: str, causal: Any, window: Any) -> CausalWindow:
    """`causal` and `window` of a call, as portattn's operations take them. Raises ArgumentError for others."""
    named = {False: "none", True: "bottom_right", "bottom_right": "bottom_right", "top_left": "top_left"}
    if not isinstance(causal, (bool, str)) or causal not in named:
        raise ArgumentError(op, "causal", causal, "must be False, True, 'bottom_right' or 'top_left'")
    sides = (UNLIMITED, UNLIMITED)
    if window is not None:
        if not isinstance(window, tuple) or len(window) != 2:
            raise ArgumentError(op, "window", window, "must be a tuple (left, right), keys before and after")
        for name, side in zip(("left", "right"), window, strict=True):
            if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < UNLIMITED):
                limit = "must be an integer ≥ 0, or None or -1 for no limit"
                raise ArgumentError(op, f"window's {name}", side, limit)
        sides = tuple(UNLIMITED if side is None else side for side in window)  # type: ignore[assignment]
    left, right = sides
    if named[causal] != "none":
        right = 0
    return CausalWindow(named[causal], left, right)


class QueryRows(NamedTuple):
    """The queries of a call: (B, Hq, Sq, …), or one a sequence of packed queries.

    lengths    (B,) keys of each whole sequence
    positions  (B, Sq) int64, each query's place in its sequence; negative before its beginning
    """

    lengths: torch.Tensor
    positions: torch.Tensor


def dense_rows(reach: CausalWindow, lengths: torch.Tensor, count: int) -> QueryRows:
    """Of `count` queries a sequence."""
    step = torch.arange(count, device=lengths.device)
    if reach.causal == "top_left":
        return QueryRows(lengths, step.expand(lengths.shape[0], count))
    return QueryRows(lengths, lengths.long()[:, None] - count + step)


def packed_rows(
    reach: CausalWindow, lengths: torch.Tensor, cu_seqlens_q: torch.Tensor, total: int
) -> tuple[QueryRows, torch.Tensor]:
    """Of packed queries, each a sequence of its own, and (Tq,) int64, whose query it is. Rows past the last sequence
    have no keys."""
    row = torch.arange(total, device=lengths.device)
    beginnings = cu_seqlens_q.long()
    found = torch.searchsorted(beginnings, row, right=True) - 1
    sequence = found.clamp(0, max(lengths.shape[0] - 1, 0))
    own = torch.where(found < lengths.shape[0], lengths.long()[sequence], 0)
    inside = row - beginnings[sequence]
    count = beginnings[sequence + 1] - beginnings[sequence]
    place = inside if reach.causal == "top_left" else own - count + inside
    return QueryRows(own.to(lengths.dtype), place[:, None]), sequence


def seen_lengths(reach: CausalWindow, rows: QueryRows) -> torch.Tensor:
    """(B,) keys of the whole sequence that some query of it sees: its beginning, up to the last query's right side."""
    if reach.right < 0 or not rows.positions.shape[1]:
        return rows.lengths
    last = rows.positions[:, -1] + reach.right + 1
    return torch.minimum(rows.lengths.long(), last.clamp(min=0)).to(rows.lengths.dtype)


def visible(shard: CacheShard, reach: CausalWindow, rows: QueryRows, keys: int) -> torch.Tensor:
    """(B, 1, Sq, keys) bool: whether a query sees each row of this rank's part. Rows past the length do not matter."""
    distance = shard.positions(keys, rows.positions.device) - rows.positions[:, None, :, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if reach.left >= 0:
        seen &= distance >= -reach.left
    if reach.right >= 0:
        seen &= distance <= reach.right
    return seen


def alibi_bias(shard: CacheShard, slopes: torch.Tensor, rows: QueryRows, keys: int) -> torch.Tensor:
    """(B, Hq, Sq, keys) float32: −slope·|distance| of slopes (Hq,) or (B, Hq)."""
    distance = (shard.positions(keys, rows.positions.device) - rows.positions[:, None, :, None]).abs()
    return -(slopes[..., None, None] * distance.float())


LAYOUTS = ("bhsd", "bshd")
# Options that are each rank's own.
_OWN = ("k_scale", "v_scale", "kv_scale", "k_block_scale", "v_block_scale")


class PartialCall:
    """One operation over this rank's part of the keys."""

    def __init__(
        self, op: str, shard: CacheShard, queries: Sequence[Any], caches: Sequence[Any], page_table: Any,
        seqlens_k: Any, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.op, self.shard, self.queries, self.caches = op, shard, queries, caches
        self.page_table, self.seqlens_k, self.options = page_table, seqlens_k, options
        self.layout = options.get("layout", "bhsd")
        self.is_packed = options.get("cu_seqlens_q") is not None
        self._function: Callable[..., Any] = getattr(ops, op)

    def facts(self) -> dict[str, object]:
        """What must be the same on every rank, by argument."""
        found: dict[str, object] = {
            "q": [(tuple(q.shape), q.dtype) for q in self.queries],
            "seqlens_k": self.seqlens_k.tolist(),
            "Dv": self.caches[-1].shape[-1],
        }
        for name, value in self.options.items():
            if name in (*_OWN, "num_splits", "backend", "validate"):
                continue  # each rank's own
            if isinstance(value, torch.Tensor):
                value = value.tolist()
            found[name] = value
        return found

    def run(self, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
        """The partial result, heads first: out (Hq, B, Sq, Dv), packed (Hq, Tq, Dv), and lse without the last axis."""
        self._check(heads)
        op, options = self.op, dict(self.options)
        reach = reach_of(op, options.pop("causal", False), options.pop("window", None))
        slopes = options.pop("alibi_slopes", None)
        if self.shard.rank:
            options.pop("sinks", None)  # one more score of a row: one rank has it
        table, lengths = self.page_table, self.seqlens_k
        queries = self.queries
        count = self._queries_a_sequence()
        by_row = reach.limited and not (count == 1 and reach.causal == "bottom_right" and reach.left < 0)
        by_row = (by_row or slopes is not None) and bool(lengths.shape[0])  # without sequences there are no keys
        unpack = self.is_packed and by_row
        if unpack:
            cu_seqlens_q = options.pop("cu_seqlens_q")
            options.pop("max_seqlen_q", None)
            rows, sequence = packed_rows(reach, lengths, cu_seqlens_q, queries[0].shape[0])
            queries = [q[:, :, None] for q in queries]  # (Tq, Hq, 1, D)
            options["layout"] = "bhsd"
            table = table.index_select(0, sequence)
            count = 1
            if slopes is not None and slopes.ndim == 2:
                slopes = slopes.index_select(0, sequence)
        elif by_row:
            assert count is not None
            rows = dense_rows(reach, lengths, count)
        if by_row:
            assert count is not None
            options |= self._by_position(reach, rows, slopes, count)
            lengths = seen_lengths(reach, rows)
        found = self._function(
            *queries, *self.caches, *(() if table is None else (table,)), self.shard.lengths(lengths),
            return_lse=True, **options,
        )  # fmt: skip
        out, lse = found
        if unpack:
            return out[:, :, 0].transpose(0, 1), lse[:, :, 0].transpose(0, 1)
        if self.is_packed:
            return out.transpose(0, 1), lse
        out = out.transpose(1, 2) if self.layout == "bshd" else out
        return out.transpose(0, 1), lse.transpose(0, 1)

    def in_layout(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads-first results as the operation gives them."""
        if self.is_packed:
            return out.transpose(0, 1).contiguous(), lse
        out = out.permute(1, 2, 0, 3) if self.layout == "bshd" else out.transpose(0, 1)
        return out.contiguous(), lse.transpose(0, 1).contiguous()

    def _by_position(
        self, reach: CausalWindow, rows: QueryRows, slopes: torch.Tensor | None, count: int
    ) -> dict[str, Any]:
        """The mask or bias of what depends on where keys are in the whole sequence. One query a sequence needs no mask
        where only later keys are hidden: a length says that."""
        masked = reach.left >= 0 or (reach.right >= 0 and count > 1)
        keys = self._rows()
        seen = visible(self.shard, reach, rows, keys) if masked else None
        if slopes is None:
            return {} if seen is None else {"mask": seen}
        bias = alibi_bias(self.shard, slopes, rows, keys)
        return {"bias": bias if seen is None else bias.masked_fill(~seen, float("-inf"))}

    def _rows(self) -> int:
        """Rows of this rank's part of a sequence that there is memory for."""
        cache = self.caches[0]
        if self.page_table is None:
            return cache.shape[2 if self.layout == "bhsd" else 1]
        return self.page_table.shape[1] * cache.shape[2 if self.options.get("page_layout", "phd") == "hpd" else 1]

    def _queries_a_sequence(self) -> int | None:
        """None of packed queries, whose numbers are on the device, but where there is at most one."""
        if self.is_packed:
            return 1 if self.options.get("max_seqlen_q") == 1 else None
        return self.queries[0].shape[2 if self.layout == "bhsd" else 1]

    def _check(self, heads: Heads) -> None:
        op, options = self.op, self.options
        for name in ("chunk", "bias", "mask", "tree_mask", "leftpad_k"):
            if options.get(name) is not None:
                limit = "is not supported over a sharded cache: it would have to be cut as the keys are"
                raise ArgumentError(op, name, shape_or_value(options[name]), limit)
        check_choice(op, "layout", self.layout, LAYOUTS)
        for name, q in zip(("q",) if len(self.queries) == 1 else ("q_nope", "q_rope"), self.queries, strict=True):
            check_tensor(op, name, q, 3 if self.is_packed else 4)
        names = {1: ("kv_pages",), 2: ("k_cache", "v_cache") if self.page_table is None else ("k_pages", "v_pages")}
        for name, cache in zip(names[len(self.caches)], self.caches, strict=True):
            check_tensor(op, name, cache, 3 if len(self.caches) == 1 else 4)
        if op != "decode_attention":
            check_tensor(op, "page_table", self.page_table, 2)
        batch = self.page_table.shape[0] if self.page_table is not None else self.queries[0].shape[0]
        check_lengths(op, self.seqlens_k, batch)
        slopes, q = options.get("alibi_slopes"), self.queries[0]
        count = q.shape[1] if self.is_packed or self.layout == "bhsd" else q.shape[2]
        if slopes is not None:
            if not isinstance(slopes, torch.Tensor) or tuple(slopes.shape) not in ((count,), (batch, count)):
                raise ArgumentError(
                    op, "alibi_slopes", shape_or_value(slopes), f"must be ({count},) or ({batch}, {count})"
                )
            if slopes.dtype is not torch.float32:
                raise ArgumentError(op, "alibi_slopes.dtype", slopes.dtype, "must be torch.float32")
        tensors = (*self.queries, *self.caches, slopes, options.get("sinks"))
        if wants_gradients(*(t for t in tensors if isinstance(t, torch.Tensor))):
            limit = (
                "has no gradient over a sharded cache; use torch.no_grad(), or portattn.distributed.context_parallel"
            )
            raise ArgumentError(op, "requires_grad", True, limit)
        if heads == "shard" and count % self.shard.world_size:
            limit = f'must be a multiple of the {self.shard.world_size} ranks for heads="shard"'
            raise ArgumentError(op, "heads_q", count, limit)


def check_choice(op: str, name: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(op, name, value, f"must be one of {', '.join(known)}")


def check_tensor(op: str, name: str, value: Any, axes: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(op, name, type(value).__name__, "must be a torch.Tensor: this rank's own")
    if value.ndim != axes:
        raise ArgumentError(op, f"{name}.shape", tuple(value.shape), f"must have {axes} axes")


def check_lengths(op: str, seqlens_k: Any, batch: int) -> None:
    if not isinstance(seqlens_k, torch.Tensor):
        raise ArgumentError(op, "seqlens_k", seqlens_k, "must be given: the keys of each whole sequence, (B,) int32")
    if seqlens_k.shape != (batch,) or seqlens_k.dtype is not torch.int32:
        given = (tuple(seqlens_k.shape), seqlens_k.dtype)
        raise ArgumentError(op, "seqlens_k", given, f"must be ({batch},) int32: the keys of each whole sequence")
