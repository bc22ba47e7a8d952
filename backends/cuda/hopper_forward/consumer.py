"""A consumer of the Hopper forward: one warp group, 64 query rows of each tile.

Over caches rows are (query, head) pairs, as kernels/decode.py has them: of HEADS heads that share their keys.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from portattn.backends.cuda.gluon_names import arrive, sync
from portattn.backends.cuda.hopper_forward import GROUP_ROWS
from portattn.backends.cuda.hopper_forward.block_lists import clear_hidden, first_tile, hidden_keys, tile_at
from portattn.backends.cuda.hopper_forward.fragments import (
    LOG2E,
    apply_score_mod,
    apply_softcap,
    clear,
    following,
    here,
    lane_sum,
    line_numbers,
    masked_scores,
    reference,
    rescale_rows,
    rescaled_where_needed,
    row_limits,
    row_maximum,
    store_rows,
)
from portattn.backends.cuda.hopper_forward.low_precision_products import (
    UNSHIFTED,
    arrive_after_exponentials,
    as_e4m3,
    key_scales,
    lane_scales,
    result_factor,
    row_factors,
    score_factor,
    scores_by_blocks,
    scores_of,
    weights_around_values,
    weights_by_blocks,
)
from portattn.backends.cuda.hopper_forward.products import (
    FREE,
    TURN,
    accumulate_pv,
    advance_ring,
    held_weights,
    last_values_by_columns,
    score_product,
    step_by_columns,
    value_product,
    weights,
)
from portattn.backends.cuda.hopper_forward.tile_scheduler import (
    BOXES,
    BufferRing,
    Keys,
    State,
    key_tiles,
    last_seen,
    position_of,
    read,
    tile_keys,
)

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


@gluon.jit
def _passed(count, ring, shared, group: gl.constexpr, form):
    """Let key tiles pass that only other consumers of the tile need."""
    for _ in range(count):
        mbarrier.wait(shared.k_full.index(ring.slot), ring.phase)
        if form.TURNS:
            sync(TURN + group, 256)
            arrive(TURN + (group + 1) % form.GROUPS, 256)
        arrive(FREE + ring.slot, form.PARTY)
        mbarrier.wait(shared.v_full.index(ring.slot), ring.phase)
        arrive(FREE + form.STAGES + ring.slot, form.PARTY)
        slot, phase = following(ring.slot, ring.phase, form.STAGES)
        ring = BufferRing(slot, phase, ring.v_slot, ring.v_phase)
    return ring


@gluon.jit
def _begun(work, buffer, phase, ring, sizes, shared, group: gl.constexpr, form):
    """Return a tile's first scores, complete; its key tiles; and the ring, at the first of them."""
    row = work.row + group * form.LINES
    all_begin, all_end, _some = tile_keys(work, sizes, form)
    begin, clean, unclean, end = all_begin, all_begin, all_end, all_end
    if form.LISTED_K:
        unclean = work.split
    if form.RIGHT or form.LEFT or form.PAGE:
        begin, clean, unclean, end = key_tiles(row, form.LINES, work, sizes, form)
        if form.TREE:
            unclean = gl.minimum(unclean, gl.maximum(work.k_length - work.q_length, 0) // form.KEYS)
        if form.PAGE:  # rows behind the last query: of a sequence of one new token most are
            end = gl.where(row < work.q_length, end, all_begin + 1)
        end = gl.minimum(gl.maximum(end, all_begin + 1), all_end)
        begin = gl.minimum(gl.maximum(begin, all_begin), end - 1)
        ring = _passed(all_end - end, ring, shared, group, form)
    place = buffer * form.GROUPS + group
    mbarrier.wait(shared.q_full.index(place), phase)
    q = shared.q.index(place).reshape([_ROWS, form.DIM])
    if form.FP8:
        q = as_e4m3(q, [_ROWS, form.DIM])
    if form.REG_Q:
        q = q.load(form.QROWS)
        mbarrier.arrive(shared.q_free.index(place), count=1)
    mbarrier.wait(shared.k_full.index(ring.slot), ring.phase)
    if form.TURNS:
        sync(TURN + group, 256)
    s = score_product(q, shared, ring, form)
    if form.TURNS:
        arrive(TURN + (group + 1) % form.GROUPS, 256)
    s = warpgroup_mma_wait(0, deps=[s])
    arrive(FREE + ring.slot, form.PARTY)
    return s, q, Keys(begin, clean, unclean, end, begin - all_begin), ring


@gluon.jit
def _first_state(s, limits, n, scale, softcap, shared, form):
    """Return the state after the first key tile, whose values are not added yet."""
    cut: gl.constexpr = form.RIGHT or form.LEFT or form.RAGGED or form.LISTED_K > 0
    masked: gl.constexpr = cut or form.SPLIT or form.TREE or form.VARYING != "none"
    s, factor = scores_of(s, key_scales(scale, n, True, form), scale, form)
    if form.SOFTCAP:
        s = apply_softcap(s, scale, softcap, form)
        factor = 1.0
    if form.SCORE_MOD is not None:
        s = apply_score_mod(s, limits, n, scale, form)
        factor = LOG2E
    if masked:
        s = masked_scores(s, limits, n, form, True)
    row_max = row_maximum(s, form) * factor
    base = row_max
    if masked or form.SCORE_MOD is not None:
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
    p = weights(s, factor, base, form)
    acc = gl.zeros([_ROWS, form.DIM], gl.float32, form.OUTPUT)
    alpha = gl.full([_ROWS], 1.0, gl.float32, form.ROW)
    return State(acc, held_weights(p, shared, form), alpha, row_max, lane_sum(p, form.KEYS))


@gluon.jit
def _step(state, q, ring, limits, n, scale, softcap, shared, masked: gl.constexpr, group: gl.constexpr,
          form):  # fmt: skip
    """Process one more key tile: its scores and softmax, while the values of the tile before are added."""
    # The order of these statements is the schedule: moving one costs up to 8 %.
    mbarrier.wait(shared.k_full.index(ring.slot), ring.phase)
    if form.TURNS:
        sync(TURN + group, 256)
    blocks: gl.constexpr = form.BLOCKS and not masked
    if blocks:
        lanes = lane_scales(scale, n, form)
    s = score_product(q, shared, ring, form)
    acc = state.acc
    if form.LATE and form.LAZY:
        acc = rescaled_where_needed(acc, state.alpha, form)
    elif form.LATE and not form.FP8:
        acc = rescale_rows(acc, here(state.alpha), form)
    mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
    fresh = value_product(State(acc, state.held, state.alpha, state.row_max, state.row_sum), shared, ring, form)
    if form.TURNS:
        arrive(TURN + (group + 1) % form.GROUPS, 256)
    if not blocks:
        keys = key_scales(scale, n, masked, form)
    s = warpgroup_mma_wait(1, deps=[s])
    if not form.KEPT:
        arrive(FREE + ring.slot, form.PARTY)
    if blocks:
        s, first, second, largest = scores_by_blocks(s, lanes, scale, n, form)
        factor = scale[0]
    else:
        s, factor = scores_of(s, keys, scale, form)
    if form.SOFTCAP:
        s = apply_softcap(s, scale, softcap, form)
        factor = 1.0
    if form.SCORE_MOD is not None:
        s = apply_score_mod(s, limits, n, scale, form)
        factor = LOG2E
    if masked:
        s = masked_scores(s, limits, n, form)
    if not blocks:
        largest = row_maximum(s, form)
    if form.LAZY:
        row_max = reference(state.row_max, largest * factor)
    else:
        row_max = gl.maximum(state.row_max, largest * factor)
    base = row_max
    if masked or form.SCORE_MOD is not None:  # a function may hide a row's every key
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
    if form.HALVED:
        alpha = gl.exp2(state.row_max - base)
        p, sums, acc = weights_around_values(
            s, factor, base, acc, state.alpha, fresh, ring.slot, ring.v_slot, FREE, form
        )
        sums = gl.convert_layout(sums, state.row_sum.type.layout)
    elif form.EARLY:
        alpha = gl.exp2(state.row_max - base)
        fresh = warpgroup_mma_wait(0, deps=[fresh])
        arrive(FREE + form.STAGES + ring.v_slot, form.PARTY)
        p = weights(s, factor, base, form)
    elif blocks:
        p = weights_by_blocks(s, first, second, base, form)
        alpha = gl.exp2(state.row_max - base)
    else:
        p = weights(s, factor, base, form)
        alpha = gl.exp2(state.row_max - base)
    row_sum = state.row_sum * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout)), 1)
    if not form.HALVED:
        sums = lane_sum(p, form.KEYS)
        if form.KEPT:
            arrive_after_exponentials(FREE + ring.slot, sums, form)
    row_sum = row_sum + sums
    if not form.EARLY and not form.HALVED:
        fresh = warpgroup_mma_wait(0, deps=[fresh])
        arrive(FREE + form.STAGES + ring.v_slot, form.PARTY)
    if not form.HALVED:
        acc = accumulate_pv(acc, fresh, state.alpha, form)
    if not form.LATE and form.LAZY:
        acc = rescaled_where_needed(acc, alpha, form)
    elif not form.LATE and not form.FP8:
        acc = rescale_rows(acc, alpha, form)
    return State(acc, held_weights(p, shared, form), alpha, row_max, row_sum), advance_ring(ring, form)


