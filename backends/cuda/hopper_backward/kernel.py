"""Attention backward for sm_90a, explicitly scheduled in Gluon: dK and dV, and dQ by additions to memory.

A program per tile of keys and key head, for all query heads of the head's group:

    producer   one warp: brings K and V, then tile after tile of Q, its statistics and dO, through TMA
    consumer   eight warps: the products (consumer.py); dK and dV stay in their registers
    writer     one warp, or two in turns: adds tiles of dQ to float32 sums in memory, by TMA's reduction

or a program per multiprocessor, whose consumer is two groups of four warps (apart.py).

The sums' order is not the same every time, so that dQ is not repeatable bit by bit. Where that is asked for, blocks add
to a tile of dQ in turns, by two writers (tile_scheduler.py). With 256 columns additions would be bound by the L2
(some 2 TB/s on an H200); there, and where blocks would wait too long for their turn (in_turns), dQ has a kernel of its
own (queries.py), for two products more. ../auxiliary_kernels.py has the kernels before and after.

Rows that do not count may be NaN, and 0·NaN is NaN. K and V are cleared in shared memory where no query sees them.
Tiles of Q and dO with rows that attend nothing, or that are behind a sequence's last, are brought from copies that the
kernel of the statistics made.
"""

# No `from __future__ import annotations`: Triton reads the annotations of constants.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from portattn.backends.cuda.gluon_names import argument_or, arrive, load, reduce_add, sync
from portattn.backends.cuda.hopper_backward.apart import attend_apart
from portattn.backends.cuda.hopper_backward.block_lists import (
    BlockLists,
    first_cursor,
    listed_steps,
    next_cursor,
    no_lists,
    tile_at_cursor,
    word_of,
    write_word,
)
from portattn.backends.cuda.hopper_backward.consumer import DO_FREE, DQ_FREE, DQ_FULL, PARTY, Q_FREE, consume
from portattn.backends.cuda.hopper_backward.tile_scheduler import (
    ONE,
    TO_FIRST,
    TO_SECOND,
    WRITERS,
    BackwardForm,
    BackwardSharedMemory,
    BackwardSizes,
    block_number,
    draw,
    earlier_end,
    member_of,
    pass_turn,
    place_of,
    queries_loaded,
    query_tiles,
    rows_loaded,
    tile_at,
    wait_for,
    work_of,
)
from portattn.backends.cuda.hopper_forward.fragments import function_tensors, score_function


@gluon.jit
def _produce(q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, sizes, shared, form):
    """Load keys, values and query tiles, by one warp."""
    work = work_of(block_number(shared, form, 1), sizes, form, form.KEYS, True, 1)
    tiles = query_tiles(work, sizes, form)
    count = tiles.end - tiles.begin
    steps, some = count * sizes.share, count > 0  # steps > 0 would spill in turns (Triton 3.8.0)
    if form.LISTED_K:
        steps, cursor = listed_steps(work, sizes, form), first_cursor(work, sizes, form)
        some = steps > 0
    key = work.k_first + work.start
    block = work.start // form.KEYS
    if some:
        mbarrier.expect(shared.kv_full.index(0), form.KEYS * form.DIM * 2)
        load(k_desc, [work.slot, work.head, key, 0], shared.kv_full.index(0), shared.k)
    slot = 0
    for i in range(steps):
        if form.LISTED_K:
            m, head, tile = tile_at_cursor(cursor, work, sizes, form)
            word = word_of(cursor, m, tile, sizes, form)
            cursor = next_cursor(cursor, work, sizes, form)
        else:
            m = tile_at(place_of(i, count, sizes, form), tiles, block, form)
            head = work.head * sizes.share + member_of(i, count, sizes, form)
        sync(Q_FREE + slot, PARTY)
        if form.LISTED_K:
            write_word(word, slot, shared)
        queries_loaded(q_desc, edge_q_desc, statistics_desc, work, head, m, slot, shared, sizes, form)
        if i == 0:
            mbarrier.expect(shared.kv_full.index(1), form.KEYS * form.DIM * 2)
            load(v_desc, [work.slot, work.head, key, 0], shared.kv_full.index(1), shared.v)
        sync(DO_FREE + slot, PARTY)
        do_full = shared.do_full.index(slot)
        mbarrier.expect(do_full, form.ROWS * form.DIM * 2)
        rows_loaded(do_desc, edge_do_desc, work, head, m, do_full, shared.do.index(slot), sizes, form)
        slot += 1
        if slot == form.STAGES:
            slot = 0
    for j in gl.static_range(form.STAGES):  # the last arrivals, for which nothing is loaded
        sync(Q_FREE + j, PARTY)
        sync(DO_FREE + j, PARTY)


