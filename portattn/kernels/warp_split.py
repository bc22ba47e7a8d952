"""warps_apart: each warp attends keys of its own. It runs in place of decode_split for plain problems of few query
rows, over 16-bit numbers, and of dense_forward for small problems of float32.

Where a tile's products are shared among warps by their columns, a step's maximum and probabilities go from warp to warp
by shared memory, and all wait for each other. With few query rows that waiting is most of a step. Here a product is a
batch of products, one for each warp: no step waits for another warp but for the tile that is read, and the warps'
results are merged once, after the loop. The kernel has nothing but what these problems need, since a short cache takes
less time than decode_split's beginning and end.

A product of float32 numbers is six, or three, one after the other. Warps that share them wait for each other between
products as well.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import Output
from portattn.kernels.combine import store_rows, with_sink
from portattn.kernels.paged_addressing import key_places, key_pointers, page_from, pages_from
from portattn.kernels.softmax import exponential, lowest, softmax_scale
from portattn.kernels.split_bf16 import add_dot, dot
from portattn.kernels.tiles import let_next_kernel_begin, load_query_rows, packed_bounds, packed_tile, sequence_bounds


@triton.jit
def load_parts(rows, valid, stride_col, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Load a tile [parts, keys of a part, BLOCK_COLS] of rows that begin at pointers [parts, keys]; 0 if not valid."""
    c = tl.arange(0, BLOCK_COLS)
    pointers = rows[:, :, None] + (c * stride_col)[None, None, :]
    inside = valid[:, :, None]
    if COLS != BLOCK_COLS:
        tile = tl.load(pointers, mask=inside & (c < COLS)[None, None, :], other=0.0)
    else:
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def half_of(x, PARTS: tl.constexpr):
    """Return sums [PARTS / 2, …] of the first and the second half of x [PARTS, rows, columns].

    A sum over the first axis would send each number through shared memory by itself; this one sends four at a time.
    """
    first, second = tl.split(tl.permute(tl.reshape(x, [2, PARTS // 2, x.shape[1], x.shape[2]]), (1, 2, 3, 0)))
    return first + second


@triton.jit
def sum_of_parts(x, PARTS: tl.constexpr):
    """Return x [PARTS, rows, columns] summed over its parts; PARTS is 1, 2, 4 or 8."""
    if PARTS == 8:
        x = half_of(x, 8)
    if PARTS >= 4:
        x = half_of(x, 4)
    if PARTS >= 2:
        x = half_of(x, 2)
    return tl.reshape(x, [x.shape[1], x.shape[2]])


@triton.jit
def pages_of(table, start, end, pages, PAGE_SIZE: tl.constexpr, PAGE_LOOP: tl.constexpr, PARTS: tl.constexpr,
             BLOCK_N: tl.constexpr):  # fmt: skip
    """Return the page of each key of a tile [PARTS, keys of a part], a scalar if they share one; any from `end` on."""
    if PAGE_SIZE == 0:
        page = start
    elif PAGE_LOOP == "per_page":
        page = page_from(table, start, end, pages, 0, BLOCK_N, PAGE_SIZE)
    elif PAGE_LOOP == "by_page":
        first, second, third, fourth = pages_from(table, start, end, pages, BLOCK_N, PAGE_SIZE)
        part = tl.reshape(tl.arange(0, BLOCK_N) // PAGE_SIZE, [PARTS, BLOCK_N // PARTS])
        page = tl.where(part < 2, tl.where(part == 0, first, second), tl.where(part == 2, third, fourth))
    else:
        page, _ = key_places(table, start, end, pages, BLOCK_N, True, PAGE_SIZE, PAGE_LOOP, "masked")
        page = tl.reshape(page, [PARTS, BLOCK_N // PARTS])
    return page


@triton.jit
def attend_parts(
    q_parts, k_pointers, v_pointers, valid, keep, k_stride_d, v_stride_d, acc, part_max, part_sum, factor,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, DOT_PRECISION: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Return the state (acc [PARTS, rows, BLOCK_DV], maxima and sums [PARTS, rows]) after one more tile of keys.

    k_pointers, v_pointers, valid: of each key [PARTS, keys of a part] the row's pointers, and whether it is one.
    keep: what is attended, [PARTS, rows or 1, keys of a part].
    FIRST: there is no state before: acc is 0, and the maxima and sums that are given are not read.
    """
    k_tile = load_parts(k_pointers, valid, k_stride_d, HEAD_DIM, BLOCK_D)
    v_tile = load_parts(v_pointers, valid, v_stride_d, HEAD_DIM_V, BLOCK_DV)
    scores = dot(q_parts, tl.permute(k_tile, (0, 2, 1)), DOT_PRECISION)  # [PARTS, rows, keys of a part]
    # Scaled before it is masked, as softmax_step has it.
    scaled = tl.where(keep, scores * factor, lowest(MASK_VALUE))
    new_max = tl.max(scaled, 2)
    if not FIRST:
        new_max = tl.maximum(part_max, new_max)
    elif MASK_VALUE == "finite":  # scores may be -inf without being masked, and -inf less -inf is NaN
        new_max = tl.maximum(new_max, lowest(MASK_VALUE))
    if MASK_VALUE == "finite":
        base = new_max
        p = tl.where(keep, exponential(scaled - base[:, :, None], EXP, False), 0.0)
    else:
        base = tl.where(new_max > float("-inf"), new_max, 0.0)
        p = exponential(scaled - base[:, :, None], EXP, False)
    if not FIRST:
        correction = exponential(part_max - base, EXP, False)
        part_sum = part_sum * correction + tl.sum(p, 2)
        acc = add_dot(p.to(v_tile.dtype), v_tile, acc * correction[:, :, None], DOT_PRECISION)
    else:
        part_sum = tl.sum(p, 2)
        acc = add_dot(p.to(v_tile.dtype), v_tile, acc, DOT_PRECISION)
    return acc, new_max, part_sum


@records.jit(do_not_specialize=["heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "batches"])
def warps_apart(
    q, k, v, out, lse, seqlens_k, leftpad_k, cu_seqlens_q, page_table, sinks,
    scale,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d,
    k_stride_b, k_stride_h, k_stride_s, k_stride_d,
    v_stride_b, v_stride_h, v_stride_s, v_stride_d,
    o_stride_p, o_stride_b, o_stride_h, o_stride_s,
    table_stride_b,
    heads_k, seq_q, seq_k, pages, row_tiles, splits, batches,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, NEGATED: tl.constexpr, SEARCH: tl.constexpr, EXP: tl.constexpr,
    MASK_VALUE: tl.constexpr, PAGE_LOOP: tl.constexpr, PARTS: tl.constexpr, FOLLOWED: tl.constexpr,
    DOT_PRECISION: tl.constexpr, PIPELINE: tl.constexpr,
):  # fmt: skip
    """Attend like decode_split with nothing but lengths, sinks and the causal mask, rows of q's dtype and GRID "tiles".

    PARTS: warps, each with its keys: a power of two up to 8.
    FOLLOWED: a kernel that merges follows, which may begin before this one ends.
    PIPELINE: `single` has no loop: all keys of a contiguous cache are in one tile, and are not split.

    Every tile is masked: a second loop, for tiles that are attended whole, is as much code again, and its first loads
    would begin when the first loop's last are done.
    """
    EACH: tl.constexpr = BLOCK_N // PARTS
    if FOLLOWED:
        let_next_kernel_begin()
    heads_q = heads_k * GROUP
    tile = tl.program_id(0)
    split = tile % splits
    row_tile = tile // splits % row_tiles
    kv_head = tile // splits // row_tiles % heads_k
    batch = tile // splits // row_tiles // heads_k
    slot = batch  # packed queries are one slot, which all sequences share
    if cu_seqlens_q is not None:
        batch, row_tile = packed_tile(cu_seqlens_q, row_tile, batches, seq_q, GROUP, BLOCK_M, SEARCH)
        q_first, q_end = packed_bounds(cu_seqlens_q, batch, batches, seq_q)
        k_first = seq_k - seq_k
        k_end = tl.load(seqlens_k + tl.minimum(batch, batches - 1), mask=batch < batches, other=0)
        k_end = tl.minimum(tl.maximum(k_end, 0), seq_k)
    else:
        q_first, q_end = seq_q - seq_q, seq_q
        k_first, k_end = sequence_bounds(seqlens_k, leftpad_k, batch, seq_k)
    queries = q_end - q_first
    row_0 = row_tile * BLOCK_M
    rows = row_0 + tl.arange(0, BLOCK_M)  # [BLOCK_M] packed: (query, head in group)
    query = rows // GROUP  # [BLOCK_M]
    head = kv_head * GROUP + rows % GROUP  # [BLOCK_M]
    row_valid = rows < queries * GROUP
    far = k_end  # the end of the keys of the row that sees furthest
    if CAUSAL != "none":
        if CAUSAL == "top_left":
            shift = k_first
        else:
            shift = k_end - queries
        row_end = tl.minimum(query + shift + 1, k_end)  # [BLOCK_M]
        far = tl.minimum(tl.minimum((row_0 + BLOCK_M - 1) // GROUP, queries - 1) + shift + 1, k_end)
    far = tl.where(row_0 < queries * GROUP, far, k_first)  # a tile without rows attends nothing
    steps = tl.maximum(far - k_first + BLOCK_N - 1, 0) // BLOCK_N
    share = tl.cdiv(steps, splits)
    first_step = tl.minimum(split * share, steps)
    last_step = tl.minimum(first_step + share, steps)

    slot_0 = slot.to(tl.int64)
    q_row = (q_first + query).to(tl.int64)  # [BLOCK_M]
    q_pointers = q + slot_0 * q_stride_b + head.to(tl.int64) * q_stride_h + q_row * q_stride_s
    k_base = k + kv_head.to(tl.int64) * k_stride_h
    v_base = v + kv_head.to(tl.int64) * v_stride_h
    if PAGE_SIZE == 0:
        table = None
        k_base += slot_0 * k_stride_b
        v_base += slot_0 * v_stride_b
    else:
        table = page_table + batch.to(tl.int64) * table_stride_b

    q_tile = load_query_rows(q_pointers, row_valid, q_stride_d, HEAD_DIM, BLOCK_D, NEGATED)
    q_parts = tl.broadcast_to(q_tile[None, :, :], [PARTS, BLOCK_M, BLOCK_D])
    factor = softmax_scale(scale, EXP, False)
    acc = tl.full([PARTS, BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    part_max = tl.full([PARTS, BLOCK_M], lowest(MASK_VALUE), tl.float32)
    part_sum = tl.full([PARTS, BLOCK_M], 0.0, tl.float32)
    keys = tl.reshape(tl.arange(0, BLOCK_N), [PARTS, EACH])
    if PIPELINE == "single":
        valid = k_first + keys < far
        if CAUSAL != "none":
            keep = (k_first + keys)[:, None, :] < row_end[None, :, None]
        else:
            keep = valid[:, None, :]
        acc, part_max, part_sum = attend_parts(
            q_parts, key_pointers(k_base, k_first, 0, keys, k_stride_b, k_stride_s, 0),
            key_pointers(v_base, k_first, 0, keys, v_stride_b, v_stride_s, 0), valid, keep, k_stride_d, v_stride_d,
            acc, part_max, part_sum, factor,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, EXP, MASK_VALUE, DOT_PRECISION, True,
        )  # fmt: skip
    else:
        # Pages are looked up a step ahead: a lookup in the step that reads its page takes a stage of the compiler's
        # pipeline of loads.
        page = pages_of(table, k_first + first_step * BLOCK_N, far, pages, PAGE_SIZE, PAGE_LOOP, PARTS, BLOCK_N)
        for step in range(first_step, last_step):
            start = k_first + step * BLOCK_N
            valid = start + keys < far
            if PAGE_SIZE == 0:
                page = start
                row = keys
            elif PAGE_LOOP == "per_page":
                row = start % PAGE_SIZE + keys
            elif BLOCK_N % PAGE_SIZE == 0:
                row = keys % PAGE_SIZE
            else:
                row = (start + keys) % PAGE_SIZE
            k_pointers = key_pointers(k_base, start, page, row, k_stride_b, k_stride_s, PAGE_SIZE)
            v_pointers = key_pointers(v_base, start, page, row, v_stride_b, v_stride_s, PAGE_SIZE)
            page = pages_of(table, start + BLOCK_N, far, pages, PAGE_SIZE, PAGE_LOOP, PARTS, BLOCK_N)
            if CAUSAL != "none":
                keep = (start + keys)[:, None, :] < row_end[None, :, None]
            else:
                keep = valid[:, None, :]
            acc, part_max, part_sum = attend_parts(
                q_parts, k_pointers, v_pointers, valid, keep, k_stride_d, v_stride_d, acc, part_max, part_sum, factor,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, EXP, MASK_VALUE, DOT_PRECISION, False,
            )  # fmt: skip
    row_max = tl.max(part_max, 0)
    base = row_max
    if MASK_VALUE != "finite":
        base = tl.where(row_max > float("-inf"), row_max, 0.0)
    weight = exponential(part_max - base[None, :], EXP, False)
    row_sum = tl.sum(part_sum * weight, 0)
    acc = sum_of_parts(acc * weight[:, :, None], PARTS)
    if sinks is not None:
        acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sinks, head, split == 0, EXP, False)
    if cu_seqlens_q is not None:
        row_sum = tl.where(batch < batches, row_sum, 0.0)  # a row of no sequence has no sink either
    slots = batches
    if cu_seqlens_q is not None:
        slots = 1
    store_rows(
        acc, row_max, row_sum,
        Output(out, lse, o_stride_p, o_stride_b, o_stride_h, o_stride_s, HEAD_DIM_V, BLOCK_DV, SPLIT),
        sinks, split, slot, slots, head, heads_q, q_row, seq_q, row_valid, EXP, False,
    )  # fmt: skip
