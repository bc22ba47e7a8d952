"""write_cache: new keys and values into a cache, contiguous or paged, on the way rotated and quantised.

A row is one head's key or value of one token. Each program writes BLOCK_M rows of K and the same rows of V.
"""

import triton
import triton.language as tl

from portattn.kernels.dequantize import MIDDLE, NV_BLOCK, dequantize
from portattn.kernels.quantize import (
    SMALLEST_SCALE,
    divide_rows,
    largest_finite,
    token_scales,
    turned_halves,
    whole_bytes,
)


@triton.jit
def quotient(numbers, factor, UNPACK: tl.constexpr):
    """Divide float32 numbers [M, N] by a positive factor [M] each row, as IEEE float32 division rounds.

    `ptx`: one division a row, and of each number a product with the reciprocal, whose remainder corrects it once. By
    exhaustion that is the quotient of all fractions of float16 and bfloat16 numbers and all of a float32. What is above
    2^18, more than any format holds, stays above. Factors near float32's ends are brought to its middle by a power of
    two. The remainder is subtracted with its sign turned: added, it would make 0 of -0. Formula: Markstein, "IA-64 and
    Elementary Functions", division by fused multiply-add.
    """
    if UNPACK == "ptx":
        power = tl.where(factor < 2.3283064365386963e-10, 7.922816251426434e28, 1.0)  # 2^-32, 2^96
        power = tl.where(factor > 1.8446744073709552e19, 5.421010862427522e-20, power)  # 2^64, 2^-64
        divisor = factor * power
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        near = numbers * power[:, None]
        found = tl.inline_asm_elementwise(
            """{ .reg .f32 about, turned, rest;
            mul.rn.f32 about, $1, $3;
            max.f32 about, about, 0fC8800000;
            min.f32 about, about, 0f48800000;
            neg.f32 turned, $1;
            fma.rn.f32 rest, about, $2, turned;
            neg.f32 rest, rest;
            fma.rn.f32 $0, rest, $3, about; }""",
            "=r,r,r,r", [near, divisor[:, None], inverse[:, None]], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = tl.div_rn(numbers, tl.broadcast_to(factor[:, None], numbers.shape))
    return found


@triton.jit
def as_eight_bits(numbers, KV_FORMAT: tl.constexpr, LARGEST: tl.constexpr, UNPACK: tl.constexpr):
    """Convert like to_eight_bits; `ptx`: by the chip's conversions if it has the format. They round alike, keep -0,
    clamp to the largest number and turn NaN into 0x7f (PTX ISA, cvt with .satfinite, from sm_89 on)."""
    if UNPACK == "ptx" and KV_FORMAT == "e4m3":
        code = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [numbers], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    elif UNPACK == "ptx" and KV_FORMAT == "e5m2":
        code = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [numbers], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = to_eight_bits(numbers, KV_FORMAT, LARGEST)
    return code


@triton.jit
def to_eight_bits(numbers, KV_FORMAT: tl.constexpr, LARGEST: tl.constexpr):
    """Convert float32 numbers to a format's codes, as int8: to the nearest, ties to even, at most the largest.

    Integer operations alone decide, so that every chip writes every format, and the same bits: each compiler converts
    to some of the formats, on some chips, and not all saturate. Formats: kernels/dequantize.py. NaN is 0x7f, and 0x80
    in e4m3fnuz; in int8, which has none, 0.
    """
    size = tl.abs(numbers)
    size = tl.where(size > LARGEST, LARGEST, size)  # NaN stays
    is_nan = numbers != numbers
    negative = numbers < 0.0
    if KV_FORMAT == "int8":
        # Beside 1.5·2²³ float32 holds whole numbers alone: adding rounds to the nearest even one.
        whole = (size + 12582912.0) - 12582912.0
        whole = tl.where(is_nan, 0.0, whole)
        code = tl.where(negative, -whole, whole).to(tl.int32)
    else:
        if KV_FORMAT == "e4m3":
            SHIFT: tl.constexpr = 20  # bits of float32's fraction beyond the format's
            BIAS: tl.constexpr = 120  # 127 less the format's bias
            SMALLEST: tl.constexpr = 0.015625  # normal number, 2⁻⁶
            STEP: tl.constexpr = 16384.0  # 2²³ of the format's smallest number: float32 counts in these beside it
            STEP_BITS: tl.constexpr = 1182793728
        elif KV_FORMAT == "e5m2":
            SHIFT: tl.constexpr = 21
            BIAS: tl.constexpr = 112
            SMALLEST: tl.constexpr = 6.103515625e-05  # 2⁻¹⁴
            STEP: tl.constexpr = 128.0
            STEP_BITS: tl.constexpr = 1124073472
        else:
            SHIFT: tl.constexpr = 20
            BIAS: tl.constexpr = 119
            SMALLEST: tl.constexpr = 0.0078125  # 2⁻⁷
            STEP: tl.constexpr = 8192.0
            STEP_BITS: tl.constexpr = 1174405120
        bits = size.to(tl.int32, bitcast=True)
        half = (1 << (SHIFT - 1)) - 1
        normal = ((bits + half + ((bits >> SHIFT) & 1)) >> SHIFT) - (BIAS << (23 - SHIFT))
        small = (size + STEP).to(tl.int32, bitcast=True) - STEP_BITS
        code = tl.where(size < SMALLEST, small, normal)
        # The sign is the number's own bit: -0 is kept where the format has it.
        sign = (numbers.to(tl.int32, bitcast=True) >> 24) & 0x80
        if KV_FORMAT == "e4m3fnuz":
            code = tl.where(code == 0, 0, code | sign)
            code = tl.where(is_nan, 0x80, code)
        else:
            code = tl.where(is_nan, 0x7F, code | sign)
        code = tl.where(code > 127, code - 256, code)  # the byte as a signed number
    return code.to(tl.int8)


@triton.jit
def four_bits(numbers, zero):
    """Convert float32 numbers [M, N] to int4 ones, 0 to 15: to the nearest, ties to even; then `zero` [M, 1] or a
    number is added. Numbers that are too large become the last on their side, NaN becomes `zero`."""
    low, high = (0 - zero).to(tl.float32), (15 - zero).to(tl.float32)
    inside = tl.where(numbers > high, high, tl.where(numbers < low, low, numbers))  # NaN stays
    whole = (inside + 12582912.0) - 12582912.0  # as in to_eight_bits
    return tl.where(numbers != numbers, 0.0, whole).to(tl.int32) + zero


@triton.jit
def store_pairs(tile, cache, offsets, stride_d, inside, scale, scale_offsets, there,
                COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
                KV_SCALES: tl.constexpr, UNPACK: tl.constexpr):  # fmt: skip
    """Store rows [BLOCK_ROWS, BLOCK_COLS] as int4 numbers, two to a byte; even columns are the lower four bits.

    scale  pointer to the scales, and by offsets each row's. One for each token is computed of its row, and stored with
           the number that stands for 0 in its lowest four bits (kernels/dequantize.py)
    """
    numbers = tile.to(tl.float32)
    if KV_SCALES == "head":
        step = tl.load(scale + scale_offsets, mask=there, other=1.0)
        zero = tl.full([BLOCK_ROWS], MIDDLE, tl.int32)
    else:
        # From the smallest finite number to the largest, 0 among them. Each is divided: no difference is infinite.
        most = tl.full([BLOCK_ROWS], 15.0, tl.float32)
        high = tl.max(finite(numbers, inside, 1.0), axis=1)
        deep = tl.max(finite(numbers, inside, -1.0), axis=1)
        step = tl.div_rn(high, most) + tl.div_rn(deep, most)
        step = tl.where(step > SMALLEST_SCALE, step, SMALLEST_SCALE)
        step = (step.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)
        below = (tl.div_rn(deep, step) + 12582912.0) - 12582912.0
        zero = tl.where(below > 15.0, 15.0, below).to(tl.int32)
        stored = (step.to(tl.int32, bitcast=True) | zero).to(tl.float32, bitcast=True)
        tl.store(scale + scale_offsets, stored, mask=there)
    code = four_bits(quotient(numbers, step, UNPACK), zero[:, None])
    even, odd = tl.split(tl.reshape(code, [BLOCK_ROWS, BLOCK_COLS // 2, 2]))
    byte = even | (odd << 4)
    byte = tl.where(byte > 127, byte - 256, byte)  # as a signed number
    places = tl.arange(0, BLOCK_COLS // 2)
    within = there[:, None] & (places < COLS // 2)[None, :]
    tl.store(cache + offsets[:, None] + places[None, :] * stride_d, byte.to(tl.int8), mask=within)


@triton.jit
def e2m1(numbers):
    """Convert float32 numbers to nvfp4's codes, 0 to 15: to the nearest, ties to the even code; larger ones become 6,
    NaN 0. The sign is the number's own: -0 is kept."""
    size = tl.abs(numbers)  # of NaN no comparison holds
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (numbers.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(numbers != numbers, 0, code | sign)


@triton.jit
def store_blocks(tile, cache, offsets, stride_d, inside, scale, scale_offsets, there, blocks, block_offsets,
                 COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
                 KV_SCALES: tl.constexpr):  # fmt: skip
    """Store rows [BLOCK_ROWS, BLOCK_COLS] as nvfp4 numbers, two to a byte; even columns are the lower four bits.

    scale   pointer to the scales, and by offsets each row's; read with KV_SCALES head
    blocks  pointer to the scales of the blocks of 16, and by offsets each row's first. They are computed, and stored as
            e4m3: a sixth of the block's largest finite number, rounded. What they are after that divides the numbers
    """
    GROUPS: tl.constexpr = BLOCK_COLS // NV_BLOCK
    numbers = tile.to(tl.float32)
    if KV_SCALES == "head":
        factor = tl.load(scale + scale_offsets, mask=there, other=1.0)
        numbers = tl.div_rn(numbers, tl.broadcast_to(factor[:, None], numbers.shape))
    size = tl.abs(numbers)
    size = tl.where(inside & (size < float("inf")), size, 0.0)
    widest = tl.max(tl.reshape(size, [BLOCK_ROWS, GROUPS, NV_BLOCK]), axis=2)  # [BLOCK_ROWS, GROUPS]
    code = to_eight_bits(tl.div_rn(widest, tl.full(widest.shape, 6.0, tl.float32)), "e4m3", 448.0)
    groups = tl.arange(0, GROUPS)
    place = block_offsets[:, None] + groups[None, :]
    tl.store(blocks + place, code, mask=there[:, None] & (groups < COLS // NV_BLOCK)[None, :])
    steps = tl.broadcast_to(dequantize(code, numbers, "e4m3")[:, :, None], [BLOCK_ROWS, GROUPS, NV_BLOCK])
    steps = tl.reshape(steps, [BLOCK_ROWS, BLOCK_COLS])
    zero = steps == 0.0  # all numbers of the block are 0, or so small that the scale is
    found = e2m1(tl.where(zero, 0.0, tl.div_rn(numbers, tl.where(zero, 1.0, steps))))
    even, odd = tl.split(tl.reshape(found, [BLOCK_ROWS, BLOCK_COLS // 2, 2]))
    byte = even | (odd << 4)
    byte = tl.where(byte > 127, byte - 256, byte)  # as a signed number
    places = tl.arange(0, BLOCK_COLS // 2)
    within = there[:, None] & (places < COLS // 2)[None, :]
    tl.store(cache + offsets[:, None] + places[None, :] * stride_d, byte.to(tl.int8), mask=within)


@triton.jit
def finite(numbers, inside, sign):
    """Return numbers times `sign`, 1 or -1, if that is positive and finite, and 0 elsewhere."""
    found = numbers * sign
    return tl.where(inside & ((found > 0.0) & (found < float("inf"))), found, 0.0)


@triton.jit
def rotate_rows(tile, source, stride_d, columns, inside, cos, sin, angles, stride_cos, stride_sin, limit,
           ROTARY: tl.constexpr, ROTARY_DIM: tl.constexpr, UNPACK: tl.constexpr):  # fmt: skip
    """Return rows of K, rotated by the angles of their positions, in their own dtype (RoFormer, arXiv 2104.09864).

    source  pointers to the rows' first elements; columns that belong together are read once more, from a cache
    limit   rows of cos and sin
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    rotated = columns < ROTARY_DIM
    if ROTARY == "neox":
        second = columns >= HALF
        pair = tl.where(second, columns - HALF, columns)
        other = tl.where(second, columns - HALF, columns + HALF)
    else:
        second = (columns & 1) == 1
        pair = columns >> 1
        other = columns ^ 1
    # Columns that are not rotated are masked, and what a compiler reads of them all the same is their own.
    other = tl.where(rotated, other, columns)
    if UNPACK == "ptx" and (ROTARY == "neox" and HALF % 16 == 0):
        # What compilers do not see by themselves: 16 neighbours have 16 neighbours for partners and angles.
        pair = tl.max_contiguous(tl.multiple_of(tl.where(rotated, pair, columns), 16), 16)
        other = tl.max_contiguous(tl.multiple_of(other, 16), 16)
    else:
        pair = tl.where(rotated, pair, 0)
    there = inside & rotated[None, :]
    angle = tl.minimum(tl.maximum(angles, 0), limit - 1)[:, None]  # nothing is read outside of the tables
    c = tl.load(cos + angle * stride_cos + pair[None, :], mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + angle * stride_sin + pair[None, :], mask=there, other=0.0).to(tl.float32)
    partner = tl.load(source[:, None] + other[None, :] * stride_d, mask=there, other=0.0).to(tl.float32)
    number = tile.to(tl.float32)
    along, across = number * c, partner * s
    found = tl.where(second[None, :], along + across, along - across)
    return tl.where(rotated[None, :], found, number).to(tile.dtype)


@triton.jit
def packed_bytes(tile, limit, power, divisor, KV_FORMAT: tl.constexpr, LARGEST: tl.constexpr):
    """Return a tile of 16-bit numbers in the cache's format; limit, power, divisor: see token_scales."""
    numbers = divide_rows(tile, limit, power, divisor, KV_FORMAT)
    if KV_FORMAT == "int8":
        code = whole_bytes(numbers)
    else:
        code = as_eight_bits(numbers, KV_FORMAT, LARGEST, "ptx")
    return code


@triton.jit
def store_halves(first, second, cache, offsets, stride_d, scale, scale_offsets, there, KV_FORMAT: tl.constexpr,
                 LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Store rows in two halves like store_rows, by `ptx`, with a scale for each token."""
    widest = tl.maximum(largest_finite(first, BLOCK_ROWS, HALF), largest_finite(second, BLOCK_ROWS, HALF))
    factor, limit, power, divisor = token_scales(widest, first, LARGEST)
    tl.store(scale + scale_offsets, factor, mask=there)
    target = cache + offsets[:, None] + tl.arange(0, HALF)[None, :] * stride_d
    tl.store(target, packed_bytes(first, limit, power, divisor, KV_FORMAT, LARGEST), mask=there[:, None])
    target += HALF * stride_d
    tl.store(target, packed_bytes(second, limit, power, divisor, KV_FORMAT, LARGEST), mask=there[:, None])


@triton.jit
def store_rows(tile, cache, offsets, stride_d, columns, inside, scale, scale_offsets, there,
               KV_FORMAT: tl.constexpr, KV_SCALES: tl.constexpr, LARGEST: tl.constexpr, UNPACK: tl.constexpr,
               BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):  # fmt: skip
    """Store rows in the cache's format. A scale for each token is computed of its row, and stored, too.

    scale  pointer to the scales, and by offsets each row's
    """
    target = cache + offsets[:, None] + columns[None, :] * stride_d
    if KV_FORMAT == "as_q":
        if cache.dtype.element_ty == tile.dtype:
            tl.store(target, tile, mask=inside)
        else:
            tl.store(target, tile.to(tl.float32).to(cache.dtype.element_ty), mask=inside)
    elif UNPACK == "ptx" and (KV_SCALES == "token" and tile.dtype.primitive_bitwidth == 16):
        widest = largest_finite(tile, BLOCK_ROWS, BLOCK_COLS)
        factor, limit, power, divisor = token_scales(widest, tile, LARGEST)
        tl.store(scale + scale_offsets, factor, mask=there)
        tl.store(target, packed_bytes(tile, limit, power, divisor, KV_FORMAT, LARGEST), mask=inside)
    else:
        numbers = tile.to(tl.float32)
        if KV_SCALES == "head":
            factor = tl.load(scale + scale_offsets, mask=there, other=1.0)
            numbers = quotient(numbers, factor, UNPACK)
        if KV_SCALES == "token":
            size = tl.abs(numbers)
            size = tl.where(inside & (size < float("inf")), size, 0.0)  # NaN too: both are stored as what they are
            widest = tl.max(size, axis=1)
            factor = tl.div_rn(widest, tl.full(widest.shape, LARGEST, tl.float32))
            factor = tl.where(factor > SMALLEST_SCALE, factor, SMALLEST_SCALE)
            tl.store(scale + scale_offsets, factor, mask=there)
            numbers = quotient(numbers, factor, UNPACK)
        tl.store(target, as_eight_bits(numbers, KV_FORMAT, LARGEST, UNPACK), mask=inside)


@triton.jit
def load_rows(source, columns, stride_d, inside, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, UNPACK: tl.constexpr):
    """Load new rows [BLOCK_M, BLOCK_COLS] by pointers to their first elements, 0 behind their last column.

    With `ptx` rows that have no place in the cache are read, too: so reading does not wait for where they go.
    """
    pointers = source[:, None] + columns[None, :] * stride_d
    if UNPACK == "ptx" and COLS == BLOCK_COLS:
        rows = tl.load(pointers)
    elif UNPACK == "ptx":
        rows = tl.load(pointers, mask=(columns < COLS)[None, :], other=0.0)
    else:
        rows = tl.load(pointers, mask=inside, other=0.0)
    return rows


@triton.jit(do_not_specialize=["heads_k", "seq_q", "seq_k", "angles", "rows", "tiles"])
def write_cache(
    q, new_v, k, v, seqlens_k, slots, k_scale, v_scale, k_block_scale, v_block_scale, cos, sin, positions,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    new_v_stride_b, new_v_stride_h, new_v_stride_s, new_v_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    k_scale_stride_b, k_scale_stride_h, k_scale_stride_s, v_scale_stride_b, v_scale_stride_h, v_scale_stride_s,
    k_block_scale_stride_b, k_block_scale_stride_h, k_block_scale_stride_s,
    v_block_scale_stride_b, v_block_scale_stride_h, v_block_scale_stride_s,
    cos_stride, sin_stride,
    heads_k, seq_q, seq_k, angles, rows, tiles,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, ROTARY: tl.constexpr, ROTARY_DIM: tl.constexpr,
    KV_FORMAT: tl.constexpr, KV_SCALES: tl.constexpr, LARGEST: tl.constexpr, GRID: tl.constexpr,
    UNPACK: tl.constexpr,
):  # fmt: skip
    """Write rows (sequence, token, head) of new keys q (B, Hk, Sq, D) and values new_v (B, Hk, Sq, Dv), BLOCK_M a tile.

    PAGE_SIZE: k and v are pages (P, Hk, page, D), and slots says where each token of the one sequence goes. Otherwise
    they are (B, Hk, seq_k, D), and a sequence's tokens go where its seqlens_k keys end. Tokens whose place is no place
    of the cache are not written, nor their scales. seq_k is the cache's capacity, of pages all slots.
    KV_SCALES: head, k_scale and v_scale divide what is stored; token, they are written. LARGEST: the largest number of
    the format. UNPACK: how numbers are divided and converted (Lowering). angles: rows of cos and sin.
    k_block_scale, v_block_scale: of nvfp4 the scales of its blocks, which are written: (…, D / 16) bytes whose last
    stride is 1.
    """
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        row = (tl.program_id(0) + turn * tl.num_programs(0)) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        valid = row < rows
        row = tl.minimum(
            row, rows - 1
        )  # compilers that read a tile whole, and mask it then, read inside of the tensors
        head = (row % heads_k).to(tl.int64)
        token = row // heads_k
        if UNPACK == "ptx" and PAGE_SIZE != 0:  # one sequence
            sequence = tl.full([BLOCK_M], 0, tl.int64)
            place = token.to(tl.int64)
        else:
            sequence = (token // seq_q).to(tl.int64)
            place = (token % seq_q).to(tl.int64)
        if PAGE_SIZE == 0:
            at = tl.load(seqlens_k + sequence, mask=valid, other=-1).to(tl.int64)
            there = valid & (at >= 0)
            at += place
            there = there & (at < seq_k)
            at = tl.where(there, at, 0)
            block = sequence
            angle = at
        else:
            slot = tl.load(slots + place, mask=valid, other=-1).to(tl.int64)
            there = valid & (slot >= 0) & (slot < seq_k)
            slot = tl.where(there, slot, 0)
            if UNPACK == "ptx":
                slot = slot.to(tl.int32)  # below seq_k
            # Of 64 bits again: strides of pages may come as 32, and a product of two such numbers wraps.
            block = (slot // PAGE_SIZE).to(tl.int64)
            at = (slot % PAGE_SIZE).to(tl.int64)
            angle = at
            if ROTARY != "none":
                if UNPACK == "ptx":
                    angle = tl.load(positions + place).to(tl.int64)
                else:
                    angle = tl.load(positions + place, mask=there, other=0).to(tl.int64)

        columns = tl.arange(0, BLOCK_D)
        inside = there[:, None] & (columns < HEAD_DIM)[None, :]
        source = q + sequence * q_stride_b + head * q_stride_h + place * q_stride_s
        # Rows that are rotated whole, in halves that a power of two numbers wide: each is read once.
        SCALED: tl.constexpr = UNPACK == "ptx" and (KV_SCALES == "token" and KV_FORMAT != "int4")
        WHOLE: tl.constexpr = ROTARY == "neox" and (ROTARY_DIM == BLOCK_D and BLOCK_D >= 32)
        HALVES: tl.constexpr = SCALED and (WHOLE and q.dtype.element_ty.primitive_bitwidth == 16)
        if not HALVES:
            keys = load_rows(source, columns, q_stride_d, inside, HEAD_DIM, BLOCK_D, UNPACK)
        columns_v = tl.arange(0, BLOCK_DV)
        inside_v = there[:, None] & (columns_v < HEAD_DIM_V)[None, :]
        source_v = new_v + sequence * new_v_stride_b + head * new_v_stride_h + place * new_v_stride_s
        values = load_rows(source_v, columns_v, new_v_stride_d, inside_v, HEAD_DIM_V, BLOCK_DV, UNPACK)
        if ROTARY != "none" and not HALVES:
            keys = rotate_rows(keys, source, q_stride_d, columns, inside, cos, sin, angle, cos_stride, sin_stride,
                               angles, ROTARY, ROTARY_DIM, UNPACK)  # fmt: skip
        k_scales = at
        v_scales = at
        if KV_SCALES != "none":
            owner = sequence  # of pages there is one
            if KV_SCALES == "token":
                owner = block
            k_scales = owner * k_scale_stride_b + head * k_scale_stride_h
            v_scales = owner * v_scale_stride_b + head * v_scale_stride_h
            if KV_SCALES == "token":
                k_scales += at * k_scale_stride_s
                v_scales += at * v_scale_stride_s
        if KV_FORMAT == "nvfp4":
            k_blocks = block * k_block_scale_stride_b + head * k_block_scale_stride_h + at * k_block_scale_stride_s
            v_blocks = block * v_block_scale_stride_b + head * v_block_scale_stride_h + at * v_block_scale_stride_s
            store_blocks(keys, k, block * k_stride_b + head * k_stride_h + at * k_stride_s, k_stride_d, inside, k_scale,
                         k_scales, there, k_block_scale, k_blocks, HEAD_DIM, BLOCK_M, BLOCK_D, KV_SCALES)  # fmt: skip
            store_blocks(values, v, block * v_stride_b + head * v_stride_h + at * v_stride_s, v_stride_d, inside_v,
                         v_scale, v_scales, there, v_block_scale, v_blocks, HEAD_DIM_V, BLOCK_M, BLOCK_DV,
                         KV_SCALES)  # fmt: skip
        elif KV_FORMAT == "int4":
            store_pairs(keys, k, block * k_stride_b + head * k_stride_h + at * k_stride_s, k_stride_d, inside, k_scale,
                        k_scales, there, HEAD_DIM, BLOCK_M, BLOCK_D, KV_SCALES, UNPACK)  # fmt: skip
            store_pairs(values, v, block * v_stride_b + head * v_stride_h + at * v_stride_s, v_stride_d, inside_v,
                        v_scale, v_scales, there, HEAD_DIM_V, BLOCK_M, BLOCK_DV, KV_SCALES, UNPACK)  # fmt: skip
        else:
            if not HALVES:
                store_rows(keys, k, block * k_stride_b + head * k_stride_h + at * k_stride_s, k_stride_d, columns,
                           inside, k_scale, k_scales, there, KV_FORMAT, KV_SCALES, LARGEST, UNPACK, BLOCK_M,
                           BLOCK_D)  # fmt: skip
            store_rows(values, v, block * v_stride_b + head * v_stride_h + at * v_stride_s, v_stride_d, columns_v,
                       inside_v, v_scale, v_scales, there, KV_FORMAT, KV_SCALES, LARGEST, UNPACK, BLOCK_M,
                       BLOCK_DV)  # fmt: skip
            if HALVES:  # after the values: their numbers are at work while angles are on their way
                first, second = turned_halves(source, q_stride_d, cos, sin, angle, cos_stride, sin_stride, angles,
                                              BLOCK_D // 2)  # fmt: skip
                store_halves(first, second, k, block * k_stride_b + head * k_stride_h + at * k_stride_s, k_stride_d,
                             k_scale, k_scales, there, KV_FORMAT, LARGEST, BLOCK_M, BLOCK_D // 2)  # fmt: skip
