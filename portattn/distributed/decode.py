"""Decoding over a cache shared by ranks: each attends its part, and one collective merges the results by their LSEs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.api import ops
from portattn.distributed.cache_shard import (
    LAYOUTS,
    NOT_HERE,
    CacheShard,
    PartialCall,
    check_choice,
    check_lengths,
    check_tensor,
    new_positions,
)
from portattn.distributed.collectives import Heads, Ranks, agree, dimensions, exchange_rows, merge_words, packed
from portattn.errors import ArgumentError, PortattnError

WHO = "decode_parallel"
HEADS = ("all", "shard")
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def decode_parallel(
    mesh: Any = None, *, interleave: int = 1, heads: Heads = "all", validate: bool | None = None
) -> DecodeParallel:
    """Make a group of ranks share the sequences of a key/value cache (decode context parallel).

    All ranks call the same method with the same queries and lengths; caches and page tables are each rank's own.

    Args:
        mesh: a torch ProcessGroup, a DeviceMesh of one dimension, or None for all processes
        interleave: consecutive tokens of a sequence on one rank, as of CacheShard
        heads: heads of a result that each rank gets: "all", or "shard" for its own Hq / N, rank·Hq/N … (rank + 1)·Hq/N
            − 1, which sends less
        validate: whether ranks compare their arguments before a collective; None: on the CPU only. Without it no rank
            waits for the device, and different shapes or lengths of a rank go unnoticed

    Returns:
        A DecodeParallel.

    Raises:
        ArgumentError: An argument is out of its limits, or differs between ranks. Every rank raises.

    Examples:
        >>> import torch, portattn, torch.distributed as dist
        >>> from portattn.distributed import decode_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more
        >>> shared = decode_parallel(interleave=16)
        >>> q, k_cache, v_cache = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 64)
        >>> seqlens_k = torch.tensor([30, 100], dtype=torch.int32)  # whole sequences'; the caches are this rank's part
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
    """portattn's cache operations over sequences shared by ranks; made by `decode_parallel`.

    Each method takes the arguments of the operation of its name, except: `seqlens_k` must be given and counts the keys
    of whole sequences, the same on every rank; caches, page tables and per-token scales are this rank's own; chunk,
    bias, mask and tree_mask are refused. Windows, ALiBi and causal masks use positions in the whole sequence, sinks
    count once. Every rank gets the same bits; a rank with an empty part contributes nothing. Without `validate` nothing
    is read back and no shape depends on data: CUDA graphs can capture a call.

    Memory beyond the operation's: the partial results, (N + 1)·B·Hq·Sq rows of Dv elements and 4 bytes (2·B·Hq·Sq with
    heads="shard"). If queries of one call see different keys (causal with Sq > 1, a window), a bool mask (B, 1, Sq,
    rows of this rank a sequence) is made, and for ALiBi a float32 bias (B, Hq, Sq, rows); packed queries then each
    count as a sequence.

    Attributes:
        ranks: the process group, this process's rank in it and the members
        shard: the CacheShard of this rank: lengths, positions and slots
        heads: "all" or "shard"

    Examples:
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
        """Run portattn.decode_attention over contiguous caches.

        Args:
            q: (B, Hq, Sq, D), complete on every rank; (B, Sq, Hq, D) with layout="bshd"
            k_cache, v_cache: (B, Hk, rows, D) and (B, Hk, rows, Dv): this rank's part of each sequence
            seqlens_k: (B,) int32: keys of each whole sequence, at most the rows of all ranks
            **options: the keywords of portattn.decode_attention but leftpad_k, bias, mask and tree_mask

        Returns:
            out (B, Hq, Sq, Dv) in q's dtype and layout; with return_lse, (out, lse). With heads="shard" Hq / N heads.

        Raises:
            ArgumentError: `portattn.decode_attention` refuses the call. With validation every rank raises.
            RuntimeError: A rank is gone (torch's own error).

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import decode_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> q, cache, lengths = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 100, 64), torch.tensor([30, 100]).int()
            >>> decode_parallel(interleave=16).decode_attention(q, cache, cache, lengths).shape
            torch.Size([2, 8, 1, 64])
            >>> dist.destroy_process_group()
        """
        return self._call("decode_attention", (q,), (k_cache, v_cache), None, seqlens_k, options)

    def paged_attention(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor,
        seqlens_k: torch.Tensor, **options: Any,
    ) -> Result:  # fmt: skip
        """Run portattn.paged_attention over this rank's own pages.

        Args:
            q: (B, Hq, Sq, D) or packed (Tq, Hq, D) with cu_seqlens_q, complete on every rank
            k_pages, v_pages: (P, page, Hk, D) and (P, page, Hk, Dv), or with page_layout="hpd" (P, Hk, page, D)
            page_table: (B, pages a sequence) int32: this rank's pages of each sequence
            seqlens_k: (B,) int32: keys of each whole sequence
            **options: the keywords of portattn.paged_attention but bias, mask and tree_mask

        Returns:
            out like q with Dv columns; with return_lse, (out, lse). With heads="shard" Hq / N heads.

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import decode_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> q, pages, table = torch.randn(1, 8, 1, 64), torch.randn(12, 16, 2, 64), torch.tensor([[3, 1, 7]]).int()
            >>> decode_parallel(interleave=16).paged_attention(q, pages, pages, table, torch.tensor([40]).int()).shape
            torch.Size([1, 8, 1, 64])
            >>> dist.destroy_process_group()
        """
        return self._call("paged_attention", (q,), (k_pages, v_pages), page_table, seqlens_k, options)

    def mla_attention(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, kv_pages: torch.Tensor, page_table: torch.Tensor,
        seqlens_k: torch.Tensor, **options: Any,
    ) -> Result:  # fmt: skip
        """Run portattn.mla_attention over this rank's own latent pages.

        Args:
            q_nope, q_rope: (B, H, Sq, R) and (B, H, Sq, E), or packed, complete on every rank
            kv_pages: (P, page, R + E)
            page_table: (B, pages a sequence) int32: this rank's pages of each sequence
            seqlens_k: (B,) int32: keys of each whole sequence
            **options: the keywords of portattn.mla_attention but bias and mask; `scale` must be given

        Returns:
            out (B, H, Sq, R); with return_lse, (out, lse). With heads="shard" H / N heads.

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import decode_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> q_nope, q_rope, pages = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 1, 16), torch.randn(3, 16, 80)
            >>> table, seqlens_k = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
            >>> decode_parallel().mla_attention(q_nope, q_rope, pages, table, seqlens_k, scale=192**-0.5).shape
            torch.Size([1, 4, 1, 64])
            >>> dist.destroy_process_group()
        """
        return self._call("mla_attention", (q_nope, q_rope), (kv_pages,), page_table, seqlens_k, options)

    def append_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seqlens_k: torch.Tensor,
        *, layout: str = "bhsd", **options: Any,
    ) -> None:  # fmt: skip
        """Write this rank's share of new keys and values into its part of contiguous caches, like portattn.append_kv.

        Args:
            k, v: (B, Hk, S, D) and (B, Hk, S, Dv), the new rows of each sequence, the same on every rank
            k_cache, v_cache: (B, Hk, rows, D) and (B, Hk, rows, Dv): this rank's part
            seqlens_k: (B,) int32: keys of each whole sequence before the call; sequences with a negative number are not
                written
            **options: the keywords of portattn.write_pages but slot_mapping, positions and page_layout. Rotary
                positions are those in the whole sequence
            layout: "bhsd", or "bshd": the order of the axes of k, v and both caches

        Returns:
            None.

        Raises:
            ArgumentError: Rows lie beyond a part (on a CPU), or `portattn.write_pages` refuses the call. No collective
                runs.

        Examples:
            >>> import torch, torch.distributed as dist
            >>> from portattn.distributed import decode_parallel
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> k_cache, v_cache, k = torch.zeros(2, 2, 100, 64), torch.zeros(2, 2, 100, 64), torch.randn(2, 2, 1, 64)
            >>> decode_parallel(interleave=16).append_kv(k, k, k_cache, v_cache, torch.tensor([30, -1]).int())
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
        """Return this rank's partial result after all ranks have agreed on the call."""
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
