"""Additions to dQ in turns: blocks of keys add to a tile of 64 query rows in the order of their keys.

Floating-point sums depend on their order: in a fixed order dQ is bitwise the same in every run, and no kernel has to
compute S and dP a second time.

Order. A block of keys has number b in its sequence and key head, and sees the query tiles [begin(b), end(b)). Blocks
that see a tile are consecutive, and neither bound falls as b grows; a block before the first of them has end 0. So a
tile gets its additions from blocks f, f + 1, …, and block b is its first one if b = 0 or the tile is not below
end(b - 1). turns[1 + t] is the number of the block whose turn it is at tile t. Block b waits until it reads b there
(the tile's first block does not wait), adds, waits until the addition is complete in memory, and writes b + 1.

Blocks visit their tiles from the last one back. Later keys' blocks then reach a causal mask's last rows when earlier
keys' blocks, which began there too, are already below them.

No deadlock. A block draws its number in the grid from turns[0] when it starts to run, so that every block with a lower
number has started. hopper_forward/work.in_turn gives a head's blocks rising numbers in the order of their keys. So a
block waits only for blocks of lower numbers, which stay resident until they end. The lowest number that has not ended
waits for no block: by induction all end. A tile belongs to one sequence, also where packed lengths are invalid
(tile_scheduler._rising_bounds). Inside a block, the writers take tiles in the consumer's order. The number of resident
blocks changes only the time: blocks of a head that start together follow each other at the distance of one addition.

Memory. TMA performs the additions (async proxy). `cp.async.bulk.wait_group 0`, unlike its form `.read`, returns when
the thread's bulk operations have been performed; the thread that issued them then writes the turn with release
semantics at the scope of the GPU. The next block's writer reads it with acquire semantics, then a proxy fence precedes
its own additions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.hopper_backward.form import BackwardWork
from portattn.backends.cuda.hopper_backward.tile_scheduler import query_tiles

# Named barriers of the two writers, beside the barriers of consumer.py: a writer arrives once it knows its tile, so
# that the other writer may wait for the next.
TO_FIRST: gl.constexpr = gl.constexpr(14)
TO_SECOND: gl.constexpr = gl.constexpr(15)
WRITERS: gl.constexpr = gl.constexpr(64)
_ONE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def draw(turns):
    """Draw the block's number, the count of blocks that began before it, into shared memory."""
    number = gl.atomic_add(turns, 1, sem="relaxed", scope="gpu")
    place = gl.allocate_shared_memory(gl.int32, [1], _ONE)
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [8], [0])))
    return place


@gluon.jit
def block_number(shared, form, WARPS: gl.constexpr):
    """Return the block's number in the grid. WARPS: number of warps that read it together."""
    if form.TURNS:
        number = gl.max(shared.block.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    else:
        number = gl.program_id(0)
    return number


@gluon.jit
def earlier_end(work, sizes, form):
    """End of the query tiles that the block of keys before this one sees: those below have been waited for."""
    before = BackwardWork(work.start - form.KEYS, work.rows, work.head, work.slot, work.sequence, work.q_first,
                          work.q_length, work.k_first, work.k_length, work.tile)  # fmt: skip
    return gl.where(work.start > 0, query_tiles(before, sizes, form).end, 0)


@gluon.jit
def wait_for(turn, number):
    """Wait until it is the turn of block `number`."""
    found = number - 1
    while found != number:
        found = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [turn], dtype=gl.int32, is_pure=False, pack=1
        )
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; mov.b32 $0, 0;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(turn, number):
    """The warp's additions are complete, and it is the turn of block `number`."""
    # The thread that elect.sync chooses is the one that TMA's instructions were issued by.
    gl.inline_asm_elementwise(
        "{ .reg .pred one; cp.async.bulk.wait_group 0; fence.proxy.async.global; elect.sync _|one, 0xffffffff; "
        "@one st.release.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [turn, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
