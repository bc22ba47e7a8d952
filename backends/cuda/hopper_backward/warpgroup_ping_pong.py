"""Additions to dQ in turns: blocks of keys add to a tile of 64 query rows in the order of their keys.

Floating-point sums depend on their order, so that dQ is then the same in every run, bit by bit, and no kernel has to
compute S and dP a second time for it.

Order. A block of keys is number b of its sequence and key head, and sees the query tiles [begin(b), end(b)). Of blocks
that see a tile neither bound falls as b grows, and they follow each other; a block before the first of them has end 0.
So a tile gets its additions from
consecutive blocks f, f + 1, …, and block b is its first one if b = 0 or the tile is not below end(b - 1). turns[1 + t]
is the number of the block whose turn it is at tile t. Block b waits until it reads b there (its first block does not
wait), adds, waits until the addition is complete in memory, and writes b + 1.

Blocks visit their tiles from the last one back. Later keys' blocks then reach a causal mask's last rows when earlier
keys' blocks, which began there too, are already below them.

No deadlock. A block draws its number in the grid from turns[0] when it starts to run, so that every block with a lower
number has started. work.in_turn gives a head's blocks rising numbers in the order of their keys. So a block waits only
for blocks of lower numbers, which run, and stay where they run until they end. The lowest number that has not ended
waits for nobody: by induction all end. A tile is one sequence's, also where packed lengths are not valid
(work._rising_bounds). Inside a block, the writers take tiles in the order in which the consumer makes
them. How many blocks run at a time does not matter for this, only for the time: a head's blocks that start together
follow each other at a distance of what one addition takes.

Memory. The additions are TMA's (the async proxy). `cp.async.bulk.wait_group 0`, unlike its form `.read`, returns when
the thread's bulk operations have been performed; the thread that issued them then writes the turn with release
semantics at the scope of the GPU. The next block's writer reads it with acquire semantics; a proxy fence stands between
that and its own additions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from portattn.backends.cuda.hopper_backward.form import BackwardWork
from portattn.backends.cuda.hopper_backward.tile_scheduler import query_tiles

# Named barriers of the two writers, beside those of consumer.py: who arrives has been told of its tile, so that the
# other one may wait for the next.
TO_FIRST: gl.constexpr = gl.constexpr(14)
TO_SECOND: gl.constexpr = gl.constexpr(15)
WRITERS: gl.constexpr = gl.constexpr(64)
_ONE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def draw(turns):
    """Shared memory with the block's number: so many blocks have begun before it."""
    number = gl.atomic_add(turns, 1, sem="relaxed", scope="gpu")
    place = gl.allocate_shared_memory(gl.int32, [1], _ONE)
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [8], [0])))
    return place


@gluon.jit
def block_number(shared, form, WARPS: gl.constexpr):
    """The block's number in the grid. WARPS: those that ask together."""
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
    """Until it is the turn of block `number`."""
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
