"""The key tiles of a row tile in e4m3, with a tile's scores multiplied while the powers of the tile before are computed.

A step has its scores when it begins. It multiplies the values of the tile before, takes the rows' maxima and computes
the powers of half of its columns. By then those values are there, and are added. Then the next tile's scores are
multiplied, while the powers of the other half are computed. So hardly any product is waited for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from portattn.backends.cuda.hopper_forward.form import State
from portattn.backends.cuda.hopper_forward.narrow import PACK, SHIFT, returned, stored
from portattn.backends.cuda.hopper_forward.parts import capped, following, lane_sum
from portattn.backends.cuda.hopper_forward.powers import powers
from portattn.backends.cuda.hopper_forward.products import FREE, advanced, value_product
from portattn.backends.cuda.named_barriers import arrive
from portattn.backends.cuda.sizes import GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)


def _after(numbers: int) -> str:
    """PTX. ptxas does not know that the least of a magnitude and 0 is 0."""
    lines = ["{", ".reg .f32 z, a, b;", f"abs.f32 z, ${4 * numbers};", "min.f32 z, z, 0f00000000;"]
    lines += [f"neg.f32 a, ${3 * numbers};", f"neg.f32 b, ${3 * numbers + 2};", "sub.f32 a, a, z;", "sub.f32 b, b, z;"]
    lines += [f"fma.rn.f32 ${i}, ${numbers + i}, ${2 * numbers}, {'ab'[i % 4 // 2]};" for i in range(numbers)]
    return "\n".join([*lines, "}"])


_AFTER = {keys: _after(GROUP_ROWS * keys // 128) for keys in (32, 64)}


@gluon.constexpr_function
def _after_code(keys):
    return _AFTER[keys]


@gluon.constexpr_function
def _after_operands(keys):
    return ",".join(["=f"] * (keys // 2) + ["f"] * (keys * 2))


@gluon.constexpr_function
def _after_pack(keys):
    return keys // 2


@gluon.jit
def after(s, factor, base, fresh, half: gl.constexpr, form):
    """s * factor - base, once `fresh` is there."""
    code: gl.constexpr = _after_code(half)
    operands: gl.constexpr = _after_operands(half)
    pack: gl.constexpr = _after_pack(half)
    for j in gl.static_range((form.DIM // half).bit_length() - 1):
        fresh, _other = gl.split(gl.permute(gl.reshape(fresh, [_ROWS, 2, form.DIM // 2 ** (j + 1)]), (0, 2, 1)))
    fresh = gl.convert_layout(fresh, s.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        code, operands, [s, factor, gl.expand_dims(base, 1), fresh], dtype=gl.float32, is_pure=False, pack=pack
    )


@gluon.jit
def _rescaled_and_added(acc, before, fresh, form):
    before = gl.expand_dims(gl.convert_layout(before, gl.SliceLayout(1, form.OUTPUT)), 1)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [acc, before, fresh], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _packed(p, keys: gl.constexpr):
    """Probabilities as four bytes in 32 bits [64, keys / 16, 4], in the order of an operand."""
    x = gl.permute(gl.reshape(p, [_ROWS, keys // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    even, odd = gl.split(x)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        PACK, "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _half_scores(q, shared, slot, part: gl.constexpr, form):
    """Scores of half of a tile's keys, begun."""
    half: gl.constexpr = form.KEYS // 2
    k = stored(shared.k.index(slot).reshape([form.KEYS, form.DIM]), [form.KEYS, form.DIM])
    k = k.slice(part * half, half, dim=0).permute((1, 0))
    zeros = gl.zeros([_ROWS, half], gl.float32, form.HALF)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _lane_maximum(s, keys: gl.constexpr):
    x = gl.reshape(s, [_ROWS, 2, keys // 16, 4, 2])
    return gl.max(gl.max(gl.max(x, 2), 3), 1)


@gluon.jit
def _masked(s, row_start, row_end, first, form):
    half: gl.constexpr = form.KEYS // 2
    columns = gl.expand_dims(first + gl.arange(0, half, gl.SliceLayout(0, form.HALF)), 0)
    keep = columns < gl.expand_dims(gl.convert_layout(row_end, gl.SliceLayout(1, form.HALF)), 1)
    if form.LEFT:
        keep = keep & (columns >= gl.expand_dims(gl.convert_layout(row_start, gl.SliceLayout(1, form.HALF)), 1))
    return gl.where(keep, s, -float("inf"))


@gluon.jit
def _step(state, a, q, ring, row_start, row_end, n, more, scale, softcap, shared, masked: gl.constexpr, form):
    """A key tile, of which the first half's scores are there. more: whether another follows."""
    half: gl.constexpr = form.KEYS // 2
    b = _half_scores(q, shared, ring.slot, 1, form)
    mbarrier.wait(shared.v_full.index(ring.v_slot), ring.v_phase)
    fresh = value_product(state, shared, ring, form)
    b = warpgroup_mma_wait(1, deps=[b])
    factor = scale
    if form.SOFTCAP:
        a = capped(a, scale, softcap, form)
        b = capped(b, scale, softcap, form)
        factor = 1.0
    if masked:
        a = _masked(a, row_start, row_end, n * form.KEYS, form)
        b = _masked(b, row_start, row_end, n * form.KEYS + half, form)
    largest = gl.maximum(_lane_maximum(a, half), _lane_maximum(b, half))
    row_max = gl.maximum(state.row_max, gl.convert_layout(gl.max(largest, 1), form.ROW) * factor)
    base = row_max
    if masked:
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
    alpha = gl.exp2(state.row_max - base)
    base = gl.convert_layout(base, gl.SliceLayout(1, form.HALF)) - SHIFT
    a = powers(a * factor - gl.expand_dims(base, 1), half, form)
    sums = lane_sum(a, half)
    returned(FREE + ring.slot, sums, form)
    fresh = warpgroup_mma_wait(0, deps=[fresh])
    a = _packed(a, half)  # not before: its words lie where the product under way reads the last tile's
    if form.AHEAD == 2:
        acc = _rescaled_and_added(state.acc, state.alpha, fresh, form)
    slot, phase = following(ring.slot, ring.phase, form.STAGES)
    slot = gl.where(more, slot, ring.slot)  # else what it multiplies is not used
    mbarrier.wait(shared.k_full.index(slot), phase, pred=more)
    next_a = _half_scores(q, shared, slot, 0, form)
    if form.AHEAD == 1:
        acc = _rescaled_and_added(state.acc, state.alpha, fresh, form)
    b = powers(after(b, factor, base, fresh, half, form), half, form)
    sums_b = lane_sum(b, half)
    returned(FREE + form.STAGES + ring.v_slot, sums_b, form)
    next_a = warpgroup_mma_wait(0, deps=[next_a])
    held = gl.join(a, _packed(b, half))
    held = gl.reshape(gl.permute(held, (0, 3, 1, 2)), [_ROWS, form.KEYS // 16, 4])
    held = gl.convert_layout(held, state.held.type.layout, assert_trivial=True)
    row_sum = state.row_sum * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout)), 1)
    row_sum = row_sum + gl.convert_layout(sums + sums_b, row_sum.type.layout)
    return State(acc, held, alpha, row_max, row_sum), next_a, advanced(ring, form)


@gluon.jit
def rest_ahead(state, ring, row_start, row_end, keys, q, scale, softcap, shared, form):
    """The key tiles after the first: masked ones, then those that need no mask, then masked ones before a window."""
    n = keys.end - 1
    s = gl.zeros([_ROWS, form.KEYS // 2], gl.float32, form.HALF)
    if n > keys.begin:
        mbarrier.wait(shared.k_full.index(ring.slot), ring.phase)
        s = _half_scores(q, shared, ring.slot, 0, form)
        s = warpgroup_mma_wait(0, deps=[s])
    if form.RIGHT:
        for _ in range(n - gl.maximum(keys.unclean, keys.begin)):
            n -= 1
            more = n > keys.begin
            state, s, ring = _step(state, s, q, ring, row_start, row_end, n, more, scale, softcap, shared, True, form)
    stop = keys.begin
    if form.LEFT:
        stop = gl.minimum(gl.maximum(keys.clean, keys.begin), n)
    for _ in range(n - stop):
        n -= 1
        more = n > keys.begin
        state, s, ring = _step(state, s, q, ring, row_start, row_end, n, more, scale, softcap, shared, False, form)
    if form.LEFT:
        n = stop
        for _ in range(stop - keys.begin):
            n -= 1
            more = n > keys.begin
            state, s, ring = _step(state, s, q, ring, row_start, row_end, n, more, scale, softcap, shared, True, form)
    return state, ring
