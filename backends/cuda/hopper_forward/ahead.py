"""The Hopper forward of e4m3 heads with scores a tile ahead: a consumer never waits for the scores that it needs next."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from portattn.backends.cuda.hopper_forward.exponentials import packed, shares
from portattn.backends.cuda.hopper_forward.form import Ring, State
from portattn.backends.cuda.hopper_forward.narrow import returned
from portattn.backends.cuda.hopper_forward.parts import capped, following, masked_scores, row_maximum
from portattn.backends.cuda.hopper_forward.products import FREE, added, score_product, value_product
from portattn.backends.cuda.named_barriers import arrive


# A word as it is, which ptxas does not know: else it would stand where the product under way still reads its operand.
_MOVED: gl.constexpr = gl.constexpr("{ .reg .b32 zero; shr.u32 zero, $2, 1; add.u32 $0, $1, zero; }")


@gluon.jit
def _moved(held, ring):
    return gl.inline_asm_elementwise(
        _MOVED, "=r,r,r", [held, ring.v_phase], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _softmax(state, s, row_start, row_end, n, scale, softcap, masked: gl.constexpr, group: gl.constexpr, form):
    factor = scale
    if form.SOFTCAP:
        s = capped(s, scale, softcap, form)
        factor = 1.0
    if masked:
        s = masked_scores(s, row_start, row_end, n, form)
    row_max = gl.maximum(state.row_max, row_maximum(s, form) * factor)
    base = row_max
    if masked:
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
    alpha = gl.exp2(state.row_max - base)
    p, sums = shares(s, factor, base, group, form)
    row_sum = state.row_sum * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout)), 1)
    return p, alpha, row_max, row_sum + sums, sums


@gluon.jit
def _step(state, s, q, ring, row_start, row_end, n, scale, softcap, shared, masked: gl.constexpr,
          group: gl.constexpr, form):  # fmt: skip
    """A tile whose scores are under way: the values of the tile before and the next one's scores are begun first."""
    mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
    fresh = value_product(state, shared, ring, form)
    slot, phase = following(ring.slot, ring.phase, form.STAGES)
    mbarrier.wait(shared.k_full.index(slot), phase)
    after = Ring(slot, phase, ring.slot, ring.phase)
    following_s = score_product(q, shared, after, form)
    p, alpha, row_max, row_sum, sums = _softmax(
        state, s, row_start, row_end, n, scale, softcap, masked, group, form
    )
    held = packed(p, form)
    returned(FREE + ring.slot, sums, form)
    fresh, following_s = warpgroup_mma_wait(0, deps=[fresh, following_s])
    arrive(FREE + form.STAGES + ring.v_slot, form.PARTY)
    acc = added(state.acc, fresh, state.alpha, form)
    return State(acc, _moved(held, ring), alpha, row_max, row_sum), following_s, after


@gluon.jit
def _last(state, s, ring, row_start, row_end, n, scale, softcap, shared, masked: gl.constexpr, group: gl.constexpr,
          form):  # fmt: skip
    mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
    fresh = value_product(state, shared, ring, form)
    p, alpha, row_max, row_sum, sums = _softmax(
        state, s, row_start, row_end, n, scale, softcap, masked, group, form
    )
    returned(FREE + ring.slot, sums, form)
    fresh = warpgroup_mma_wait(0, deps=[fresh])
    arrive(FREE + form.STAGES + ring.v_slot, form.PARTY)
    acc = added(state.acc, fresh, state.alpha, form)
    slot, phase = following(ring.slot, ring.phase, form.STAGES)
    return State(acc, packed(p, form), alpha, row_max, row_sum), Ring(slot, phase, ring.slot, ring.phase)


@gluon.jit
def rest_ahead(state, ring, row_start, row_end, keys, q, scale, softcap, shared, group: gl.constexpr, form):
    """The key tiles after the first."""
    gl.static_assert(not form.TURNS)
    n = keys.end - 1
    if n > keys.begin:
        mbarrier.wait(shared.k_full.index(ring.slot), ring.phase)
        s = warpgroup_mma_wait(0, deps=[score_product(q, shared, ring, form)])
        begin = keys.begin + 1
        if form.RIGHT:
            for _ in range(n - gl.maximum(keys.unclean, begin)):
                n -= 1
                state, s, ring = _step(
                    state, s, q, ring, row_start, row_end, n, scale, softcap, shared, True, group, form
                )
        stop = begin
        if form.LEFT:
            stop = gl.minimum(gl.maximum(keys.clean, begin), n)
        if form.AHEAD == 1:
            for _ in range(n - stop):
                state, s, ring = _step(
                    state, s, q, ring, row_start, row_end, n, scale, softcap, shared, False, group, form
                )
        else:
            steps = n - stop
            for _ in range(steps // 2):  # two at a time: the scores of each have registers of their own
                state, s, ring = _step(
                    state, s, q, ring, row_start, row_end, n, scale, softcap, shared, False, group, form
                )
                state, s, ring = _step(
                    state, s, q, ring, row_start, row_end, n, scale, softcap, shared, False, group, form
                )
            if steps % 2 == 1:
                state, s, ring = _step(
                    state, s, q, ring, row_start, row_end, n, scale, softcap, shared, False, group, form
                )
        if form.LEFT:
            n = stop
            for _ in range(stop - begin):
                n -= 1
                state, s, ring = _step(
                    state, s, q, ring, row_start, row_end, n, scale, softcap, shared, True, group, form
                )
        masked: gl.constexpr = form.RIGHT or form.LEFT
        state, ring = _last(
            state, s, ring, row_start, row_end, keys.begin, scale, softcap, shared, masked, group, form
        )
    return state, ring
