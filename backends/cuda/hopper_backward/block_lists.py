"""Lists of query blocks in the Hopper backward: a block of keys visits the query tiles that its list names, for each
query head of its key head.

A list has a count of whole blocks, one of others, which a mask function decides in part, and then their numbers, whole
ones first. The producer writes a word about each tile beside its statistics: the query head among the key head's, the
tile's number, whether a row of it attends nothing, and whether the function decides it.

What no query sees and rows that attend nothing may be NaN, and 0·NaN is NaN. `find_hidden_keys` of the forward names
the keys; the kernel of the statistics names tiles with such rows. Both are cleared in shared memory.
"""

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.gluon_names import aggregate
from portattn.backends.cuda.hopper_forward import FLAGS
from portattn.backends.cuda.hopper_forward.fragments import FunctionTensors, clear_rows, no_tensors

_FLAGS: gl.constexpr = gl.constexpr(FLAGS)


@aggregate
class BlockLists:
    """Lists (B, Hq, blocks of keys, 2 + blocks of queries) int32 by their strides, and what MASK_MOD reads.

    shown: of each query head, or of all, the flags of `find_hidden_keys`; attend: of each query tile of each query
    head whether a row attends nothing, int32.
    """

    lists: gl.tensor
    list_b: gl.tensor
    list_h: gl.tensor
    list_k: gl.tensor
    shown: gl.tensor
    shown_b: gl.tensor
    shown_h: gl.tensor
    attend: gl.tensor
    tensors: FunctionTensors

    @gluon.constexpr_function
    def __init__(self, lists, list_b, list_h, list_k, shown, shown_b, shown_h, attend, tensors):
        self.lists, self.list_b, self.list_h, self.list_k, self.shown = lists, list_b, list_h, list_k, shown
        self.shown_b, self.shown_h, self.attend, self.tensors = shown_b, shown_h, attend, tensors


@gluon.jit
def no_lists(pointer, number):
    """Return the lists of a kernel without any: nothing is read."""
    return BlockLists(pointer, number, number, number, pointer, number, number, pointer, no_tensors(pointer, number))


