"""dQ for sm_90a by a kernel of its own, in Gluon: a block per 128 query rows, over their keys from the last one back.

It computes S and dP again (kernel.py has computed them for dK and dV), and in exchange adds nothing to memory: its
results are repeatable bit by bit, and with 256 columns it is faster than additions, which the L2 bounds.

    producer   one warp: brings Q and dO, then tile after tile of K and V, through TMA
    consumer   eight warps: S = Q Kᵀ, dP = dO Vᵀ, dQ += dS K; dS is an operand of dQ as it lies in registers
"""

# No `from __future__ import annotations`: Triton reads the annotations of constants.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from portattn.backends.cuda.gluon_names import aggregate, arrive, load, sync
from portattn.backends.cuda.hopper_backward import STATISTICS_ROWS
from portattn.backends.cuda.hopper_backward.block_lists import no_lists
from portattn.backends.cuda.hopper_backward.consumer import clear_rows_outside, rows_stored
from portattn.backends.cuda.hopper_backward.tile_scheduler import BackwardSizes, first_seen, work_of
from portattn.backends.cuda.hopper_forward.fragments import final_scores, following, score_function, with_derivative
from portattn.backends.cuda.hopper_forward.tile_scheduler import attention_mask, key_tiles, last_seen

# Named barriers: all of the consumer; buffer b of K, and of V, may be loaded again.
TOGETHER: gl.constexpr = gl.constexpr(5)
K_FREE: gl.constexpr = gl.constexpr(6)  # 6, 7
V_FREE: gl.constexpr = gl.constexpr(8)  # 8, 9
THREADS: gl.constexpr = gl.constexpr(256)
PARTY: gl.constexpr = gl.constexpr(THREADS.value + 32)
_STATISTICS: gl.constexpr = gl.constexpr(STATISTICS_ROWS)


@aggregate
class QueriesForm:
    """Constants of a compiled kernel, named as in BackwardForm. K_STAGES and V_STAGES count buffers."""

    ROWS: gl.constexpr
    KEYS: gl.constexpr
    DIM: gl.constexpr
    K_STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    RIGHT: gl.constexpr
    LEFT: gl.constexpr
    TURNS: gl.constexpr
    TOP_LEFT: gl.constexpr
    RAGGED: gl.constexpr
    VARYING: gl.constexpr
    EDGES: gl.constexpr
    UNSEEN: gl.constexpr
    SOFTCAP: gl.constexpr
    SCORE_MOD: gl.constexpr
    SCORE_GRADIENT: gl.constexpr
    MASKED: gl.constexpr
    SCORES: gl.constexpr
    WEIGHTS: gl.constexpr
    SUMS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, KEYS, DIM, K_STAGES, V_STAGES, RIGHT, LEFT, TOP_LEFT, RAGGED, VARYING, EDGES, UNSEEN,
                 SOFTCAP, SCORE_MOD, SCORE_GRADIENT):  # fmt: skip
        self.ROWS, self.KEYS, self.DIM = map(gl.constexpr, (ROWS, KEYS, DIM))
        self.K_STAGES, self.V_STAGES = map(gl.constexpr, (K_STAGES, V_STAGES))
        self.RIGHT, self.LEFT, self.TOP_LEFT = map(gl.constexpr, (RIGHT, LEFT, TOP_LEFT))
        self.RAGGED, self.VARYING, self.TURNS = map(gl.constexpr, (RAGGED, VARYING, False))
        self.EDGES, self.UNSEEN, self.SOFTCAP = map(gl.constexpr, (EDGES, UNSEEN, SOFTCAP))
        self.SCORE_MOD, self.SCORE_GRADIENT = map(gl.constexpr, (SCORE_MOD, SCORE_GRADIENT))
        self.MASKED = gl.constexpr(RIGHT or LEFT or RAGGED or UNSEEN)
        sums = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DIM, 16])
        self.SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16]))
        self.WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2))
        self.SUMS = gl.constexpr(sums)


