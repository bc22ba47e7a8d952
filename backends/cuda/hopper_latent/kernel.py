"""Latent (MLA) decode attention for sm_90a, explicitly scheduled in Gluon (Triton 3.6 and later).

A latent row is 576 wide: K is all of it, V its first 512 columns. One block attends 64 query rows (heads × queries) of
one sequence over one share of its keys, 64 keys a tile:

    producer     one warp: tiles through TMA into two buffers, each half of a buffer as soon as it is free
    consumer w   one warp group, w = 0 or 1: owns columns [256·w, 256·w + 256) of the output for all 64 rows, and the
                 tiles of parity w, whose scores and softmax it computes; the other gets P through shared memory

Lists (LISTED) name each key's slot: then the producer is a warp group, which gathers rows by cp.async; a hole is a row
of zeros in shared memory, and its score is masked.

So nothing is computed twice, an accumulator takes 128 registers a thread, and while one warp group is in its softmax
the other has the tensor cores. The idea is FlashMLA's (github.com/deepseek-ai/FlashMLA, "seesaw"); here both warp
groups take the tiles in order, so one running maximum serves both. A tile's parity is also its buffer. Per tile:

    owner   scores → row maximum → "maximum" → P → "ready" → acc += P V → own half "free"
    other   ...................... rescales acc .......... → acc += P V → own half "free"

One buffer for P and one for the maximum are enough: who writes next is who has just read.
"""

# No `from __future__ import annotations`: Triton's aggregates read the types of their fields.

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portattn.backends.cuda.gluon_names import aggregate, arrive, load, reinterpreted, store, sync
from portattn.backends.cuda.hopper_latent import CHUNKS, FREE, KEYS, ROPE, ROWS
from portattn.backends.cuda.hopper_latent import RANK as LATENT  # columns that are V too: the kernel's word for them
from portattn.backends.cuda.hopper_latent.gather import gather_bytes, gather_rows, load_slots

# Named barriers of the hardware, of which there are 16. Triton's warp specialisation takes 0 to 4 (3.6).
_READY: gl.constexpr = gl.constexpr(5)  # 5, 6    P of the tile in buffer b is there: READY + b
_MAXIMUM: gl.constexpr = gl.constexpr(7)  # 7, 8    the row maxima up to and with that tile: MAXIMUM + b
_FREE: gl.constexpr = gl.constexpr(FREE)  # 9..12   half w of buffer b may be loaded again: FREE + 2·b + w
_DONE: gl.constexpr = gl.constexpr(13)  # both warp groups have left their row sums
_CONSUMERS: gl.constexpr = gl.constexpr(256)  # threads that meet there: both warp groups

_ROWS: gl.constexpr = gl.constexpr(ROWS)
_KEYS: gl.constexpr = gl.constexpr(KEYS)
_LATENT: gl.constexpr = gl.constexpr(LATENT)
_ROPE: gl.constexpr = gl.constexpr(ROPE)
_HALF: gl.constexpr = gl.constexpr(LATENT // 2)
_CHUNKS: gl.constexpr = gl.constexpr(CHUNKS)
_CHUNK: gl.constexpr = gl.constexpr(LATENT // CHUNKS)
_LN2: gl.constexpr = gl.constexpr(math.log(2))

_SCORES: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
_OUTPUT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LATENT // 2, 16]))
_PROBS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_OUTPUT.value, k_width=2))
_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
_OUTPUT_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(1, _OUTPUT.value))
_SCORE_COLUMN: gl.constexpr = gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_LISTED_KEYS: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # each warp has all of a tile


