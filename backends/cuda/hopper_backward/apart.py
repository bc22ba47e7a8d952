"""The Hopper backward by two warp groups of 64 keys each, half a step apart, over many blocks of keys.

One group's products run while the other computes exponentials. Both meet once a step, at different places of theirs:

    group 0   dQ(i-1) dV(i) dK(i)            | S(i+1) dP(i+1) exp dS(i+1)   meet
    group 1   S(i) dP(i) exp dS(i)           | dQ(i) dV(i) dK(i)            meet

dQ needs both groups' dS. At meeting i group 0 has stored dS(i), and group 1 has ended step i - 1: then group 0 may
compute dQ(i-1), and group 1 dQ(i) as soon as its own dS(i) is stored. dS has two buffers: group 0 stores dS(i+1) while
group 1 reads dS(i). Group 1 read dS(i-1), whose buffer it is, before meeting i.

Of a tile's dQ each group computes 64 rows (ROWS = 128), or half the columns of 64 rows.

A program stays on its multiprocessor and draws blocks of keys, so that a block's K, V and first query tile are on their
way while the block before is computed, and dK and dV are stored by the writer while the next one is. Started anew for
each block, a program had its first tiles after 3,000 to 5,000 cycles, and ended 2,800 to 4,200 after its last step; a
step takes 3,400 to 4,000 (H200, D = 64 and 128, S = 1,024).
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

from portattn.backends.cuda.gluon_names import aggregate, arrive, hide, load, reduce_add, store, sync
from portattn.backends.cuda.hopper_backward.block_lists import (
    clear_idle_rows,
    first_cursor,
    hidden_keys,
    list_of,
    listed_steps,
    next_cursor,
    read_word,
    tile_at_cursor,
    where_seen,
    word_of,
    write_word,
)
from portattn.backends.cuda.hopper_backward.consumer import (
    DO_FREE,
    PARTY,
    Q_FREE,
    THREADS,
    TOGETHER,
    clear_rows_outside,
)
from portattn.backends.cuda.hopper_backward.tile_scheduler import (
    ONE,
    first_seen,
    queries_loaded,
    query_tiles,
    rows_loaded,
    work_of,
)
from portattn.backends.cuda.hopper_forward.fragments import clear_rows
from portattn.backends.cuda.hopper_forward.tile_scheduler import attention_mask, last_seen

# Named barriers beside consumer.py's: half g of a tile of dQ lies in shared memory; its memory may be written again.
HALF_FULL: gl.constexpr = gl.constexpr(6)  # 6, 7
HALF_FREE: gl.constexpr = gl.constexpr(13)  # 13, 14
MEETING: gl.constexpr = gl.constexpr(15)
HALF_PARTY: gl.constexpr = gl.constexpr(128 + 32)  # a group, and the writer
CONSUMER: gl.constexpr = gl.constexpr(240)  # registers of a thread
HALF: gl.constexpr = gl.constexpr(64)  # keys of a group


@aggregate
class ApartSharedMemory:
    """Of block t of keys, K lies in buffer t & 1, and V in buffer t & (VALUES - 1): with 64 columns there are two."""

    VALUES: gl.constexpr
    q: gl.shared_memory_descriptor  # [STAGES][1, 1, ROWS, DIM]
    do: gl.shared_memory_descriptor  # [STAGES][1, 1, ROWS, DIM]
    k: gl.shared_memory_descriptor  # [2][1, 1, KEYS, DIM]; at a block's end dK
    v: gl.shared_memory_descriptor  # [VALUES][1, 1, KEYS, DIM]; at a block's end dV
    statistics: gl.shared_memory_descriptor  # [STAGES][2, ROWS] float32: LSE in powers of 2, delta
    ds: gl.shared_memory_descriptor  # [2][KEYS, ROWS]
    dq: gl.shared_memory_descriptor  # [ROWS·DIM/256, 256] float32, in the order of `_put`
    q_full: gl.shared_memory_descriptor  # [STAGES] mbarriers: Q and the statistics
    do_full: gl.shared_memory_descriptor  # [STAGES]: dO, and with a block's first one V
    k_full: gl.shared_memory_descriptor  # [2]: the block's number, and K if some query sees it
    k_free: gl.shared_memory_descriptor  # [2]: dK has been stored
    v_free: gl.shared_memory_descriptor  # [VALUES]: dV has been stored
    dv_full: gl.shared_memory_descriptor  # [1]
    dk_full: gl.shared_memory_descriptor  # [1]
    number: gl.shared_memory_descriptor  # [2][1] int32: numbers of blocks of keys; behind the last one any greater
    places: gl.shared_memory_descriptor  # [STAGES][1] int32: with LISTED_K words of block_lists.py about tiles

    @gluon.constexpr_function
    def __init__(self, VALUES, q, do, k, v, statistics, ds, dq, q_full, do_full, k_full, k_free, v_free, dv_full,
                 dk_full, number, places):  # fmt: skip
        self.VALUES = gl.constexpr(VALUES)
        self.q, self.do, self.k, self.v, self.statistics, self.ds, self.dq = q, do, k, v, statistics, ds, dq
        self.q_full, self.do_full, self.k_full, self.k_free, self.v_free = q_full, do_full, k_full, k_free, v_free
        self.dv_full, self.dk_full, self.number, self.places = dv_full, dk_full, number, places


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(count):
        mbarrier.init(made.index(j), count=arrivals)
    return made


@gluon.jit
def _shared_memory(q_desc, do_desc, k_desc, v_desc, statistics_desc, dq_desc, form):
    dtype: gl.constexpr = q_desc.dtype
    values: gl.constexpr = 2 if form.DIM == 64 else 1
    across: gl.constexpr = gl.NVMMASharedLayout.get_default_for([form.KEYS, form.ROWS], dtype)
    return ApartSharedMemory(
        values,
        gl.allocate_shared_memory(dtype, [form.STAGES, 1, 1, form.ROWS, form.DIM], q_desc.layout),
        gl.allocate_shared_memory(dtype, [form.STAGES, 1, 1, form.ROWS, form.DIM], do_desc.layout),
        gl.allocate_shared_memory(dtype, [2, 1, 1, form.KEYS, form.DIM], k_desc.layout),
        gl.allocate_shared_memory(dtype, [values, 1, 1, form.KEYS, form.DIM], v_desc.layout),
        gl.allocate_shared_memory(gl.float32, [form.STAGES, 2, form.ROWS], statistics_desc.layout),
        gl.allocate_shared_memory(dtype, [2, form.KEYS, form.ROWS], across),
        gl.allocate_shared_memory(gl.float32, [form.ROWS * form.DIM // 256, 256], dq_desc.layout),
        _barriers(form.STAGES, 1),
        _barriers(form.STAGES, 1),
        _barriers(2, 1),
        _barriers(2, 1),
        _barriers(values, 1),
        _barriers(1, 2),
        _barriers(1, 2),
        gl.allocate_shared_memory(gl.int32, [2, 1], ONE),
        gl.allocate_shared_memory(gl.int32, [form.STAGES, 1], ONE),
    )


@gluon.jit
def _number(t, shared, WARPS: gl.constexpr):
    """Wait for the number of block t of the program, and return it."""
    mbarrier.wait(shared.k_full.index(t & 1), (t >> 1) & 1)
    return gl.max(shared.number.index(t & 1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _blocks(sizes):
    return sizes.tiles * sizes.heads * sizes.batches


@gluon.jit
def _produce(q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, drawn, sizes, shared, form):
    """Draw blocks of keys, and load keys, values and query tiles, by one warp."""
    values: gl.constexpr = shared.VALUES
    number, t, i = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(0)
    while number < _blocks(sizes):
        mbarrier.wait(shared.k_free.index(t & 1), ((t >> 1) & 1) ^ 1)
        shared.number.index(t & 1).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        work = work_of(number, sizes, form, form.KEYS, True, 1)
        tiles = query_tiles(work, sizes, form)
        steps = (tiles.end - tiles.begin) * sizes.share
        if form.LISTED_K:
            steps, cursor = listed_steps(work, sizes, form), first_cursor(work, sizes, form)
        key = work.k_first + work.start
        if steps > 0:
            mbarrier.expect(shared.k_full.index(t & 1), form.KEYS * form.DIM * 2)
            load(k_desc, [work.slot, work.head, key, 0], shared.k_full.index(t & 1), shared.k.index(t & 1))
        else:
            # No query sees the block, so that nothing holds the consumers back: they would write its zeros before the
            # writer has asked for the block before. dK of that block is stored last.
            mbarrier.wait(shared.k_free.index((t + 1) & 1), ((t - 1) >> 1) & 1)
            mbarrier.arrive(shared.k_full.index(t & 1))
        m, head = tiles.begin, work.head * sizes.share
        for j in range(steps):
            slot = i & 1
            if form.LISTED_K:
                m, head, tile = tile_at_cursor(cursor, work, sizes, form)
                word = word_of(cursor, m, tile, sizes, form)
                cursor = next_cursor(cursor, work, sizes, form)
            sync(Q_FREE + slot, PARTY)
            if form.LISTED_K:
                write_word(word, slot, shared)
            queries_loaded(q_desc, edge_q_desc, statistics_desc, work, head, m, slot, shared, sizes, form)
            sync(DO_FREE + slot, PARTY)
            do_full = shared.do_full.index(slot)
            if j == 0:
                mbarrier.wait(shared.v_free.index(t & (values - 1)), ((t >> (values - 1)) & 1) ^ 1)
                mbarrier.expect(do_full, (form.ROWS + form.KEYS) * form.DIM * 2)
                load(v_desc, [work.slot, work.head, key, 0], do_full, shared.v.index(t & (values - 1)))
            else:
                mbarrier.expect(do_full, form.ROWS * form.DIM * 2)
            rows_loaded(do_desc, edge_do_desc, work, head, m, do_full, shared.do.index(slot), sizes, form)
            i += 1
            if not form.LISTED_K:
                m += 1
                if m == tiles.end:
                    m, head = tiles.begin, head + 1
        number = gl.num_programs(0) + gl.atomic_add(drawn, 1, sem="relaxed", scope="gpu")
        t += 1
    mbarrier.wait(shared.k_free.index(t & 1), ((t >> 1) & 1) ^ 1)
    shared.number.index(t & 1).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(shared.k_full.index(t & 1))
    for j in gl.static_range(form.STAGES):  # the last arrivals, for which nothing is loaded
        sync(Q_FREE + j, PARTY)
        sync(DO_FREE + j, PARTY)


@gluon.jit
def _half_added(dq_desc, tile, shared, half: gl.constexpr, form):
    """Add a group's half of a tile of dQ to memory."""
    count: gl.constexpr = form.MESSAGES // 2
    rows: gl.constexpr = form.ROWS * form.DIM // 256 // form.MESSAGES
    arrive(HALF_FREE + half, HALF_PARTY)
    sync(HALF_FULL + half, HALF_PARTY)
    for part in gl.static_range(half * count, half * count + count):
        reduce_add(dq_desc, [(tile * form.MESSAGES + part) * rows, 0], shared.dq.slice(part * rows, rows))
    tma.store_wait(0)


