"""Tiles in registers of the Hopper forward: rows' maxima and sums, masks, soft caps, operands, rescaling.

Rescaling only where a row's maximum has grown much (Form.LAZY): weights may be relative to any number, which the last
division removes. So a row keeps the maximum that they are relative to until a tile's is more than 2^GROWTH times as
large; weights are then at most 2^GROWTH, which fp16 holds, and so are their sums in float32. A row's LSE is that number
and the logarithm of the sum of its weights, as ever, and so are the partial results of split keys.

A vote of a warp's lanes tells whether the factor of any of its rows is not 1, and the products that follow are a branch
of that warp alone: no warp waits for another. With scores of one size hardly any tile takes it. The idea is
FlashAttention-4's.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from portattn.backends.cuda.gluon_names import aggregate, argument_or, store
from portattn.backends.cuda.hopper_forward import FLAGS, GROUP_ROWS

_ROWS: gl.constexpr = gl.constexpr(GROUP_ROWS)
_FLAGS: gl.constexpr = gl.constexpr(FLAGS)


@gluon.jit
def here(x):
    # Keeps the compiler from folding a rescaling into the trip of the loop before.
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def following(slot, phase, count: gl.constexpr):
    slot += 1
    if slot == count:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def line_numbers(layout: gl.constexpr, form):
    """Return the query number of each of a warp group's rows, from the first."""
    rows = gl.arange(0, _ROWS, layout)
    if form.HEADS > 1:
        rows = rows // form.HEADS
    return rows


