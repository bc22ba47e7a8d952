"""Attention forward of heads of 257 to 512 columns for sm_90a, explicitly scheduled in Gluon (Triton 3.6 and later).

A persistent block per multiprocessor draws tiles of 128 query rows of one head, and of 256 columns of its output:

    producer     one warp: Q, then K and V of tile after tile of 64 keys, through TMA
    consumer w   one warp group, w = 0 or 1: 64 of the rows

An accumulator of 512 columns takes 256 registers a thread, which no thread has. So the columns of the output are split
over two tiles, each of which computes the scores: 3/2 of the products. The other division, 64 rows and all columns as
in ../hopper_latent, reads K and V twice as often, 128 bytes of the L2 for the work for which this one reads 96, and the
L2 bounds both.

Q takes 128 KB of shared memory at 512 columns, a tile of K 64 KB and of V 32 KB: there is one buffer of each. K is
loaded and its buffer returned by chunks of 128 columns, so that the next tile's keys come while this one's values are
multiplied. A consumer's step is that of consumer.py: this tile's scores and the tile before's values are under way
while it computes a softmax.
"""

# No `from __future__ import annotations`: Triton reads the annotations of constants.

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

from portattn.backends.cuda.gluon_names import arrive, load, sync
from portattn.backends.cuda.hopper_forward import GROUP_ROWS, WIDE_CHUNK, WIDE_KEYS, WIDE_PART
from portattn.backends.cuda.hopper_forward.consumer import normalize_rows
from portattn.backends.cuda.hopper_forward.fragments import (
    clear,
    following,
    hold,
    lane_sum,
    line_numbers,
    masked_scores,
    no_tensors,
    operand,
    rescale_rows,
    row_limits,
    row_maximum,
    split_columns,
    store_part,
)
from portattn.backends.cuda.hopper_forward.kernel import draw_tile
from portattn.backends.cuda.hopper_forward.products import FREE
from portattn.backends.cuda.hopper_forward.tile_scheduler import (
    BOXES,
    FIELDS,
    Form,
    ForwardSharedMemory,
    Sizes,
    State,
    Work,
    key_tiles,
    last_seen,
    position_of,
    read,
    send,
    tile_keys,
    work_of,
)

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)
_KEYS: gl.constexpr = gl.constexpr(WIDE_KEYS)
_PART: gl.constexpr = gl.constexpr(WIDE_PART)
_CHUNK: gl.constexpr = gl.constexpr(WIDE_CHUNK)
_GROUPS: gl.constexpr = gl.constexpr(2)
_STAGED: gl.constexpr = gl.constexpr(WIDE_PART // WIDE_CHUNK)  # chunks of Q, the first, through which the output leaves
_LN2: gl.constexpr = gl.constexpr(math.log(2))


@gluon.jit
def _zero():
    # An offset of 0 that the compiler does not know. The matrix descriptors of a tile's 32 products are then not
    # computed ahead of the loop, where they would take more registers than there are.
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_keys(k_desc, work, kv_head, n, shared, form, CHUNKS: gl.constexpr):
    key = work.k_first + n * _KEYS
    for i in gl.static_range(CHUNKS):
        j = (i + _STAGED) % CHUNKS
        sync(FREE + j, form.PARTY)
        full = shared.k_full.index(j)
        mbarrier.expect(full, _KEYS * _CHUNK * 2)
        load(k_desc, [work.slot, kv_head, key, j * _CHUNK], full, shared.k.index(j))


@gluon.jit
def _load_queries(q_desc, work, begin: gl.constexpr, end: gl.constexpr, barriers: gl.constexpr, phase, shared,
                  CHUNKS: gl.constexpr):  # fmt: skip
    """Load chunks [begin, end) of the rows of both consumers, whose barriers begin at `barriers`."""
    for w in gl.static_range(_GROUPS):
        full = shared.q_full.index(barriers + w)
        mbarrier.wait(shared.q_free.index(barriers + w), phase)
        mbarrier.expect(full, _ROWS * (end - begin) * _CHUNK * 2)
        row = work.q_first + work.row + w * _ROWS
        for j in gl.static_range(begin, end):
            load(q_desc, [work.slot, work.head, row, j * _CHUNK], full, shared.q.index(w * CHUNKS + j))


@gluon.jit
def _produce(q_desc, k_desc, v_desc, counter, sizes, shared, form, CHUNKS: gl.constexpr, PARTS: gl.constexpr):
    """Load the tiles of queries, keys and values. In `sizes` each head counts PARTS times."""
    tiles = sizes.row_tiles * sizes.heads
    if not form.PACKED:
        tiles *= sizes.batches
    zero = gl.program_id(0) - gl.program_id(0)
    box, box_phase, q_phase = 0, 1, 1
    tile = gl.program_id(0)
    while tile < tiles:
        found = work_of(tile, sizes, form)
        if found.row < 0:
            tile = draw_tile(counter, tiles)
        else:
            part, head = found.head % PARTS, found.head // PARTS
            work = Work(found.row, head, found.slot, found.q_first, found.q_length, found.k_first, found.k_length, part)
            box, box_phase = send(work, box, box_phase, shared, form)
            begin, end, _some = tile_keys(work, sizes, form)
            kv_head = head // sizes.share
            _load_keys(k_desc, work, kv_head, end - 1, shared, form, CHUNKS)
            _load_queries(q_desc, work, _STAGED, CHUNKS, _GROUPS, q_phase, shared, CHUNKS)
            _load_queries(q_desc, work, 0, _STAGED, 0, q_phase, shared, CHUNKS)
            q_phase ^= 1
            for n in range(end - 1, begin - 1, -1):
                # The next keys before this tile's values: their buffers are free first, and their scores come first.
                if n > begin:
                    _load_keys(k_desc, work, kv_head, n - 1, shared, form, CHUNKS)
                else:
                    tile = draw_tile(counter, tiles)
                sync(FREE + CHUNKS, form.PARTY)
                v_full = shared.v_full.index(0)
                mbarrier.expect(v_full, _KEYS * _PART * 2)
                load(v_desc, [work.slot, kv_head, work.k_first + n * _KEYS, part * _PART], v_full, shared.v.index(0))
    none = Work(zero - 1, zero, zero, zero, zero, zero, zero, zero)
    send(none, box, box_phase, shared, form)
    for j in gl.static_range(CHUNKS + 1):  # the last arrivals, for which nothing is loaded
        sync(FREE + j, form.PARTY)


@gluon.jit
def _scores(shared, phase, group: gl.constexpr, form, CHUNKS: gl.constexpr):
    """Begin Q Kᵀ, chunk by chunk as they are loaded."""
    zero = _zero()
    s = gl.zeros([_ROWS, _KEYS], gl.float32, form.SCORES)
    for i in gl.static_range(CHUNKS):
        j = (i + _STAGED) % CHUNKS
        mbarrier.wait(shared.k_full.index(j), phase)
        q = shared.q.index(zero + (group * CHUNKS + j)).reshape([_ROWS, _CHUNK])
        k = shared.k.index(zero + j).reshape([_KEYS, _CHUNK])
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=i != 0, is_async=True)
    return s


