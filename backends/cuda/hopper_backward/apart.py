"""The consumers of the Hopper backward as two warp groups of 64 keys each, half a step apart.

One group's products run while the other computes exponentials. Both meet once a step, at different places of theirs:

    group 0   dQ(i-1) dV(i) dK(i)            | S(i+1) dP(i+1) exp dS(i+1)   meet
    group 1   S(i) dP(i) exp dS(i)           | dQ(i) dV(i) dK(i)            meet

dQ needs both groups' dS. At meeting i group 0 has stored dS(i), and group 1 has ended step i - 1: then group 0 may
compute dQ(i-1), and group 1 dQ(i) as soon as its own dS(i) is stored. dS has two buffers: group 0 stores dS(i+1) while
group 1 reads dS(i). Group 1 read dS(i-1), whose buffer it is, before meeting i.

Of a tile's dQ each group computes 64 rows (ROWS = 128), or half the columns of 64 rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portattn.backends.cuda.gluon_names import arrive, sync
from portattn.backends.cuda.hopper_backward.consumer import (
    DO_FREE,
    PARTY,
    Q_FREE,
    THREADS,
    TOGETHER,
    clear_rows_outside,
    rows_stored,
)
from portattn.backends.cuda.hopper_backward.tile_scheduler import first_seen, query_tiles, work_of
from portattn.backends.cuda.hopper_forward.tile_scheduler import attention_mask, last_seen

# Named barriers beside consumer.py's: half g of a tile of dQ lies in shared memory; its memory may be written again.
HALF_FULL: gl.constexpr = gl.constexpr(6)  # 6, 7
HALF_FREE: gl.constexpr = gl.constexpr(13)  # 13, 14
MEETING: gl.constexpr = gl.constexpr(15)
HALF_PARTY: gl.constexpr = gl.constexpr(128 + 32)  # a group, and the writer
CONSUMER: gl.constexpr = gl.constexpr(240)  # registers of a thread
HALF: gl.constexpr = gl.constexpr(64)  # keys of a group


@gluon.jit
def _masked(p, m, group: gl.constexpr, work, sizes, form):
    """Return P of a tile in which some row does not see all of the keys."""
    first = work.start + group * HALF
    keys = gl.expand_dims(first + gl.arange(0, HALF, gl.SliceLayout(1, form.SCORES)), 1)
    rows = gl.arange(0, form.ROWS, gl.SliceLayout(0, form.SCORES))
    rows = gl.expand_dims(m * form.ROWS + rows, 0)
    return gl.where(attention_mask(keys, rows, work, sizes, form), p, 0.0)


@gluon.jit
def _gradients_of_scores(i, m, work, scale, sizes, shared, group: gl.constexpr, masked: gl.constexpr, form):
    """Compute P and dS of a tile, as operands of dV and dK, and store dS. dP begins at -delta."""
    dtype: gl.constexpr = shared.k.dtype
    slot, phase = i & 1, (i >> 1) & 1
    k = shared.k.reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
    v = shared.v.reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
    q = shared.q.index(slot).reshape([form.ROWS, form.DIM]).permute((1, 0))
    do = shared.do.index(slot).reshape([form.ROWS, form.DIM]).permute((1, 0))
    zeros = gl.zeros([HALF, form.ROWS], gl.float32, form.SCORES)
    mbarrier.wait(shared.q_full.index(slot), phase)
    s = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
    mbarrier.wait(shared.do_full.index(slot), phase)
    dp = warpgroup_mma(v, do, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * scale - shared.statistics.index(slot).slice(0, 1).load(form.SCORES))
    if masked:
        p = _masked(p, m, group, work, sizes, form)
    weights = gl.convert_layout(p.to(dtype), form.WEIGHTS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    delta = shared.statistics.index(slot).slice(1, 1).load(form.SCORES)
    ds = (p * (dp - delta)).to(dtype)
    shared.ds.index(i & 1).slice(group * HALF, HALF).store(ds)
    fence_async_shared()
    return weights, gl.convert_layout(ds, form.WEIGHTS)


@gluon.jit
def _dq(buffer, shared, group: gl.constexpr, form):
    """Begin the group's half of dQ of the tile whose dS lies in a buffer."""
    ds = shared.ds.index(buffer).permute((1, 0))
    k = shared.k.reshape([form.KEYS, form.DIM])
    if form.ROWS == 128:
        zeros = gl.zeros([64, form.DIM], gl.float32, form.QUERIES)
        dq = warpgroup_mma(ds.slice(group * 64, 64), k, zeros, use_acc=False, is_async=True)
    else:
        half: gl.constexpr = form.DIM // 2
        zeros = gl.zeros([64, half], gl.float32, form.QUERIES)
        dq = warpgroup_mma(ds, k.slice(group * half, half, dim=1), zeros, use_acc=False, is_async=True)
    return dq


@gluon.jit
def _put(dq, shared, group: gl.constexpr, form):
    """Half a tile of dQ into shared memory, in consumer.put's order."""
    columns: gl.constexpr = form.DIM // 16
    rows: gl.constexpr = form.ROWS * form.DIM // 512
    if form.ROWS == 128:
        x = gl.permute(gl.reshape(dq, [4, 2, 8, 2, columns, 4, 2]), (3, 4, 0, 2, 5, 1, 6))
    else:
        x = gl.permute(gl.reshape(dq, [4, 2, 8, columns, 4, 2]), (3, 0, 2, 4, 1, 5))
    sync(HALF_FREE + group, HALF_PARTY)
    shared.dq.slice(group * rows, rows).store(gl.reshape(x, [rows, 256]))
    fence_async_shared()
    arrive(HALF_FULL + group, HALF_PARTY)