@gluon.jit
def lane_maximum(s, keys: gl.constexpr):
    # Registers first, in independent chains.
    x = gl.reshape(s, [_ROWS, 2, keys // 16, 4, 2])
    return gl.max(gl.max(gl.max(x, 2), 3), 1)


@gluon.jit
def row_maximum(s, form):
    return gl.convert_layout(gl.max(lane_maximum(s, form.KEYS), 1), form.ROW)


@gluon.jit
def split_columns(x, columns: gl.constexpr):
    """Return the first and the last half of the columns. No register moves."""
    return gl.split(gl.permute(gl.reshape(x, [_ROWS, 2, columns // 2]), (0, 2, 1)))


@gluon.jit
def whole(first, last, form):
    """Join halves of scores' columns side by side again."""
    found = gl.reshape(gl.permute(gl.join(first, last), (0, 2, 1)), [_ROWS, form.KEYS])
    return gl.convert_layout(found, form.SCORES, assert_trivial=True)


@gluon.jit
def lane_sum(p, keys: gl.constexpr):
    # The exchange between lanes waits until the end of the tile.
    x = gl.reshape(p, [_ROWS, 2, keys // 16, 4, 2])
    return gl.sum(gl.sum(gl.sum(x, 2), 3), 1)


@gluon.jit
def hold(p, form, dtype: gl.constexpr):
    # 16-bit numbers carried over the loop's edge as such are unpacked and packed again on every trip.
    if form.PAIRS:
        low, high = gl.split(gl.reshape(p, [_ROWS, form.KEYS // 2, 2]))
        if dtype == gl.bfloat16:
            held = gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
            )
        else:
            held = gl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
            )
    else:
        held = p
    return held


@gluon.jit
def operand(held, form, dtype: gl.constexpr):
    if form.PAIRS:
        low = (held & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
        high = (held >> 16).to(gl.int16).to(dtype, bitcast=True)
        p = gl.reshape(gl.join(low, high), [_ROWS, form.KEYS])
    else:
        p = held.to(dtype)
    return gl.convert_layout(p, form.PROBS)


@gluon.jit
def rescale_rows(acc, factor, form):
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, form.OUTPUT)), 1)


# tanh, of one number after the other: of a whole tile at a time each intermediate would take 64 registers. Near 0 much
# cancels in (1 - e^-2x)/(1 + e^-2x), and a cap multiplies what is left wrong: below 1/4 it is the series x - x^3/3 +
# 2x^5/15 - 17x^7/315 + 62x^9/2835 (relative error 1e-8), as in portattn/kernels/softmax.py.
_TANH = f"""{{
.reg .f32 x, a, far, y, p; .reg .pred low;
mul.f32 x, $1, $2;
abs.f32 a, x;
setp.lt.f32 low, a, 0.25;
mul.f32 far, a, {-2 * math.log2(math.e)!r};
ex2.approx.ftz.f32 far, far;
add.f32 y, far, 1.0;
rcp.approx.ftz.f32 y, y;
sub.f32 far, 1.0, far;
mul.f32 far, far, y;
copysign.f32 far, x, far;
mul.f32 y, x, x;
fma.rn.f32 p, y, {62 / 2835!r}, {-17 / 315!r};
fma.rn.f32 p, p, y, {2 / 15!r};
fma.rn.f32 p, p, y, {-1 / 3!r};
mul.f32 p, p, y;
fma.rn.f32 p, p, x, x;
selp.f32 p, p, far, low;
mul.f32 $0, p, $3;
}}"""
TANH: gl.constexpr = gl.constexpr(_TANH)


@gluon.jit
def apply_softcap(s, scale, softcap, form):
    """Cap raw scores: softcap·tanh(s·scale), with log2(e) in softcap and the cap itself in scale."""
    if form.SOFTCAP:
        s = gl.inline_asm_elementwise(
            TANH, "=f,f,f,f", [s, scale, softcap], dtype=gl.float32, is_pure=True, pack=1
        )  # fmt: skip
    return s


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise(TANH, "=f,f,f,f", [x, 1.0, 1.0], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def score_function(source):
    """Return the Gluon function of a source of kernels/score_program.py; None for None."""
    from portattn.kernels.score_program import load_function  # the dependencies of a global have to be constants

    return None if source is None else load_function(source, gluon, gl, _tanh)


LOG2E: gl.constexpr = gl.constexpr(math.log2(math.e))


@aggregate
class FunctionTensors:
    """The tensors that SCORE_MOD and MASK_MOD read, and their sizes; of an absent one anything."""

    c0: gl.tensor
    c1: gl.tensor
    c2: gl.tensor
    c3: gl.tensor
    n0: gl.tensor
    n1: gl.tensor
    n2: gl.tensor
    n3: gl.tensor
    n4: gl.tensor
    n5: gl.tensor
    n6: gl.tensor
    n7: gl.tensor

    @gluon.constexpr_function
    def __init__(self, c0, c1, c2, c3, n0, n1, n2, n3, n4, n5, n6, n7):
        self.c0, self.c1, self.c2, self.c3 = c0, c1, c2, c3
        self.n0, self.n1, self.n2, self.n3, self.n4, self.n5, self.n6, self.n7 = n0, n1, n2, n3, n4, n5, n6, n7


@gluon.jit
def function_tensors(c0, c1, c2, c3, n0, n1, n2, n3, n4, n5, n6, n7, pointer, number):
    """Return the tensors of functions and their sizes; for None a pointer or a number that is not read."""
    return FunctionTensors(
        argument_or(c0, pointer), argument_or(c1, pointer), argument_or(c2, pointer), argument_or(c3, pointer),
        argument_or(n0, number), argument_or(n1, number), argument_or(n2, number), argument_or(n3, number),
        argument_or(n4, number), argument_or(n5, number), argument_or(n6, number), argument_or(n7, number),
    )  # fmt: skip


@gluon.jit
def no_tensors(pointer, number):
    """Return the tensors of a kernel without functions: none is read."""
    return FunctionTensors(pointer, pointer, pointer, pointer, number, number, number, number, number, number, number,
                           number)  # fmt: skip


@gluon.jit
def call_function(function: gl.constexpr, s, limits, n, form):
    """Return a function's result for key tile n's scores. No tensor is read behind the last block of keys."""
    if form.LISTED_K:
        n = gl.minimum(n, limits.blocks * (form.LISTED_K // form.KEYS) - 1)
    keys = n * form.KEYS + gl.arange(0, form.KEYS, gl.SliceLayout(0, form.SCORES))
    t = limits.tensors
    return function(s, limits.slot, limits.head, limits.rows, keys, t.c0, t.c1, t.c2, t.c3,
                    t.n0, t.n1, t.n2, t.n3, t.n4, t.n5, t.n6, t.n7)  # fmt: skip


@gluon.jit
def apply_score_mod(s, limits, n, scale, form):
    """Return the natural scores that SCORE_MOD makes of a tile's products."""
    return call_function(form.SCORE_MOD, s * scale, limits, n, form)


@gluon.jit
def _call_mod(s, slot, head, rows, keys, form):
    none = 0  # captured tensors and their sizes
    return form.SCORE_MOD(s, slot, head, rows, keys, none, none, none, none, none, none, none, none, none, none, none,
                          none)  # fmt: skip


@gluon.jit
def final_scores(s, slot, head, rows, keys, scale, softcap, form):
    """Return the scores of a tile's products in powers of 2. rows and keys: numbers that broadcast with the tile."""
    if form.SCORE_MOD is not None:
        s = _call_mod(s * scale, slot, head, rows, keys, form) * LOG2E
    elif form.SOFTCAP:
        s = apply_softcap(s, scale, softcap, form)
    else:
        s = s * scale
    return s


@gluon.jit
def with_derivative(p, s, final, slot, head, rows, keys, scale, softcap, form):
    """Return P times the derivative of `final_scores` by the scaled products; 0 where P is 0.

    P dies as early as without a function: dS is this product times (dP - delta)."""
    none = 0
    if form.SCORE_GRADIENT is not None:
        found = form.SCORE_GRADIENT(s * scale, slot, head, rows, keys, none, none, none, none, none, none, none, none,
                                    none, none, none, none, p)  # fmt: skip
        p = gl.where(p == 0.0, 0.0, found)  # a derivative may be infinite where the function hides a key
    elif form.SOFTCAP:
        share = final * (1.0 / softcap)
        p = p - p * (share * share)
    return p


@gluon.jit
def list_of(slot, head, row, sizes, form):
    """Return the pointer to the list of a tile of rows: counts of whole blocks and of others, then their numbers."""
    at = slot.to(gl.int64) * sizes.list_b + head.to(gl.int64) * sizes.list_h
    return sizes.lists + (at + (row // form.LISTED_Q).to(gl.int64) * sizes.list_q)


@aggregate
class Limits:
    """The keys that each of a warp group's rows sees: [start, end), with TREE from `first` on the nodes of its word.

    Without TREE the fields from `low` to `hidden` hold no meaning, without functions those from `rows` to `tensors`,
    and without lists those after them.
    """

    start: gl.tensor  # [64]
    end: gl.tensor  # [64]
    low: gl.tensor  # [64] bits 0 to 31 of each row's word
    high: gl.tensor  # [64]
    first: gl.tensor  # the key of bit 0
    hidden: gl.tensor  # bits of the nodes that no row of the sequence sees, int64
    rows: gl.tensor  # [64] numbers of the queries,
    slot: gl.tensor  # of their sequence
    head: gl.tensor  # and of their head
    tensors: FunctionTensors
    listed: gl.tensor  # the tile's list
    whole: gl.tensor  # whether all its blocks are whole
    blocks: gl.tensor  # of all keys
    shown: gl.tensor  # with MASK_MOD: of each key tile, which keys some query attends (block_lists.py)

    @gluon.constexpr_function
    def __init__(self, start, end, low, high, first, hidden, rows, slot, head, tensors, listed, whole, blocks, shown):
        self.start, self.end, self.low, self.high, self.first, self.hidden = start, end, low, high, first, hidden
        self.rows, self.slot, self.head, self.tensors = rows, slot, head, tensors
        self.listed, self.whole, self.blocks, self.shown = listed, whole, blocks, shown


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def row_limits(work, rows, seen, position, sizes, form):
    """Return the keys that a warp group's rows see; the sequence sees none from `seen` on."""
    end = gl.full([_ROWS], 0, gl.int32, form.ROW) + seen
    start = end
    if form.RIGHT:
        end = gl.minimum(rows + (position + sizes.right + 1), seen)
    if form.LEFT:
        start = rows + (position - sizes.left)
    first = work.k_length - work.q_length
    low, high, hidden = end, end, first
    if form.TREE:
        words = sizes.tree_mask + (work.slot.to(gl.int64) * sizes.tree_stride + work.q_first)
        own = gl.load(words + rows, mask=rows < work.q_length, other=0)
        low, high = own.to(gl.int32), (own >> 32).to(gl.int32)
        each: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
        node = gl.arange(0, 64, each)
        all_words = gl.load(words + node, mask=node < work.q_length, other=0)
        if form.RIGHT:  # the bits up to the last node that a row's causal mask shows
            last = (node + (position + sizes.right - first)).to(gl.int64)
            bits = (gl.full([64], 2, gl.int64, each) << gl.minimum(gl.maximum(last, 0), 62)) - 1
            all_words = all_words & gl.where(last < 0, 0, gl.where(last > 62, -1, bits))
        nodes = gl.where(node < work.q_length, gl.full([64], 1, gl.int64, each) << node.to(gl.int64), 0)
        hidden = gl.reduce(nodes, 0, _or) & ~gl.reduce(all_words, 0, _or)
    listed, whole, blocks, shown = sizes.lists, first == first, first, sizes.shown
    if form.LISTED_K:
        listed = list_of(work.slot, work.head, work.row, sizes, form)
        whole, blocks = work.split == work.k_first, gl.cdiv(sizes.seq_k, form.LISTED_K)
        tiles = blocks * (form.LISTED_K // form.KEYS) * (form.KEYS + _FLAGS)
        shown += (work.slot * sizes.shown_b + work.head * sizes.shown_h).to(gl.int64) * tiles
    return Limits(start, end, low, high, first, hidden, rows, work.slot, work.head, sizes.tensors, listed, whole,
                  blocks, shown)  # fmt: skip


@gluon.jit
def _masked_by_function(s, limits, n, form):
    keep = call_function(form.MASK_MOD, 0, limits, n, form)
    if form.RAGGED:
        keys = n * form.KEYS + gl.arange(0, form.KEYS, gl.SliceLayout(0, form.SCORES))
        keep = keep & (gl.expand_dims(keys, 0) < gl.expand_dims(limits.end, 1))
    return gl.where(keep, s, -float("inf"))


@gluon.jit
def masked_scores(s, limits, n, form, first: gl.constexpr = False):
    """Return scores, -inf for each key that a row does not see. first: the tile may be of a whole block."""
    keys = n * form.KEYS + gl.arange(0, form.KEYS, gl.SliceLayout(0, form.SCORES))
    columns = gl.expand_dims(keys, 0)
    if form.MASK_MOD is not None:
        if first:
            if limits.whole:  # or of no block, behind the last key
                s = gl.where(columns < gl.expand_dims(limits.end, 1), s, -float("inf"))
            else:
                s = _masked_by_function(s, limits, n, form)
        else:
            s = _masked_by_function(s, limits, n, form)
        return s
    keep = columns < gl.expand_dims(limits.end, 1)
    if form.LEFT:
        keep = keep & (columns >= gl.expand_dims(limits.start, 1))
    if form.TREE:
        node = keys - limits.first
        bit = (node - node + 1) << (node & 31)  # once a key: rows then take an `and` each
        of_low = gl.expand_dims(gl.where((node >= 0) & (node < 32), bit, 0), 0)
        of_high = gl.expand_dims(gl.where(node >= 32, bit, 0), 0)
        shown = (gl.expand_dims(limits.low, 1) & of_low) | (gl.expand_dims(limits.high, 1) & of_high)
        keep = keep & ((shown != 0) | gl.expand_dims(node < 0, 0))
    return gl.where(keep, s, -float("inf"))


@gluon.jit
def clear_rows(place, there, DIM: gl.constexpr):
    """Clear rows of shared memory [rows, DIM] that are not there, by the warps of the layout of `there`, [rows, 1]."""
    for j in gl.static_range(DIM // 64):  # few registers at a time: accumulators have most of them
        part = place.slice(j * 64, 64, dim=1)
        part.store(gl.where(there, part.load(there.type.layout), 0.0).to(place.dtype))
    fence_async_shared()


@gluon.jit
def clear(v, first, end, n, limits, form):
    """Clear the rows of V, key tile n's, before `first`, from `end` on, and those that the tree mask hides."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, form.KEYS, gl.SliceLayout(1, layout)), 1)
    there = (row >= first) & (row < end)
    if form.TREE:
        node = row + (n * form.KEYS - limits.first)
        hidden = (limits.hidden >> gl.minimum(gl.maximum(node, 0), 63).to(gl.int64)) & 1
        there = there & ((node < 0) | (hidden == 0))
    clear_rows(v, there, form.DIM)


@gluon.jit
def store_rows(acc, o_desc, out, stride_h, stride_s, work, row, place, form):
    """Store rows of the output by way of shared memory, one part of the columns after the other."""
    if form.PARTS == 1:
        store_part(acc, 0, o_desc, out, stride_h, stride_s, work, row, place, form)
    else:
        gl.static_assert(form.PARTS == 2)
        halves = gl.permute(gl.reshape(acc, [_ROWS, 2, form.DIM // 2]), (0, 2, 1))
        first, second = gl.split(halves)
        store_part(first, 0, o_desc, out, stride_h, stride_s, work, row, place, form)
        tma.store_wait(0)
        store_part(second, form.DIM // 2, o_desc, out, stride_h, stride_s, work, row, place, form)


@gluon.jit
def store_part(acc, column, o_desc, out, stride_h, stride_s, work, row, place, form):
    flat = place.reshape([_ROWS, form.DIM // form.PARTS])
    flat.store(acc.to(place.dtype))
    at = work.q_first + row
    whole = row + form.LINES <= work.q_length  # else a packed tile would overwrite the next sequence's rows
    if not form.PACKED or whole:
        fence_async_shared()
        if form.PAGE:
            store(o_desc, [work.slot, at, work.head * form.HEADS, column], place)
        else:
            store(o_desc, [work.slot, work.head, at, column], place)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        # In steps of 8 columns, which heads and strides have too, so that 16 bytes are stored at a time.
        first = out + (at.to(gl.int64) * stride_s + (work.head * form.HEADS).to(gl.int64) * stride_h) * 8
        rows = line_numbers(gl.SliceLayout(1, layout), form)
        columns = gl.arange(0, 16, gl.SliceLayout(0, layout))
        strides = rows * stride_s
        if form.HEADS > 1:
            strides += gl.arange(0, _ROWS, gl.SliceLayout(1, layout)) % form.HEADS * stride_h
        offsets = gl.expand_dims(strides * 8, 1) + gl.expand_dims(columns, 0)
        inside = gl.expand_dims(rows < work.q_length - row, 1)
        for j in gl.static_range(form.DIM // form.PARTS // 16):
            there = inside & gl.expand_dims(columns // 8 < (o_desc.shape[3] - column) // 8 - j * 2, 0)
            gl.store(first + (offsets + column + j * 16), flat.slice(j * 16, 16, dim=1).load(layout), mask=there)
        if not form.OWN_OUT:  # TMA brings the next queries there, whose writes are not ordered after those above
            fence_async_shared()


GROWTH: gl.constexpr = gl.constexpr(8.0)  # in powers of 2
_THREADS = 128  # of a warp group


def _multiplied(numbers: int) -> str:
    """PTX. A thread's numbers are of two rows, by turns two of one and two of the other; so are their factors, which
    are the operands after them. A factor that is NaN is not 1."""
    kept = "".join(f"mov.b32 ${i}, ${numbers + i};\n" for i in range(numbers))
    multiplied = "".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};\n" for i in range(numbers))
    return f"""{{
.reg .pred some, other;
setp.neu.f32 some, ${2 * numbers}, 1.0;
setp.neu.f32 other, ${2 * numbers + 2}, 1.0;
or.pred some, some, other;
vote.sync.any.pred some, some, 0xffffffff;
{kept}@!some bra.uni KEPT;
{multiplied}KEPT:
}}"""


def _operands(numbers: int) -> str:
    return ",".join(["=f"] * numbers + ["f"] * 2 * numbers)


_NUMBERS = {dim: GROUP_ROWS * dim // _THREADS for dim in (64, 128, 256)}
_CODE = {dim: _multiplied(numbers) for dim, numbers in _NUMBERS.items()}
_OPERANDS = {dim: _operands(numbers) for dim, numbers in _NUMBERS.items()}


@gluon.constexpr_function
def _code(dim):
    return _CODE[dim]


@gluon.constexpr_function
def _constraints(dim):
    return _OPERANDS[dim]


@gluon.constexpr_function
def _pack(dim):
    return _NUMBERS[dim]


@gluon.jit
def rescaled_where_needed(acc, factor, form):
    """Multiply acc [64, DIM] by each row's factor."""
    code: gl.constexpr = _code(form.DIM)
    constraints: gl.constexpr = _constraints(form.DIM)
    pack: gl.constexpr = _pack(form.DIM)
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, form.OUTPUT)), 1)
    # Not pure: it stays where it stands, outside the products that are under way.
    return gl.inline_asm_elementwise(code, constraints, [acc, factor], dtype=gl.float32, is_pure=False, pack=pack)


@gluon.jit
def reference(before, found):
    """Return the base of a row's weights, in powers of 2: as before or the maximum found; -inf until there is one."""
    return gl.where(found > before + GROWTH, found, before)
