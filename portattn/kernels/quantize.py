"""Numbers quantized to 8 bits with a scale for each block or each row.

quantise_rows makes SAGE's int8 queries and keys, with a scale for each block of rows (api/quantize.py). The functions
below it are `unpack = ptx` of write_cache: rows of 16-bit numbers with a scale for each token, two numbers an
instruction. Each row's largest number is found, and infinities are held to it, while numbers are 16 bits wide; only the
division is done number by number.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(127.0)
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # float32's smallest normal number
# Added to a float32 below 2^22 and taken away again it rounds to whole numbers, ties to even.
ROUNDING = tl.constexpr(12582912.0)


# Strides and widths are specialised: where they are multiples of 16, rows are read 16 bytes at a time.
@triton.jit(do_not_specialize=["heads", "share", "rows"])
def quantise_rows(
    x, numbers, scales, mean, shift, heads, share, rows, columns,
    x_b, x_h, x_s, numbers_b, numbers_h, numbers_s, scales_b, scales_h, scales_s,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCK rows of one head with one scale.

    x        (B, H, S, D) by its strides, its columns side by side
    numbers  int8, of that shape, by its strides
    scales   float32 (B, H, S) by its strides
    mean     float32 (B, H / share, D), contiguous, or None: with SUBTRACT taken off the rows
    shift    float32 (B, H, S), contiguous, or None: each row times the mean
    """
    blocks = tl.cdiv(rows, BLOCK)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    slot, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    row = block * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    given = tl.load(
        x + slot * x_b + head * x_h + row[:, None].to(tl.int64) * x_s + column[None, :], mask=there, other=0.0
    ).to(tl.float32)
    if mean is not None:
        middle = tl.load(
            mean + (slot * (heads // share) + head // share) * columns + column, mask=column < columns, other=0.0
        )
        if shift is not None:
            tl.store(shift + pair.to(tl.int64) * rows + row, tl.sum(given * middle[None, :], 1), mask=row < rows)
        if SUBTRACT:
            given = tl.where(there, given - middle[None, :], 0.0)
    largest = tl.max(tl.max(tl.abs(given), 1), 0)
    scale = tl.where(largest > 0, tl.maximum(largest / LARGEST, SMALLEST), 1.0)
    found = given / scale
    found = tl.minimum(tl.maximum((found + ROUNDING) - ROUNDING, -LARGEST), LARGEST)
    tl.store(
        numbers + slot * numbers_b + head * numbers_h + row[:, None].to(tl.int64) * numbers_s + column[None, :],
        found.to(tl.int8), mask=there,
    )  # fmt: skip
    tl.store(
        scales + slot * scales_b + head * scales_h + row.to(tl.int64) * scales_s, tl.zeros([BLOCK], tl.float32) + scale,
        mask=row < rows,
    )  # fmt: skip


SMALLEST_SCALE: tl.constexpr = tl.constexpr(1.1754943508222875e-38)  # float32's smallest normal number
NEIGHBOURS: tl.constexpr = tl.constexpr(16)  # numbers of a row that one thread holds: 16 bytes of the cache
SMALL_SCALE: tl.constexpr = tl.constexpr(2.3283064365386963e-10)  # 2^-32: below it remainders leave float32
RAISED: tl.constexpr = tl.constexpr(7.922816251426434e28)  # 2^96
LEAST_FLOAT16: tl.constexpr = tl.constexpr(5.960464477539063e-08)  # 2^-24


@triton.jit
def halves(tile, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the first and second halves of each WIDTH neighbours [ROWS, GROUPS, WIDTH / 2]; no number changes
    registers if a thread holds the neighbours."""
    parts = tl.reshape(tile, [ROWS, GROUPS, 2, WIDTH // 2])
    return tl.split(tl.permute(parts, [0, 1, 3, 2]))


@triton.jit
def larger_finite(first, second):
    """Return, elementwise, the finite value of larger magnitude; NaN if neither is finite.

    A number times 0 and itself again is itself, or NaN where it is infinite; max takes the number beside a NaN.
    """
    KIND: tl.constexpr = "bf16x2 " if first.dtype == tl.bfloat16 else "f16x2 "
    return tl.inline_asm_elementwise(
        "{ .reg .b32 one, two, none; mov.b32 none, 0; "
        "fma.rn." + KIND + "one, $1, none, $1; fma.rn." + KIND + "two, $2, none, $2; "
        "max.xorsign.abs." + KIND + "$0, one, two; }",
        "=r,r,r", [first, second], dtype=first.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def larger(first, second):
    """Return, elementwise, the number of larger magnitude, of either sign; the number beside a NaN."""
    KIND: tl.constexpr = "bf16x2 " if first.dtype == tl.bfloat16 else "f16x2 "
    return tl.inline_asm_elementwise(
        "max.xorsign.abs." + KIND + "$0, $1, $2;", "=r,r,r", [first, second], dtype=first.dtype, is_pure=True, pack=2
    )


@triton.jit
def largest_finite(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the largest finite |number| of each row of a tile [ROWS, COLS], float32; 0 if none is finite."""
    GROUPS: tl.constexpr = COLS // NEIGHBOURS
    first, second = halves(tile, ROWS, GROUPS, NEIGHBOURS)
    first, second = halves(larger_finite(first, second), ROWS, GROUPS, NEIGHBOURS // 2)
    first, second = halves(larger(first, second), ROWS, GROUPS, NEIGHBOURS // 4)
    pairs = tl.reshape(larger(first, second), [ROWS, GROUPS * 2])
    return tl.maximum(tl.max(tl.abs(pairs.to(tl.float32)), 1), 0.0)


@triton.jit
def clamp_rows(tile, limit, power, NAN_IS_ZERO: tl.constexpr):
    """Clamp numbers to their row's limit in size, and multiply them with their row's power; NaN stays, or becomes 0.

    limit, power  of the tile's dtype [M]. A float16 tile's power is 1, and not looked at
    """
    limit, power = limit[:, None], power[:, None]
    KIND: tl.constexpr = "bf16x2 " if tile.dtype == tl.bfloat16 else "f16x2 "
    FIRST: tl.constexpr = "max.xorsign.abs." + KIND + "number, $1, none; " if NAN_IS_ZERO else "mov.b32 number, $1; "
    HELD: tl.constexpr = "min.NaN.xorsign.abs." + KIND
    if tile.dtype == tl.bfloat16:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 number, inside, none, rest; mov.b32 none, 0; mov.b32 rest, 0x80008000; "
            + FIRST + HELD + "inside, number, $2; fma.rn.bf16x2 $0, inside, $3, rest; }",
            "=r,r,r,r", [tile, limit, power], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 number, none; mov.b32 none, 0; " + FIRST + HELD + "$0, number, $2; }",
            "=r,r,r", [tile, limit], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return found


@triton.jit
def by_largest(widest, LARGEST: tl.constexpr):
    """Return widest / LARGEST, as IEEE float32 division rounds where the quotient is a normal number: the formula of
    `quotient` (write.py), with a constant reciprocal."""
    INVERSE: tl.constexpr = 1.0 / LARGEST
    near = widest * INVERSE
    return tl.fma(tl.fma(-near, LARGEST, widest), INVERSE, near)


@triton.jit
def token_scales(widest, like, LARGEST: tl.constexpr):
    """Return rows' scales from their largest finite numbers [M], and divide_rows' arguments: the limit of a row's
    numbers, the power of two that multiplies them, and their divisor after that. like: a tile of the numbers' dtype."""
    scale = by_largest(widest, LARGEST)
    scale = tl.where(scale > SMALLEST_SCALE, scale, SMALLEST_SCALE)
    if like.dtype == tl.bfloat16:
        # Numbers that the smallest scale divides may all be smaller than the format's largest; an infinity is not.
        limit = tl.maximum(widest, LARGEST * SMALLEST_SCALE)
        power = tl.where(scale < SMALL_SCALE, RAISED, 1.0)
        divisor = scale * power
    else:
        # Float16 has nothing between 0 and 2^-24: with that for 0, a row of zeros needs no limit beside its infinities.
        limit = tl.maximum(widest, LEAST_FLOAT16)
        power = limit
        divisor = by_largest(limit, LARGEST)
    return scale, limit.to(like.dtype), power.to(like.dtype), divisor


@triton.jit
def divide_rows(tile, limit, power, divisor, KV_FORMAT: tl.constexpr):
    """Divide a tile of 16-bit numbers by its rows' scales, float32.

    As store_rows has them with `bytes`, to the last bit once they are 8 bits wide. In front of the division infinities
    become the row's largest number, so that no quotient needs a limit.
    """
    near = clamp_rows(tile, limit, power, KV_FORMAT == "int8").to(tl.float32)
    inverse = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [divisor], dtype=tl.float32, is_pure=True, pack=1)
    return tl.inline_asm_elementwise(
        """{ .reg .f32 about, turned, rest;
        mul.rn.f32 about, $1, $3;
        neg.f32 turned, $1;
        fma.rn.f32 rest, about, $2, turned;
        neg.f32 rest, rest;
        fma.rn.f32 $0, rest, $3, about; }""",
        "=r,r,r,r", [near, divisor[:, None], inverse[:, None]], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def turned_halves(source, stride_d, cos, sin, angles, stride_cos, stride_sin, limit, HALF: tl.constexpr):
    """Return both halves [M, HALF] of rows of K, rotated like rotate_rows' (write.py) neox pairs, each read once.

    source, limit  rotate_rows' arguments
    """
    columns = tl.arange(0, HALF)[None, :]
    angle = tl.minimum(tl.maximum(angles, 0), limit - 1)[:, None]
    first = tl.load(source[:, None] + columns * stride_d)
    second = tl.load(source[:, None] + (columns + HALF) * stride_d)
    c = tl.load(cos + angle * stride_cos + columns).to(tl.float32)
    s = tl.load(sin + angle * stride_sin + columns).to(tl.float32)
    one, two = first.to(tl.float32), second.to(tl.float32)
    return (one * c - two * s).to(first.dtype), (two * c + one * s).to(first.dtype)


@triton.jit
def whole_bytes(numbers):
    """Convert float32 numbers from -127 to 127 to int8: to the nearest, ties to even. Beside 1.5·2²³ the lowest byte of
    a float32's bits counts ones."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 one, two, three, four;
        add.rn.f32 one, $1, 0f4B400000;
        add.rn.f32 two, $2, 0f4B400000;
        add.rn.f32 three, $3, 0f4B400000;
        add.rn.f32 four, $4, 0f4B400000;
        prmt.b32 one, one, two, 0x0040;
        prmt.b32 three, three, four, 0x0040;
        prmt.b32 $0, one, three, 0x5410; }""",
        "=r,r,r,r,r", [numbers], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip
