"""Records that the functions of the Hopper backward exchange (constants of a compilation, shared memory, tiles), and a
scheduler: which keys a block has, and which query tiles see them. All of a block's warps ask alike.

Additions to dQ in turns: blocks of keys add to a tile of 64 query rows in the order of their keys.

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
number has started. in_turn gives a head's blocks rising numbers in the order of their keys. So a
block waits only for blocks of lower numbers, which stay resident until they end. The lowest number that has not ended
waits for no block: by induction all end. A tile belongs to one sequence, also where packed lengths are invalid
(_rising_bounds). Inside a block, the writers take tiles in the consumer's order. The number of resident
blocks changes only the time: blocks of a head that start together follow each other at the distance of one addition.

Memory. TMA performs the additions (async proxy). `cp.async.bulk.wait_group 0`, unlike its form `.read`, returns when
the thread's bulk operations have been performed; the thread that issued them then writes the turn with release
semantics at the scope of the GPU. The next block's writer reads it with acquire semantics, then a proxy fence precedes
its own additions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from portattn.backends.cuda.gluon_names import aggregate, load
from portattn.backends.cuda.hopper_backward import STATISTICS_ROWS
from portattn.backends.cuda.hopper_backward.block_lists import BlockLists
from portattn.backends.cuda.hopper_forward.tile_scheduler import (
    first_row,
    in_turn,
    last_seen,
    padded_lengths,
    position_of,
)

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.


@aggregate
class BackwardForm:
    """Constants of a compilation.

    ROWS, KEYS, DIM, STAGES  query rows and keys of a tile, padded head dimension, buffers of a loop's loads
    MESSAGES  number of parts in which a tile of dQ is added to memory; 0: another kernel computes dQ
    LATE      dQ of a tile is computed during the next tile's exponentials
    AFTER     dP is begun after P is computed, unless LATE: a function then has more registers
    APART     two warp groups of 64 keys each are half a step apart (apart.py)
    STAGGER   query tiles between the first tiles of a head's neighbouring blocks, so that they add to other parts of dQ
    TURNS     blocks add to a tile of dQ in the order of their keys (tile_scheduler.py): deterministic
    GROUPED   query heads share a key head
    RIGHT, LEFT   queries see keys up to `right` after, and from `left` before, their own position
    TOP_LEFT      query i's position is key i; otherwise the last query's is the last key
    RAGGED        the last key tile is not full
    VARYING       "none", "packed" (first rows of sequences are given) or "padded" (their lengths are), "padded_q" or
                  "padded_k" (lengths of queries or keys only)
    EDGES         the tensors may have rows that attend nothing or follow a sequence's last row: tiles that mix them
                  with others come from copies without them
    UNSEEN        the tensor may have keys that no query sees
    SOFTCAP       scores are capped
    SCORE_MOD     a Gluon function of a program of scores (kernels/score_program.py), or None: without SOFTCAP
    SCORE_GRADIENT  the function of its derivative; None where that is 1
    LISTED_Q, LISTED_K, MASK_MOD  blocks that lists name, multiples of a tile's sizes, or 0, and the function that
                  decides their parts, or None (block_lists.py)
    """

    ROWS: gl.constexpr
    KEYS: gl.constexpr
    DIM: gl.constexpr
    STAGES: gl.constexpr
    MESSAGES: gl.constexpr
    LATE: gl.constexpr
    AFTER: gl.constexpr
    APART: gl.constexpr
    STAGGER: gl.constexpr
    TURNS: gl.constexpr
    GROUPED: gl.constexpr
    RIGHT: gl.constexpr
    LEFT: gl.constexpr
    TOP_LEFT: gl.constexpr
    RAGGED: gl.constexpr
    VARYING: gl.constexpr
    EDGES: gl.constexpr
    UNSEEN: gl.constexpr
    SOFTCAP: gl.constexpr
    SCORE_MOD: gl.constexpr
    SCORE_GRADIENT: gl.constexpr
    LISTED_Q: gl.constexpr
    LISTED_K: gl.constexpr
    MASK_MOD: gl.constexpr
    MASKED: gl.constexpr  # some tile needs a mask
    # BESIDE: the two warp groups have half the columns each, not half the keys: products read shared memory
    BESIDE: gl.constexpr
    SCORES: gl.constexpr  # layouts: of transposed scores [KEYS, ROWS],
    WEIGHTS: gl.constexpr  # of those as an operand in registers,
    SUMS: gl.constexpr  # of dK and dV [KEYS, DIM],
    QUERIES: gl.constexpr  # of dQ [ROWS, DIM]

    @gluon.constexpr_function
    def __init__(self, ROWS, KEYS, DIM, STAGES, MESSAGES, LATE, AFTER, APART, STAGGER, TURNS, GROUPED, RIGHT, LEFT,
                 TOP_LEFT, RAGGED, VARYING, EDGES, UNSEEN, SOFTCAP, SCORE_MOD, SCORE_GRADIENT, LISTED_Q, LISTED_K,
                 MASK_MOD):  # fmt: skip
        self.ROWS, self.KEYS, self.DIM, self.STAGES = map(gl.constexpr, (ROWS, KEYS, DIM, STAGES))
        self.MESSAGES, self.LATE, self.STAGGER = map(gl.constexpr, (MESSAGES, LATE, STAGGER))
        self.TURNS, self.GROUPED, self.AFTER, self.APART = map(gl.constexpr, (TURNS, GROUPED, AFTER, APART))
        self.RIGHT, self.LEFT = map(gl.constexpr, (RIGHT, LEFT))
        self.TOP_LEFT, self.RAGGED, self.VARYING = map(gl.constexpr, (TOP_LEFT, RAGGED, VARYING))
        self.EDGES, self.UNSEEN, self.SOFTCAP = map(gl.constexpr, (EDGES, UNSEEN, SOFTCAP))
        self.SCORE_MOD, self.SCORE_GRADIENT = map(gl.constexpr, (SCORE_MOD, SCORE_GRADIENT))
        self.LISTED_Q, self.LISTED_K, self.MASK_MOD = map(gl.constexpr, (LISTED_Q, LISTED_K, MASK_MOD))
        self.MASKED = gl.constexpr(RIGHT or LEFT or RAGGED or UNSEEN)
        beside = KEYS == 64
        self.BESIDE = gl.constexpr(beside)
        warps, share = ([4, 2], 2) if beside else ([4 if APART else 8, 1], 1)
        sums = gl.NVMMADistributedLayout([3, 0], warps, [16, DIM // share, 16])
        self.SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps, [16, ROWS // share, 16]))
        self.WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2))
        self.SUMS = gl.constexpr(sums)
        across = 128 // ROWS  # warp groups that share the rows of a tile have half the columns of its dQ each
        queries = [4, 1] if APART else [8 // across, across]
        self.QUERIES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], queries, [16, DIM // across, 16]))


@aggregate
class BackwardSharedMemory:
    q: gl.shared_memory_descriptor  # [STAGES][1, 1, ROWS, DIM]
    do: gl.shared_memory_descriptor  # [STAGES][1, 1, ROWS, DIM]
    k: gl.shared_memory_descriptor  # [1, 1, KEYS, DIM]
    v: gl.shared_memory_descriptor  # [1, 1, KEYS, DIM]
    statistics: gl.shared_memory_descriptor  # [STAGES][2, ROWS] float32: LSE in powers of 2, delta
    p: gl.shared_memory_descriptor  # [KEYS, ROWS], where warp groups have half the columns each
    ds: gl.shared_memory_descriptor  # [KEYS, ROWS]
    dq: gl.shared_memory_descriptor  # [ROWS·DIM/256, 256] float32, in the order of `put`
    kv_full: gl.shared_memory_descriptor  # [2] mbarriers: K, V
    q_full: gl.shared_memory_descriptor  # [STAGES]: Q and the statistics
    do_full: gl.shared_memory_descriptor  # [STAGES]
    block: gl.shared_memory_descriptor  # [1] int32: the block's number, where blocks draw it (tile_scheduler.py)
    places: gl.shared_memory_descriptor  # [STAGES][1] int32: with LISTED_K words of block_lists.py about tiles

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, statistics, p, ds, dq, kv_full, q_full, do_full, block, places):
        self.q, self.do, self.k, self.v, self.statistics, self.block = q, do, k, v, statistics, block
        self.places = places
        self.p, self.ds, self.dq, self.kv_full, self.q_full, self.do_full = p, ds, dq, kv_full, q_full, do_full


@aggregate
class BackwardSizes:
    """The numbers of the call.

    lengths_q, lengths_k  (B,) int32 lengths, or (B + 1,) int32 first rows of packed sequences; else anything
    """

    lengths_q: gl.tensor
    lengths_k: gl.tensor
    batches: gl.tensor
    heads: gl.tensor  # heads whose tiles are numbered: key heads, or query heads in the kernel of dQ
    share: gl.tensor  # query heads of a key head
    seq_q: gl.tensor  # rows of the query tensor
    seq_k: gl.tensor  # rows of the key tensor
    left: gl.tensor
    right: gl.tensor
    tiles: gl.tensor  # the kernel's own tiles of a head of a sequence; of a head of all packed ones
    query_tiles: gl.tensor  # the same of query rows, by which the statistics and dQ's sums are stored
    together: gl.tensor  # causal or packed: heads that are worked on at a time
    lists: BlockLists  # without LISTED_K anything

    @gluon.constexpr_function
    def __init__(self, lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, left, right, tiles, query_tiles,
                 together, lists):  # fmt: skip
        self.lengths_q, self.lengths_k, self.batches, self.heads = lengths_q, lengths_k, batches, heads
        self.share, self.seq_q, self.seq_k, self.left, self.right = share, seq_q, seq_k, left, right
        self.tiles, self.query_tiles, self.together, self.lists = tiles, query_tiles, together, lists


@aggregate
class BackwardWork:
    """Work of a block. Rows and keys count from the sequence's first."""

    start: gl.tensor  # first key of the block, or first query row in the kernel of dQ
    rows: gl.tensor  # rows to be written from there on; none or fewer: no block
    head: gl.tensor
    slot: gl.tensor  # of the first axis of the tensors
    sequence: gl.tensor
    q_first: gl.tensor  # row of the tensors at which the sequence begins
    q_length: gl.tensor
    k_first: gl.tensor
    k_length: gl.tensor
    tile: gl.tensor  # number of the sequence's first tile of query rows among a head's

    @gluon.constexpr_function
    def __init__(self, start, rows, head, slot, sequence, q_first, q_length, k_first, k_length, tile):
        self.start, self.rows, self.head, self.slot, self.sequence = start, rows, head, slot, sequence
        self.q_first, self.q_length, self.k_first, self.k_length = q_first, q_length, k_first, k_length
        self.tile = tile


