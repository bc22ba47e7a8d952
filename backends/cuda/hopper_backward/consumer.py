"""The consumer of the Hopper backward: eight warps, which compute all five products of each query tile.

    S = K Qᵀ    P = exp(S - LSE)    dV += P dO    dP = V dOᵀ    dS = P (dP - delta)    dK += dS Q    dQ = dSᵀ K

Scores are transposed, so that P and dS are operands of dV and dK as they lie in registers. The order of the statements
of a step is its schedule; which one is best depends on the width (variant.BackwardSchedule).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portattn.backends.cuda.gluon_names import arrive, store, sync
from portattn.backends.cuda.hopper_backward.block_lists import (
    clear_idle_rows,
    hidden_keys,
    listed_steps,
    read_word,
    where_seen,
)
from portattn.backends.cuda.hopper_backward.tile_scheduler import (
    BackwardState,
    block_number,
    first_seen,
    member_of,
    query_tiles,
    tile_at,
    work_of,
)
from portattn.backends.cuda.hopper_forward.fragments import clear_rows, final_scores, following, with_derivative
from portattn.backends.cuda.hopper_forward.tile_scheduler import attention_mask, last_seen


@gluon.jit
def rows_stored(place, flat, desc, pointer, stride_h, stride_s, slot, head, first, rows, ROWS: gl.constexpr,
                DIM: gl.constexpr, VARYING: gl.constexpr):  # fmt: skip
    """Store rows of shared memory to global memory, by eight warps.

    The last rows of a packed sequence are stored through pointers, so that the next sequence's rows keep their values.

    place, flat  the same memory as [1, 1, ROWS, DIM] and as [ROWS, DIM], written and fenced
    pointer  the tensor of `desc`, with its strides in steps of 8 elements
    rows     rows that are left in the sequence
    """
    if VARYING != "packed" or rows >= ROWS:
        store(desc, [slot, head, first, 0], place)
        tma.store_wait(0)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [8, 1], [1, 0])
        # In steps of 8 columns, which heads and strides have too, so that 16 bytes are stored at a time.
        start = pointer + (first.to(gl.int64) * stride_s + head.to(gl.int64) * stride_h) * 8
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = gl.arange(0, 16, gl.SliceLayout(0, layout))
        offsets = gl.expand_dims(row * stride_s * 8, 1) + gl.expand_dims(column, 0)
        inside = gl.expand_dims(row < rows, 1)
        for j in gl.static_range(DIM // 16):
            there = inside & gl.expand_dims(column // 8 < desc.shape[3] // 8 - j * 2, 0)
            gl.store(start + (offsets + j * 16), flat.slice(j * 16, 16, dim=1).load(layout), mask=there)


@gluon.jit
def clear_rows_outside(place, first, end, ROWS: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr):
    """Clear the rows of shared memory (ROWS, DIM) before `first` and from `end` on, by so many warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    clear_rows(place, (row >= first) & (row < end), DIM)


# Named barriers: all of the consumer; a tile of dQ lies in shared memory; that memory may be written again; buffer b of
# Q, and of dO, may be loaded again.
TOGETHER: gl.constexpr = gl.constexpr(5)
DQ_FULL: gl.constexpr = gl.constexpr(6)
DQ_FREE: gl.constexpr = gl.constexpr(7)
Q_FREE: gl.constexpr = gl.constexpr(8)  # 8..10
DO_FREE: gl.constexpr = gl.constexpr(11)  # 11..13
THREADS: gl.constexpr = gl.constexpr(256)
PARTY: gl.constexpr = gl.constexpr(THREADS.value + 32)  # they, and the producer or the writer


@gluon.jit
def _scores(slot, shared, form):
    """Begin S of a tile."""
    k = shared.k.reshape([form.KEYS, form.DIM])
    q = shared.q.index(slot).reshape([form.ROWS, form.DIM]).permute((1, 0))
    zeros = gl.zeros([form.KEYS, form.ROWS], gl.float32, form.SCORES)
    return warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)