@gluon.jit
def _write(dq_desc, dk_desc, dv_desc, sizes, shared, form):
    """Add dQ's tiles to memory, of each the second group's half first, and store dK and dV, by one warp."""
    values: gl.constexpr = shared.VALUES
    t = gl.to_tensor(0)
    number = _number(t, shared, 1)
    while number < _blocks(sizes):
        work = work_of(number, sizes, form, form.KEYS, True, 1)
        tiles = query_tiles(work, sizes, form)
        steps = (tiles.end - tiles.begin) * sizes.share
        m = tiles.begin
        tile = (work.slot * sizes.heads + work.head) * sizes.share * sizes.query_tiles + m
        if form.LISTED_K:
            steps, cursor = listed_steps(work, sizes, form), first_cursor(work, sizes, form)
            _, _, tile = tile_at_cursor(cursor, work, sizes, form)
        for _j in range(steps - 1):
            _half_added(dq_desc, tile, shared, 1, form)
            _half_added(dq_desc, tile, shared, 0, form)
            if form.LISTED_K:
                cursor = next_cursor(cursor, work, sizes, form)
                _, _, tile = tile_at_cursor(cursor, work, sizes, form)
            else:
                m += 1
                tile += 1
                if m == tiles.end:
                    m, tile = tiles.begin, tile + sizes.query_tiles - (tiles.end - tiles.begin)
        if steps > 0:
            _half_added(dq_desc, tile, shared, 1, form)
        mbarrier.wait(shared.dv_full.index(0), t & 1)
        store(dv_desc, [work.slot, work.head, work.start, 0], shared.v.index(t & (values - 1)))
        tma.store_wait(0)
        mbarrier.arrive(shared.v_free.index(t & (values - 1)))
        if steps > 0:
            _half_added(dq_desc, tile, shared, 0, form)
        mbarrier.wait(shared.dk_full.index(0), t & 1)
        store(dk_desc, [work.slot, work.head, work.start, 0], shared.k.index(t & 1))
        tma.store_wait(0)
        mbarrier.arrive(shared.k_free.index(t & 1))
        t += 1
        number = _number(t, shared, 1)


