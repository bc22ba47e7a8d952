"""What the Hopper forward's consumers do to each tile: its two products, and the weights between them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from portattn.backends.cuda.hopper_forward.form import BufferRing
from portattn.backends.cuda.hopper_forward.fp8_forward import SHIFT, as_e4m3, hold_bytes, narrow_values
from portattn.backends.cuda.hopper_forward.fragments import following, hold, operand, rescale_rows
from portattn.backends.cuda.sizes import GROUP_ROWS

TURN: gl.constexpr = gl.constexpr(5)  # 5..7   named barriers: consumer w may issue its products: TURN + w
FREE: gl.constexpr = gl.constexpr(8)  # 8..15  key buffer b may be loaded again: FREE + b; values: FREE + STAGES + b
_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


@gluon.jit
def score_product(q, shared, ring, form):
    """Q Kᵀ of this tile, begun."""
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
    """acc += P V of the tile before, begun."""
    if form.FP8:
        found = narrow_values(state.held, shared, ring.v_slot, form)
    else:
        v = shared.v.index(ring.v_slot).reshape([form.KEYS, form.DIM])
        found = warpgroup_mma(operand(state.held, form, shared.v.dtype), v, state.acc, is_async=True)
    return found


@gluon.jit
def weights(s, factor, base, form):
    """Probabilities from scores: the largest is 1, with FP8 2^SHIFT, with LAZY at most 2^GROWTH."""
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
    """What a product of values leaves: its accumulator, or with FP8 that of all tiles."""
    if form.FP8:
        found = rescale_rows(acc, alpha, form) + fresh
    else:
        found = fresh
    return found


@gluon.jit
def advance_ring(ring, form):
    slot, phase = following(ring.slot, ring.phase, form.STAGES)
    return BufferRing(slot, phase, ring.slot, ring.phase)