@aggregate
class QueriesSharedMemory:
    q: gl.shared_memory_descriptor  # [1, 1, ROWS, DIM]; in the end dQ
    do: gl.shared_memory_descriptor  # [1, 1, ROWS, DIM]
    k: gl.shared_memory_descriptor  # [K_STAGES][1, 1, KEYS, DIM]
    v: gl.shared_memory_descriptor  # [V_STAGES][1, 1, KEYS, DIM]
    rows_full: gl.shared_memory_descriptor  # [2] mbarriers: Q, dO
    k_full: gl.shared_memory_descriptor  # [K_STAGES]
    v_full: gl.shared_memory_descriptor  # [V_STAGES]

    @gluon.constexpr_function
    def __init__(self, q, do, k, v, rows_full, k_full, v_full):
        self.q, self.do, self.k, self.v = q, do, k, v
        self.rows_full, self.k_full, self.v_full = rows_full, k_full, v_full


@aggregate
class QueriesState:
    s: gl.tensor  # the tile's scores, complete
    dq: gl.tensor  # [ROWS, DIM] float32
    k_slot: gl.tensor
    k_phase: gl.tensor
    v_slot: gl.tensor
    v_phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, s, dq, k_slot, k_phase, v_slot, v_phase):
        self.s, self.dq = s, dq
        self.k_slot, self.k_phase, self.v_slot, self.v_phase = k_slot, k_phase, v_slot, v_phase


@gluon.jit
def _produce(q_desc, do_desc, k_desc, v_desc, sizes, shared, form):
    """Load query rows and key tiles, by one warp."""
    work = work_of(gl.program_id(0), sizes, form, form.ROWS, False, 1)
    begin, _clean, _unclean, end = key_tiles(work.start, form.ROWS, work, sizes, form)
    at, kv_head = work.q_first + work.start, work.head // sizes.share
    mbarrier.expect(shared.rows_full.index(0), form.ROWS * form.DIM * 2)
    load(q_desc, [work.slot, work.head, at, 0], shared.rows_full.index(0), shared.q)
    k_slot, v_slot = 0, 0
    for n in range(end - 1, begin - 1, -1):
        key = work.k_first + n * form.KEYS
        sync(K_FREE + k_slot, PARTY)
        k_full = shared.k_full.index(k_slot)
        mbarrier.expect(k_full, form.KEYS * form.DIM * 2)
        load(k_desc, [work.slot, kv_head, key, 0], k_full, shared.k.index(k_slot))
        if n == end - 1:
            mbarrier.expect(shared.rows_full.index(1), form.ROWS * form.DIM * 2)
            load(do_desc, [work.slot, work.head, at, 0], shared.rows_full.index(1), shared.do)
        sync(V_FREE + v_slot, PARTY)
        v_full = shared.v_full.index(v_slot)
        mbarrier.expect(v_full, form.KEYS * form.DIM * 2)
        load(v_desc, [work.slot, kv_head, key, 0], v_full, shared.v.index(v_slot))
        k_slot += 1
        if k_slot == form.K_STAGES:
            k_slot = 0
        v_slot += 1
        if v_slot == form.V_STAGES:
            v_slot = 0
    for j in gl.static_range(form.K_STAGES):  # the last arrivals, for which nothing is loaded
        sync(K_FREE + j, PARTY)
    for j in gl.static_range(form.V_STAGES):
        sync(V_FREE + j, PARTY)


@gluon.jit
def _scores(slot, shared, form):
    """Begin S of a tile."""
    q = shared.q.reshape([form.ROWS, form.DIM])
    k = shared.k.index(slot).reshape([form.KEYS, form.DIM]).permute((1, 0))
    zeros = gl.zeros([form.ROWS, form.KEYS], gl.float32, form.SCORES)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _places(n, work, form):
    """Return a tile's query rows and keys, which broadcast with its scores."""
    keys = gl.expand_dims(n * form.KEYS + gl.arange(0, form.KEYS, gl.SliceLayout(0, form.SCORES)), 0)
    rows = gl.expand_dims(work.start + gl.arange(0, form.ROWS, gl.SliceLayout(1, form.SCORES)), 1)
    return rows, keys


@gluon.jit
def _masked(ds, n, work, sizes, form):
    """Return dS of a tile that some row does not see whole. P and dP may both be NaN there."""
    rows, keys = _places(n, work, form)
    return gl.where(attention_mask(keys, rows, work, sizes, form), ds, 0.0)