@gluon.jit
def _next(state, q, ring, limits, n, scale, softcap, shared, masked: gl.constexpr, group: gl.constexpr,
          form):  # fmt: skip
    if form.COLUMNS < form.DIM:
        found = step_by_columns(state, q, ring, limits, n, scale, softcap, shared, masked, group, form)
    else:
        found = _step(state, q, ring, limits, n, scale, softcap, shared, masked, group, form)
    return found


@gluon.jit
def _last_values(state, ring, shared, form):
    """Return the accumulator with the last tile's P V."""
    acc = state.acc
    if form.COLUMNS < form.DIM:
        acc = last_values_by_columns(state, ring, shared, form)
    else:
        if form.LATE and not form.FP8:
            acc = rescale_rows(acc, state.alpha, form)
        mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
        before = State(acc, state.held, state.alpha, state.row_max, state.row_sum)
        fresh = value_product(before, shared, ring, form)
        fresh = warpgroup_mma_wait(0, deps=[fresh])
        arrive(FREE + form.STAGES + ring.v_slot, form.PARTY)
        acc = accumulate_pv(state.acc, fresh, state.alpha, form)
    return acc


@gluon.jit
def _rest(state, ring, limits, keys, q, scale, softcap, shared, group: gl.constexpr, form):
    """Process the key tiles after the first: masked ones, unmasked ones, then masked ones before a window."""
    n = keys.end - 1
    if form.RIGHT or form.TREE or form.LISTED_K:
        for _ in range(n - gl.maximum(keys.unclean, keys.begin)):
            n -= 1
            tile = tile_at(n, limits, form)
            if form.MASK_MOD is not None:  # asked for early: it comes during the step
                flags, hidden = hidden_keys(tile, limits, form)
            state, ring = _next(state, q, ring, limits, tile, scale, softcap, shared, True, group, form)
            if form.MASK_MOD is not None:
                clear_hidden(flags, hidden, ring.v_slot, ring.v_phase, shared, form)
    if form.TREE:  # at most two tiles have nodes
        if (limits.hidden != 0) & (n < keys.end - 1):
            mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
            clear(shared.v.index(ring.v_slot).reshape([form.KEYS, form.DIM]), 0, form.KEYS, n, limits, form)
    stop = keys.begin
    if form.LEFT:
        stop = gl.minimum(gl.maximum(keys.clean, keys.begin), n)
    for _ in range(n - stop):
        tile = n
        if form.INT8 or form.SCORE_MOD is not None:  # else which tile it is plays no part
            n -= 1
            tile = tile_at(n, limits, form)
        state, ring = _next(state, q, ring, limits, tile, scale, softcap, shared, False, group, form)
    if form.LEFT:
        n = stop
        for _ in range(stop - keys.begin):
            n -= 1
            state, ring = _next(state, q, ring, limits, n, scale, softcap, shared, True, group, form)
    return state, ring