@gluon.jit
def _dp(slot, shared, form):
    """Begin dP of a tile."""
    v = shared.v.reshape([form.KEYS, form.DIM])
    do = shared.do.index(slot).reshape([form.ROWS, form.DIM]).permute((1, 0))
    zeros = gl.zeros([form.KEYS, form.ROWS], gl.float32, form.SCORES)
    return warpgroup_mma(v, do, zeros, use_acc=False, is_async=True)


@gluon.jit
def _dq(shared, form):
    """Begin dQ of the tile whose dS lies in shared memory."""
    k = shared.k.reshape([form.KEYS, form.DIM])
    zeros = gl.zeros([form.ROWS, form.DIM], gl.float32, form.QUERIES)
    return warpgroup_mma(shared.ds.permute((1, 0)), k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _places(m, work, form):
    """Return a tile's query rows and keys, which broadcast with its scores."""
    keys = gl.expand_dims(work.start + gl.arange(0, form.KEYS, gl.SliceLayout(1, form.SCORES)), 1)
    rows = gl.expand_dims(m * form.ROWS + gl.arange(0, form.ROWS, gl.SliceLayout(0, form.SCORES)), 0)
    return rows, keys


@gluon.jit
def _masked(p, m, work, sizes, form):
    """Return P of a tile in which some row does not see all of the keys."""
    rows, keys = _places(m, work, form)
    keep = attention_mask(keys, rows, work, sizes, form)
    if form.SCORE_MOD is not None:  # of a row that is not there it may make infinity
        keep = keep & (rows < work.q_length)
    return gl.where(keep, p, 0.0)


@gluon.jit
def _weights(s, slot, tile, tiles, work, scales, sizes, shared, form):
    """Return P of a tile, and P times the derivative of the scores by the products' multiples."""
    if form.LISTED_K:
        m, head, part = tile
    else:
        m, head = tile
    scale, softcap = scales
    rows, keys = m, m
    if form.SCORE_MOD is not None:
        rows, keys = _places(m, work, form)
    final = final_scores(s, work.slot, head, rows, keys, scale, softcap, form)
    p = gl.exp2(final - shared.statistics.index(slot).slice(0, 1).load(form.SCORES))
    if form.LISTED_K:
        if form.SCORE_MOD is not None:
            part = part | (m * form.ROWS + form.ROWS > work.q_length)
        if part:
            p = where_seen(p, work.start, form.KEYS, m, head, work, sizes, form)
    elif form.MASKED or form.SCORE_MOD is not None:
        # A branch, not a loop of its own for masked tiles: accumulators that go from loop to loop are spilled.
        some = m < tiles.clean
        if form.LEFT:
            some = some | (m >= tiles.unclean)
        if form.SCORE_MOD is not None:
            some = some | (m * form.ROWS + form.ROWS > work.q_length)
        if some:
            p = _masked(p, m, work, sizes, form)
    return p, with_derivative(p, s, final, work.slot, head, rows, keys, scale, softcap, form)


@gluon.jit
def put(dq, shared, form):
    """A tile of dQ into shared memory, for the writer: a lane's registers side by side, lanes side by side, so that
    banks do not conflict. auxiliary_kernels.query_gradients undoes the order."""
    columns: gl.constexpr = form.DIM // 16
    tiles: gl.constexpr = form.ROWS // 64
    x = gl.reshape(dq, [tiles, 4, 2, 8, 2, columns, 4, 2])
    x = gl.permute(x, (0, 4, 5, 1, 3, 6, 2, 7))
    sync(DQ_FREE, PARTY)
    shared.dq.store(gl.reshape(x, [form.ROWS * form.DIM // 256, 256]))
    fence_async_shared()
    arrive(DQ_FULL, PARTY)


@gluon.jit
def _plain(state, tile, more, tiles, work, scales, sizes, shared, form):
    """Process one tile after the other, with dQ before dK."""
    dtype: gl.constexpr = shared.k.dtype
    slot = state.slot
    mbarrier.wait(shared.q_full.index(slot), state.phase)
    s = _scores(slot, shared, form)
    if form.AFTER:
        s = warpgroup_mma_wait(0, deps=[s])
        p, slope = _weights(s, slot, tile, tiles, work, scales, sizes, shared, form)
        mbarrier.wait(shared.do_full.index(slot), state.phase)
        dp = _dp(slot, shared, form)
    else:
        mbarrier.wait(shared.do_full.index(slot), state.phase)
        dp = _dp(slot, shared, form)
        s = warpgroup_mma_wait(1, deps=[s])
        p, slope = _weights(s, slot, tile, tiles, work, scales, sizes, shared, form)
    delta = shared.statistics.index(slot).slice(1, 1).load(form.SCORES)
    do = shared.do.index(slot).reshape([form.ROWS, form.DIM])
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), form.WEIGHTS), do, state.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (slope * (dp - delta)).to(dtype)
    q = shared.q.index(slot).reshape([form.ROWS, form.DIM])
    if form.MESSAGES:
        shared.ds.store(ds)
        fence_async_shared()
        dq = _dq(shared, form)
        dk = warpgroup_mma(gl.convert_layout(ds, form.WEIGHTS), q, state.dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv])
        arrive(DO_FREE + slot, PARTY)
        dq = warpgroup_mma_wait(1, deps=[dq])
        put(dq, shared, form)
    else:
        dk = warpgroup_mma(gl.convert_layout(ds, form.WEIGHTS), q, state.dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv])
        arrive(DO_FREE + slot, PARTY)
    dk = warpgroup_mma_wait(0, deps=[dk])
    arrive(Q_FREE + slot, PARTY)
    slot, phase = following(slot, state.phase, form.STAGES)
    return BackwardState(state.s, dk, dv, slot, phase)


