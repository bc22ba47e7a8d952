"""Decoding over a cache whose sequences are dealt out to the ranks of a process group: each attends its part, and the
partial results are merged by their log-sum-exps, which travel with them in one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from portattn.api import ops
from portattn.distributed.cache_shard import CacheShard, new_positions
from portattn.distributed.groups import Ranks, agree, dimensions
from portattn.distributed.local_keys import (
    Reach,
    Rows,
    alibi_bias,
    dense_rows,
    packed_rows,
    reach_of,
    seen_lengths,
    visible,
)
from portattn.distributed.partials import Heads, exchanged, merged, packed, unpacked
from portattn.errors import ArgumentError, PortattnError
from portattn.validate import wants_gradients

WHO = "decode_parallel"
HEADS = ("all", "shard")
LAYOUTS = ("bhsd", "bshd")
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def decode_parallel(
    mesh: Any = None, *, interleave: int = 1, heads: Heads = "all", validate: bool | None = None
) -> DecodeParallel:
    """Ranks that share the sequences of a key/value cache (decode context parallel).

    mesh        a torch ProcessGroup, a DeviceMesh of one dimension, or None for all processes
    interleave  consecutive tokens of a sequence on one rank, as CacheShard says: 1 deals tokens out one by one, a page
                size by pages; with the longest sequence divided by the number of ranks each has one stretch
    heads       what each rank gets of a result: "all" heads, or with "shard" its own Hq / N, heads
                rank·Hq/N … (rank + 1)·Hq/N − 1, for which less is sent
    validate    whether ranks tell each other before a collective what they call with; None: on the CPU only. Without it
                nothing waits for the device, and a rank that calls with other shapes or lengths is not noticed

    All ranks call the same method with the same queries and the same lengths; caches and page tables are each rank's
    own. Ranks tell each other here that they agree on interleave and heads.

    Returns a DecodeParallel.

    Raises ArgumentError, on every rank: what is out of its limits, or differs between ranks.
    """
    dims = dimensions(WHO, mesh)
    problem: ArgumentError | None = None
    if len(dims) != 1:
        names = ", ".join(ranks.name for ranks in dims)
        raise ArgumentError(WHO, "mesh", names, "must have one dimension: give mesh[name]")
    try:
        CacheShard(dims[0].rank, dims[0].size, interleave).check()
        _check_choice(WHO, "heads", heads, HEADS)
        if validate is not None and not isinstance(validate, bool):
            raise ArgumentError(WHO, "validate", validate, "must be True, False or None")
    except ArgumentError as error:
        problem = error
    agree(WHO, dims, {"interleave": interleave, "heads": heads, "validate": validate}, problem)
    return DecodeParallel(dims[0], interleave, heads, validate)


class DecodeParallel:
    """portattn's cache operations over sequences shared by ranks. `decode_parallel` makes one.

    Each method takes what the operation of its name takes, with these differences: `seqlens_k` counts the keys of whole
    sequences, alike on every rank, and must be given; caches, page tables and per-token scales are this rank's own;
    bias and mask are refused. Windows, ALiBi and causal masks go by positions in the whole sequence, sinks count once.

    A rank whose part of a sequence is empty contributes nothing, whatever its cache holds. Every rank gets the same
    result, bit for bit.

    Where queries of one call see different keys of a rank (causal with Sq > 1, a window), a bool mask (B, 1, Sq, rows)
    is made on the device, and for ALiBi a float32 bias (B, Hq, Sq, rows), rows being this rank's rows a sequence; of
    packed queries each is attended as a sequence of its own then. Otherwise memory beyond the operation's own is that
    of the partial results: (N + 1)·B·Hq·Sq rows of Dv elements and 4 bytes; with heads="shard" 2·B·Hq·Sq rows.

    Nothing is read back without `validate`, and no shape depends on data: CUDA graphs can capture a call.

    ranks  the process group, this process's place in it and the others
    shard  the CacheShard of this rank: lengths, positions and slots
    heads  what results hold
    """

    def __init__(self, ranks: Ranks, interleave: int, heads: Heads, validate: bool | None) -> None:
        self.ranks, self.heads = ranks, heads
        self.shard = CacheShard(ranks.rank, ranks.size, interleave)
        self._validate = validate

    def __repr__(self) -> str:
        return (
            f"DecodeParallel(rank {self.shard.rank} of {self.shard.world_size}, "
            f"interleave={self.shard.interleave}, heads={self.heads!r})"
        )

    def decode_attention(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor, **options: Any
    ) -> Result:
        """portattn.decode_attention over contiguous caches.

        q                 (B, Hq, Sq, D), all of it on every rank; (B, Sq, Hq, D) with layout="bshd"
        k_cache, v_cache  (B, Hk, rows, D) and (B, Hk, rows, Dv): this rank's part of each sequence
        seqlens_k         (B,) int32: keys of each whole sequence, at most what the ranks' rows hold
        options           the keywords of portattn.decode_attention but leftpad_k, bias and mask

        Returns out (B, Hq, Sq, Dv) in q's dtype and layout; with return_lse, (out, lse). With heads="shard" Hq / N
        heads.

        Raises ArgumentError, with validation on every rank; what portattn.decode_attention raises; and torch's own
        error where a rank has gone.
        """
        return self._call("decode_attention", (q,), (k_cache, v_cache), None, seqlens_k, options)

    def paged_attention(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor,
        seqlens_k: torch.Tensor, **options: Any,
    ) -> Result:  # fmt: skip
        """portattn.paged_attention over pages of this rank's own.

        q                 (B, Hq, Sq, D) or packed (Tq, Hq, D) with cu_seqlens_q, all of it on every rank
        k_pages, v_pages  (P, page, Hk, D) and (P, page, Hk, Dv), or with page_layout="hpd" (P, Hk, page, D)
        page_table        (B, pages a sequence) int32: this rank's pages of each sequence, whose rows are its part
        seqlens_k         (B,) int32: keys of each whole sequence
        options           the keywords of portattn.paged_attention but bias and mask

        Returns out like q with Dv columns; with return_lse, (out, lse). With heads="shard" Hq / N heads.

        Raises as decode_attention.
        """
        return self._call("paged_attention", (q,), (k_pages, v_pages), page_table, seqlens_k, options)

    def mla_attention(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, kv_pages: torch.Tensor, page_table: torch.Tensor,
        seqlens_k: torch.Tensor, **options: Any,
    ) -> Result:  # fmt: skip
        """portattn.mla_attention over latent pages of this rank's own.

        q_nope, q_rope  (B, H, Sq, R) and (B, H, Sq, E), or packed, all of it on every rank
        kv_pages        (P, page, R + E)
        page_table      (B, pages a sequence) int32: this rank's pages of each sequence
        seqlens_k       (B,) int32: keys of each whole sequence
        options         the keywords of portattn.mla_attention but bias and mask; `scale` must be given

        Returns out (B, H, Sq, R); with return_lse, (out, lse). With heads="shard" H / N heads.

        Raises as decode_attention.
        """
        return self._call("mla_attention", (q_nope, q_rope), (kv_pages,), page_table, seqlens_k, options)

    def append_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor,
        *, layout: str = "bhsd", **options: Any,
    ) -> None:  # fmt: skip
        """portattn.append_kv: this rank's share of new keys and values, into its part of contiguous caches.

        k, v              (B, Hk, S, D) and (B, Hk, S, Dv), the new rows of each sequence, alike on every rank
        k_cache, v_cache  (B, Hk, rows, D) and (B, Hk, rows, Dv): this rank's part
        seqlens_k         (B,) int32: keys that each whole sequence has before the call. Nothing is written of a
                          sequence whose number is negative
        options           the keywords of portattn.write_pages but slot_mapping, positions and page_layout. Keys are
                          rotated by their places in the whole sequence

        Returns None.

        Raises ArgumentError for rows that lie beyond a part (on a CPU), and what portattn.write_pages raises. No
        collective runs.
        """
        op = "append_kv"
        _check_choice(op, "layout", layout, LAYOUTS)
        for name in ("slot_mapping", "positions", "page_layout"):
            if name in options:
                raise ArgumentError(op, name, options[name], "follows from seqlens_k and layout here")
        for name, tensor in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
            _check_tensor(op, name, tensor, 4)
        _check_lengths(op, seqlens_k, k.shape[0])
        tokens, rows = (2, 2) if layout == "bhsd" else (1, 1)
        places = new_positions(seqlens_k, k.shape[tokens])
        if options.get("cos") is not None:
            options["positions"] = places.clamp(min=0).reshape(-1)
        new = [(t.transpose(1, 2) if layout == "bhsd" else t).flatten(0, 1) for t in (k, v)]
        slots = self.shard.slots(places, max(k_cache.shape[rows], 1))
        if not k_cache.shape[rows]:
            slots = torch.full_like(slots, -1)
        ops.write_pages(
            *new, k_cache, v_cache, slots, page_layout="hpd" if layout == "bhsd" else "phd", **options
        )  # fmt: skip

    def _call(
        self, op: str, queries: Sequence[torch.Tensor], caches: Sequence[torch.Tensor],
        page_table: torch.Tensor | None, seqlens_k: torch.Tensor, options: dict[str, Any],
    ) -> Result:  # fmt: skip
        return_lse = options.pop("return_lse", False)
        call = _LocalCall(op, self.shard, queries, caches, page_table, seqlens_k, options)
        if self._validating(queries[0] if queries else None):
            out, lse = self._agreed(call)
        else:
            out, lse = call.run(self.heads)
        words = exchanged(packed(out, lse), self.ranks.group, self.shard.world_size, self.heads)
        found, found_lse = merged(*unpacked(words, out.shape[-1], out.dtype))
        found, found_lse = call.in_layout(found.to(out.dtype), found_lse)
        return (found, found_lse) if return_lse else found

    def _validating(self, q: Any) -> bool:
        if torch.compiler.is_compiling():
            return False
        return (not isinstance(q, torch.Tensor) or q.device.type == "cpu") if self._validate is None else self._validate

    def _agreed(self, call: _LocalCall) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's partial result, once all ranks are known to make the same call."""
        problem, found = None, None
        try:
            found = call.run(self.heads)
        except ArgumentError as error:
            problem = error
        except PortattnError as error:  # a path that is not there, or will not compile, on this rank
            problem = ArgumentError(call.op, "backend", call.options.get("backend"), f"on one rank: {error}")
            problem.__cause__ = error
        agree(call.op, (self.ranks,), {} if problem else call.facts(), problem)
        assert found is not None
        return found


