"""attend: the loop over key tiles that every core kernel with matrix products shares.

Algorithm: Dao, "FlashAttention-2" (2023), section 3.1. Scores live in the base that EXP names.
"""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import Dropout, KeyRows, LoopShape, Pages, Query, Rows, ScoreTerms, TileRange
from portattn.kernels.dequantize import (
    dequantize,
    ds_mla_qk,
    nvfp4_pv,
    nvfp4_qk,
    packed_pv,
    packed_qk,
    token_scales,
)
from portattn.kernels.dropout import head_words, kept_tile
from portattn.kernels.softmax import softmax_step
from portattn.kernels.split_bf16 import add_dot, dot, split_product
from portattn.kernels.tiles import load_query_rows, read_columns, read_rows, sequence_bounds

# Depth of the float8 products whose sum a chip may keep in fewer bits than float32's; longer ones are added in float32.
# Source: NVIDIA's warpgroup products of 8-bit operands are this deep, and Triton adds those in full between them.
IMPRECISE_DEPTH = tl.constexpr(32)


@triton.jit
def operand(tile, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """Return stored numbers as an operand. Each number of every format is exact in float16."""
    if OPERANDS == "widened":
        found = dequantize(tile, tl.full([1], 0.0, tl.float16), FORMAT)
    elif FORMAT == "e4m3":
        found = tile.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == "e5m2":
        found = tile.to(tl.float8e5, bitcast=True)
    elif FORMAT == "e4m3fnuz":
        found = tile.to(tl.float8e4b8, bitcast=True)
    else:
        found = tile  # int8
    return found


@triton.jit
def query_tile(pointers, valid, stride_col, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, NEGATED: tl.constexpr,
               Q_FORMAT: tl.constexpr, OPERANDS: tl.constexpr):  # fmt: skip
    """Load queries of any format with load_query_rows. If they are quantised, the scores carry the sign (products)."""
    if Q_FORMAT == "as_q":
        tile = load_query_rows(pointers, valid, stride_col, COLS, BLOCK_COLS, NEGATED)
    else:
        tile = operand(load_query_rows(pointers, valid, stride_col, COLS, BLOCK_COLS, False), Q_FORMAT, OPERANDS)
    return tile


@triton.jit
def products(q_tile, k_tile, row_scales, NEGATED: tl.constexpr, FORMAT: tl.constexpr, OPERANDS: tl.constexpr):
    """Return Q·Kᵀ [BLOCK_M, BLOCK_N] of quantised operands, float32.

    row_scales  a scale for each query [BLOCK_M], or None
    """
    if OPERANDS == "widened":
        scores = tl.dot(q_tile, k_tile, input_precision="ieee")
    elif FORMAT == "int8":
        scores = tl.dot(q_tile, k_tile, out_dtype=tl.int32).to(tl.float32)
    else:
        scores = tl.dot(q_tile, k_tile, max_num_imprecise_acc=IMPRECISE_DEPTH)
    if NEGATED:
        scores = -scores
    if row_scales is not None:
        scores = scores * row_scales[:, None]
    return scores


@records.jit
def read_query(q: Query, row_valid):
    """Load the query tile of the first product, and that of the second; without one the first again."""
    q_tile = query_tile(q.pointers, row_valid, q.stride_col, q.COLS, q.BLOCK_COLS, q.NEGATED, q.FORMAT, q.OPERANDS)
    q_tail = q_tile  # never used: a tuple that holds None fails to compile
    if q.BLOCK_TAIL != 0:
        q_tail = query_tile(q.tail_pointers, row_valid, q.tail_stride_col, q.TAIL_COLS, q.BLOCK_TAIL, q.NEGATED,
                            q.FORMAT, q.OPERANDS)  # fmt: skip
    return q_tile, q_tail


@records.jit
def plain_qk(q_tile, q_tail, q: Query, keys: KeyRows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr):
    """Run qk on keys whose numbers are one element each, with a scale for each token or none."""
    FORMAT: tl.constexpr = keys.main.FORMAT
    if C.LATENT:
        rows = dequantize(read_rows(keys.main, pages, start, end, C.BLOCK_N, BOUNDED), q_tile, FORMAT)
        scores = dot(q_tile, tl.trans(rows), C.DOT_PRECISION)
    else:
        k_tile = read_columns(keys.main, pages, start, end, C, BOUNDED)
        if q.FORMAT == "as_q":
            k_tile = dequantize(k_tile, q_tile, FORMAT)
            scores = dot(q_tile, k_tile, C.DOT_PRECISION)
        else:
            scores = products(q_tile, operand(k_tile, FORMAT, q.OPERANDS), q.scales, q.NEGATED, FORMAT, q.OPERANDS)
        rows = scores  # never used: a tuple that holds None fails to compile
    if q.BLOCK_TAIL != 0:
        k_tail = read_columns(keys.tail, pages, start, end, C, BOUNDED)
        if q.FORMAT == "as_q":
            k_tail = dequantize(k_tail, q_tail, FORMAT)
            scores = add_dot(q_tail, k_tail, scores, C.DOT_PRECISION)
        else:
            k_tail = operand(k_tail, FORMAT, q.OPERANDS)
            scores += products(q_tail, k_tail, q.scales, q.NEGATED, FORMAT, q.OPERANDS)
    if keys.main.scales.source is not None:
        scores = scores * token_scales(keys.main.scales, pages, start, end, C.BLOCK_N, BOUNDED)[None, :]
    return scores, rows


@records.jit
def qk(q_tile, q_tail, q: Query, keys: KeyRows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr):
    """Return raw scores [BLOCK_M, BLOCK_N] of the keys from `start` on and, if LATENT, their tile: it holds the values.

    The main columns are one product; with BLOCK_TAIL the tail's columns are another.
    """
    if keys.main.FORMAT == "nvfp4":
        scores = nvfp4_qk(q_tile, q_tail, q, keys, pages, start, end, C, BOUNDED)
        rows = scores  # never used, as in plain_qk
    elif keys.main.BLOCK_COLS != q.BLOCK_COLS:  # a byte holds several numbers
        scores = packed_qk(q_tile, q_tail, q, keys, pages, start, end, C, BOUNDED)
        rows = scores
    elif keys.main.FORMAT == "fp8_ds_mla":
        scores, rows = ds_mla_qk(q_tile, q_tail, q, keys, pages, start, end, C, BOUNDED)
    else:
        scores, rows = plain_qk(q_tile, q_tail, q, keys, pages, start, end, C, BOUNDED)
    return scores, rows


@records.jit
def plain_pv(acc, correction, p, v_tile, like, values: Rows, pages: Pages, start, end, C: LoopShape,
             BOUNDED: tl.constexpr, UNUSED_ZERO: tl.constexpr, Q_FORMAT: tl.constexpr):  # fmt: skip
    """Run pv on a tile of values whose numbers are one element each, with a scale for each token or none.

    A token's scale goes into the values: times a probability, a small scale would leave float16's range.
    """
    FORMAT: tl.constexpr = "as_q" if C.LATENT else values.FORMAT  # latent rows have been widened
    if Q_FORMAT == "as_q":
        v_tile = dequantize(v_tile, like, FORMAT)
    else:
        v_tile = operand(v_tile, FORMAT, "widened")
    if values.scales.source is not None:
        by_key = token_scales(values.scales, pages, start, end, C.BLOCK_N, BOUNDED)
        v_tile = (v_tile.to(tl.float32) * by_key[:, None]).to(like.dtype)
    if UNUSED_ZERO:
        v_tile = tl.where((tl.max(p, 0) == 0.0)[:, None], 0.0, v_tile)
    if Q_FORMAT == "as_q":
        acc = add_dot(p.to(v_tile.dtype), v_tile, acc * correction[:, None], C.DOT_PRECISION)
    else:
        acc = split_product(p, v_tile, acc * correction[:, None], C.P_TERMS)
    return acc


@records.jit
def pv(acc, correction, p, read, like, values: Rows, pages: Pages, start, end, C: LoopShape, BOUNDED: tl.constexpr,
       READ: tl.constexpr, UNUSED_ZERO: tl.constexpr, Q_FORMAT: tl.constexpr):  # fmt: skip
    """Return acc [BLOCK_M, BLOCK_DV] rescaled, plus the probabilities times the values from `start` on.

    READ: the values have been read already; they are `read`.
    UNUSED_ZERO: values that no row of the tile gives weight to count as 0. They may be NaN, and 0·NaN is NaN. Rows that
    are not real have no part in that (see attend).
    like    a tile of the dtype of the products
    """
    if READ:
        v_tile = read
    else:
        v_tile = read_rows(values, pages, start, end, C.BLOCK_N, BOUNDED)
    if values.FORMAT == "nvfp4":
        acc = nvfp4_pv(acc, correction, p, v_tile, values, pages, start, end, C, BOUNDED, UNUSED_ZERO)
    elif acc.shape[1] != values.BLOCK_COLS:  # a byte holds several numbers
        acc = packed_pv(acc, correction, p, v_tile, values, pages, start, end, C, BOUNDED)
    else:
        acc = plain_pv(acc, correction, p, v_tile, like, values, pages, start, end, C, BOUNDED, UNUSED_ZERO, Q_FORMAT)
    return acc


@records.jit
def attend_tile(
    acc, row_max, row_sum, raw, read, q_tile, q_tail, start, following,
    q: Query, keys: KeyRows, values: Rows, pages: Pages, steps: TileRange, scores: ScoreTerms, dropout: Dropout,
    C: LoopShape, LIMITED: tl.constexpr, ROTATED: tl.constexpr, UNUSED_ZERO: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, whose raw scores are known, to the softmax of rows.

    read       the tile's values if they have been read, else anything
    LIMITED    whether rows attend a part of the tile alone
    ROTATED    before P·V the raw scores of the tile at `following` are computed: that product is under way during the
               softmax. Otherwise `following` has no meaning, and raw and read come back as they are
    UNUSED_ZERO  see pv

    Returns row_max, row_sum, raw, a tile that holds the values of the tile that raw is of, if LATENT, and acc: loops of
    Triton 3.2 carry values in the order in which their bodies assign them, and code in this order was timed.
    """
    p, correction, row_max, row_sum = softmax_step(
        raw, start, steps.end, row_max, row_sum, scores, C.BLOCK_N, LIMITED
    )  # fmt: skip
    if dropout.seed is not None:
        # Kept probabilities are scaled once, at the end; the row's sum counts all.
        kept = kept_tile(dropout.key, dropout.turn, start - dropout.origin, dropout.row, dropout.threshold, p.shape[1],
                         p.shape[0], False, dropout.WAY)  # fmt: skip
        p = tl.where(kept, p, 0.0)
    if ROTATED:
        if C.Q_OPERAND == "reload":
            q_tile, q_tail = read_query(q, scores.row_valid)
        raw, read = qk(q_tile, q_tail, q, keys, pages, following, steps.end, C, True)
    READ: tl.constexpr = C.LATENT or C.PIPELINE == "single"
    acc = pv(acc, correction, p, read, q_tile, values, pages, start, steps.end, C, LIMITED, READ, UNUSED_ZERO, q.FORMAT)
    return row_max, row_sum, raw, read, acc


@triton.jit
def step_start(step, origin, first_step, full_begin, full, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key of a step of `attend`: the `full` tiles from full_begin on come first, then those before
    them, then the rest."""
    tile = full_begin + step
    if WINDOW:
        before = first_step + step - full
        tile = tl.where(step < full, tile, tl.where(before < full_begin, before, before + full))
    return origin + tile * BLOCK_N


@triton.jit
def listed_start(blocks, place, end, BLOCK: tl.constexpr, INSIDE: tl.constexpr):
    """Return the first key of the tile at a place of a list of blocks of BLOCK keys; `end` for a hole.

    A block behind the end, whatever its number, gives `end` too, from which on nothing is read. INSIDE: any number
    gives a tile of a block that ends by `end`.
    """
    block = tl.load(blocks + place // BLOCK)
    if INSIDE:
        start = tl.minimum(tl.maximum(block, 0), end // BLOCK - 1) * BLOCK + place % BLOCK
    else:
        start = tl.minimum(block, tl.cdiv(end, BLOCK)) * BLOCK + place % BLOCK
        start = tl.where(block < 0, end, tl.minimum(start, end))
    return start


@triton.jit
def listed_tiles(listed, length, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the ends of the whole tiles and of all tiles of a block mask's list of blocks of `length` keys (or rows).

    The list begins with the counts of its whole blocks and of the others; more than there are do not count.
    """
    whole = tl.minimum(tl.maximum(tl.load(listed), 0), length // BLOCK)
    others = tl.minimum(tl.maximum(tl.load(listed + 1), 0), tl.cdiv(length, BLOCK) - whole)
    return whole * (BLOCK // BLOCK_N), (whole + others) * (BLOCK // BLOCK_N)


@triton.jit
def listed_keys(seqlens_k, indices, counts, list_stride_b, list_stride_h, list_stride_s, count_stride_b,
                count_stride_h, count_stride_s, batch, kv_head, query, seq_q, seq_k, places,
                CAUSAL: tl.constexpr):  # fmt: skip
    """Return the end of the keys that a query sees, its list of blocks and how many places of it count."""
    _, k_end = sequence_bounds(seqlens_k, None, batch, seq_k)
    end = seen_end(query, seq_q, k_end, CAUSAL)
    listed = (
        indices + batch.to(tl.int64) * list_stride_b + kv_head.to(tl.int64) * list_stride_h
        + query.to(tl.int64) * list_stride_s
    )  # fmt: skip
    count = places
    if counts is not None:
        at = batch * count_stride_b + kv_head * count_stride_h + query * count_stride_s
        count = tl.minimum(tl.maximum(tl.load(counts + at), 0), places)
    return end, listed, count


@triton.jit
def seen_end(query, seq_q, k_end, CAUSAL: tl.constexpr):
    """Return the end of the keys that queries see, of a sequence of seq_q queries whose keys end at k_end."""
    if CAUSAL == "bottom_right":
        end = tl.maximum(tl.minimum(query + (k_end - seq_q) + 1, k_end), 0)
    elif CAUSAL == "top_left":
        end = tl.minimum(query + 1, k_end)
    else:
        end = query - query + k_end
    return end


@records.jit
def attend_single(
    acc, row_max, row_sum, q_tile, q_tail,
    q: Query, keys: KeyRows, values: Rows, pages: Pages, steps: TileRange, scores: ScoreTerms, dropout: Dropout,
    C: LoopShape, MASKS: tl.constexpr, EDGE_UNUSED: tl.constexpr,
):  # fmt: skip
    """Run attend for at most one tile. Without a loop there is half as much code, and one step's registers."""
    read = read_rows(values, pages, steps.origin, steps.end, C.BLOCK_N, True)
    raw, _ = qk(q_tile, q_tail, q, keys, pages, steps.origin, steps.end, C, True)
    NONE: tl.constexpr = C.NONE and values.LOAD == "descriptor"
    row_max, row_sum, _, _, acc = attend_tile(
        acc, row_max, row_sum, raw, read, q_tile, q_tail, steps.origin, steps.origin,
        q, keys, values, pages, steps, scores, dropout, C, True, False, (MASKS or EDGE_UNUSED) or NONE,
    )  # fmt: skip
    return acc, row_max, row_sum


@records.jit
def attend_rotated(
    acc, row_max, row_sum, q_tile, q_tail,
    q: Query, keys: KeyRows, values: Rows, pages: Pages, steps: TileRange, scores: ScoreTerms, dropout: Dropout,
    C: LoopShape, MASKS: tl.constexpr, EDGE_UNUSED: tl.constexpr,
):  # fmt: skip
    """Run attend with a step's scores computed in the step before: that product is under way during the softmax."""
    # A branch in here, after which accumulators of both its sides come together, makes ptxas wait for each product
    # (C7515): so the last step is taken always, and always masked.
    full, total = steps.full_end - steps.full_begin, steps.last - steps.first
    nought = full - full  # a 0 that is a tensor: Triton 3.2 compares no constant with one
    start = step_start(nought, steps.origin, steps.first, steps.full_begin, full, C.BLOCK_N, scores.WINDOW)
    raw, read = qk(q_tile, q_tail, q, keys, pages, start, steps.end, C, True)
    for edge in tl.static_range(2):
        if edge == 0:
            begin, stop = nought, tl.minimum(full, total - 1)
        else:
            begin, stop = tl.minimum(full, total - 1), total - 1
        for i in range(begin, stop):
            start = step_start(i, steps.origin, steps.first, steps.full_begin, full, C.BLOCK_N, scores.WINDOW)
            following = step_start(i + 1, steps.origin, steps.first, steps.full_begin, full, C.BLOCK_N, scores.WINDOW)
            row_max, row_sum, raw, read, acc = attend_tile(
                acc, row_max, row_sum, raw, read, q_tile, q_tail, start, following,
                q, keys, values, pages, steps, scores, dropout, C,
                edge == 1, True, MASKS or (EDGE_UNUSED and edge == 1),
            )  # fmt: skip
    last = tl.maximum(total - 1, 0)
    start = step_start(last, steps.origin, steps.first, steps.full_begin, full, C.BLOCK_N, scores.WINDOW)
    NONE: tl.constexpr = C.NONE and values.LOAD == "descriptor"
    row_max, row_sum, _, _, acc = attend_tile(
        acc, row_max, row_sum, raw, read, q_tile, q_tail, start, start,
        q, keys, values, pages, steps, scores, dropout, C, True, False, MASKS or (EDGE_UNUSED or NONE),
    )  # fmt: skip
    return acc, row_max, row_sum


@records.jit
def attend_passes(
    acc, row_max, row_sum, q_tile, q_tail,
    q: Query, keys: KeyRows, values: Rows, pages: Pages, steps: TileRange, scores: ScoreTerms, dropout: Dropout,
    C: LoopShape, MASKS: tl.constexpr, EDGE_UNUSED: tl.constexpr,
):  # fmt: skip
    """Run attend in two passes: key tiles that every row attends whole, then those at the edges. With PIPELINE "masked"
    in one, as if all were edges. A mask function is called for the edges alone."""
    ONE_PASS: tl.constexpr = 1 if C.PIPELINE == "masked" else 0
    for edge in tl.static_range(ONE_PASS, 2):
        if C.PIPELINE == "masked":
            count = steps.last - steps.first
        elif edge == 0:
            count = steps.full_end - steps.full_begin
        else:
            count = steps.full_begin - steps.first + steps.last - steps.full_end
        for i in range(count):
            if C.PIPELINE == "masked":
                start = steps.origin + (steps.first + i) * C.BLOCK_N
            elif edge == 0:
                start = steps.origin + (steps.full_begin + i) * C.BLOCK_N
            elif scores.WINDOW:
                # The edge before the full tiles, then the one after them.
                skipped = tl.where(steps.first + i >= steps.full_begin, steps.full_end - steps.full_begin, 0)
                start = steps.origin + (steps.first + i + skipped) * C.BLOCK_N
            else:
                start = steps.origin + (steps.full_end + i) * C.BLOCK_N
            if steps.blocks is not None:
                start = listed_start(steps.blocks, start, steps.end, steps.BLOCK, edge == 0 and not steps.LIMITED)
            if C.Q_OPERAND == "reload":
                q_tile, q_tail = read_query(q, scores.row_valid)
            raw, read = qk(q_tile, q_tail, q, keys, pages, start, steps.end, C, edge == 1 or steps.LIMITED)
            row_max, row_sum, _, _, acc = attend_tile(
                acc, row_max, row_sum, raw, read, q_tile, q_tail, start, start,
                q, keys, values, pages, steps,
                scores._replace(mods=scores.mods._replace(MASK=None if edge == 0 else scores.mods.MASK)), dropout, C,
                edge == 1 or steps.LIMITED, False, MASKS or (EDGE_UNUSED and (edge == 1 or steps.LIMITED)),
            )  # fmt: skip
    return acc, row_max, row_sum


@records.jit
def attend(
    acc, row_max, row_sum,
    q: Query, keys: KeyRows, values: Rows, pages: Pages, steps: TileRange, scores: ScoreTerms, dropout: Dropout,
    C: LoopShape,
):  # fmt: skip
    """Attend the key tiles of `steps`: those that every row attends whole, and the others masked.

    No key at or after steps.end, which no row attends, is read (but by descriptors over pages): it may hold NaN. Rows
    that are not real have a query of 0, a bias of -inf and a mask of False. They attend no key that no real row
    attends, where the unused values of a tile are decided over its rows; their results may be anything.

    Of quantised queries the products of values are float16, which holds each number of every format exactly. With
    PIPELINE "single" there is at most one tile, which begins at the origin. With "masked" and "plain", steps may be
    places of a list of blocks. No key from scores.tree_first on lies in a tile that is attended whole.

    Returns acc, row_max and row_sum.
    """
    MASKS: tl.constexpr = scores.mask is not None or scores.bias is not None
    # In edge tiles: values before a window, those that no row's tree mask or mask function shows, and what descriptors
    # read behind a sequence's end in its last page.
    BEHIND: tl.constexpr = values.LOAD == "descriptor" and pages.SIZE != 0
    HIDES: tl.constexpr = scores.tree_low is not None or scores.mods.MASK is not None
    EDGE_UNUSED: tl.constexpr = scores.WINDOW or (BEHIND or HIDES)
    row_end = scores.row_end
    if MASKS or EDGE_UNUSED:
        row_end = tl.where(scores.row_valid, row_end, steps.origin)
    limited = scores._replace(row_end=row_end)
    q_tile, q_tail = read_query(q, scores.row_valid)
    key = None
    turn = None
    if dropout.seed is not None:
        key, turn = head_words(dropout.seed, dropout.head, dropout.WAY)
    drops = dropout._replace(key=key, turn=turn)
    if C.PIPELINE == "single":
        acc, row_max, row_sum = attend_single(
            acc, row_max, row_sum, q_tile, q_tail, q, keys, values, pages, steps, limited, drops, C, MASKS, EDGE_UNUSED
        )
    elif C.PIPELINE == "rotated":
        acc, row_max, row_sum = attend_rotated(
            acc, row_max, row_sum, q_tile, q_tail, q, keys, values, pages, steps, limited, drops, C, MASKS, EDGE_UNUSED
        )
    else:
        acc, row_max, row_sum = attend_passes(
            acc, row_max, row_sum, q_tile, q_tail, q, keys, values, pages, steps, limited, drops, C, MASKS, EDGE_UNUSED
        )
    return acc, row_max, row_sum


@triton.jit
def in_chunk(start, end, position, origin, chunk):
    """Intersect keys [start, end) with the chunk of a position. Chunks of `chunk` keys count from `origin`.

    A position before the origin lies in a chunk without keys. Triton's division truncates: it is of numbers from 0 on.
    """
    own = position - origin
    begin = origin + tl.maximum(own, 0) // chunk * chunk
    return tl.maximum(start, begin), tl.minimum(end, tl.where(own < 0, origin, begin + chunk))


@triton.jit
def kv_tile_range(near, far, low_near, low_far, origin, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return the key tiles that some row attends, [first, last), and every row whole, [full_begin, full_end).

    near, far          least and greatest end of a row's keys
    low_near, low_far  with WINDOW: least and greatest first key of a row's window
    """
    last = tl.maximum(far - origin + BLOCK_N - 1, 0) // BLOCK_N
    full_end = tl.maximum(tl.minimum(near, far) - origin, 0) // BLOCK_N
    if WINDOW:
        first = tl.minimum(tl.maximum(low_near - origin, 0) // BLOCK_N, last)
        full_begin = tl.minimum(tl.maximum(low_far - origin + BLOCK_N - 1, 0) // BLOCK_N, last)
        full_begin = tl.maximum(full_begin, first)
        full_end = tl.minimum(tl.maximum(full_end, full_begin), last)
    else:
        first = last - last
        full_begin = last - last
    return first, full_begin, full_end, last