@gluon.jit
def _step(i, m, dk, dv, work, scale, sizes, shared, group: gl.constexpr, masked: gl.constexpr, form):
    slot = i & 1
    if group == 1:
        sync(MEETING, THREADS)
    weights, ds = _gradients_of_scores(i, m, work, scale, sizes, shared, group, masked, form)
    if group == 0:
        sync(MEETING, THREADS)
        dq = _dq((i & 1) ^ 1, shared, group, form)
    else:
        dq = _dq(i & 1, shared, group, form)
    dv = warpgroup_mma(weights, shared.do.index(slot).reshape([form.ROWS, form.DIM]), dv, is_async=True)
    dk = warpgroup_mma(ds, shared.q.index(slot).reshape([form.ROWS, form.DIM]), dk, is_async=True)
    dq = warpgroup_mma_wait(2, deps=[dq])
    if group == 0:
        if i > 0:
            _put(dq, shared, group, form)
    else:
        _put(dq, shared, group, form)
    dv = warpgroup_mma_wait(1, deps=[dv])
    arrive(DO_FREE + slot, PARTY)
    dk = warpgroup_mma_wait(0, deps=[dk])
    arrive(Q_FREE + slot, PARTY)
    return dk, dv


@gluon.jit
def _tiles_of_head(i, dk, dv, tiles, work, scale, sizes, shared, group: gl.constexpr, form):
    """Do the steps of a query head, those with a mask in loops of their own: a branch would take registers from all."""
    for m in range(tiles.begin, tiles.clean):
        dk, dv = _step(i, m, dk, dv, work, scale, sizes, shared, group, True, form)
        i += 1
    for m in range(tiles.clean, tiles.unclean):
        dk, dv = _step(i, m, dk, dv, work, scale, sizes, shared, group, False, form)
        i += 1
    if form.LEFT:
        for m in range(tiles.unclean, tiles.end):
            dk, dv = _step(i, m, dk, dv, work, scale, sizes, shared, group, True, form)
            i += 1
    return i, dk, dv


@gluon.jit
def consume_half(dk_desc, dv_desc, grad_k, grad_v, dk_strides, dv_strides, scale, factor, sizes, shared,
                 group: gl.constexpr, form):  # fmt: skip
    """Compute dK and dV of half a block's keys, and half of each tile of dQ, by four warps."""
    dtype: gl.constexpr = shared.k.dtype
    gl.static_assert(form.STAGES == 2)
    for j in gl.static_range(form.STAGES):  # every buffer starts free
        arrive(Q_FREE + j, PARTY)
        arrive(DO_FREE + j, PARTY)
    work = work_of(gl.program_id(0), sizes, form, form.KEYS, True, 4)
    tiles = query_tiles(work, sizes, form)
    steps = (tiles.end - tiles.begin) * sizes.share
    k = shared.k.reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
    v = shared.v.reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
    mbarrier.wait(shared.kv_full.index(0), 0, pred=steps > 0)
    mbarrier.wait(shared.kv_full.index(1), 0, pred=steps > 0)
    if form.UNSEEN:
        first = work.start + group * HALF
        begin, end = first_seen(work, sizes, form) - first, last_seen(work, sizes, form) - first
        if (steps > 0) & ((begin > 0) | (end < HALF)):  # what no query sees may be NaN, and 0·NaN is NaN
            clear_rows_outside(k, begin, end, HALF, form.DIM, 4)
            clear_rows_outside(v, begin, end, HALF, form.DIM, 4)
            fence_async_shared()
        sync(TOGETHER, THREADS)
    dk = gl.zeros([HALF, form.DIM], gl.float32, form.SUMS)
    dv = gl.zeros([HALF, form.DIM], gl.float32, form.SUMS)
    if not form.MASKED:
        for i in range(steps):
            dk, dv = _step(i, i, dk, dv, work, scale, sizes, shared, group, False, form)
    else:
        i = steps - steps
        for _head in range(sizes.share):
            i, dk, dv = _tiles_of_head(i, dk, dv, tiles, work, scale, sizes, shared, group, form)
    sync(TOGETHER, THREADS)  # the last dS of both groups is stored
    if group == 0:
        if steps > 0:
            _put(warpgroup_mma_wait(0, deps=[_dq((steps - 1) & 1, shared, group, form)]), shared, group, form)
    sync(TOGETHER, THREADS)  # K and V have been read for the last time
    v.store(dv.to(dtype))
    k.store((dk * factor).to(dtype))
    fence_async_shared()
    sync(TOGETHER, THREADS)
    # What is the block's is computed again, not kept in registers over the loops, which need all that there are.
    work = work_of(gl.program_id(0), sizes, form, form.KEYS, True, 4)
    rows = work.rows - group * HALF
    if rows > 0:
        at = work.k_first + work.start + group * HALF
        whole_k, whole_v = shared.k.slice(group * HALF, HALF, dim=2), shared.v.slice(group * HALF, HALF, dim=2)
        rows_stored(whole_v, v, dv_desc, grad_v, dv_strides[0], dv_strides[1], work.slot, work.head, at, rows,
                    HALF, form.DIM, form.VARYING, 4)  # fmt: skip
        rows_stored(whole_k, k, dk_desc, grad_k, dk_strides[0], dk_strides[1], work.slot, work.head, at, rows,
                    HALF, form.DIM, form.VARYING, 4)  # fmt: skip
