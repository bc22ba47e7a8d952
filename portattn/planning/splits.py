"""Over how many programs to split keys: small functions of sizes, which native.c has too (schema/symbolic_int.py)."""

from __future__ import annotations

from portattn.schema.symbolic_int import traceable

NEARLY = 85  # per cent of the best: fewer splits than the best are taken where they are nearly as good


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@traceable("split_evenly")
def split_evenly(programs: int, key_tiles: int, slots: int, limit: int) -> int:
    """Fewest splits whose last wave of programs is nearly as full as the best number of splits makes it.

    programs   without splitting
    key_tiles  of a row; a split reads whole ones, so uneven shares leave some programs idle in the last step
    slots      programs that the chip runs at a time
    limit      most splits

    What a number of splits costs is waves · key tiles of the longest share.
    """
    count = range(1, min(limit, key_tiles, max(slots // programs, 1) * 2) + 1)
    costs = [_ceil_div(programs * splits, slots) * _ceil_div(key_tiles, splits) for splits in count]
    best = min(costs)
    return next(splits for splits, cost in zip(count, costs, strict=True) if 100 * best >= NEARLY * cost)


@traceable("split_cheapest")
def split_cheapest(
    programs: int, key_tiles: int, cores: int, limit: int, ends: int, merge_once: int, merge_each: int
) -> int:
    """Fewest splits of least time, one program a core at a time, counted in key tiles.

    ends        a program's start and end
    merge_once  the merging of partial results, for the whole launch; merge_each: for each wave of programs
    """

    def cost(splits: int) -> int:
        once, each = (merge_once, merge_each) if splits > 1 else (0, 0)
        return _ceil_div(programs * splits, cores) * (_ceil_div(key_tiles, splits) + ends + each) + once

    return min(range(1, limit + 1), key=cost)