@gluon.jit
def _write(dq_desc, sizes, shared, form):
    """Add dQ's tiles to memory, by one warp. Tiles come in the producer's order; a late consumer puts zeros first."""
    if form.MESSAGES:
        rows: gl.constexpr = form.ROWS * form.DIM // 256 // form.MESSAGES
        work = work_of(gl.program_id(0), sizes, form, form.KEYS, True, 1)
        tiles = query_tiles(work, sizes, form)
        count = tiles.end - tiles.begin
        steps = count * sizes.share
        if form.LISTED_K:
            steps, cursor = listed_steps(work, sizes, form), first_cursor(work, sizes, form)
        if form.LATE:
            steps = gl.where(steps > 0, steps + 1, 0)
        for j in range(steps):
            i = j
            if form.LATE:
                i = gl.maximum(j - 1, 0)
            if form.LISTED_K:
                _, _, tile = tile_at_cursor(cursor, work, sizes, form)
                if j >= (1 if form.LATE else 0):
                    cursor = next_cursor(cursor, work, sizes, form)
            else:
                m = tile_at(i % count, tiles, work.start // form.KEYS, form)
                head = work.head * sizes.share + i // count
                tile = (work.slot * sizes.heads * sizes.share + head) * sizes.query_tiles + work.tile + m
            arrive(DQ_FREE, PARTY)
            sync(DQ_FULL, PARTY)
            for part in gl.static_range(form.MESSAGES):
                place = shared.dq.slice(part * rows, rows)
                reduce_add(dq_desc, [(tile * form.MESSAGES + part) * rows, 0], place)
            tma.store_wait(0)


@gluon.jit
def _write_in_turns(dq_desc, turns, sizes, shared, form, second: gl.constexpr):
    """One warp of two, which write tiles in turns: one waits until its additions are complete while the other adds.
    This function does the steps of tile_scheduler.py. A late consumer's first tile, of zeros, is not added."""
    rows: gl.constexpr = form.ROWS * form.DIM // 256 // form.MESSAGES
    mine: gl.constexpr = TO_SECOND if second else TO_FIRST
    other: gl.constexpr = TO_FIRST if second else TO_SECOND
    work = work_of(block_number(shared, form, 1), sizes, form, form.KEYS, True, 1)
    tiles = query_tiles(work, sizes, form)
    count = tiles.end - tiles.begin
    steps = count * sizes.share
    if form.LATE:
        steps = gl.where(count > 0, steps + 1, 0)
    seen = earlier_end(work, sizes, form)
    block = work.start // form.KEYS
    for j in range(1 if second else 0, steps, 2):
        i = j
        if form.LATE:
            i = gl.maximum(j - 1, 0)
        m = tile_at(place_of(i, count, sizes, form), tiles, block, form)
        head = work.head * sizes.share + member_of(i, count, sizes, form)
        tile = (work.slot * sizes.heads * sizes.share + head) * sizes.query_tiles + work.tile + m
        real = i >= 0
        if form.LATE:
            real = j > 0
        if real & (m < seen):
            wait_for(turns + 1 + tile, block)
        if j > 0:
            sync(mine, WRITERS)  # the other warp has been told of the tile before
        else:
            arrive(DQ_FREE, PARTY)
        sync(DQ_FULL, PARTY)
        if j + 1 < steps:
            arrive(other, WRITERS)
        if real:
            for part in gl.static_range(form.MESSAGES):
                source = shared.dq.slice(part * rows, rows)
                reduce_add(dq_desc, [(tile * form.MESSAGES + part) * rows, 0], source)
            tma.store_wait(0)
        if j + 1 < steps:
            arrive(DQ_FREE, PARTY)
        if real:
            pass_turn(turns + 1 + tile, block + 1)


@gluon.jit
def _attend_block(q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, dq_desc, turns, dk_desc,
                  dv_desc, grad_k, grad_v, dk_strides, dv_strides, scales, factor, sizes, form,
                  WORKER: gl.constexpr):  # fmt: skip
    """Process the program's block of keys."""
    dtype: gl.constexpr = q_desc.dtype
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    across: gl.constexpr = gl.NVMMASharedLayout.get_default_for([form.KEYS, form.ROWS], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [form.STAGES, 1, 1, form.ROWS, form.DIM], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [form.STAGES, 1, 1, form.ROWS, form.DIM], do_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, form.KEYS, form.DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, form.KEYS, form.DIM], v_desc.layout)
    statistics = gl.allocate_shared_memory(gl.float32, [form.STAGES, 2, form.ROWS], statistics_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [form.KEYS, form.ROWS], across)
    if form.KEYS == 64:
        p_smem = gl.allocate_shared_memory(dtype, [form.KEYS, form.ROWS], across)
    else:
        p_smem = ds_smem
    if form.MESSAGES:
        dq_smem = gl.allocate_shared_memory(gl.float32, [form.ROWS * form.DIM // 256, 256], dq_desc.layout)
    else:
        dq_smem = statistics
    if form.TURNS:
        block_smem = draw(turns)
    else:
        block_smem = statistics
    if form.LISTED_K:
        places = gl.allocate_shared_memory(gl.int32, [form.STAGES, 1], ONE)
    else:
        places = statistics
    shared = BackwardSharedMemory(
        q_smem, do_smem, k_smem, v_smem, statistics, p_smem, ds_smem, dq_smem,
        gl.allocate_shared_memory(gl.int64, [2, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [form.STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [form.STAGES, 1], barriers),
        block_smem, places,
    )  # fmt: skip
    for j in gl.static_range(2):
        mbarrier.init(shared.kv_full.index(j), count=1)
    for j in gl.static_range(form.STAGES):
        mbarrier.init(shared.q_full.index(j), count=1)
        mbarrier.init(shared.do_full.index(j), count=1)
    fence_async_shared()
    if form.TURNS:
        gl.warp_specialize(
            [
                (
                    consume,
                    (dk_desc, dv_desc, grad_k, grad_v, dk_strides, dv_strides, scales, factor, sizes, shared, form),
                ),
                (
                    _produce,
                    (q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, sizes, shared, form),
                ),
                (_write_in_turns, (dq_desc, turns, sizes, shared, form, False)),
                (_write_in_turns, (dq_desc, turns, sizes, shared, form, True)),
            ],
            [1, 1, 1],
            [WORKER, WORKER, WORKER],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (dk_desc, dv_desc, grad_k, grad_v, dk_strides, dv_strides, scales, factor, sizes, shared, form),
                ),
                (
                    _produce,
                    (q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, sizes, shared, form),
                ),
                (_write, (dq_desc, sizes, shared, form)),
            ],
            [1, 1],
            [WORKER, WORKER],
        )


@gluon.jit(
    do_not_specialize=[
        "scale", "softcap", "factor", "dk_stride_h", "dk_stride_s", "dv_stride_h", "dv_stride_s", "batches", "heads",
        "share", "seq_q", "seq_k", "left", "right", "tiles", "query_tiles", "together", "list_b", "list_h", "list_k",
        "shown_b", "shown_h", "size_0", "size_1", "size_2", "size_3", "size_4", "size_5", "size_6", "size_7",
    ]
)  # fmt: skip
def scheduled_backward(
    q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, dq_desc, turns, dk_desc, dv_desc,
    grad_k, grad_v, lengths_q, lengths_k, scale, factor, dk_stride_h, dk_stride_s, dv_stride_h, dv_stride_s, batches,
    heads, share, seq_q, seq_k, left, right, tiles, query_tiles, together, softcap,
    lists, list_b, list_h, list_k, shown, shown_b, shown_h, captured_0, captured_1, captured_2, captured_3,
    size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    ROWS: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, MESSAGES: gl.constexpr,
    LATE: gl.constexpr, AFTER: gl.constexpr, APART: gl.constexpr, STAGGER: gl.constexpr, TURNS: gl.constexpr,
    GROUPED: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, TOP_LEFT: gl.constexpr, RAGGED: gl.constexpr,
    VARYING: gl.constexpr, EDGES: gl.constexpr,
    UNSEEN: gl.constexpr, SOFTCAP: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_GRADIENT: gl.constexpr,
    LISTED_Q: gl.constexpr, LISTED_K: gl.constexpr, MASK_MOD: gl.constexpr, WORKER: gl.constexpr,
):  # fmt: skip
    """A program for each tile of keys of each key head, or with APART for each multiprocessor.

    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc  (B, H, S, D) by blocks of ROWS, ROWS, KEYS, … rows and DIM
          columns; packed tensors are one batch
    edge_q_desc, edge_do_desc  (2·B, Hq, ROWS, D): tiles with rows that do not count; None without EDGES
    statistics_desc  (2·tiles, ROWS) float32 by blocks of 2: of each query tile LSE in powers of 2, and delta
    dq_desc   (tiles·ROWS·DIM/256, 256) float32: sums of dQ, to be added to; None where MESSAGES is 0
    turns     (1 + tiles,) int32, all 0: the next block's number, and with TURNS of each tile of dQ whose turn it is;
          None without TURNS and APART
    grad_k, grad_v  the tensors of dk_desc and dv_desc, for the last rows of packed sequences, with their strides in
          steps of 8 elements
    lengths_q, lengths_k  as VARYING says: (B,) lengths or (B + 1,) first rows, int32; None for those that are not given
    scale     the softmax scale times log2(e); with SOFTCAP scale/softcap, with SCORE_MOD the scale alone
    softcap   with SOFTCAP log2(e)·softcap
    factor    the softmax scale: dK is dS Q times it
    lists, list_b, list_h, list_k  with LISTED_K (B, Hq, blocks of keys, 2 + blocks of queries) int32 by these strides
    shown, shown_b, shown_h  with MASK_MOD find_hidden_keys' result for tiles of KEYS; then `turns` tells after its
              first number of each query tile whether some row attends nothing
    captured_0, …, size_7  tensors that MASK_MOD reads, and their sizes
    SCORE_MOD, SCORE_GRADIENT  None, or sources of a function of scores and of its derivative
    WORKER    registers of a thread of producer and writer. The other constants: BackwardForm
    """
    form = BackwardForm(ROWS, KEYS, DIM, STAGES, MESSAGES, LATE, AFTER, APART, STAGGER, TURNS, GROUPED, RIGHT, LEFT,
                TOP_LEFT, RAGGED, VARYING, EDGES, UNSEEN, SOFTCAP, score_function(SCORE_MOD),
                score_function(SCORE_GRADIENT), LISTED_Q, LISTED_K, score_function(MASK_MOD))  # fmt: skip
    gl.static_assert(SCORE_MOD is None or not (SOFTCAP or VARYING == "packed"))
    gl.static_assert(not (APART and (SOFTCAP or SCORE_MOD is not None)))
    gl.static_assert(not LISTED_K or not (TURNS or STAGGER or RIGHT or LEFT or VARYING != "none" or EDGES))
    gl.static_assert(not LISTED_K or (MESSAGES > 0 and LISTED_Q % ROWS == 0 and LISTED_K % KEYS == 0))
    gl.static_assert(MASK_MOD is None or LISTED_K > 0)
    gl.static_assert(MESSAGES == 0 or KEYS == 128, "what is beside each other has no dQ")
    gl.static_assert(MESSAGES > 0 or not (LATE or TURNS), "there is no dQ to be late, or to be added in turns")
    gl.static_assert(not (TURNS and STAGGER), "in turns blocks begin at their last tile")
    gl.static_assert(not APART or not (LATE or TURNS or STAGGER), "groups apart add dQ in any order")
    gl.static_assert(not APART or VARYING != "packed", "groups apart store blocks of 128 keys")
    if lengths_q is None:
        lengths_q = grad_k  # not read
    if lengths_k is None:
        lengths_k = grad_k
    if LISTED_K:
        tensors = function_tensors(captured_0, captured_1, captured_2, captured_3, size_0, size_1, size_2, size_3,
                                   size_4, size_5, size_6, size_7, grad_k, heads)  # fmt: skip
        listed = BlockLists(lists, list_b, list_h, list_k, argument_or(shown, grad_k), argument_or(shown_b, heads),
                            argument_or(shown_h, heads), argument_or(turns, grad_k) + 1, tensors)  # fmt: skip
    else:
        listed = no_lists(grad_k, heads)
    sizes = BackwardSizes(
        lengths_q, lengths_k, batches, heads, share, seq_q, seq_k, left, right, tiles, query_tiles, together, listed
    )
    dk_strides, dv_strides, scales = (dk_stride_h, dk_stride_s), (dv_stride_h, dv_stride_s), (scale, softcap)
    if APART:
        attend_apart(q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, dq_desc, dk_desc,
                     dv_desc, turns, scale, factor, sizes, form, WORKER)  # fmt: skip
    else:
        _attend_block(q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, dq_desc, turns,
                      dk_desc, dv_desc, grad_k, grad_v, dk_strides, dv_strides, scales, factor, sizes, form,
                      WORKER)  # fmt: skip
