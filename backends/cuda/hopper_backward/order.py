"""In which order the Hopper backward's blocks run: heads side by side, and when additions to dQ in turns pay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portattn.backends.cuda.sizes import STATISTICS_ROWS
from portattn.planning.kernel_specs import ceil_div
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.symbolic_int import least, most

if TYPE_CHECKING:
    from portattn.schema.problem import Problem
    from portattn.schema.target import Arch

MOST_TOGETHER = 32  # heads that are worked on side by side
FEW = 8  # blocks a multiprocessor
# The same in turns under a causal mask: fewer heads have more blocks at work at a time, and the later ones, which have
# little to do, wait for each other (H200, S = 16,384: 1.06 of the time in any order by 2 heads, 1.03 by 8).
LEAST_IN_TURNS = 8
# Under a causal mask no fewer heads are worked on at a time than have a block for each multiprocessor, and than these.
FEWEST = 4
# In turns, blocks of a head that start together follow each other at a distance of some tiles. A launch may wait so for
# at most this part of its time; else a kernel of its own for dQ is faster.
LAG = 2
PART = 3


def arch() -> Arch:
    """The chip that the kernels are for."""
    from portattn.planning.registry import Registry  # which imports the backends

    return Registry.load().arch("cuda:sm_90")


def slots(p: Problem) -> int:
    """Of the tensors' first axis."""
    return 1 if p.packed else p.batch


def tiles_of(rows: int, total: int | None, p: Problem, size: int) -> int:
    """Tiles of so many rows of a head; of packed rows the numbers that sequences are looked up by (work.py)."""
    return ceil_div(rows, size) if total is None else total // size + p.batch + 1


def limited_right(p: Problem) -> bool:
    """Whether queries do not see all keys after their own position."""
    return p.causal != "none" or p.window_right != UNLIMITED


def together(p: Problem, tiles: int, cores: int, turns: bool = False) -> int:
    """Key heads whose blocks run side by side, the longest first. Where blocks are few all, or under a causal mask
    about as many as keep the chip busy; else as many as have their queries and those's gradients in the cache's share.

    Few blocks of many heads, causal, read their queries from memory each for itself if all run side by side: four heads
    of 4,096 keys at a time take 0.82 of that time with 32/8 heads (4 sequences), 0.91 with 16/4, 0.95 with 16/16 (one
    sequence); eight of 2,048 keys 0.96, four 1.25 (H200, bf16, D = 128).

    turns  blocks add to dQ in turns
    """
    heads = p.heads_k * slots(p)
    if tiles * heads < FEW * cores:
        causal = limited_right(p) and p.window_left == UNLIMITED
        return least(most(cores // most(tiles, 1), FEWEST), heads) if causal and not turns else heads
    of_head = 2 * _rows(p) * (p.head_dim + p.head_dim_v) * p.group
    fewest = LEAST_IN_TURNS if turns and limited_right(p) else 1
    return least(most(least(arch().cache_share // most(of_head, 1), MOST_TOGETHER), fewest), heads)


def in_turns(p: Problem, keys: int) -> bool:
    """Return whether blocks of so many keys should add to dQ in turns (warpgroup_ping_pong.py).

    The estimate compares a launch's wait, while its first blocks follow each other, with its work, in query tiles.
    """
    cores, causal = arch().cores, limited_right(p) and p.window_left == UNLIMITED
    tiles = tiles_of(p.seq_k, p.total_k, p, keys)
    blocks = tiles * p.heads_k * slots(p)
    if causal and blocks <= cores and p.seq_q >= p.seq_k:
        return True  # all run at once, and each has less to do than the one that it waits for
    beside = most(together(p, tiles, cores, turns=True), 1)
    following, seen = least(ceil_div(p.seq_k, keys), ceil_div(cores, beside)), _rows(p)
    if p.window_left != UNLIMITED:  # so many blocks see a tile; so many rows see a block
        following = least(following, ceil_div(p.window_left, keys) + 2)
        seen = least(seen, p.window_left + keys)
    of_block = ceil_div(seen, STATISTICS_ROWS) * p.group
    if causal:
        of_block = ceil_div(of_block, 2)
    work = most(of_block, blocks * of_block // cores)
    # Where blocks are not a multiple of the multiprocessors, it waits while others would have nothing to do.
    idle = 0 if causal else ceil_div(blocks, cores) * of_block - work
    return bool(PART * (LAG * following - idle) <= work)


def _rows(p: Problem) -> int:
    """Return the mean number of query rows of a sequence."""
    return p.seq_q if p.total_q is None else ceil_div(p.total_q, most(p.batch, 1))