@gluon.jit
def _complete_scores(s, after: gl.constexpr, form, CHUNKS: gl.constexpr):
    """Wait for the scores, begun before `after` more products, and return each chunk's buffer once it has been read."""
    for i in gl.static_range(CHUNKS):
        s = warpgroup_mma_wait(CHUNKS - 1 - i + after, deps=[s])
        arrive(FREE + (i + _STAGED) % CHUNKS, form.PARTY)
    return s


@gluon.jit
def _values(held, acc, shared, phase, form):
    """Begin acc += P V."""
    mbarrier.wait(shared.v_full.index(0), phase)
    v = shared.v.index(0).reshape([_KEYS, _PART])
    return warpgroup_mma(operand(held, form, shared.v.dtype), v, acc, is_async=True)


@gluon.jit
def _exponentials(s, row_max, limits, n, scale, masked: gl.constexpr, form):
    """Return a tile's weights, the new maxima and the base of the weights."""
    if masked:
        s = masked_scores(s, limits, n, form)
    row_max = gl.maximum(row_max, row_maximum(s, form) * scale)
    base = row_max
    if masked:
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
    return gl.exp2(s * scale - gl.expand_dims(base, 1)), row_max, base


@gluon.jit
def _passed(count, phase, shared, form, CHUNKS: gl.constexpr):
    """Let key tiles pass that only the other consumer needs."""
    for _ in range(count):
        for j in gl.static_range(CHUNKS):
            mbarrier.wait(shared.k_full.index(j), phase)
            arrive(FREE + j, form.PARTY)
        mbarrier.wait(shared.v_full.index(0), phase)
        arrive(FREE + CHUNKS, form.PARTY)
        phase ^= 1
    return phase


@gluon.jit
def _step(state, phase, limits, n, scale, shared, masked: gl.constexpr, group: gl.constexpr, form,
          CHUNKS: gl.constexpr):  # fmt: skip
    """Process one more key tile: its scores and softmax, while the values of the tile before are added."""
    s = _scores(shared, phase, group, form, CHUNKS)
    acc = rescale_rows(state.acc, state.alpha, form)
    fresh = _values(state.held, acc, shared, phase ^ 1, form)
    s = _complete_scores(s, 1, form, CHUNKS)
    p, row_max, base = _exponentials(s, state.row_max, limits, n, scale, masked, form)
    alpha = gl.exp2(state.row_max - base)
    row_sum = state.row_sum * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout)), 1)
    row_sum = row_sum + lane_sum(p, _KEYS)
    fresh = warpgroup_mma_wait(0, deps=[fresh])
    arrive(FREE + CHUNKS, form.PARTY)
    # After the wait: until then the product reads the registers of the weights before.
    return State(fresh, hold(p, form, shared.v.dtype), alpha, row_max, row_sum)


@gluon.jit
def _write(acc, state, box, o_desc, out, lse, stride_h, stride_s, sizes, shared, group: gl.constexpr, form,
           CHUNKS: gl.constexpr):  # fmt: skip
    """Write the tile's results, normalised, to memory, by way of where the queries were."""
    work = read(box, shared)
    row = work.row + group * _ROWS
    rows = row + line_numbers(form.ROW, form)
    valid = ((rows < work.q_length) & (work.k_length >= 0)).to(gl.int32)
    acc, row_lse = normalize_rows(acc, state.row_max, state.row_sum, None, valid, 1.0, form)
    if lse is not None:
        if work.split == 0:
            slot = work.slot
            last = sizes.seq_q
            if form.PACKED:
                last = work.q_length
            first = (slot * sizes.heads + work.head).to(gl.int64) * sizes.seq_q + work.q_first
            gl.store(lse + first + rows, row_lse, mask=rows < last)
    first, second = split_columns(acc, _PART)
    column = work.split * _PART
    place = shared.q.index(group * CHUNKS)
    store_part(first, column, o_desc, out, stride_h, stride_s, work, row, place, form)
    if column + _CHUNK < o_desc.shape[3]:
        place = shared.q.index(group * CHUNKS + 1)
        store_part(second, column + _CHUNK, o_desc, out, stride_h, stride_s, work, row, place, form)


@gluon.jit
def _consume(o_desc, out, lse, stride_h, stride_s, scale, sizes, shared, group: gl.constexpr, form,
             CHUNKS: gl.constexpr):  # fmt: skip
    """Compute and write one warp group's rows of each tile."""
    for j in gl.static_range(CHUNKS + 1):  # every buffer starts free
        arrive(FREE + j, form.PARTY)
    zero = gl.to_tensor(0)
    phase, q_phase, box, box_phase = zero, zero, zero, zero
    mbarrier.wait(shared.mail_full.index(box), box_phase)
    work = read(box, shared)
    while work.row >= 0:
        row = work.row + group * _ROWS
        _first, all_end, _some = tile_keys(work, sizes, form)
        _begin, _clean, unclean, end = key_tiles(row, _ROWS, work, sizes, form)
        end = gl.minimum(end, all_end)
        phase = _passed(all_end - end, phase, shared, form, CHUNKS)
        seen, position = last_seen(work, sizes, form), position_of(work, form)
        limits = row_limits(work, row + line_numbers(form.ROW, form), seen, position, sizes, form)
        mbarrier.wait(shared.q_full.index(_GROUPS + group), q_phase)
        mbarrier.wait(shared.q_full.index(group), q_phase)
        s = _complete_scores(_scores(shared, phase, group, form, CHUNKS), 0, form, CHUNKS)
        n = end - 1
        lowest = gl.full([_ROWS], -float("inf"), gl.float32, form.ROW)
        p, row_max, _base = _exponentials(s, lowest, limits, n, scale, True, form)
        acc = gl.zeros([_ROWS, _PART], gl.float32, form.OUTPUT)
        alpha = gl.full([_ROWS], 1.0, gl.float32, form.ROW)
        state = State(acc, hold(p, form, shared.v.dtype), alpha, row_max, lane_sum(p, _KEYS))
        if form.UNSEEN:
            if end * _KEYS > seen:
                mbarrier.wait(shared.v_full.index(0), phase)
                clear(shared.v.index(0).reshape([_KEYS, _PART]), 0, seen - n * _KEYS, n, limits, form)
        phase ^= 1
        if form.RIGHT:
            for _ in range(n - unclean):
                n -= 1
                state = _step(state, phase, limits, n, scale, shared, True, group, form, CHUNKS)
                phase ^= 1
        for _ in range(n):
            state = _step(state, phase, limits, n, scale, shared, False, group, form, CHUNKS)
            phase ^= 1
        # No score is left: the next tile's queries come to the chunks that the output does not pass through.
        mbarrier.arrive(shared.q_free.index(_GROUPS + group), count=1)
        acc = rescale_rows(state.acc, state.alpha, form)
        acc = warpgroup_mma_wait(0, deps=[_values(state.held, acc, shared, phase ^ 1, form)])
        arrive(FREE + CHUNKS, form.PARTY)
        _write(acc, state, box, o_desc, out, lse, stride_h, stride_s, sizes, shared, group, form, CHUNKS)
        tma.store_wait(0)
        mbarrier.arrive(shared.q_free.index(group), count=1)
        mbarrier.arrive(shared.mail_free.index(box), count=1)
        box, box_phase = following(box, box_phase, BOXES)
        q_phase ^= 1
        mbarrier.wait(shared.mail_full.index(box), box_phase)
        work = read(box, shared)


@gluon.jit(
    do_not_specialize=[
        "scale", "stride_h", "stride_s", "batches", "heads", "share", "seq_q", "seq_k", "row_tiles", "together",
    ]
)  # fmt: skip
def wide_forward(
    q_desc, k_desc, v_desc, o_desc, out, lse, lengths_q, lengths_k, counter, scale, stride_h, stride_s, batches, heads,
    share, seq_q, seq_k, row_tiles, together, CHUNKS: gl.constexpr, PARTS: gl.constexpr, RIGHT: gl.constexpr,
    TOP_LEFT: gl.constexpr, VARYING: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """A persistent block. The number of blocks is anything up to the number of tiles.

    q_desc, k_desc, v_desc, o_desc  (B, H, S, D) by blocks of 64 rows and of WIDE_CHUNK columns, of v_desc WIDE_PART;
          packed tensors are one batch
    out, lse, lengths_q, lengths_k, counter, scale, stride_h, stride_s and the sizes as in kernel.py. CHUNKS and PARTS:
    chunks of the columns of Q and K, and parts of the output's. The other constants: Form (tile_scheduler.py)
    """
    form = Form(2, _KEYS, _PART, 1, RIGHT, False, TOP_LEFT, True, VARYING, VARYING != "none" or TOP_LEFT, False, False,
                False, True, False, True, False, 1, False, 2, 0, 1, _KEYS, _PART, False, False, _PART, _PART, False,
                False, False, False, False, "as_q", False, False, None, 0, 0, None)  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [_GROUPS * CHUNKS, 1, 1, _ROWS, _CHUNK], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [CHUNKS, 1, 1, _KEYS, _CHUNK], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, _KEYS, _PART], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], barriers)
    shared = ForwardSharedMemory(
        q_smem,
        k_smem,
        v_smem,
        q_smem,
        gl.allocate_shared_memory(gl.int64, [2 * _GROUPS, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [2 * _GROUPS, 1], barriers),
        k_full,
        gl.allocate_shared_memory(gl.int64, [1, 1], barriers),
        k_smem,
        k_full,
        k_full,
        gl.allocate_shared_memory(gl.int32, [BOXES * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [BOXES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [BOXES, 1], barriers),
    )
    for j in gl.static_range(2 * _GROUPS):
        mbarrier.init(shared.q_full.index(j), count=1)
        mbarrier.init(shared.q_free.index(j), count=1)
    for j in gl.static_range(CHUNKS):
        mbarrier.init(shared.k_full.index(j), count=1)
    mbarrier.init(shared.v_full.index(0), count=1)
    for j in gl.static_range(BOXES):
        mbarrier.init(shared.mail_full.index(j), count=1)
        mbarrier.init(shared.mail_free.index(j), count=_GROUPS)
    fence_async_shared()
    if lengths_q is None:
        lengths_q = counter  # not read
    if lengths_k is None:
        lengths_k = counter
    zero = batches - batches
    none = no_tensors(counter, zero)
    sizes = Sizes(lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, zero, zero, row_tiles, together, zero,
                  counter, zero, none, counter, zero, zero, zero, counter, zero, zero)  # fmt: skip
    parts = Sizes(lengths_q, lengths_k, batches, heads * PARTS, share, seq_q, seq_k, zero, zero, row_tiles, together,
                  zero, counter, zero, none, counter, zero, zero, zero, counter, zero, zero)  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (o_desc, out, lse, stride_h, stride_s, scale, sizes, shared, 0, form, CHUNKS)),
            (_consume, (o_desc, out, lse, stride_h, stride_s, scale, sizes, shared, 1, form, CHUNKS)),
            (_produce, (q_desc, k_desc, v_desc, counter, parts, shared, form, CHUNKS, PARTS)),
        ],
        [4, 1],
        [CONSUMER, PRODUCER],
    )