@gluon.jit
def _step(state, n, more, clean, unclean, work, sizes, lse, delta, scales, shared, form):
    """Add dS K of a tile to dQ, and begin the next tile's scores."""
    dtype: gl.constexpr = shared.k.dtype
    mbarrier.wait(shared.v_full.index(state.v_slot), state.v_phase)
    do = shared.do.reshape([form.ROWS, form.DIM])
    v = shared.v.index(state.v_slot).reshape([form.KEYS, form.DIM]).permute((1, 0))
    zeros = gl.zeros([form.ROWS, form.KEYS], gl.float32, form.SCORES)
    dp = warpgroup_mma(do, v, zeros, use_acc=False, is_async=True)
    scale, softcap = scales
    rows, keys = n, n
    if form.SCORE_MOD is not None:
        rows, keys = _places(n, work, form)
    final = final_scores(state.s, work.slot, work.head, rows, keys, scale, softcap, form)
    p = gl.exp2(final - gl.expand_dims(lse, 1))
    p = with_derivative(p, state.s, final, work.slot, work.head, rows, keys, scale, softcap, form)
    dp = warpgroup_mma_wait(0, deps=[dp])
    arrive(V_FREE + state.v_slot, PARTY)
    ds = p * (dp - gl.expand_dims(delta, 1))
    if form.MASKED:
        if (n < clean) | (n >= unclean):
            ds = _masked(ds, n, work, sizes, form)
    k = shared.k.index(state.k_slot).reshape([form.KEYS, form.DIM])
    dq = warpgroup_mma(gl.convert_layout(ds.to(dtype), form.WEIGHTS), k, state.dq, is_async=True)
    k_slot, k_phase = following(state.k_slot, state.k_phase, form.K_STAGES)
    mbarrier.wait(shared.k_full.index(k_slot), k_phase, pred=more)
    s = _scores(k_slot, shared, form)
    dq = warpgroup_mma_wait(1, deps=[dq])
    arrive(K_FREE + state.k_slot, PARTY)
    s = warpgroup_mma_wait(0, deps=[s])
    v_slot, v_phase = following(state.v_slot, state.v_phase, form.V_STAGES)
    return QueriesState(s, dq, k_slot, k_phase, v_slot, v_phase)