@gluon.jit
def _first_row(position, keys, sizes, form):
    """Of the first key tile, the first row in the window of some query of the sequence; 0 or less: all rows are.

    Values of the rows before it, and of rows behind the sequence's keys, may be NaN: `clear` makes them 0. Warp groups
    clear a tile at the same time, so each must write there what the others write. Both ends of a tile that is the first
    and the last one are therefore cleared at once: else a group that clears the one end would write back the NaN of the
    other end, where another group may already have written its zeros.
    """
    return gl.maximum(position - sizes.left, 0) - keys.begin * form.KEYS


@gluon.jit
def consume(
    o_desc, out, lse, sinks, stride_h, stride_s, scale, softcap, scales, sizes, shared, group: gl.constexpr, form
):
    """Compute and write one warp group's rows of each tile."""
    for j in gl.static_range(2 * form.STAGES):  # every buffer starts free
        arrive(FREE + j, form.PARTY)
    if form.TURNS and group == form.GROUPS - 1:
        arrive(TURN, 256)
    zero = gl.to_tensor(0)
    ring = BufferRing(zero, zero, zero, zero)
    buffer, q_phase, box, box_phase = zero, zero, zero, zero
    mbarrier.wait(shared.mail_full.index(box), box_phase)
    work = read(box, shared)
    while work.row >= 0:
        if form.LISTED_K:  # asked for early
            tile = first_tile(work, sizes, form)
        s, q, keys, ring = _begun(work, buffer, q_phase, ring, sizes, shared, group, form)
        place = buffer * form.GROUPS + group
        rows = work.row + group * form.LINES + line_numbers(form.ROW, form)
        seen, position = last_seen(work, sizes, form), position_of(work, form)
        if form.SPLIT:
            _begin, _end, some = tile_keys(work, sizes, form)
            seen = gl.where(some, seen, 0)
        limits = row_limits(work, rows, seen, position, sizes, form)
        factor = scale
        if form.FP8 or form.DEQUANTIZE:
            factor = score_factor(scale, scales, sizes, work, form)
        elif form.INT8:
            factor = row_factors(scale, scales, sizes, work, group, form)
        if not form.LISTED_K:
            tile = keys.end - 1
        state = _first_state(s, limits, tile, factor, softcap, shared, form)
        if form.MASK_MOD is not None:
            flags, hidden = hidden_keys(tile, limits, form)
            clear_hidden(flags, hidden, ring.slot, ring.phase, shared, form)
        if form.UNSEEN and not form.FP8:
            unseen = keys.end * form.KEYS > seen
            if form.TREE:
                unseen = unseen | (limits.hidden != 0)
            if unseen:
                mbarrier.wait(shared.v_full.index(ring.slot), ring.phase)
                v = shared.v.index(ring.slot).reshape([form.KEYS, form.DIM])
                begin = zero
                if form.LEFT:
                    if keys.end - 1 == keys.begin:
                        begin = gl.maximum(_first_row(position, keys, sizes, form), 0)
                clear(v, begin, seen - (keys.end - 1) * form.KEYS, keys.end - 1, limits, form)
        ring = advance_ring(ring, form)
        state, ring = _rest(state, ring, limits, keys, q, factor, softcap, shared, group, form)
        if form.LEFT and not form.FP8:
            first = _first_row(position, keys, sizes, form)
            if form.UNSEEN:
                if (keys.end - 1 == keys.begin) & (keys.end * form.KEYS > seen):
                    first = zero  # both ends are cleared
            if first > 0:
                mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
                v = shared.v.index(ring.v_slot).reshape([form.KEYS, form.DIM])
                clear(v, first, form.KEYS, keys.begin, limits, form)
        if form.OWN_OUT:
            if not form.REG_Q:  # the queries have been read for the last time
                mbarrier.arrive(shared.q_free.index(place), count=1)
        # What is this tile's is read again below, not kept in registers over the loops, which need all that there are.
        acc = _last_values(state, ring, shared, form)
        ring = _passed(keys.after, ring, shared, group, form)
        write(acc, state, box, place, o_desc, out, lse, sinks, stride_h, stride_s, scales, sizes, shared, group, form)
        if not form.OWN_OUT:  # staged where the queries were
            tma.store_wait(0)
            mbarrier.arrive(shared.q_free.index(place), count=1)
        mbarrier.arrive(shared.mail_free.index(box), count=1)
        box, box_phase = following(box, box_phase, BOXES)
        buffer, q_phase = following(buffer, q_phase, form.QUERIES)
        mbarrier.wait(shared.mail_full.index(box), box_phase)
        work = read(box, shared)
    if form.TURNS and group == 0:
        sync(TURN, 256)
    tma.store_wait(0)


