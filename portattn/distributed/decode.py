"""Decoding over a cache whose sequences are dealt out to the ranks of a process group: each attends its part, and the
partial results are merged by their log-sum-exps, which travel with them in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import ops
from portattn.distributed.cache_shard import NOT_HERE, CacheShard, new_positions
from portattn.distributed.groups import Ranks, agree, dimensions
from portattn.distributed.merging import merge_words
from portattn.distributed.partial_call import LAYOUTS, PartialCall, check_choice, check_lengths, check_tensor
from portattn.distributed.partials import Heads, exchange_rows, packed
from portattn.errors import ArgumentError, PortattnError

WHO = "decode_parallel"
HEADS = ("all", "shard")
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def decode_parallel(
    mesh: Any = None, *, interleave: int = 1, heads: Heads = "all", validate: bool | None = None
) -> DecodeParallel:
    """Ranks that share the sequences of a key/value cache (decode context parallel).

    mesh        a torch ProcessGroup, a DeviceMesh of one dimension, or None for all processes
    interleave  consecutive tokens of a sequence on one rank, as CacheShard says: 1 deals tokens out one by one, a page
                size by pages; with the longest sequence divided by the number of ranks each has one stretch
    heads       heads of a result that each rank gets: "all", or with "shard" its own Hq / N,
                rank·Hq/N … (rank + 1)·Hq/N − 1, for which less is sent
    validate    whether ranks compare their arguments before a collective; None: on the CPU only. Without it no rank
                waits for the device, and a rank that calls with other shapes or lengths is not noticed

    All ranks call the same method with the same queries and the same lengths; caches and page tables are each rank's
    own. Ranks check here that they agree on interleave and heads.

    Returns a DecodeParallel.

    Raises ArgumentError, on every rank, for an argument out of its limits or different between ranks.

    >>> import torch, portattn, torch.distributed as dist
    >>> from portattn.distributed import decode_parallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more processes
    >>> shared = decode_parallel(interleave=16)
    >>> q, k_cache, v_cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
    >>> seqlens_k = torch.tensor([30, 100], dtype=torch.int32)  # of whole sequences; the caches are this rank's part
    >>> out = shared.decode_attention(q, k_cache, v_cache, seqlens_k)
    >>> torch.allclose(out, portattn.decode_attention(q, k_cache, v_cache, seqlens_k), atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """
    dims = dimensions(WHO, mesh)
    problem: ArgumentError | None = None
    if len(dims) != 1:
        names = ", ".join(ranks.name for ranks in dims)
        raise ArgumentError(WHO, "mesh", names, "must have one dimension: give mesh[name]")
    try:
        CacheShard(dims[0].rank, dims[0].size, interleave).check()
        check_choice(WHO, "heads", heads, HEADS)
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
    chunk, bias, mask and tree_mask are refused. Windows, ALiBi and causal masks go by positions in the whole sequence,
    sinks count once.

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

    >>> import torch.distributed as dist
    >>> from portattn.distributed import decode_parallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> decode_parallel(heads="shard")
    DecodeParallel(rank 0 of 1, interleave=1, heads='shard')
    >>> dist.destroy_process_group()
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
        options           the keywords of portattn.decode_attention but leftpad_k, bias, mask and tree_mask

        Returns out (B, Hq, Sq, Dv) in q's dtype and layout; with return_lse, (out, lse). With heads="shard" Hq / N
        heads.

        Raises ArgumentError, with validation on every rank; what portattn.decode_attention raises; and torch's own
        error where a rank has gone.

        >>> import torch, torch.distributed as dist
        >>> from portattn.distributed import decode_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shared = decode_parallel(interleave=16)
        >>> q, cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64)
        >>> shared.decode_attention(q, cache, cache, torch.tensor([30, 100], dtype=torch.int32)).shape
        torch.Size([2, 8, 1, 64])
        >>> dist.destroy_process_group()
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
        options           the keywords of portattn.paged_attention but bias, mask and tree_mask

        Returns out like q with Dv columns; with return_lse, (out, lse). With heads="shard" Hq / N heads.

        Raises as decode_attention.

        >>> import torch, torch.distributed as dist
        >>> from portattn.distributed import decode_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shared = decode_parallel(interleave=16)
        >>> q, pages = torch.randn(1, 8, 1, 64), torch.randn(12, 16, 2, 64)
        >>> table, seqlens_k = torch.tensor([[3, 1, 7]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
        >>> shared.paged_attention(q, pages, pages, table, seqlens_k).shape
        torch.Size([1, 8, 1, 64])
        >>> dist.destroy_process_group()
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

        >>> import torch, torch.distributed as dist
        >>> from portattn.distributed import decode_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shared = decode_parallel(interleave=16)
        >>> q_nope, q_rope, pages = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1, 16), torch.randn(3, 16, 80)
        >>> table, seqlens_k = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
        >>> shared.mla_attention(q_nope, q_rope, pages, table, seqlens_k, scale=192**-0.5).shape
        torch.Size([1, 4, 1, 64])
        >>> dist.destroy_process_group()
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

        layout            "bhsd", or "bshd": the order of the axes of k, v and both caches

        Returns None.

        Raises ArgumentError for rows that lie beyond a part (on a CPU), and what portattn.write_pages raises. No
        collective runs.

        >>> import torch, torch.distributed as dist
        >>> from portattn.distributed import decode_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shared = decode_parallel(interleave=16)
        >>> k_cache, v_cache, k = torch.zeros(2, 2, 100, 64), torch.zeros(2, 2, 100, 64), torch.randn(2, 2, 1, 64)
        >>> shared.append_kv(k, k, k_cache, v_cache, torch.tensor([30, -1], dtype=torch.int32))
        >>> torch.equal(k_cache[0, :, 30], k[0, :, 0]), int(k_cache[1].count_nonzero())
        (True, 0)
        >>> dist.destroy_process_group()
        """
        op = "append_kv"
        check_choice(op, "layout", layout, LAYOUTS)
        for name in ("slot_mapping", "positions", "page_layout"):
            if name in options:
                raise ArgumentError(op, name, options[name], "follows from seqlens_k and layout here")
        for name, tensor in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
            check_tensor(op, name, tensor, 4)
        check_lengths(op, seqlens_k, k.shape[0])
        tokens, rows = (2, 2) if layout == "bhsd" else (1, 1)
        places = new_positions(seqlens_k, k.shape[tokens])
        if options.get("cos") is not None:
            options["positions"] = places.clamp(min=0).reshape(-1)
        rows_k, rows_v = ((t.transpose(1, 2) if layout == "bhsd" else t).flatten(0, 1) for t in (k, v))
        slots = self.shard.slots(places, max(k_cache.shape[rows], 1))
        if not k_cache.shape[rows]:
            slots = torch.full_like(slots, NOT_HERE)
        page_layout = "hpd" if layout == "bhsd" else "phd"
        ops.write_pages(rows_k, rows_v, k_cache, v_cache, slots, page_layout=page_layout, **options)

    def _call(
        self, op: str, queries: Sequence[torch.Tensor], caches: Sequence[torch.Tensor],
        page_table: torch.Tensor | None, seqlens_k: torch.Tensor, options: dict[str, Any],
    ) -> Result:  # fmt: skip
        return_lse = options.pop("return_lse", False)
        call = PartialCall(op, self.shard, queries, caches, page_table, seqlens_k, options)
        if self._validating(queries[0] if queries else None):
            out, lse = self._agreed(call)
        else:
            out, lse = call.run(self.heads)
        words = exchange_rows(packed(out, lse), self.ranks.group, self.shard.world_size, self.heads)
        found, found_lse = call.in_layout(*merge_words(words, out.shape[-1], out.dtype))
        return (found, found_lse) if return_lse else found

    def _validating(self, q: Any) -> bool:
        if torch.compiler.is_compiling():
            return False
        return (not isinstance(q, torch.Tensor) or q.device.type == "cpu") if self._validate is None else self._validate

    def _agreed(self, call: PartialCall) -> tuple[torch.Tensor, torch.Tensor]:
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