@gluon.jit
def list_of(member, work, sizes, form):
    """Return a block's list for a query head of its key head: (pointer, tiles, tiles of whole blocks)."""
    lists = sizes.lists
    head = work.head * sizes.share + member
    at = work.slot.to(gl.int64) * lists.list_b + head.to(gl.int64) * lists.list_h
    listed = lists.lists + (at + (work.start // form.LISTED_K).to(gl.int64) * lists.list_k)
    blocks = gl.cdiv(sizes.seq_q, form.LISTED_Q)
    whole = gl.minimum(gl.maximum(gl.load(listed), 0), blocks)
    others = gl.minimum(gl.maximum(gl.load(listed + 1), 0), blocks - whole)
    # Keys behind the last one are hidden as by the function.
    inside = (work.start // form.LISTED_K + 1) * form.LISTED_K <= sizes.seq_k
    per: gl.constexpr = form.LISTED_Q // form.ROWS
    return listed + 2, (whole + others) * per, gl.where(inside, whole * per, 0)


@gluon.jit
def tile_of(listed, place, sizes, form):
    """Return the query tile at a place of a list. No number, however wild, gives a tile that is not there."""
    per: gl.constexpr = form.LISTED_Q // form.ROWS
    block = gl.minimum(gl.maximum(gl.load(listed + place // per), 0), gl.cdiv(sizes.seq_q, form.LISTED_Q) - 1)
    return block * per + place % per


@gluon.jit
def listed_steps(work, sizes, form):
    """Return how many tiles the lists of a block have, of all of its query heads."""
    steps = work.start - work.start
    for member in range(sizes.share):
        _, count, _ = list_of(member, work, sizes, form)
        steps += count
    return steps


@aggregate
class Cursor:
    """A place in the lists of a block's query heads."""

    member: gl.tensor  # the head, among the key head's
    place: gl.tensor
    listed: gl.tensor
    count: gl.tensor
    whole: gl.tensor

    @gluon.constexpr_function
    def __init__(self, member, place, listed, count, whole):
        self.member, self.place, self.listed, self.count, self.whole = member, place, listed, count, whole


@gluon.jit
def cursor_at(member, place, listed, count, whole, work, sizes, form):
    """Return the cursor at this place, or at the next head's first tile behind a list's last place."""
    while (place == count) & (member + 1 < sizes.share):
        member += 1
        place = place - place
        listed, count, whole = list_of(member, work, sizes, form)
    return Cursor(member, place, listed, count, whole)


@gluon.jit
def first_cursor(work, sizes, form):
    zero = work.start - work.start
    listed, count, whole = list_of(zero, work, sizes, form)
    return cursor_at(zero, zero, listed, count, whole, work, sizes, form)


@gluon.jit
def next_cursor(at, work, sizes, form):
    return cursor_at(at.member, at.place + 1, at.listed, at.count, at.whole, work, sizes, form)


@gluon.jit
def tile_at_cursor(at, work, sizes, form):
    """Return (query tile, query head, number of the tile among all query heads' tiles)."""
    m, head = tile_of(at.listed, at.place, sizes, form), work.head * sizes.share + at.member
    return m, head, (work.slot * sizes.heads * sizes.share + head) * sizes.query_tiles + m


@gluon.jit
def word_of(at, m, tile, sizes, form):
    """Return the word about the cursor's tile, query tile m. tile: its number among all query heads'."""
    word = (at.member * sizes.query_tiles + m) * 4 + (at.place >= at.whole).to(gl.int32)
    if form.MASK_MOD is not None:
        word += gl.load(sizes.lists.attend + tile) * 2
    return word


@gluon.jit
def write_word(word, slot, shared):
    """Write, by one warp, the word about the tile of a buffer."""
    shared.places.index(slot).store(gl.full([1], word, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_word(slot, work, shared, sizes, WARPS: gl.constexpr):
    """Return, by WARPS, (query tile, query head, whether the function decides it, whether rows attend nothing)."""
    word = gl.max(shared.places.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    place = word >> 2
    head = work.head * sizes.share + place // sizes.query_tiles
    return place % sizes.query_tiles, head, (word & 1) != 0, (word & 2) != 0


@gluon.jit
def where_seen(p, first, KEYS: gl.constexpr, m, head, work, sizes, form):
    """Return P of a tile's queries and so many keys from the first, 0 where the function hides a key.

    Behind the last row the LSE is inf and P is 0, if no function of scores makes it NaN: a bound there would cost more
    than a document mask's comparisons."""
    keys = first + gl.arange(0, KEYS, gl.SliceLayout(1, form.SCORES))
    rows = m * form.ROWS + gl.arange(0, form.ROWS, gl.SliceLayout(0, form.SCORES))
    if form.MASK_MOD is not None:
        t = sizes.lists.tensors
        seen = form.MASK_MOD(
            0.0, work.slot, head, rows, keys, t.c0, t.c1, t.c2, t.c3, t.n0, t.n1, t.n2, t.n3, t.n4, t.n5, t.n6, t.n7
        )
        p = gl.where(seen, p, 0.0)
    if form.RAGGED:
        p = gl.where(gl.expand_dims(keys, 1) < sizes.seq_k, p, 0.0)
    if form.SCORE_MOD is not None:
        p = gl.where(gl.expand_dims(rows, 0) < sizes.seq_q, p, 0.0)
    return p


@gluon.jit
def hidden_keys(first, KEYS: gl.constexpr, work, sizes, form, WARPS: gl.constexpr):
    """Return whether some key of the block is attended by no query of its query heads, and for KEYS of them from the
    first on whether each is attended, [KEYS, 1]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    lists = sizes.lists
    tiles = gl.cdiv(sizes.seq_k, form.LISTED_K) * (form.LISTED_K // form.KEYS)
    tile = (work.slot * lists.shown_b + work.head * sizes.share * lists.shown_h) * tiles + work.start // form.KEYS
    flags = lists.shown + tile.to(gl.int64) * (form.KEYS + _FLAGS)
    of_head = (lists.shown_h * tiles).to(gl.int64) * (form.KEYS + _FLAGS)
    key = first + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    hidden = gl.load(flags)
    shown = gl.load(flags + _FLAGS + key)
    for member in range(1, sizes.share):
        hidden = gl.minimum(hidden, gl.load(flags + member * of_head))
        shown = gl.maximum(shown, gl.load(flags + member * of_head + _FLAGS + key))
    return hidden != 0, gl.expand_dims(shown != 0, 1)


@gluon.jit
def clear_idle_rows(q, do, statistics, form, WARPS: gl.constexpr):
    """Clear a tile's rows that attend nothing, by WARPS. statistics: [2, ROWS], LSE first, inf in such rows."""
    # Loaded along the row: a permuted view of the slice gave other rows' numbers (H200, Triton 3.6.0).
    across: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    there = gl.permute(statistics.slice(0, 1).load(across), (1, 0)) < float("inf")
    clear_rows(q, there, form.DIM)
    clear_rows(do, there, form.DIM)
