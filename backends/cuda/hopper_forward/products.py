"""Products of a tile of the Hopper forward, Q Kᵀ and P V, and the weights between them.

Wide e4m3 heads (step_by_columns) multiply a tile's values by a quarter of the columns at a time. A tile's sums of
values have registers apart from the sums of all tiles (low_precision_products.py). At 256 columns both take 256
registers of a thread, all that it can have. So a product has 64 columns, whose sums take 32 registers and are added
during the next product. Such a step multiplies the preceding tile's values, then computes its own scores. No product of
its own runs during the softmax: the other consumer's does, since they take turns. So scores, weights and sums need not
fit beside each other, and a tile has 128 keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from portattn.backends.cuda.gluon_names import arrive, sync
from portattn.backends.cuda.hopper_forward import GROUP_ROWS
from portattn.backends.cuda.hopper_forward.fragments import (
    apply_softcap,
    following,
    hold,
    lane_sum,
    masked_scores,
    operand,
    rescale_rows,
    row_maximum,
)
from portattn.backends.cuda.hopper_forward.low_precision_products import (
    SHIFT,
    as_e4m3,
    hold_bytes,
    narrow_values,
    operand_bytes,
)
from portattn.backends.cuda.hopper_forward.tile_scheduler import BufferRing, State

TURN: gl.constexpr = gl.constexpr(5)  # 5..7   named barriers: consumer w may issue its products: TURN + w
FREE: gl.constexpr = gl.constexpr(8)  # 8..15  key buffer b may be loaded again: FREE + b; values: FREE + STAGES + b
_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


@gluon.jit
def score_product(q, shared, ring, form):
    """Begin Q Kᵀ of this tile."""
    k = shared.k.index(ring.slot).reshape([form.KEYS, form.DIM])
    if form.FP8:
        k = as_e4m3(k, [form.KEYS, form.DIM])
    k = k.permute((1, 0))
    kind: gl.constexpr = gl.int32 if form.INT8 else gl.float32
    zeros = gl.zeros([_ROWS, form.KEYS], kind, form.SCORES)
    if form.USED < form.DIM:  # three quarters: a half, and half of the other
        gl.static_assert(not form.REG_Q)
        half: gl.constexpr = form.DIM // 2
        rest: gl.constexpr = form.USED - half
        found = warpgroup_mma(q.slice(0, half, dim=1), k.slice(0, half, dim=0), zeros, use_acc=False, is_async=True)
        found = warpgroup_mma(q.slice(half, rest, dim=1), k.slice(half, rest, dim=0), found, is_async=True)
    else:
        found = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    return found


@gluon.jit
def value_product(state, shared, ring, form):
    """Begin acc += P V of the tile before."""
    if form.FP8:
        found = narrow_values(state.held, shared, ring.v_slot, form)
    else:
        v = shared.v.index(ring.v_slot).reshape([form.KEYS, form.DIM])
        found = warpgroup_mma(operand(state.held, form, shared.v.dtype), v, state.acc, is_async=True)
    return found


@gluon.jit
def weights(s, factor, base, form):
    """Return probabilities from scores: the largest is 1, with FP8 2^SHIFT, with LAZY at most 2^GROWTH."""
    if form.FP8:
        p = gl.exp2(s * factor - gl.expand_dims(base - SHIFT, 1))
    elif form.INT8:
        p = gl.exp2(s * gl.expand_dims(factor, 1) - gl.expand_dims(base, 1))
    else:
        p = gl.exp2(s * factor - gl.expand_dims(base, 1))
    return p


@gluon.jit
def held_weights(p, shared, form):
    if form.FP8:
        found = hold_bytes(p, form)
    else:
        found = hold(p, form, shared.v.dtype)
    return found


@gluon.jit
def accumulate_pv(acc, fresh, alpha, form):
    """Return the accumulator of a product of values, with FP8 that of all tiles."""
    if form.FP8:
        found = rescale_rows(acc, alpha, form) + fresh
    else:
        found = fresh
    return found


@gluon.jit
def advance_ring(ring, form):
    slot, phase = following(ring.slot, ring.phase, form.STAGES)
    return BufferRing(slot, phase, ring.slot, ring.phase)


@gluon.jit
def _halves(x, columns: gl.constexpr):
    return gl.split(gl.permute(gl.reshape(x, [_ROWS, 2, columns // 2]), (0, 2, 1)))


@gluon.jit
def _whole(first, second, columns: gl.constexpr):
    return gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [_ROWS, columns])


@gluon.jit
def _quarters(acc, form):
    """Return the accumulator's columns in quarters of COLUMNS. No register moves."""
    low, high = _halves(acc, form.DIM)
    a, b = _halves(low, form.DIM // 2)
    c, d = _halves(high, form.DIM // 2)
    return (
        gl.convert_layout(a, form.PART),
        gl.convert_layout(b, form.PART),
        gl.convert_layout(c, form.PART),
        gl.convert_layout(d, form.PART),
    )


@gluon.jit
def _joined(a, b, c, d, form):
    whole = _whole(_whole(a, b, form.DIM // 2), _whole(c, d, form.DIM // 2), form.DIM)
    return gl.convert_layout(whole, form.OUTPUT)


@gluon.jit
def _begun(p, shared, slot, part: gl.constexpr, form):
    """Begin P V of some columns."""
    v = as_e4m3(shared.v.index(slot).reshape([form.DIM, form.KEYS]), [form.DIM, form.KEYS])
    v = v.slice(part * form.COLUMNS, form.COLUMNS, dim=0).permute((1, 0))
    zeros = gl.zeros([_ROWS, form.COLUMNS], gl.float32, form.PART)
    return warpgroup_mma(p, v, zeros, use_acc=False, is_async=True)


@gluon.jit
def _added(acc, fresh, alpha, form):
    # Where it stands: what is only computed, LLVM puts behind the last product, whose sums then stand beside all these.
    alpha = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, form.PART)), 1)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, alpha, fresh], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _products(state, shared, slot, form):
    """The accumulator's quarters with a tile's values but for the last columns', and those, which are complete.

    Columns that are padding have no product.
    """
    a, b, c, d = _quarters(state.acc, form)
    p = operand_bytes(state.held, form)
    first = _begun(p, shared, slot, 0, form)
    second = _begun(p, shared, slot, 1, form)
    first = warpgroup_mma_wait(1, deps=[first])
    a = _added(a, first, state.alpha, form)
    last = _begun(p, shared, slot, 2, form)
    second = warpgroup_mma_wait(1, deps=[second])
    b = _added(b, second, state.alpha, form)
    if form.USED == form.DIM:
        third = last
        last = _begun(p, shared, slot, 3, form)
        third = warpgroup_mma_wait(1, deps=[third])
        c = _added(c, third, state.alpha, form)
    return a, b, c, d, warpgroup_mma_wait(0, deps=[last])