@aggregate
class Tiles:
    """Query tiles that see a block's keys: [begin, end), of which [clean, unclean) need no mask."""

    begin: gl.tensor
    clean: gl.tensor
    unclean: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, begin, clean, unclean, end):
        self.begin, self.clean, self.unclean, self.end = begin, clean, unclean, end


@aggregate
class BackwardState:
    s: gl.tensor  # the tile's scores, complete; with plain steps anything
    dk: gl.tensor  # [KEYS, DIM] float32
    dv: gl.tensor  # [KEYS, DIM] float32
    slot: gl.tensor  # of the buffers
    phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, s, dk, dv, slot, phase):
        self.s, self.dk, self.dv, self.slot, self.phase = s, dk, dv, slot, phase


_STATISTICS: gl.constexpr = gl.constexpr(STATISTICS_ROWS)  # the kernel of dQ follows tiles of so many rows


@gluon.jit
def _sequence_of(number, lengths, total, size: gl.constexpr, batches, WARPS: gl.constexpr):
    """As kernels/tiles.py packed_tile: sequence b's tiles begin at number lengths[b] // size + b. Rows after the last
    sequence are sequence number `batches`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    sequence = batches - batches
    for chunk in range(gl.cdiv(batches + 1, 32)):
        b = chunk * 32 + gl.arange(0, 32, layout)
        first = gl.load(lengths + gl.minimum(b, batches))
        first = gl.minimum(gl.maximum(first, 0), total)
        begun = (first // size + b <= number) & (b <= batches)
        sequence = gl.maximum(sequence, gl.max(gl.where(begun, b, 0), 0))
    return sequence


@gluon.jit
def _bounds(lengths, sequence, batches, total):
    first = first_row(lengths, sequence, batches, total)
    end = gl.where(sequence == batches, total, first_row(lengths, sequence + 1, batches, total))
    return first, gl.maximum(end, first) - first


@gluon.jit
def _rising_bounds(lengths, sequence, batches, total, WARPS: gl.constexpr):
    """_bounds where no sequence begins before the one before it, as of valid lengths: of others too each tile of rows
    is then one sequence's, and blocks that add in turns do not wait for what another sequence's blocks count."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first, end = sequence - sequence, sequence - sequence
    for chunk in range(gl.cdiv(batches + 1, 32)):
        b = chunk * 32 + gl.arange(0, 32, layout)
        row = gl.load(lengths + gl.minimum(b, batches))
        row = gl.minimum(gl.maximum(row, 0), total)
        first = gl.maximum(first, gl.max(gl.where(b <= sequence, row, 0), 0))
        end = gl.maximum(end, gl.max(gl.where(b <= sequence + 1, row, 0), 0))
    return first, gl.where(sequence == batches, total, end) - first