@gluon.jit
def _statistics(statistics, work, sizes, form):
    """Load LSE in powers of 2, and delta, of the block's rows."""
    rows = work.start + gl.arange(0, form.ROWS, gl.SliceLayout(1, form.SCORES))
    tile = (work.slot * sizes.heads + work.head) * sizes.query_tiles + work.tile
    at = tile.to(gl.int64) * (2 * _STATISTICS) + (rows // _STATISTICS * (2 * _STATISTICS) + rows % _STATISTICS)
    there = rows < work.q_length
    lse = gl.load(statistics + at, mask=there, other=float("inf"))
    return lse, gl.load(statistics + (at + _STATISTICS), mask=there, other=0.0)


@gluon.jit
def _consume(dq_desc, out, stride_h, stride_s, statistics, scales, factor, sizes, shared, form):
    """Compute dQ of the block's rows, by eight warps."""
    dtype: gl.constexpr = shared.k.dtype
    for j in gl.static_range(form.K_STAGES):  # every buffer starts free
        arrive(K_FREE + j, PARTY)
    for j in gl.static_range(form.V_STAGES):
        arrive(V_FREE + j, PARTY)
    work = work_of(gl.program_id(0), sizes, form, form.ROWS, False, 8)
    begin, clean, unclean, end = key_tiles(work.start, form.ROWS, work, sizes, form)
    seen = last_seen(work, sizes, form)
    lse, delta = _statistics(statistics, work, sizes, form)
    if form.LEFT:
        clean, unclean = gl.maximum(clean, begin + 1), gl.maximum(unclean, begin + 1)
    zero = gl.to_tensor(0)
    mbarrier.wait(shared.rows_full.index(0), 0)
    mbarrier.wait(shared.k_full.index(0), 0)
    if form.UNSEEN:
        if end * form.KEYS > seen:  # keys that no query sees may be NaN
            k = shared.k.index(0).reshape([form.KEYS, form.DIM])
            clear_rows_outside(k, 0, seen - (end - 1) * form.KEYS, form.KEYS, form.DIM, 8)
            fence_async_shared()
        sync(TOGETHER, THREADS)
    s = warpgroup_mma_wait(0, deps=[_scores(0, shared, form)])
    mbarrier.wait(shared.rows_full.index(1), 0)
    dq = gl.zeros([form.ROWS, form.DIM], gl.float32, form.SUMS)
    state = QueriesState(s, dq, zero, zero, zero, zero)
    for n in range(end - 1, begin - 1 + form.LEFT, -1):
        state = _step(state, n, n > begin, clean, unclean, work, sizes, lse, delta, scales, shared, form)
    if form.LEFT:
        first = first_seen(work, sizes, form) - begin * form.KEYS
        if first > 0:  # so may keys before the first window
            k = shared.k.index(state.k_slot).reshape([form.KEYS, form.DIM])
            clear_rows_outside(k, first, form.KEYS, form.KEYS, form.DIM, 8)
            fence_async_shared()
        sync(TOGETHER, THREADS)
        state = _step(state, begin, False, begin, begin, work, sizes, lse, delta, scales, shared, form)
    sync(TOGETHER, THREADS)  # Q has been read for the last time
    dq = state.dq * factor
    if form.EDGES:  # rows that attend nothing, and padding rows, may hold anything
        lse, _delta = _statistics(statistics, work, sizes, form)
        counted = gl.convert_layout((lse != float("inf")).to(gl.int32), gl.SliceLayout(1, form.SUMS))
        dq = gl.where(gl.expand_dims(counted, 1) != 0, dq, 0.0)
    place = shared.q.reshape([form.ROWS, form.DIM])
    place.store(dq.to(dtype))
    fence_async_shared()
    sync(TOGETHER, THREADS)
    if work.rows > 0:
        rows_stored(shared.q, place, dq_desc, out, stride_h, stride_s, work.slot, work.head, work.q_first + work.start,
                    work.rows, form.ROWS, form.DIM, form.VARYING)  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "scale", "softcap", "factor", "stride_h", "stride_s", "batches", "heads", "share", "seq_q", "seq_k", "left",
        "right", "tiles", "query_tiles", "together",
    ]
)  # fmt: skip
def scheduled_queries(
    q_desc, do_desc, k_desc, v_desc, dq_desc, out, statistics, lengths_q, lengths_k, scale, factor, stride_h, stride_s,
    batches, heads, share, seq_q, seq_k, left, right, tiles, query_tiles, together, softcap,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr, TOP_LEFT: gl.constexpr, RAGGED: gl.constexpr, VARYING: gl.constexpr,
    EDGES: gl.constexpr, UNSEEN: gl.constexpr, SOFTCAP: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_GRADIENT: gl.constexpr, WORKER: gl.constexpr,
):  # fmt: skip
    """Compute dQ: a block for each 128 query rows of each head.

    q_desc, do_desc, k_desc, v_desc, dq_desc  (B, H, S, D) by blocks of ROWS or KEYS rows and DIM columns
    out, stride_h, stride_s  the tensor of dq_desc, and its strides in steps of 8 elements
    statistics  (2·query_tiles·heads, 64) float32, as kernel.py's; heads are query heads
    kernel.py describes the other arguments
    """
    form = QueriesForm(ROWS, KEYS, DIM, K_STAGES, V_STAGES, RIGHT, LEFT, TOP_LEFT, RAGGED, VARYING, EDGES, UNSEEN,
                       SOFTCAP, score_function(SCORE_MOD), score_function(SCORE_GRADIENT))  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    shared = QueriesSharedMemory(
        gl.allocate_shared_memory(dtype, [1, 1, ROWS, DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, ROWS, DIM], do_desc.layout),
        gl.allocate_shared_memory(dtype, [K_STAGES, 1, 1, KEYS, DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, KEYS, DIM], v_desc.layout),
        gl.allocate_shared_memory(gl.int64, [2, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barriers),
    )
    for j in gl.static_range(2):
        mbarrier.init(shared.rows_full.index(j), count=1)
    for j in gl.static_range(K_STAGES):
        mbarrier.init(shared.k_full.index(j), count=1)
    for j in gl.static_range(V_STAGES):
        mbarrier.init(shared.v_full.index(j), count=1)
    fence_async_shared()
    if lengths_q is None:
        lengths_q = statistics  # not read
    if lengths_k is None:
        lengths_k = statistics
    lists = no_lists(statistics, heads)
    sizes = BackwardSizes(
        lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, left, right, tiles, query_tiles, together, lists
    )
    gl.warp_specialize(
        [
            (_consume, (dq_desc, out, stride_h, stride_s, statistics, (scale, softcap), factor, sizes, shared, form)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, sizes, shared, form)),
        ],
        [1],
        [WORKER],
    )