@gluon.jit
def _complete(a, b, c, d, last, alpha, form):
    """Return the accumulator with the last columns' values too, whose product is complete."""
    if form.USED == form.DIM:
        d = _added(d, last, alpha, form)
    else:
        c = _added(c, last, alpha, form)
    return _joined(a, b, c, d, form)


@gluon.jit
def last_values_by_columns(state, ring, shared, form):
    """Return the accumulator with the last tile's values."""
    mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
    a, b, c, d, last = _products(state, shared, ring.v_slot, form)
    arrive(FREE + form.STAGES + ring.v_slot, form.PARTY)
    return _complete(a, b, c, d, last, state.alpha, form)


@gluon.jit
def step_by_columns(state, q, ring, limits, n, scale, softcap, shared, masked: gl.constexpr,
                    group: gl.constexpr, form):  # fmt: skip
    """Process one more key tile: the values of the tile before, then its scores and softmax."""
    mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
    if form.TURNS:
        sync(TURN + group, 256)
    a, b, c, d, last = _products(state, shared, ring.v_slot, form)
    arrive(FREE + form.STAGES + ring.v_slot, form.PARTY)
    mbarrier.wait(shared.k_full.index(ring.slot), ring.phase)
    s = score_product(q, shared, ring, form)
    if form.TURNS:
        arrive(TURN + (group + 1) % form.GROUPS, 256)
    acc = _complete(a, b, c, d, last, state.alpha, form)
    s = warpgroup_mma_wait(0, deps=[s])
    arrive(FREE + ring.slot, form.PARTY)
    factor = scale
    if form.SOFTCAP:
        s = apply_softcap(s, scale, softcap, form)
        factor = 1.0
    if masked:
        s = masked_scores(s, limits, n, form)
    row_max = gl.maximum(state.row_max, row_maximum(s, form) * factor)
    base = row_max
    if masked:
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
    p = weights(s, factor, base, form)
    alpha = gl.exp2(state.row_max - base)
    row_sum = state.row_sum * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout)), 1)
    row_sum = row_sum + lane_sum(p, form.KEYS)
    return State(acc, held_weights(p, shared, form), alpha, row_max, row_sum), advance_ring(ring, form)
