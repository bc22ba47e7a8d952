"""Lists of key blocks in the Hopper forward: a tile of query rows attends the blocks that its row of lists names.

The producer sends how many key tiles a tile of rows has in its Work: `k_first` counts all, `split` the tiles of whole
blocks, which a list names first. Tiles have places in a list, and consumers go from the last place to the first: blocks
that a mask function decides, masked, then whole ones. A list of no block has one tile, of zeros behind the last key.

Keys that no query attends may hold anything, and 0·NaN is NaN. So `find_hidden_keys`, before the forward, looks for
keys that the mask function shows no query of any listed block; their values are cleared in shared memory.
"""

# No `from __future__ import annotations`: Triton reads the annotations of constants.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portattn.backends.cuda.hopper_forward import FLAGS
from portattn.backends.cuda.hopper_forward.fragments import clear_rows, list_of, score_function

_FLAGS: gl.constexpr = gl.constexpr(FLAGS)


@gluon.jit
def listed_tiles(slot, head, row, sizes, form):
    """Return how many key tiles a list has: of all blocks, and of whole ones. Counts beyond all blocks do not count."""
    listed = list_of(slot, head, row, sizes, form)
    blocks = gl.cdiv(sizes.seq_k, form.LISTED_K)
    whole = gl.minimum(gl.maximum(gl.load(listed), 0), sizes.seq_k // form.LISTED_K)
    others = gl.minimum(gl.maximum(gl.load(listed + 1), 0), blocks - whole)
    per: gl.constexpr = form.LISTED_K // form.KEYS
    return (whole + others) * per, whole * per


@gluon.jit
def listed_tile(listed, place, tiles, blocks, form):
    """Return the key tile at a place of a list with so many tiles; the first behind `blocks` for no block, and where
    there are no tiles. No number, however wild, gives a tile further behind."""
    per: gl.constexpr = form.LISTED_K // form.KEYS
    block = gl.load(listed + (place // per + 2))
    block = gl.where((block < 0) | (block > blocks) | (tiles == 0), blocks, block)
    return block * per + place % per


@gluon.jit
def first_tile(work, sizes, form):
    """Return the key tile at a list's last place, which is processed first."""
    listed, blocks = list_of(work.slot, work.head, work.row, sizes, form), gl.cdiv(sizes.seq_k, form.LISTED_K)
    return listed_tile(listed, gl.maximum(work.k_first, 1) - 1, work.k_first, blocks, form)


@gluon.jit
def tile_at(n, limits, form):
    """Return the key tile at place n: n itself without lists."""
    if form.LISTED_K:
        n = listed_tile(limits.listed, n, 1, limits.blocks, form)
    return n


@gluon.jit
def hidden_keys(tile, limits, form):
    """Return the pointer to a key tile's flags of find_hidden_keys, and the first: whether some key is hidden."""
    per: gl.constexpr = form.LISTED_K // form.KEYS
    flags = limits.shown + gl.minimum(tile, limits.blocks * per - 1) * (form.KEYS + _FLAGS)
    return flags, gl.load(flags)


@gluon.jit
def clear_hidden(flags, hidden, slot, phase, shared, form):
    """Clear the values, in buffer `slot`, of a key tile's keys that no query attends."""
    if hidden != 0:
        mbarrier.wait(shared.v_full.index(slot), phase)
        v = shared.v.index(slot).reshape([form.KEYS, form.DIM])
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        row = gl.arange(0, form.KEYS, gl.SliceLayout(1, layout))
        shown = gl.expand_dims(gl.load(flags + _FLAGS + row) != 0, 1)
        clear_rows(v, shown, form.DIM)


@gluon.jit
def _blocks_that_list(lists, block, first, list_q, down, across, LINES: gl.constexpr):
    """Return two words of LINES bits: whether lists, from `first` on, name a block as a part, and as a whole one."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    line = gl.arange(0, LINES, gl.SliceLayout(1, layout))
    there = first + line < down
    rows = lists + gl.minimum(first + line, down - 1).to(gl.int64) * list_q
    whole = gl.minimum(gl.load(rows), across)
    count = gl.minimum(whole + gl.load(rows + 1), across)
    part_found, whole_found = line - line, line - line
    for begin in range(0, across, 64):
        place = begin + gl.arange(0, 64, gl.SliceLayout(0, layout))
        inside = gl.expand_dims(place < across, 0) & gl.expand_dims(there, 1)
        numbers = gl.load(gl.expand_dims(rows + 2, 1) + gl.expand_dims(place, 0), mask=inside, other=-1)
        equal = numbers == block
        own = gl.expand_dims(place, 0)
        is_whole = equal & (own < gl.expand_dims(whole, 1))
        is_part = equal & (own >= gl.expand_dims(whole, 1)) & (own < gl.expand_dims(count, 1))
        whole_found = gl.maximum(whole_found, gl.max(is_whole.to(gl.int32), 1))
        part_found = gl.maximum(part_found, gl.max(is_part.to(gl.int32), 1))
    return gl.sum(part_found << line, 0), gl.sum(whole_found << line, 0)


@gluon.jit(
    do_not_specialize=[
        "list_b", "list_h", "list_q", "heads", "seq_q", "seq_k", "down", "across",
        "size_0", "size_1", "size_2", "size_3", "size_4", "size_5", "size_6", "size_7",
    ]
)  # fmt: skip
def find_hidden_keys(
    shown, lists, list_b, list_h, list_q, heads, seq_q, seq_k, down, across,
    captured_0, captured_1, captured_2, captured_3,
    size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    KEYS: gl.constexpr, LISTED_Q: gl.constexpr, LISTED_K: gl.constexpr, MASK_MOD: gl.constexpr,
):  # fmt: skip
    """A tile of KEYS keys of one head: which of them some query attends.

    shown   (B, H, key tiles, FLAGS + KEYS) int32: 1 in the first place if some key of the tile is attended by no query,
            then 1 for each attended key. B and H are 1 for all sequences and heads, or the call's
    lists, list_b, list_h, list_q  lists of blocks, and their strides along B, H and blocks of queries
    down, across  blocks of queries and of keys
    """
    function: gl.constexpr = score_function(MASK_MOD)
    LINES: gl.constexpr = 32
    ROWS: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    tile, slot_head = gl.program_id(0), gl.program_id(1)
    slot, head = slot_head // heads, slot_head % heads
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    key_layout: gl.constexpr = gl.SliceLayout(0, layout)
    keys = tile * KEYS + gl.arange(0, KEYS, key_layout)
    lists += slot.to(gl.int64) * list_b + head.to(gl.int64) * list_h
    block = tile * KEYS // LISTED_K
    found = gl.where(keys < seq_k, 0, 1)
    missing = gl.sum(1 - found, 0)
    groups = gl.cdiv(down, LINES)
    own = gl.minimum(tile * KEYS // LISTED_Q, down - 1)  # first: most keys are attended by queries of their number
    turn = 0
    while (turn < groups) & (missing > 0):
        first = (own // LINES + turn) % groups * LINES
        parts, whole = _blocks_that_list(lists, block, first, list_q, down, across, LINES)
        if whole != 0:
            missing = missing - missing
            found = gl.maximum(found, 1)
        line = 0
        while (line < LINES) & (missing > 0):
            at = (own + line) % LINES
            if (parts >> at) & 1 != 0:
                for begin in range(0, LISTED_Q, ROWS):
                    rows = (first + at) * LISTED_Q + begin + gl.arange(0, ROWS, row_layout)
                    rows = gl.minimum(rows, seq_q - 1)
                    seen = function(
                        0.0, slot, head, rows, gl.minimum(keys, seq_k - 1),
                        captured_0, captured_1, captured_2, captured_3,
                        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
                    )  # fmt: skip
                    seen = seen & (gl.expand_dims(rows, 1) >= 0) & (gl.expand_dims(keys, 0) >= 0)  # of the tile's shape
                    found = gl.maximum(found, gl.max(seen.to(gl.int32), 0))
                missing = gl.sum(1 - found, 0)
            line += 1
        turn += 1
    tiles = gl.num_programs(0)
    flags = shown + (slot_head * tiles + tile).to(gl.int64) * (KEYS + _FLAGS)
    gl.store(flags, (missing > 0).to(gl.int32))
    gl.store(flags + _FLAGS + gl.arange(0, KEYS, key_layout), found)
