"""attend_apart: attend's loop with each warp at keys of its own, for caches as wide as the queries.

Where a tile's products are shared among warps by their columns, a step's maximum and probabilities go from warp to warp
by shared memory, and all wait for each other. Of few query rows that waiting is most of a step. Here a product is a
batch of products, one for each warp: no step waits for another warp but for the tile that is read, and the warps'
results are merged once, after the loop.
"""

import triton
import triton.language as tl

from portattn.kernels.keyplaces import key_places, key_pointers
from portattn.kernels.tiles import exponential, load_query_rows, lowest, softmax_scale


@triton.jit
def load_parts(rows, there, stride_col, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Tile [parts, keys of a part, BLOCK_COLS] of the rows that begin at pointers [parts, keys]; 0 where none is."""
    c = tl.arange(0, BLOCK_COLS)
    pointers = rows[:, :, None] + (c * stride_col)[None, None, :]
    inside = there[:, :, None]
    if COLS != BLOCK_COLS:
        tile = tl.load(pointers, mask=inside & (c < COLS)[None, None, :], other=0.0)
    else:
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def half_of(x, PARTS: tl.constexpr):
    """Sums [PARTS / 2, …] of the first and the second half of x [PARTS, rows, columns].

    A sum over the first axis would send each number through shared memory by itself; this one sends four at a time.
    """
    first, second = tl.split(tl.permute(tl.reshape(x, [2, PARTS // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0)))
    return first + second


@triton.jit
def sum_of_parts(x, PARTS: tl.constexpr):
    """x [PARTS, rows, columns] summed over its parts; PARTS is 1, 2, 4 or 8."""
    if PARTS == 8:
        x = half_of(x, 8)
    if PARTS >= 4:
        x = half_of(x, 4)
    if PARTS >= 2:
        x = half_of(x, 2)
    return tl.reshape(x, [x.shape[1], x.shape[2]])


@triton.jit
def attend_apart(
    q_pointers, row_valid, q_stride_d,
    k_rows, v_rows, table, pages, k_stride_p, k_stride_s, k_stride_d, v_stride_p, v_stride_s, v_stride_d,
    origin, first_step, last_step, end, row_end, scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, NEGATED: tl.constexpr, CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, EXP: tl.constexpr, MASK_VALUE: tl.constexpr, PAGE_LOOP: tl.constexpr,
    READS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As `attend`, with nothing but lengths and the causal mask, over 16-bit rows. PARTS: warps, each with its keys.

    Every tile is masked: a second loop, for tiles that are attended whole, is as much code again, and its first loads
    would begin when the first loop's last are done.

    Returns acc [BLOCK_M, BLOCK_DV], row_max and row_sum.
    """
    EACH: tl.constexpr = BLOCK_N // PARTS
    q_tile = load_query_rows(q_pointers, row_valid, q_stride_d, HEAD_DIM, BLOCK_D, NEGATED)
    q_parts = tl.broadcast_to(q_tile[None, :, :], [PARTS, BLOCK_M, BLOCK_D])
    factor = softmax_scale(scale, EXP, False)
    acc = tl.full([PARTS, BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    part_max = tl.full([PARTS, BLOCK_M], lowest(MASK_VALUE), tl.float32)
    part_sum = tl.full([PARTS, BLOCK_M], 0.0, tl.float32)
    keys = tl.reshape(tl.arange(0, BLOCK_N), [PARTS, EACH])
    for step in range(first_step, last_step):
        start = origin + step * BLOCK_N
        page, row = key_places(table, start, end, pages, BLOCK_N, True, PAGE_SIZE, PAGE_LOOP, READS)
        # Numbers are laid out anew and not pointers, of which the compiler would no longer know multiples of what they are.
        row = tl.reshape(row, [PARTS, EACH])
        if PAGE_SIZE != 0 and PAGE_LOOP != "per_page":
            page = tl.reshape(page, [PARTS, EACH])
        there = start + keys < end
        at_k = key_pointers(k_rows, start, page, row, k_stride_p, k_stride_s, PAGE_SIZE)
        at_v = key_pointers(v_rows, start, page, row, v_stride_p, v_stride_s, PAGE_SIZE)
        k_tile = load_parts(at_k, there, k_stride_d, HEAD_DIM, BLOCK_D)
        v_tile = load_parts(at_v, there, v_stride_d, HEAD_DIM_V, BLOCK_DV)
        scores = tl.dot(q_parts, tl.permute(k_tile, (0, 2, 1)), input_precision="ieee")  # [PARTS, BLOCK_M, EACH]
        if CAUSAL:
            keep = (start + keys)[:, None, :] < row_end[None, :, None]
        else:
            keep = there[:, None, :]
        # Scaled before it is masked, as softmax_step has it.
        scaled = tl.where(keep, scores * factor, lowest(MASK_VALUE))
        new_max = tl.maximum(part_max, tl.max(scaled, 2))
        if MASK_VALUE == "finite":
            base = new_max
            p = tl.where(keep, exponential(scaled - base[:, :, None], EXP, False), 0.0)
        else:
            base = tl.where(new_max > float("-inf"), new_max, 0.0)
            p = exponential(scaled - base[:, :, None], EXP, False)
        correction = exponential(part_max - base, EXP, False)
        part_sum = part_sum * correction + tl.sum(p, 2)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * correction[:, :, None], input_precision="ieee")
        part_max = new_max
    row_max = tl.max(part_max, 0)
    base = row_max
    if MASK_VALUE != "finite":
        base = tl.where(row_max > float("-inf"), row_max, 0.0)
    weight = exponential(part_max - base[None, :], EXP, False)
    return sum_of_parts(acc * weight[:, :, None], PARTS), row_max, tl.sum(part_sum * weight, 0)