@gluon.jit
def _late(state, tile, more, tiles, work, scales, sizes, shared, form):
    """dQ of the tile before under this tile's exponentials; the next tile's scores under dK. For narrow heads, whose
    accumulators leave registers for the scores."""
    dtype: gl.constexpr = shared.k.dtype
    slot = state.slot
    mbarrier.wait(shared.do_full.index(slot), state.phase)
    dp = _dp(slot, shared, form)
    dq = _dq(shared, form)
    p, slope = _weights(state.s, slot, tile, tiles, work, scales, sizes, shared, form)
    delta = shared.statistics.index(slot).slice(1, 1).load(form.SCORES)
    do = shared.do.index(slot).reshape([form.ROWS, form.DIM])
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), form.WEIGHTS), do, state.dv, is_async=True)
    dp, dq = warpgroup_mma_wait(1, deps=[dp, dq])
    put(dq, shared, form)
    ds = (slope * (dp - delta)).to(dtype)
    shared.ds.store(ds)
    fence_async_shared()
    q = shared.q.index(slot).reshape([form.ROWS, form.DIM])
    dk = warpgroup_mma(gl.convert_layout(ds, form.WEIGHTS), q, state.dk, is_async=True)
    following_slot, phase = following(slot, state.phase, form.STAGES)
    mbarrier.wait(shared.q_full.index(following_slot), phase, pred=more)
    s = _scores(following_slot, shared, form)
    dv = warpgroup_mma_wait(2, deps=[dv])
    arrive(DO_FREE + slot, PARTY)
    dk = warpgroup_mma_wait(1, deps=[dk])
    arrive(Q_FREE + slot, PARTY)
    s = warpgroup_mma_wait(0, deps=[s])
    return BackwardState(s, dk, dv, following_slot, phase)


@gluon.jit
def _beside(state, tile, more, tiles, work, scales, sizes, shared, form):
    """P and dS by way of shared memory, each warp group half the columns of dK and dV: for wide heads, whose dQ another
    kernel computes."""
    dtype: gl.constexpr = shared.k.dtype
    slot = state.slot
    mbarrier.wait(shared.do_full.index(slot), state.phase)
    dp = _dp(slot, shared, form)
    p, slope = _weights(state.s, slot, tile, tiles, work, scales, sizes, shared, form)
    delta = shared.statistics.index(slot).slice(1, 1).load(form.SCORES)
    shared.p.store(p.to(dtype))
    dp = warpgroup_mma_wait(0, deps=[dp])
    shared.ds.store((slope * (dp - delta)).to(dtype))
    fence_async_shared()
    dv = warpgroup_mma(shared.p, shared.do.index(slot).reshape([form.ROWS, form.DIM]), state.dv, is_async=True)
    dk = warpgroup_mma(shared.ds, shared.q.index(slot).reshape([form.ROWS, form.DIM]), state.dk, is_async=True)
    following_slot, phase = following(slot, state.phase, form.STAGES)
    mbarrier.wait(shared.q_full.index(following_slot), phase, pred=more)
    s = _scores(following_slot, shared, form)
    dv = warpgroup_mma_wait(2, deps=[dv])
    arrive(DO_FREE + slot, PARTY)
    dk = warpgroup_mma_wait(1, deps=[dk])
    arrive(Q_FREE + slot, PARTY)
    s = warpgroup_mma_wait(0, deps=[s])
    sync(TOGETHER, THREADS)  # P and dS may be overwritten
    return BackwardState(s, dk, dv, following_slot, phase)


@gluon.jit
def _step(state, tile, more, tiles, work, scales, sizes, shared, form):
    if form.BESIDE:
        state = _beside(state, tile, more, tiles, work, scales, sizes, shared, form)
    elif form.LATE:
        state = _late(state, tile, more, tiles, work, scales, sizes, shared, form)
    else:
        state = _plain(state, tile, more, tiles, work, scales, sizes, shared, form)
    return state


@gluon.jit
def _listed_tile(state, work, shared, sizes, form):
    """Return the tile of the next step, whose Q and dO then hold no NaN of rows that attend nothing."""
    slot = state.slot
    if not form.LATE:
        mbarrier.wait(shared.q_full.index(slot), state.phase)
    m, head, part, idle = read_word(slot, work, shared, sizes, 8)
    if form.MASK_MOD is not None:
        if idle:
            mbarrier.wait(shared.do_full.index(slot), state.phase)
            q, do = shared.q.index(slot), shared.do.index(slot)
            clear_idle_rows(q.reshape([form.ROWS, form.DIM]), do.reshape([form.ROWS, form.DIM]),
                            shared.statistics.index(slot), form, 8)  # fmt: skip
            sync(TOGETHER, THREADS)
    return m, head, part


@gluon.jit
def _tile(i, m, tiles, work, sizes, form):
    """Return the number of the query tile in step i, and its head's."""
    head = work.head * sizes.share
    if form.GROUPED:
        head += member_of(i, tiles.end - tiles.begin, sizes, form)
    if form.STAGGER:
        m = tile_at(m - tiles.begin, tiles, work.start // form.KEYS, form)
    return m, head


@gluon.jit
def consume(dk_desc, dv_desc, grad_k, grad_v, dk_strides, dv_strides, scales, factor, sizes, shared, form):
    """Compute dK, dV and dQ's tiles, by eight warps."""
    dtype: gl.constexpr = shared.k.dtype
    for j in gl.static_range(form.STAGES):  # every buffer starts free
        arrive(Q_FREE + j, PARTY)
        arrive(DO_FREE + j, PARTY)
    work = work_of(block_number(shared, form, 8), sizes, form, form.KEYS, True, 8)
    tiles = query_tiles(work, sizes, form)
    steps = (tiles.end - tiles.begin) * sizes.share
    if form.LISTED_K:
        steps = listed_steps(work, sizes, form)
    zero = gl.to_tensor(0)
    k, v = shared.k.reshape([form.KEYS, form.DIM]), shared.v.reshape([form.KEYS, form.DIM])
    mbarrier.wait(shared.kv_full.index(0), 0, pred=steps > 0)
    mbarrier.wait(shared.kv_full.index(1), 0, pred=steps > 0)
    if form.UNSEEN:
        begin, end = first_seen(work, sizes, form) - work.start, last_seen(work, sizes, form) - work.start
        if (steps > 0) & ((begin > 0) | (end < form.KEYS)):  # what no query sees may be NaN, and 0·NaN is NaN
            clear_rows_outside(k, begin, end, form.KEYS, form.DIM, 8)
            clear_rows_outside(v, begin, end, form.KEYS, form.DIM, 8)
        sync(TOGETHER, THREADS)
    if form.MASK_MOD is not None:
        if steps > 0:
            some, there = hidden_keys(0, form.KEYS, work, sizes, form, 8)
            if some:
                clear_rows(k, there, form.DIM)
                clear_rows(v, there, form.DIM)
        sync(TOGETHER, THREADS)
    dk = gl.zeros([form.KEYS, form.DIM], gl.float32, form.SUMS)
    dv = gl.zeros([form.KEYS, form.DIM], gl.float32, form.SUMS)
    if form.BESIDE or form.LATE:
        mbarrier.wait(shared.q_full.index(0), 0, pred=steps > 0)
        s = warpgroup_mma_wait(0, deps=[_scores(0, shared, form)])
    else:
        s = zero
    if form.LATE:  # the first step computes the dQ of no tile
        shared.ds.store(gl.zeros([form.KEYS, form.ROWS], dtype, form.SCORES))
        fence_async_shared()
    state = BackwardState(s, dk, dv, zero, zero)
    m = tiles.begin
    if form.TURNS:
        m = tiles.end - 1
    for i in range(steps):
        if form.STAGES == 2:  # two registers less
            state = BackwardState(state.s, state.dk, state.dv, i & 1, (i >> 1) & 1)
        tile = m, work.head
        if form.LISTED_K:
            tile = _listed_tile(state, work, shared, sizes, form)
        elif form.SCORE_MOD is not None:  # which otherwise plays no part where no mask is needed
            tile = _tile(i, m, tiles, work, sizes, form)
        state = _step(state, tile, i + 1 < steps, tiles, work, scales, sizes, shared, form)
        if form.TURNS:
            if form.GROUPED:  # the other heads' tiles first
                m = tiles.end - 1 - (i + 1) // sizes.share
            else:  # after the last tile none is visited; but without the choice ptxas spills in the loop (3.6.0)
                m = gl.where(m == tiles.begin, tiles.end, m) - 1
        else:
            m += 1
            if form.GROUPED:
                m = gl.where(m == tiles.end, tiles.begin, m)  # the next head
    if form.LATE:
        if steps > 0:
            put(warpgroup_mma_wait(0, deps=[_dq(shared, form)]), shared, form)
    sync(TOGETHER, THREADS)  # K and V have been read for the last time
    v.store(state.dv.to(dtype))
    k.store((state.dk * factor).to(dtype))
    fence_async_shared()
    sync(TOGETHER, THREADS)
    # What is the block's is computed again, not kept in registers over the loops, which need all that there are.
    work = work_of(block_number(shared, form, 8), sizes, form, form.KEYS, True, 8)
    if work.rows > 0:
        at = work.k_first + work.start
        rows_stored(shared.v, v, dv_desc, grad_v, dv_strides[0], dv_strides[1], work.slot, work.head, at, work.rows,
                    form.KEYS, form.DIM, form.VARYING)  # fmt: skip
        rows_stored(shared.k, k, dk_desc, grad_k, dk_strides[0], dk_strides[1], work.slot, work.head, at, work.rows,
                    form.KEYS, form.DIM, form.VARYING)  # fmt: skip