class _LocalCall:
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
            if name in ("k_scale", "v_scale", "kv_scale", "num_splits", "backend", "validate"):
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
        by_row = by_row or slopes is not None
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
            rows = dense_rows(reach, lengths, count)
        if by_row:
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

    def _by_position(self, reach: Reach, rows: Rows, slopes: torch.Tensor | None, count: int) -> dict[str, Any]:
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
        for name in ("bias", "mask", "leftpad_k"):
            if options.get(name) is not None:
                limit = "is not supported over a sharded cache: it would have to be cut as the keys are"
                raise ArgumentError(op, name, _shape(options[name]), limit)
        _check_choice(op, "layout", self.layout, LAYOUTS)
        for name, q in zip(("q",) if len(self.queries) == 1 else ("q_nope", "q_rope"), self.queries, strict=True):
            _check_tensor(op, name, q, 3 if self.is_packed else 4)
        names = {1: ("kv_pages",), 2: ("k_cache", "v_cache") if self.page_table is None else ("k_pages", "v_pages")}
        for name, cache in zip(names[len(self.caches)], self.caches, strict=True):
            _check_tensor(op, name, cache, 3 if len(self.caches) == 1 else 4)
        if op != "decode_attention":
            _check_tensor(op, "page_table", self.page_table, 2)
        batch = self.page_table.shape[0] if self.page_table is not None else self.queries[0].shape[0]
        _check_lengths(op, self.seqlens_k, batch)
        slopes, q = options.get("alibi_slopes"), self.queries[0]
        count = q.shape[1] if self.is_packed or self.layout == "bhsd" else q.shape[2]
        if slopes is not None:
            if not isinstance(slopes, torch.Tensor) or tuple(slopes.shape) not in ((count,), (batch, count)):
                raise ArgumentError(op, "alibi_slopes", _shape(slopes), f"must be ({count},) or ({batch}, {count})")
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


def _check_choice(op: str, name: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(op, name, value, f"must be one of {', '.join(known)}")


def _check_tensor(op: str, name: str, value: Any, axes: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(op, name, type(value).__name__, "must be a torch.Tensor: this rank's own")
    if value.ndim != axes:
        raise ArgumentError(op, f"{name}.shape", tuple(value.shape), f"must have {axes} axes")


def _check_lengths(op: str, seqlens_k: Any, batch: int) -> None:
    if not isinstance(seqlens_k, torch.Tensor):
        raise ArgumentError(op, "seqlens_k", seqlens_k, "must be given: the keys of each whole sequence, (B,) int32")
    if seqlens_k.shape != (batch,) or seqlens_k.dtype is not torch.int32:
        given = (tuple(seqlens_k.shape), seqlens_k.dtype)
        raise ArgumentError(op, "seqlens_k", given, f"must be ({batch},) int32: the keys of each whole sequence")


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value