@gluon.jit
def _packed(number, head, sizes, size: gl.constexpr, by_keys: gl.constexpr, reverse: gl.constexpr,
            rising: gl.constexpr, query_rows: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    if by_keys:
        sequence = _sequence_of(number, sizes.lengths_k, sizes.seq_k, size, sizes.batches, WARPS)
    else:
        sequence = _sequence_of(number, sizes.lengths_q, sizes.seq_q, size, sizes.batches, WARPS)
    if rising:
        q_first, q_length = _rising_bounds(sizes.lengths_q, sequence, sizes.batches, sizes.seq_q, WARPS)
    else:
        q_first, q_length = _bounds(sizes.lengths_q, sequence, sizes.batches, sizes.seq_q)
    k_first, k_length = _bounds(sizes.lengths_k, sequence, sizes.batches, sizes.seq_k)
    first, length = q_first, q_length
    if by_keys:
        first, length = k_first, k_length
    number -= first // size + sequence
    if reverse:  # longest rows first
        number = gl.where(number * size < length, gl.cdiv(length, size) - 1 - number, number)
    after = sequence == sizes.batches  # rows of no sequence: nothing sees them, and they see nothing
    q_length, k_length = gl.where(after, 0, q_length), gl.where(after, 0, k_length)
    tile = q_first // query_rows + sequence
    start = number * size
    return BackwardWork(start, length - start, head, head - head, sequence, q_first, q_length, k_first, k_length, tile)


@gluon.jit
def work_of(block, sizes, form, size: gl.constexpr, by_keys: gl.constexpr, WARPS: gl.constexpr):
    """Return a block's work: `size` keys, or query rows unless `by_keys`. WARPS: those that ask together."""
    reverse: gl.constexpr = form.RIGHT and not by_keys  # later rows see more keys; earlier keys are seen by more rows
    heads = sizes.heads
    if form.VARYING != "packed":
        heads = heads * sizes.batches
    if form.RIGHT or form.TURNS or form.VARYING == "packed":
        number, head = in_turn(block, sizes.tiles, heads, sizes)
    else:
        number, head = block % sizes.tiles, block // sizes.tiles
    if form.VARYING == "packed":
        query_rows: gl.constexpr = form.ROWS if by_keys else _STATISTICS
        work = _packed(number, head, sizes, size, by_keys, reverse, form.TURNS, query_rows, WARPS)
    else:
        if reverse:
            number = sizes.tiles - 1 - number
        slot = head // sizes.heads
        q_length, k_length = padded_lengths(slot, sizes, form)
        rows = sizes.seq_q
        if by_keys:
            rows = sizes.seq_k
        zero, start = number - number, number * size
        work = BackwardWork(start, rows - start, head % sizes.heads, slot, slot, zero, q_length, zero, k_length, zero)
    return work


@gluon.jit
def first_seen(work, sizes, form):
    """Return the first key that some query of the sequence sees."""
    first = work.start - work.start
    if form.LEFT:
        first = gl.maximum(position_of(work, form) - sizes.left, 0)
    return first


@gluon.jit
def attending(work, sizes, form):
    """Return the sequence's query rows that see a key: (first, end)."""
    position = position_of(work, form)
    first, end = work.start - work.start, work.q_length
    if form.RIGHT:
        first = gl.maximum(-(position + sizes.right), 0)
    if form.LEFT:
        end = gl.minimum(end, work.k_length - position + sizes.left)
    return first, end


@gluon.jit
def query_tiles(work, sizes, form):
    keys: gl.constexpr = form.KEYS
    rows: gl.constexpr = form.ROWS
    position = position_of(work, form)
    seen_begin, seen_end = first_seen(work, sizes, form), last_seen(work, sizes, form)
    first, end = gl.maximum(work.start, seen_begin), gl.minimum(work.start + keys, seen_end)
    row, row_end = work.start - work.start, work.q_length
    if form.RIGHT:
        row = gl.maximum(first - position - sizes.right, 0)
    if form.LEFT:
        row_end = gl.minimum(row_end, end - position + sizes.left)
    begin = row // rows
    last = gl.where((end > first) & (row_end > row), gl.cdiv(row_end, rows), begin)
    clean, unclean = begin, last
    if form.RIGHT:
        clean = gl.cdiv(gl.maximum(work.start + keys - 1 - position - sizes.right, 0), rows)
        clean = gl.minimum(gl.maximum(clean, begin), last)
    if form.LEFT:
        unclean = gl.maximum(work.start - position + sizes.left + 1, 0) // rows
        unclean = gl.minimum(gl.maximum(unclean, clean), last)
    if form.RAGGED or form.UNSEEN:
        whole = (work.start >= seen_begin) & (work.start + keys <= seen_end)
        clean, unclean = gl.where(whole, clean, last), gl.where(whole, unclean, last)
    return Tiles(begin, clean, unclean, last)


@gluon.jit
def place_of(i, count, sizes, form):
    """Return the place, for tile_at, of the query tile among `count` that a block visits in step i."""
    if form.TURNS:  # heads side by side: one after the other, blocks of few tiles would wait at each one's first tile
        place = i // sizes.share
    else:
        place = i % count
    return place


@gluon.jit
def member_of(i, count, sizes, form):
    """Return the query head of its key head's group that a block visits in step i."""
    if form.TURNS:
        member = i % sizes.share
    else:
        member = i // count
    return member


@gluon.jit
def tile_at(place, tiles, block, form):
    """Return the query tile of a place: in order, those without a mask turned by the block's number."""
    tile = tiles.begin + place
    if form.TURNS:  # from the last one back
        tile = tiles.end - 1 - place
    if form.STAGGER:
        among = tile - tiles.clean
        count = tiles.unclean - tiles.clean
        if (among >= 0) & (among < count):
            tile = tiles.clean + (among + block * form.STAGGER) % count
    return tile


@gluon.jit
def rows_loaded(desc, edge_desc, work, head, m, barrier, place, sizes, form):
    """Begin to load a tile of query rows, from the copies if some of its rows do not count."""
    row = m * form.ROWS
    if form.EDGES:
        first, end = attending(work, sizes, form)
        if row < first:
            load(edge_desc, [work.sequence * 2, head, 0, 0], barrier, place)
        elif row + form.ROWS > end:
            load(edge_desc, [work.sequence * 2 + 1, head, 0, 0], barrier, place)
        else:
            load(desc, [work.slot, head, work.q_first + row, 0], barrier, place)
    else:
        load(desc, [work.slot, head, work.q_first + row, 0], barrier, place)


@gluon.jit
def queries_loaded(q_desc, edge_q_desc, statistics_desc, work, head, m, slot, shared, sizes, form):
    """Begin to load a tile of Q and its statistics into a buffer."""
    tile = (work.slot * sizes.heads * sizes.share + head) * sizes.query_tiles + work.tile + m
    q_full = shared.q_full.index(slot)
    mbarrier.expect(q_full, form.ROWS * (form.DIM * 2 + 8))
    rows_loaded(q_desc, edge_q_desc, work, head, m, q_full, shared.q.index(slot), sizes, form)
    load(statistics_desc, [tile * 2, 0], q_full, shared.statistics.index(slot))


# Named barriers of the two writers, beside the barriers of consumer.py: a writer arrives once it knows its tile, so
# that the other writer may wait for the next.
TO_FIRST: gl.constexpr = gl.constexpr(14)
TO_SECOND: gl.constexpr = gl.constexpr(15)
WRITERS: gl.constexpr = gl.constexpr(64)
ONE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def draw(turns):
    """Draw the block's number, the count of blocks that began before it, into shared memory."""
    number = gl.atomic_add(turns, 1, sem="relaxed", scope="gpu")
    place = gl.allocate_shared_memory(gl.int32, [1], ONE)
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
    """Return the end of the query tiles seen by the block of keys before this one, which have been waited for."""
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
    """Complete the warp's additions, and give the turn to block `number`."""
    # The thread that elect.sync chooses is the one that TMA's instructions were issued by.
    gl.inline_asm_elementwise(
        "{ .reg .pred one; cp.async.bulk.wait_group 0; fence.proxy.async.global; elect.sync _|one, 0xffffffff; "
        "@one st.release.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [turn, number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