_LN2: gl.constexpr = gl.constexpr(math.log(2))
_LARGEST: gl.constexpr = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def normalize_rows(acc, row_max, row_sum, sink, valid, value_factor, form):
    """Output rows and the natural LSE of each. `sink`: one more score, natural, without a value; `valid`: 0 for padding
    rows; value_factor: with FP8 or a FORMAT a factor on the output."""
    total = gl.convert_layout(gl.sum(row_sum, 1), form.ROW)
    if form.FP8:
        total = total * UNSHIFTED
    factor = 1.0
    largest = row_max * _LN2
    if sink is not None:
        # One that base 2 cannot hold stays as it is: both numbers are beyond every score.
        score = sink * (1.0 / _LN2)
        score = gl.where(gl.abs(score) == float("inf"), sink, score)
        score = gl.where(score == float("inf"), _LARGEST, score)  # inf - inf is NaN
        new_max = gl.maximum(row_max, score)
        factor = gl.where(row_max == -float("inf"), 0.0, gl.exp2(row_max - new_max))
        total = total * factor + gl.where(score == -float("inf"), 0.0, gl.exp2(score - new_max))
        largest = gl.where(new_max == score, sink, new_max * _LN2)
    empty = total == 0.0  # a NaN total stays NaN
    if form.VARYING != "none":
        empty = empty | (valid == 0)
    lse = gl.where(empty, -float("inf"), largest + gl.log2(gl.where(empty, 1.0, total)) * _LN2)
    factor = gl.where(empty, 0.0, factor / gl.where(empty, 1.0, total))
    if form.FP8:
        factor = factor * (value_factor * UNSHIFTED)
    elif form.DEQUANTIZE:
        factor = factor * value_factor
    acc = rescale_rows(acc, factor, form)
    if form.VARYING != "none":  # padding rows may hold anything
        nothing = gl.convert_layout(empty.to(gl.int32), gl.SliceLayout(1, form.OUTPUT))
        acc = gl.where(gl.expand_dims(nothing, 1) != 0, 0.0, acc)
    return acc, lse