@gluon.jit
def _masked(p, m, group: gl.constexpr, work, sizes, form):
    """Return P of a tile in which some row does not see all of the keys."""
    first = hide(work.start + group * HALF)
    keys = gl.expand_dims(first + gl.arange(0, HALF, gl.SliceLayout(1, form.SCORES)), 1)
    rows = gl.arange(0, form.ROWS, gl.SliceLayout(0, form.SCORES))
    rows = gl.expand_dims(m * form.ROWS + rows, 0)
    return gl.where(attention_mask(keys, rows, work, sizes, form), p, 0.0)


@gluon.jit
def _gradients_of_scores(i, t, m, work, scale, sizes, shared, group: gl.constexpr, masked: gl.constexpr, form):
    """Compute P and dS of a tile, as operands of dV and dK, and store dS. dP begins at -delta."""
    dtype: gl.constexpr = shared.k.dtype
    slot, phase = i & 1, (i >> 1) & 1
    k = shared.k.index(t & 1).reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
    v = shared.v.index(t & (shared.VALUES - 1)).reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
    q = shared.q.index(slot).reshape([form.ROWS, form.DIM]).permute((1, 0))
    do = shared.do.index(slot).reshape([form.ROWS, form.DIM]).permute((1, 0))
    zeros = gl.zeros([HALF, form.ROWS], gl.float32, form.SCORES)
    mbarrier.wait(shared.q_full.index(slot), phase)
    if form.LISTED_K and masked:
        m, head, _, idle = read_word(slot, work, shared, sizes, 4)
        if form.MASK_MOD is not None:
            if idle:  # both groups clear them, each before it reads them
                mbarrier.wait(shared.do_full.index(slot), phase)
                clear_idle_rows(q.permute((1, 0)), do.permute((1, 0)), shared.statistics.index(slot), form, 4)
    s = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
    mbarrier.wait(shared.do_full.index(slot), phase)
    dp = warpgroup_mma(v, do, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * scale - shared.statistics.index(slot).slice(0, 1).load(form.SCORES))
    if form.LISTED_K and masked:
        p = where_seen(p, hide(work.start + group * HALF), HALF, m, head, work, sizes, form)
    elif masked:
        p = _masked(p, m, group, work, sizes, form)
    weights = gl.convert_layout(p.to(dtype), form.WEIGHTS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    delta = shared.statistics.index(slot).slice(1, 1).load(form.SCORES)
    ds = (p * (dp - delta)).to(dtype)
    shared.ds.index(i & 1).slice(group * HALF, HALF).store(ds)
    fence_async_shared()
    return weights, gl.convert_layout(ds, form.WEIGHTS)


@gluon.jit
def _dq(buffer, t, shared, group: gl.constexpr, form):
    """Begin the group's half of dQ of the tile whose dS lies in a buffer."""
    ds = shared.ds.index(buffer).permute((1, 0))
    k = shared.k.index(t & 1).reshape([form.KEYS, form.DIM])
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
def _step(i, place, m, dk, dv, work, scale, sizes, shared, group: gl.constexpr, masked: gl.constexpr, form):
    """Process a tile. place: the block's number in the program, its first step and its last one."""
    t, first, last = place
    t = hide(t)  # addresses of K, for each product
    slot = i & 1
    if group == 1:
        sync(MEETING, THREADS)
    weights, ds = _gradients_of_scores(i, t, m, work, scale, sizes, shared, group, masked, form)
    if group == 0:
        sync(MEETING, THREADS)
        dq = _dq((i & 1) ^ 1, t, shared, group, form)
    else:
        if i == last:
            arrive(MEETING, THREADS)  # group 0 may compute its half of the block's last dQ
        dq = _dq(i & 1, t, shared, group, form)
    dv = warpgroup_mma(weights, shared.do.index(slot).reshape([form.ROWS, form.DIM]), dv, is_async=True)
    dk = warpgroup_mma(ds, shared.q.index(slot).reshape([form.ROWS, form.DIM]), dk, is_async=True)
    dq = warpgroup_mma_wait(2, deps=[dq])
    if group == 0:
        if i > first:
            _put(dq, shared, group, form)
    else:
        _put(dq, shared, group, form)
    dv = warpgroup_mma_wait(1, deps=[dv])
    arrive(DO_FREE + slot, PARTY)
    dk = warpgroup_mma_wait(0, deps=[dk])
    arrive(Q_FREE + slot, PARTY)
    return dk, dv


@gluon.jit
def _tiles_of_head(i, place, dk, dv, tiles, work, scale, sizes, shared, group: gl.constexpr, form):
    """Do the steps of a query head, those with a mask in loops of their own: a branch would take registers from all."""
    head = i - tiles.begin  # the step of the head's query tile 0
    for j in range(i, head + tiles.clean):
        dk, dv = _step(hide(j), place, j - head, dk, dv, work, scale, sizes, shared, group, True, form)
    for j in range(head + tiles.clean, head + tiles.unclean):
        dk, dv = _step(hide(j), place, j, dk, dv, work, scale, sizes, shared, group, False, form)
    if form.LEFT:
        for j in range(head + tiles.unclean, head + tiles.end):
            dk, dv = _step(hide(j), place, j - head, dk, dv, work, scale, sizes, shared, group, True, form)
    return head + tiles.end, dk, dv


@gluon.jit
def _tiles_of_lists(i, place, dk, dv, work, scale, sizes, shared, group: gl.constexpr, form):
    """Do the steps of all query heads, of each its whole blocks first."""
    for member in range(sizes.share):
        _, count, whole = list_of(member, work, sizes, form)
        for j in range(i, i + whole):
            dk, dv = _step(hide(j), place, j, dk, dv, work, scale, sizes, shared, group, False, form)
        for j in range(i + whole, i + count):
            dk, dv = _step(hide(j), place, j, dk, dv, work, scale, sizes, shared, group, True, form)
        i += count
    return i, dk, dv


@gluon.jit
def _consume(scale, factor, sizes, shared, group: gl.constexpr, form):
    """Compute dK and dV of half of each block's keys, and half of each tile of dQ, by four warps."""
    dtype: gl.constexpr = shared.k.dtype
    gl.static_assert(form.STAGES == 2)
    for j in gl.static_range(form.STAGES):  # every buffer starts free
        arrive(Q_FREE + j, PARTY)
        arrive(DO_FREE + j, PARTY)
    t, i = gl.to_tensor(0), gl.to_tensor(0)
    number = _number(t, shared, 4)
    while number < _blocks(sizes):
        work = work_of(number, sizes, form, form.KEYS, True, 4)
        tiles = query_tiles(work, sizes, form)
        steps = (tiles.end - tiles.begin) * sizes.share
        if form.LISTED_K:
            steps = listed_steps(work, sizes, form)
        k = shared.k.index(t & 1).reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
        v = shared.v.index(t & (shared.VALUES - 1)).reshape([form.KEYS, form.DIM]).slice(group * HALF, HALF)
        if form.UNSEEN:
            first = work.start + group * HALF
            begin, end = first_seen(work, sizes, form) - first, last_seen(work, sizes, form) - first
            if (steps > 0) & ((begin > 0) | (end < HALF)):  # what no query sees may be NaN, and 0·NaN is NaN
                mbarrier.wait(shared.do_full.index(i & 1), (i >> 1) & 1)
                clear_rows_outside(k, begin, end, HALF, form.DIM, 4)
                clear_rows_outside(v, begin, end, HALF, form.DIM, 4)
            sync(TOGETHER, THREADS)
        if form.MASK_MOD is not None:
            some, there = hidden_keys(group * HALF, HALF, work, sizes, form, 4)
            if (steps > 0) & some:
                mbarrier.wait(shared.do_full.index(i & 1), (i >> 1) & 1)
                clear_rows(k, there, form.DIM)
                clear_rows(v, there, form.DIM)
            sync(TOGETHER, THREADS)
        dk = gl.zeros([HALF, form.DIM], gl.float32, form.SUMS)
        dv = gl.zeros([HALF, form.DIM], gl.float32, form.SUMS)
        place = t, i, i + steps - 1
        if form.LISTED_K:
            i, dk, dv = _tiles_of_lists(i, place, dk, dv, work, scale, sizes, shared, group, form)
        elif not form.MASKED:
            for step in range(i, i + steps):
                dk, dv = _step(hide(step), place, step, dk, dv, work, scale, sizes, shared, group, False, form)
            i += steps
        elif form.GROUPED:
            for _head in range(sizes.share):
                i, dk, dv = _tiles_of_head(i, place, dk, dv, tiles, work, scale, sizes, shared, group, form)
        else:
            i, dk, dv = _tiles_of_head(i, place, dk, dv, tiles, work, scale, sizes, shared, group, form)
        v.store(dv.to(dtype))  # only the group itself has read its values
        fence_async_shared()
        mbarrier.arrive(shared.dv_full.index(0))
        if group == 0:
            if steps > 0:
                sync(MEETING, THREADS)
                dq = _dq((i & 1) ^ 1, t, shared, group, form)
                _put(warpgroup_mma_wait(0, deps=[dq]), shared, group, form)
        sync(TOGETHER, THREADS)  # K has been read for the last time
        k.store((dk * factor).to(dtype))
        fence_async_shared()
        mbarrier.arrive(shared.dk_full.index(0))
        t += 1
        number = _number(t, shared, 4)


@gluon.jit
def attend_apart(q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, dq_desc, dk_desc, dv_desc,
                 drawn, scale, factor, sizes, form, WORKER: gl.constexpr):  # fmt: skip
    """Process blocks of keys until all have been drawn. drawn: (1,) int32, 0 at the launch's begin."""
    shared = _shared_memory(q_desc, do_desc, k_desc, v_desc, statistics_desc, dq_desc, form)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (scale, factor, sizes, shared, 0, form)),
            (_consume, (scale, factor, sizes, shared, 1, form)),
            (
                _produce,
                (q_desc, do_desc, k_desc, v_desc, edge_q_desc, edge_do_desc, statistics_desc, drawn, sizes, shared,
                 form),
            ),
            (_write, (dq_desc, dk_desc, dv_desc, sizes, shared, form)),
        ],
        [4, 1, 1],
        [CONSUMER, WORKER, WORKER],
    )  # fmt: skip
