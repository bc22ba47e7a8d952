"""The tokens of a sequence that each rank's part of a key/value cache holds, and a rank's partial call over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from portattn.api import ops
from portattn.distributed.collectives import Heads
from portattn.errors import ArgumentError
from portattn.schema.ops import FEATURES
from portattn.validate import wants_gradients
from portattn.validate.checks import shape_or_value

WHO = "CacheShard"
NOT_HERE = -1  # a slot in which portattn.write_pages writes nothing


class CacheShard(NamedTuple):
    """One rank's part of a cache whose sequences are dealt out to the ranks in blocks of `interleave` tokens.

    Token t lies on rank (t // interleave) % world_size, as row (t // (interleave·world_size))·interleave + t %
    interleave of the sequence's part there: a part has the sequence's order, without gaps. All methods are arithmetic
    on the device without a read-back: a CUDA graph can replay them with lengths changed in place.

    Attributes:
        rank: 0 … world_size − 1
        world_size: ranks that share each sequence
        interleave: consecutive tokens on one rank: 1 for token by token, the page size for every world_size-th page,
            the longest sequence / world_size for one stretch on each rank

    Examples:
        >>> import torch
        >>> from portattn.distributed import CacheShard
        >>> shards = [CacheShard(rank, world_size=2, interleave=4) for rank in range(2)]
        >>> [shard.lengths(torch.tensor([0, 3, 6, 13], dtype=torch.int32)).tolist() for shard in shards]
        [[0, 3, 4, 8], [0, 0, 2, 5]]
        >>> shards[1].positions(6).tolist()
        [4, 5, 6, 7, 12, 13]
    """

    rank: int
    world_size: int
    interleave: int = 1

    def check(self) -> None:
        for name, least in (("world_size", 1), ("interleave", 1), ("rank", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(WHO, name, value, f"must be an integer ≥ {least}")
        if self.rank >= self.world_size:
            raise ArgumentError(WHO, "rank", self.rank, f"must be below world_size, {self.world_size}")

    def lengths(self, seqlens_k: torch.Tensor) -> torch.Tensor:
        """Return this rank's number of keys of each sequence.

        Args:
            seqlens_k: keys of each whole sequence, int32 or int64, of any shape; negative counts as 0

        Returns:
            Integers of seqlens_k's shape, as (B,), and dtype, on its device.

        Examples:
            >>> import torch
            >>> from portattn.distributed import CacheShard
            >>> CacheShard(1, world_size=2).lengths(torch.tensor([0, 1, 2, 5]))
            tensor([0, 0, 1, 2])
        """
        cycle = self.interleave * self.world_size
        total = seqlens_k.clamp(min=0)
        over = (total % cycle - self.rank * self.interleave).clamp(0, self.interleave)
        return total // cycle * self.interleave + over

    def positions(self, rows: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the positions in the sequence of the first rows of this rank's part.

        Args:
            rows: number of rows
            device: of the result; None for torch's default

        Returns:
            (rows,) int64.

        Examples:
            >>> from portattn.distributed import CacheShard
            >>> CacheShard(1, world_size=2, interleave=2).positions(4)
            tensor([2, 3, 6, 7])
        """
        row = torch.arange(rows, device=device)
        cycle, inside = row // self.interleave, row % self.interleave
        return (cycle * self.world_size + self.rank) * self.interleave + inside

    def slots(
        self,
        positions: torch.Tensor,
        page_size: int,
        page_table: torch.Tensor | None = None,
        sequences: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the slots of new tokens in this rank's part: the `slot_mapping` of portattn.write_pages.

        Args:
            positions: (B, S) int32 or int64: positions of new tokens in their sequences, or (T,) with `sequences`;
                tokens with a negative position are not written
            page_size: tokens of a page of this rank; for a contiguous cache its rows a sequence
            page_table: (B, pages a sequence) int32: this rank's pages; None if sequence b's tokens lie in page b, as in
                a contiguous cache
            sequences: (T,) int32 or int64: each token's row of page_table; None for (B, S) positions

        Returns:
            (B·S,) or (T,) int64: page·page_size + row in the page, and -1 for tokens of other ranks.

        Raises:
            ArgumentError: Shapes do not match; on a CPU also if a token lies beyond the table, which elsewhere gets -1.

        Examples:
            >>> import torch
            >>> from portattn.distributed import CacheShard
            >>> table = torch.tensor([[5, 3]], dtype=torch.int32)
            >>> CacheShard(1, world_size=2).slots(torch.tensor([[0, 1, 2, 33]]), page_size=16, page_table=table)
            tensor([-1, 80, -1, 48])
        """
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ArgumentError(WHO, "page_size", page_size, "must be an integer ≥ 1")
        if positions.ndim != (2 if sequences is None else 1):
            limit = "must be (B, S), or (T,) with sequences"
            raise ArgumentError(WHO, "positions.shape", tuple(positions.shape), limit)
        if sequences is None:
            batch = torch.arange(positions.shape[0], device=positions.device)
            sequences = batch.repeat_interleave(positions.shape[1], output_size=positions.numel())
        elif sequences.shape != positions.shape:
            limit = f"must be that of positions, {tuple(positions.shape)}"
            raise ArgumentError(WHO, "sequences.shape", tuple(sequences.shape), limit)
        place, sequences = positions.reshape(-1).long(), sequences.long()
        block = place // self.interleave
        row = block // self.world_size * self.interleave + place % self.interleave
        page, pages = row // page_size, 1
        here = (place >= 0) & (block % self.world_size == self.rank)
        if page_table is not None:
            if page_table.ndim != 2:
                raise ArgumentError(WHO, "page_table.shape", tuple(page_table.shape), "must be (B, pages a sequence)")
            pages = page_table.shape[1]
        fits = page < pages
        if place.device.type == "cpu" and not torch.compiler.is_compiling() and bool((here & ~fits).any()):
            beyond = int(place[here & ~fits][0])
            limit = f"rank {self.rank} has {pages} pages of {page_size} tokens a sequence"
            raise ArgumentError(WHO, "positions", beyond, limit)
        here = here & fits
        if page_table is None:
            identity = sequences
        elif not page_table.numel():
            identity = torch.zeros_like(place)
        else:
            identity = page_table[sequences, page.clamp(0, pages - 1)].long()
        return torch.where(here, identity * page_size + row % page_size, NOT_HERE)


def new_positions(seqlens_k: torch.Tensor, count: int) -> torch.Tensor:
    """Return (B, count) int64 positions of new tokens after seqlens_k (B,) keys; -1 for negative lengths."""
    first = seqlens_k.long()[:, None]
    return torch.where(first < 0, NOT_HERE, first + torch.arange(count, device=seqlens_k.device))


UNLIMITED = -1


class CausalWindow(NamedTuple):
    """Reach of queries: a causal mask, which also aligns them, and keys left and right of them, or UNLIMITED."""

    causal: str
    left: int
    right: int

    @property
    def limited(self) -> bool:
        return self.left >= 0 or self.right >= 0


def reach_of(op: str, causal: Any, window: Any) -> CausalWindow:
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
    """The queries of a call, (B, Hq, Sq, …), or one a sequence for packed queries."""

    lengths: torch.Tensor
    positions: torch.Tensor


def dense_rows(reach: CausalWindow, lengths: torch.Tensor, count: int) -> QueryRows:
    step = torch.arange(count, device=lengths.device)
    if reach.causal == "top_left":
        return QueryRows(lengths, step.expand(lengths.shape[0], count))
    return QueryRows(lengths, lengths.long()[:, None] - count + step)


def packed_rows(
    reach: CausalWindow, lengths: torch.Tensor, cu_seqlens_q: torch.Tensor, total: int
) -> tuple[QueryRows, torch.Tensor]:
    """Return packed queries as sequences of their own, and each one's sequence; rows past the last have no keys."""
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
    """Return (B,) keys of the whole sequence up to the last query's right side."""
    if reach.right < 0 or not rows.positions.shape[1]:
        return rows.lengths
    last = rows.positions[:, -1] + reach.right + 1
    return torch.minimum(rows.lengths.long(), last.clamp(min=0)).to(rows.lengths.dtype)


def visible(shard: CacheShard, reach: CausalWindow, rows: QueryRows, keys: int) -> torch.Tensor:
    """Return the mask (B, 1, Sq, keys) of this rank's rows that a query sees; rows past the length do not matter."""
    distance = shard.positions(keys, rows.positions.device) - rows.positions[:, None, :, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if reach.left >= 0:
        seen &= distance >= -reach.left
    if reach.right >= 0:
        seen &= distance <= reach.right
    return seen


def alibi_bias(shard: CacheShard, slopes: torch.Tensor, rows: QueryRows, keys: int) -> torch.Tensor:
    """Return −slope·|distance|, (B, Hq, Sq, keys) float32, for slopes (Hq,) or (B, Hq)."""
    distance = (shard.positions(keys, rows.positions.device) - rows.positions[:, None, :, None]).abs()
    return -(slopes[..., None, None] * distance.float())


LAYOUTS = ("bhsd", "bshd")
# Options that are each rank's own.
_OWN = ("k_scale", "v_scale", "kv_scale", "k_block_scale", "v_block_scale")


class PartialCall:
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
        """Return the partial result, heads first: out (Hq, B, Sq, Dv) or packed (Hq, Tq, Dv), and its lse."""
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
        if self.is_packed:
            return out.transpose(0, 1).contiguous(), lse
        out = out.permute(1, 2, 0, 3) if self.layout == "bshd" else out.transpose(0, 1)
        return out.contiguous(), lse.transpose(0, 1).contiguous()

    def _by_position(
        self, reach: CausalWindow, rows: QueryRows, slopes: torch.Tensor | None, count: int
    ) -> dict[str, Any]:
        """Return a mask or bias by position; a length replaces it if one query a sequence sees no later keys."""
        masked = reach.left >= 0 or (reach.right >= 0 and count > 1)
        keys = self._rows()
        seen = visible(self.shard, reach, rows, keys) if masked else None
        if slopes is None:
            return {} if seen is None else {"mask": seen}
        bias = alibi_bias(self.shard, slopes, rows, keys)
        return {"bias": bias if seen is None else bias.masked_fill(~seen, float("-inf"))}

    def _rows(self) -> int:
        cache = self.caches[0]
        if self.page_table is None:
            return cache.shape[2 if self.layout == "bhsd" else 1]
        return self.page_table.shape[1] * cache.shape[2 if self.options.get("page_layout", "phd") == "hpd" else 1]

    def _queries_a_sequence(self) -> int | None:
        """Return the queries a sequence; None for packed ones, whose lengths are on the device, unless at most one."""
        if self.is_packed:
            return 1 if self.options.get("max_seqlen_q") == 1 else None
        return self.queries[0].shape[2 if self.layout == "bhsd" else 1]

    def _check(self, heads: Heads) -> None:
        op, options = self.op, self.options
        # an axis of keys or of rows
        cut = (name for name, feature in FEATURES.items() if "k" in feature.axes or "r" in feature.axes)
        for name in ("chunk", *cut, "leftpad_k"):
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