@gluon.jit
def write(acc, state, box, place, o_desc, out, lse, sinks, stride_h, stride_s, scales, sizes, shared,
           group: gl.constexpr, form):  # fmt: skip
    """Write the tile's results, normalised, to memory. place: that of its queries, which have been read."""
    work = read(box, shared)
    row = work.row + group * form.LINES
    rows = row + line_numbers(form.ROW, form)
    sink = None
    if sinks is not None:
        if form.HEADS > 1:
            sink = gl.load(sinks + work.head * form.HEADS + gl.arange(0, _ROWS, form.ROW) % form.HEADS).to(gl.float32)
        else:
            sink = gl.load(sinks + work.head).to(gl.float32)
        if form.SPLIT:  # it counts once
            sink = gl.where(work.split == 0, sink, -float("inf"))
    valid = ((rows < work.q_length) & (work.k_length >= 0)).to(gl.int32)
    value_factor = 1.0
    if form.FP8 or form.DEQUANTIZE:
        value_factor = result_factor(scales, sizes, work, form)
    acc, row_lse = normalize_rows(acc, state.row_max, state.row_sum, sink, valid, value_factor, form)
    split, slots = work.split, sizes.batches
    if form.PACKED:
        slots = 1
    if (form.FP8 and form.PACKED) or form.LISTED_K:  # there it is the sequence, or the whole tiles
        split = work.split - work.split
    first = ((split * slots + work.slot) * sizes.heads + work.head).to(gl.int64) * sizes.seq_q
    first_of_split = first * form.HEADS
    if form.HEADS > 1:
        first = first_of_split + (gl.arange(0, _ROWS, form.ROW) % form.HEADS).to(gl.int64) * sizes.seq_q
    if lse is not None:
        if form.PACKED:
            gl.store(lse + first + work.q_first + rows, row_lse, mask=rows < work.q_length)
        else:
            gl.store(lse + first + rows, row_lse, mask=rows < sizes.seq_q)
    if form.SPLIT:
        last = sizes.seq_q
        if form.PACKED:
            last = work.q_length
        inside = gl.convert_layout(last - rows, gl.SliceLayout(1, form.OUTPUT))
        columns = gl.arange(0, form.DIM, gl.SliceLayout(0, form.OUTPUT))
        lines = line_numbers(gl.SliceLayout(1, form.OUTPUT), form) * form.DIM
        first_line = first_of_split + work.q_first + row
        if form.HEADS > 1:
            lines += gl.arange(0, _ROWS, gl.SliceLayout(1, form.OUTPUT)) % form.HEADS * sizes.seq_q * form.DIM
        offsets = gl.expand_dims(lines, 1) + gl.expand_dims(columns, 0)
        there = gl.expand_dims(inside > 0, 1)
        gl.store(out + first_line * form.DIM + offsets, acc, mask=there)
    else:
        if form.OWN_OUT:
            tma.store_wait(0)
            place = group
        store_rows(acc, o_desc, out, stride_h, stride_s, work, row, shared.out.index(place), form)
