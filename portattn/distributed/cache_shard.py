"""Which tokens of a sequence each rank's part of a key/value cache holds."""

from __future__ import annotations

from typing import NamedTuple

import torch

from portattn.errors import ArgumentError

WHO = "CacheShard"
NOT_HERE = -1  # a slot in which portattn.write_pages writes nothing


class CacheShard(NamedTuple):
    """One rank's part of a cache whose sequences are dealt out to the ranks in blocks of `interleave` tokens.

    rank        whose part it is, 0 … world_size − 1
    world_size  ranks that share each sequence
    interleave  consecutive tokens on one rank. Token t of a sequence lies on rank (t // interleave) % world_size, as
                row (t // (interleave·world_size))·interleave + t % interleave of the sequence's part there. 1: token by
                token. The page size: every world_size-th page. Longest sequence / world_size: each rank has one stretch

    The rows of a part are in the order of the sequence, without gaps. All methods are arithmetic on the device: nothing
    is read back, and a CUDA graph can replay them with lengths changed in place.

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
        """Raise ArgumentError where a number is out of its limits."""
        for name, least in (("world_size", 1), ("interleave", 1), ("rank", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(WHO, name, value, f"must be an integer ≥ {least}")
        if self.rank >= self.world_size:
            raise ArgumentError(WHO, "rank", self.rank, f"must be below world_size, {self.world_size}")

    def lengths(self, seqlens_k: torch.Tensor) -> torch.Tensor:
        """Keys of each sequence that this rank holds.

        seqlens_k  keys of each whole sequence, int32 or int64, of any shape; negative counts as 0

        Returns integers of seqlens_k's shape, as (B,), and dtype, on its device.

        Raises nothing: bad numbers are refused where a DecodeParallel is made.

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
        """Positions in the sequence of the first rows of this rank's part.

        rows    how many
        device  of the result; None for torch's default

        Returns (rows,) int64.

        Raises nothing.

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

        positions   (B, S) int32 or int64: places of new tokens in their sequences, or (T,) with `sequences`. A token
                    with a negative place is not written
        page_size   tokens a page of this rank's; of a contiguous cache its rows a sequence
        page_table  (B, pages a sequence) int32: this rank's pages of each sequence; None if sequence b's tokens lie in
                    page b, as in a contiguous cache
        sequences   (T,) int32 or int64: the row of page_table of each token; None for (B, S) positions

        Returns (B·S,) or (T,) int64: page·page_size + row in the page, and -1 for tokens of other ranks.

        Raises ArgumentError for shapes that do not go together; on a CPU also for tokens that lie beyond the table.
        Elsewhere such tokens get -1.

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
    """Places of `count` new tokens of each sequence that has seqlens_k (B,) keys: (B, count) int64, and -1 where the
    number is negative."""
    first = seqlens_k.long()[:, None]
    return torch.where(first < 0, NOT_HERE, first + torch.arange(count, device=seqlens_k.device))