@aggregate
class LatentSharedMemory:
    """Buffers and barriers in shared memory; [chunk], [half] and [buffer] are leading indices."""

    q: gl.shared_memory_descriptor  # [chunk][1, heads, queries, _CHUNK]
    q_tail: gl.shared_memory_descriptor  # [1][1, heads, queries, ROPE]
    k: gl.shared_memory_descriptor  # [CHUNKS·buffer + chunk][KEYS, _CHUNK]
    k_tail: gl.shared_memory_descriptor  # [buffer][KEYS, ROPE]
    p: gl.shared_memory_descriptor  # [ROWS, KEYS]
    row_max: gl.shared_memory_descriptor  # [ROWS] float32
    row_sum: gl.shared_memory_descriptor  # [half][ROWS] float32
    q_full: gl.shared_memory_descriptor  # mbarrier
    k_full: gl.shared_memory_descriptor  # [CHUNKS·buffer + chunk] mbarriers

    @gluon.constexpr_function
    def __init__(self, q, q_tail, k, k_tail, p, row_max, row_sum, q_full, k_full):
        self.q, self.q_tail, self.k, self.k_tail = q, q_tail, k, k_tail
        self.p, self.row_max, self.row_sum = p, row_max, row_sum
        self.q_full, self.k_full = q_full, k_full


@aggregate
class LatentWork:
    """Rows and keys of this block."""

    table: gl.tensor  # the sequence's pages, or the query's list
    batch: gl.tensor
    head: gl.tensor  # the first of the block's heads
    query: gl.tensor  # the first of its queries
    length: gl.tensor  # keys of the sequence, or places of the list
    unmasked: gl.tensor  # how many of them every row of the block sees
    first: gl.tensor  # tile of the sequence with which the share begins
    tiles: gl.tensor  # tiles of the share
    LISTED: gl.constexpr
    LOADERS: gl.constexpr  # threads that meet at FREE

    @gluon.constexpr_function
    def __init__(self, table, batch, head, query, length, unmasked, first, tiles, LISTED):
        self.table, self.batch, self.head, self.query = table, batch, head, query
        self.length, self.unmasked, self.first, self.tiles = length, unmasked, first, tiles
        self.LISTED = gl.constexpr(LISTED)
        self.LOADERS = gl.constexpr(256 if LISTED else 160)


@aggregate
class LatentState:
    """A warp group's running result."""

    acc: gl.tensor  # [ROWS, _HALF] float32
    row_max: gl.tensor  # [ROWS], in powers of 2, of all tiles so far
    row_sum: gl.tensor  # [ROWS], of the own tiles so far

    @gluon.constexpr_function
    def __init__(self, acc, row_max, row_sum):
        self.acc, self.row_max, self.row_sum = acc, row_max, row_sum


@gluon.jit
def _zero():
    # An offset of 0 that the compiler does not know: what is addressed with it is not computed ahead of the loop, where
    # the 36 pairs of matrix descriptors of a tile's scores would take more registers than there are.
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# ---------------------------------------------------------------------------------------------------------------------
# producer
# ---------------------------------------------------------------------------------------------------------------------
@gluon.jit
def _produce(q_desc, q_tail_desc, k_desc, k_tail_desc, page_tiles, k, row_units, slots, work, shared):
    """Load the queries once, then every tile of the share into the buffer of its parity."""
    mbarrier.expect(shared.q_full, _ROWS * (_LATENT + _ROPE) * 2)
    for j in gl.static_range(_CHUNKS):
        q_at = [work.batch, work.head, work.query, j * _CHUNK]
        load(q_desc, q_at, shared.q_full, shared.q.index(j))
    tail_at = [work.batch, work.head, work.query, 0]
    load(q_tail_desc, tail_at, shared.q_full, shared.q_tail.index(0))
    if not work.LISTED:
        _copy(k_desc, k_tail_desc, page_tiles, work, shared)
    elif k.dtype.element_ty.is_int():
        gather_bytes(k, row_units, slots - 1, work, shared)
    else:
        gather_rows(k, row_units, slots - 1, work, shared)
    for i in range(gl.maximum(work.tiles - 2, 0), work.tiles):  # the last arrivals, for which nothing is loaded
        for side in gl.static_range(2):
            sync(_FREE + 2 * (i % 2) + side, work.LOADERS)


@gluon.jit
def _copy(k_desc, k_tail_desc, page_tiles, work, shared):
    """Load every tile of the share into the buffer of its parity, by one warp."""
    last = work.first + work.tiles - 1
    page = gl.load(work.table + work.first // page_tiles, mask=work.tiles > 0, other=0)
    for i in range(work.tiles):
        buffer = i % 2
        tile = work.first + i
        row = (page * page_tiles + tile % page_tiles) * _KEYS
        page = gl.load(work.table + gl.minimum(tile + 1, last) // page_tiles)  # ahead of the waits below
        for turn in gl.static_range(2):
            half = buffer ^ turn  # the owner's first: it is free first
            if i >= 2:
                sync(_FREE + 2 * buffer + half, work.LOADERS)
            for j in gl.static_range(_CHUNKS // 2):
                chunk = half * (_CHUNKS // 2) + j
                slot = buffer * _CHUNKS + chunk
                full = shared.k_full.index(slot)
                if turn + j == 0:  # and the tail, which the owner has read before it frees its half
                    mbarrier.expect(full, _KEYS * (_CHUNK + _ROPE) * 2)
                    load(k_tail_desc, [row, _LATENT], full, shared.k_tail.index(buffer))
                else:
                    mbarrier.expect(full, _KEYS * _CHUNK * 2)
                load(k_desc, [row, chunk * _CHUNK], full, shared.k.index(slot))


# ---------------------------------------------------------------------------------------------------------------------
# consumers
# ---------------------------------------------------------------------------------------------------------------------
@gluon.jit
def _values(shared, buffer: gl.constexpr, half: gl.constexpr):
    """Return V of a tile, one half's columns: chunks side by side are laid out as one of their joint width."""
    halves = reinterpreted(shared.k, shared.k.dtype, [4, _KEYS, _HALF], shared.k.layout)
    return halves.index(2 * buffer + half)


@gluon.jit
def _chunk_there(shared, chunk, phase, work):
    mbarrier.wait(shared.k_full.index(chunk), phase)
    if work.LISTED:  # other threads' cp.async wrote what a product reads
        fence_async_shared()


@gluon.jit
def _values_there(shared, buffer: gl.constexpr, half: gl.constexpr, phase, work):
    # They are, long since, as the tile's scores are known; but the wait is a branch, over which ptxas does not move the
    # rescaling of the accumulator. Without it the rescaling ends up where the other warp group, or P, waits for it.
    for j in gl.static_range(_CHUNKS // 2):
        _chunk_there(shared, _CHUNKS * buffer + half * (_CHUNKS // 2) + j, phase, work)


@gluon.jit
def _clear_unwritten(v, valid):
    """Clear the rows of V from `valid` on: their weight is 0, but a page may hold NaN there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    there = gl.arange(0, _KEYS, gl.SliceLayout(1, layout))[:, None] < valid
    for j in gl.static_range(_HALF // 64):  # few registers at a time: the accumulator has most of them
        part = v.slice(j * 64, 64, dim=1)
        part.store(gl.where(there, part.load(layout), 0.0).to(v.dtype))


@gluon.jit
def _finite(row_max):
    """Return a base for exponents with which a row that has seen no key has weights of 0, not NaN."""
    return gl.where(row_max == -float("inf"), 0.0, row_max)


@gluon.jit
def _rescaled(acc, factor):
    return acc * gl.convert_layout(factor, _OUTPUT_ROW)[:, None]


@gluon.jit
def _scores(shared, half: gl.constexpr, phase, work):
    """Begin Q Kᵀ of an own tile, chunk by chunk as they are loaded, the own half's chunks first."""
    zero = _zero()
    s = gl.zeros([_ROWS, _KEYS], gl.float32, _SCORES)
    for j in gl.static_range(_CHUNKS):
        chunk = (half * (_CHUNKS // 2) + j) % _CHUNKS
        _chunk_there(shared, _CHUNKS * half + chunk, phase, work)
        q = shared.q.index(zero + chunk).reshape([_ROWS, _CHUNK])
        k = shared.k.index(zero + _CHUNKS * half + chunk)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=j != 0, is_async=True)
        if j == 0:
            q_tail = shared.q_tail.index(zero).reshape([_ROWS, _ROPE])
            k_tail = shared.k_tail.index(zero + half)
            s = warpgroup_mma(q_tail, k_tail.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _holes(tile, work):
    """Return how many of a tile's keys a list does not have."""
    if work.LISTED:
        return gl.sum((load_slots(tile, work, _LISTED_KEYS) < 0).to(gl.int32), 0)
    else:
        return 0


@gluon.jit
def _maximum(s, row_max, shared, key, holes, work, row_end, scale, half: gl.constexpr):
    """Return an own tile's masked scores and new row maxima, and send the maxima to the other warp group."""
    if work.LISTED:
        if holes != 0:
            s = gl.where((load_slots(key // _KEYS, work, _SCORE_COLUMN) >= 0)[None, :], s, -float("inf"))
    elif key + _KEYS > work.unmasked:
        columns = key + gl.arange(0, _KEYS, gl.SliceLayout(0, _SCORES))
        s = gl.where(columns[None, :] < row_end[:, None], s, -float("inf"))
    row_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    shared.row_max.store(row_max)
    arrive(_MAXIMUM + half, _CONSUMERS)
    return s, row_max


@gluon.jit
def _own_values(state, s, new_max, shared, phase, key, work, scale, half: gl.constexpr):
    """Process an own tile from its scores on: P, also for the other warp group, and acc += P V."""
    if not work.LISTED and key + _KEYS > work.length:
        for side in gl.static_range(2):
            _clear_unwritten(_values(shared, half, side), work.length - key)
    base = _finite(new_max)
    p = gl.exp2(s * scale - base[:, None])
    weights = p.to(shared.p.dtype)
    shared.p.store(weights)
    fence_async_shared()
    arrive(_READY + half, _CONSUMERS)
    _values_there(shared, half, half, phase, work)
    alpha = gl.exp2(state.row_max - base)
    acc = _rescaled(state.acc, alpha)
    acc = warpgroup_mma(gl.convert_layout(weights, _PROBS), _values(shared, half, half), acc, is_async=True)
    row_sum = state.row_sum * alpha + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    arrive(_FREE + 2 * half + half, work.LOADERS)
    return LatentState(acc, new_max, row_sum)


@gluon.jit
def _other_values(state, shared, phase, work, half: gl.constexpr):
    """Begin acc += P V of a tile of the other parity; return the accumulator and the rest of the new state."""
    buffer: gl.constexpr = 1 - half
    sync(_MAXIMUM + buffer, _CONSUMERS)
    new_max = shared.row_max.load(_ROW)
    alpha = gl.exp2(state.row_max - _finite(new_max))
    acc = _rescaled(state.acc, alpha)
    _values_there(shared, buffer, half, phase, work)
    sync(_READY + buffer, _CONSUMERS)
    acc = warpgroup_mma(shared.p, _values(shared, buffer, half), acc, is_async=True)
    return acc, new_max, state.row_sum * alpha


@gluon.jit
def _other_tile(state, shared, phase, work, half: gl.constexpr):
    acc, row_max, row_sum = _other_values(state, shared, phase, work, half)
    acc = warpgroup_mma_wait(0, deps=[acc])
    arrive(_FREE + 2 * (1 - half) + half, work.LOADERS)
    return LatentState(acc, row_max, row_sum)


@gluon.jit
def _even_owner(state, shared, work, row_end, scale):
    """Run warp group 0 over the share: an own tile, a tile of the other's, ..."""
    for i in range(0, work.tiles, 2):
        phase = i // 2 & 1
        key = (work.first + i) * _KEYS
        holes = _holes(work.first + i, work)
        s = warpgroup_mma_wait(0, deps=[_scores(shared, 0, phase, work)])
        s, new_max = _maximum(s, state.row_max, shared, key, holes, work, row_end, scale, 0)
        state = _own_values(state, s, new_max, shared, phase, key, work, scale, 0)
        if i + 1 < work.tiles:
            state = _other_tile(state, shared, phase, work, 0)
    return state


@gluon.jit
def _odd_owner(state, shared, work, row_end, scale):
    """Run warp group 1 over the share: the own tile's scores are under way before the other's tile is ready."""
    for i in range(0, work.tiles - 1, 2):
        phase = i // 2 & 1
        key = (work.first + i + 1) * _KEYS
        # Waits for nothing, but ptxas does not see over the loop's edge that the accumulator is complete.
        acc = warpgroup_mma_wait(0, deps=[state.acc])
        state = LatentState(acc, state.row_max, state.row_sum)
        holes = _holes(work.first + i + 1, work)
        s = _scores(shared, 1, phase, work)
        acc, row_max, row_sum = _other_values(state, shared, phase, work, 1)
        s = warpgroup_mma_wait(1, deps=[s])
        s, new_max = _maximum(s, row_max, shared, key, holes, work, row_end, scale, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        arrive(_FREE + 1, work.LOADERS)
        state = _own_values(LatentState(acc, row_max, row_sum), s, new_max, shared, phase, key, work, scale, 1)
    if work.tiles % 2 == 1:
        state = _other_tile(state, shared, work.tiles // 2 & 1, work, 1)
    return state


@gluon.jit
def _consume(out_desc, partial, lse, heads, seq_q, batches, scale, work, shared, half: gl.constexpr,
             QUERIES: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Compute 256 columns of the output, by one warp group."""
    rows = gl.arange(0, _ROWS, _ROW)
    row_end = gl.full([_ROWS], 0, gl.int32, _ROW) + work.length
    if CAUSAL:
        row_end = row_end - (seq_q - 1) + work.query + rows % QUERIES
    state = LatentState(
        gl.zeros([_ROWS, _HALF], gl.float32, _OUTPUT),
        gl.full([_ROWS], -float("inf"), gl.float32, _ROW),
        gl.zeros([_ROWS], gl.float32, _ROW),
    )
    mbarrier.wait(shared.q_full, 0)
    if half == 0:
        state = _even_owner(state, shared, work, row_end, scale)
    else:
        state = _odd_owner(state, shared, work, row_end, scale)

    shared.row_sum.index(half).store(state.row_sum)
    sync(_DONE, _CONSUMERS)
    total = state.row_sum + shared.row_sum.index(1 - half).load(_ROW)
    empty = total == 0.0  # a NaN total stays NaN
    acc = _rescaled(state.acc, gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total)))
    head = work.head + rows // QUERIES
    query = work.query + rows % QUERIES
    there = (head < heads) & (query < seq_q)
    row = ((gl.program_id(1) * batches + work.batch).to(gl.int64) * heads + head) * seq_q + query
    if SPLIT:
        columns = half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, _OUTPUT))
        offsets = gl.convert_layout(row * _LATENT, _OUTPUT_ROW)[:, None] + columns[None, :]
        gl.store(partial + offsets, acc, mask=gl.convert_layout(there, _OUTPUT_ROW)[:, None])
    else:  # by way of where the queries were: every P has been seen, so nobody reads them any more
        shape: gl.constexpr = [2, 1, _ROWS // QUERIES, QUERIES, _HALF]
        place = reinterpreted(shared.q, shared.q.dtype, shape, out_desc.layout).index(half)
        place.reshape([_ROWS, _HALF]).store(acc.to(shared.q.dtype))
        fence_async_shared()
        store(out_desc, [work.batch, work.head, work.query, half * _HALF], place)
    if half == 0 and lse is not None:
        natural = (state.row_max + gl.log2(gl.where(empty, 1.0, total))) * _LN2
        gl.store(lse + row, gl.where(empty, -float("inf"), natural), mask=there)
    if not SPLIT:
        tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------------------
# kernel
# ---------------------------------------------------------------------------------------------------------------------
@gluon.jit
def _work(table, table_stride, seqlens_k, capacity, head_tiles, seq_q, HEADS: gl.constexpr, QUERIES: gl.constexpr,
          CAUSAL: gl.constexpr, LISTED: gl.constexpr):  # fmt: skip
    row_tile, split, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    head, query = row_tile % head_tiles * HEADS, row_tile // head_tiles * QUERIES
    sequence = batch
    if LISTED:  # every query is a sequence of its own
        sequence, batch, query = query, query // seq_q, query % seq_q
    length = capacity
    if seqlens_k is not None:
        length = gl.minimum(gl.maximum(gl.load(seqlens_k + sequence), 0), capacity)
    unmasked, end = length, length
    if CAUSAL:  # what the block's first query sees, and its last; blocks with the most keys begin first
        query = (gl.num_programs(0) // head_tiles - 1 - row_tile // head_tiles) * QUERIES
        unmasked = length - (seq_q - 1) + query
        end = gl.minimum(length, gl.maximum(unmasked + QUERIES - 1, 0))
    tiles = gl.cdiv(end, _KEYS)
    share = gl.cdiv(tiles, gl.num_programs(1))
    first = gl.minimum(split * share, tiles)
    table += sequence.to(gl.int64) * table_stride
    return LatentWork(table, batch, head, query, length, unmasked, first, gl.minimum(share, tiles - first), LISTED)


@gluon.jit(
    do_not_specialize=[
        "scale", "heads", "seq_q", "batches", "head_tiles", "page_tiles", "capacity", "table_stride", "row_units",
        "slots",
    ],
    do_not_specialize_on_alignment=["page_table", "seqlens_k"],
)  # fmt: skip
def latent_decode(
    q_desc, q_tail_desc, k_desc, k_tail_desc, out_desc, k, partial, lse, page_table, seqlens_k,
    scale, heads, seq_q, batches, head_tiles, page_tiles, capacity, table_stride, row_units, slots,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, LISTED: gl.constexpr,
    CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """One block (row tile, split, sequence): HEADS × QUERIES = 64 rows over one share of the keys.

    Queries and output by descriptors of (B, H, Sq, columns), latent rows by descriptors of (slots, 576); page_tiles:
    tiles of a page, capacity: the most keys of a sequence. scale: the softmax scale times log2(e), positive.
    LISTED: page_table (B · Sq, capacity) has the slots of each query's keys, seqlens_k (B · Sq,) or None how many of
    them count. Rows of k, row_units times 16 bytes apart, are gathered, and QUERIES is 1. Bytes are rows of fp8_ds_mla.
    SPLIT: `partial` (splits, B, H, Sq, 512) and `lse` (splits, B, H, Sq), float32, are to be merged. Otherwise the
    output goes to `out_desc`, and `lse` (B, H, Sq) may be None. CONSUMER, PRODUCER: registers of a thread.
    """
    dtype: gl.constexpr = q_desc.dtype
    BYTES: gl.constexpr = LISTED and k.dtype.element_ty.is_int()
    k_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = LatentSharedMemory(
        gl.allocate_shared_memory(dtype, [_CHUNKS, 1, HEADS, QUERIES, _CHUNK], q_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, HEADS, QUERIES, _ROPE], q_tail_desc.layout),
        gl.allocate_shared_memory(dtype, [2 * _CHUNKS, _KEYS, _CHUNK], k_layout),
        gl.allocate_shared_memory(dtype, [2, _KEYS, _ROPE], k_layout),
        gl.allocate_shared_memory(dtype, [_ROWS, _KEYS], k_layout),
        gl.allocate_shared_memory(gl.float32, [_ROWS], vector),
        gl.allocate_shared_memory(gl.float32, [2, _ROWS], vector),
        gl.allocate_shared_memory(gl.int64, [1], barriers),
        gl.allocate_shared_memory(gl.int64, [2 * _CHUNKS, 1], barriers),
    )
    mbarrier.init(shared.q_full, count=1)
    for j in gl.static_range(2 * _CHUNKS):
        if BYTES:  # and the copies of the tail, beside the chunk that comes first
            mbarrier.init(shared.k_full.index(j), count=129 if j == 0 or j == _CHUNKS + _CHUNKS // 2 else 1)
        else:
            mbarrier.init(shared.k_full.index(j), count=128 if LISTED else 1)
    fence_async_shared()
    work = _work(page_table, table_stride, seqlens_k, capacity, head_tiles, seq_q, HEADS, QUERIES, CAUSAL, LISTED)
    WARPS: gl.constexpr = 4 if LISTED else 1
    gl.warp_specialize(
        [
            (_consume, (out_desc, partial, lse, heads, seq_q, batches, scale, work, shared, 0, QUERIES, CAUSAL, SPLIT)),
            (_consume, (out_desc, partial, lse, heads, seq_q, batches, scale, work, shared, 1, QUERIES, CAUSAL, SPLIT)),
            (_produce, (q_desc, q_tail_desc, k_desc, k_tail_desc, page_tiles, k, row_units, slots, work, shared)),
        ],
        [4, WARPS],
        [CONSUMER, PRODUCER],
    )
