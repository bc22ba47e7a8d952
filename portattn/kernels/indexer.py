"""index_scores: the logits of a lightning indexer, Σ w·ReLU(q·k) over its heads. topk_rows: each row's k largest.

Formula: DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2.1. Selection: radix select, from the highest digit on.
"""

import triton
import triton.language as tl

from portattn.kernels.attend import operand
from portattn.kernels.split_bf16 import dot

LOWEST: tl.constexpr = tl.constexpr(-2147483648)
RADIX: tl.constexpr = tl.constexpr(256)


@triton.jit
def key_range(row, place, sequence, row_starts, row_ends, seqlens_k, seq_q, seq_k, inside, PAGE_SIZE: tl.constexpr):
    """Return the first key that a row sees and the end of its keys, inside 0..seq_k; rows not `inside` see none."""
    # Over pages a sequence's last row sees all of its seqlens_k keys, and each row before it one less.
    first = tl.where(inside, 0, seq_k)
    end = tl.where(inside, seq_k, 0)
    if PAGE_SIZE != 0:
        length = tl.maximum(tl.load(seqlens_k + sequence, mask=inside, other=0), 0)
        end = tl.minimum(length - (seq_q - 1 - place), end)
    if row_starts is not None:
        first = tl.maximum(tl.load(row_starts + row, mask=inside, other=0), first)
    if row_ends is not None:
        end = tl.minimum(tl.load(row_ends + row, mask=inside, other=0), end)
    return first, end


@triton.jit
def left_operand(places, columns, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KV_FORMAT: tl.constexpr,
                 OPERANDS: tl.constexpr):  # fmt: skip
    """Load a tile of keys by pointers as the left operand of products."""
    if HEAD_DIM == BLOCK_D:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    if KV_FORMAT != "as_q":
        tile = operand(tile, KV_FORMAT, OPERANDS)
    return tile


@triton.jit(do_not_specialize=["seq_q", "seq_k", "pages", "row_tiles", "key_tiles", "tiles"])
def index_scores(
    q, k, weights, k_scale, row_starts, row_ends, seqlens_k, page_table, result,
    q_stride_b, q_stride_h, q_stride_s, q_stride_d, k_stride_b, k_stride_s, k_stride_d,
    k_scale_stride_b, k_scale_stride_s, weights_stride_b, weights_stride_s, weights_stride_h,
    result_stride_b, result_stride_s, table_stride_b,
    seq_q, seq_k, pages, row_tiles, key_tiles, tiles,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr, DOT_PRECISION: tl.constexpr,
    OPERANDS: tl.constexpr, Q_OPERAND: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Write result (B, Sq, Sk), float32: BLOCK_M rows of BLOCK_N keys a program, one key tile for all of them.

    q (B, H, Sq, D), weights (B, Sq, H). k (1, Sk, D) for all rows, or with PAGE_SIZE pages (P, page, D)."""
    # A key's scale is positive: it multiplies the sum. The heads are the columns of a product, so that few threads add
    # them up.
    if GRID == "persistent":
        rounds = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        key_tile = tile % key_tiles
        tile = tile // key_tiles
        sequence = tile // row_tiles
        first_row = (tile % row_tiles) * BLOCK_M
        rows = first_row + tl.arange(0, BLOCK_M)
        firsts, ends = key_range(sequence * seq_q + rows, rows, sequence + rows * 0, row_starts, row_ends, seqlens_k,
                                 seq_q, seq_k, rows < seq_q, PAGE_SIZE)  # fmt: skip
        start = key_tile * BLOCK_N
        keys = start + tl.arange(0, BLOCK_N)
        heads, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        count = tl.minimum(BLOCK_M, seq_q - first_row)
        to = result + sequence.to(tl.int64) * result_stride_b
        if (tl.min(firsts, axis=0) < start + BLOCK_N) & (tl.max(ends, axis=0) > start):
            # Every key is read where there is one: no row sees the others, whatever is read for them.
            at = tl.minimum(keys, seq_k - 1)
            block = tl.full([BLOCK_N], 0, tl.int64)
            if PAGE_SIZE != 0:
                table = page_table + sequence.to(tl.int64) * table_stride_b
                block = tl.load(table + at // PAGE_SIZE).to(tl.int64)
                block = tl.minimum(tl.maximum(block, 0), pages - 1)
                at = at % PAGE_SIZE
            k_rows = k + block * k_stride_b + at.to(tl.int64) * k_stride_s
            k_places = k_rows[:, None] + columns[None, :] * k_stride_d
            key_rows = left_operand(k_places, columns, HEAD_DIM, BLOCK_D, KV_FORMAT, OPERANDS)
            if k_scale is not None:
                scales = tl.load(k_scale + block * k_scale_stride_b + at.to(tl.int64) * k_scale_stride_s)
            there = (heads < HEADS)[:, None] & (columns < HEAD_DIM)[None, :]
            q_base = q + sequence.to(tl.int64) * q_stride_b
            q_places = tl.minimum(heads, HEADS - 1)[:, None].to(tl.int64) * q_stride_h + columns[None, :] * q_stride_d
            w_base = weights + sequence.to(tl.int64) * weights_stride_b
            for step in range(count):
                row = first_row + step
                q_rows = q_base + row.to(tl.int64) * q_stride_s + q_places
                if (HEADS == BLOCK_H) & (HEAD_DIM == BLOCK_D):
                    queries = tl.load(q_rows)
                else:
                    queries = tl.load(q_rows, mask=there, other=0.0)
                w = tl.load(w_base + row.to(tl.int64) * weights_stride_s + heads * weights_stride_h,
                            mask=heads < HEADS, other=0.0)  # fmt: skip
                # Before the product, which hides the latency of reading them.
                first, end = key_range(sequence * seq_q + row, row, sequence, row_starts, row_ends, seqlens_k, seq_q,
                                       seq_k, row < seq_q, PAGE_SIZE)  # fmt: skip
                if Q_OPERAND == "reload":
                    key_rows = left_operand(k_places, columns, HEAD_DIM, BLOCK_D, KV_FORMAT, OPERANDS)
                if KV_FORMAT == "as_q":
                    scores = dot(key_rows, tl.trans(queries), DOT_PRECISION)
                elif OPERANDS == "widened":
                    scores = tl.dot(key_rows, tl.trans(operand(queries, KV_FORMAT, OPERANDS)), input_precision="ieee")
                else:
                    # sm_90's matrix unit rounds sums of 8-bit products to 14 bits; to add up 32 at a time outside of it
                    # takes half of the time.
                    scores = tl.dot(key_rows, tl.trans(operand(queries, KV_FORMAT, OPERANDS)),
                                    max_num_imprecise_acc=BLOCK_D)  # fmt: skip
                scores = tl.where(scores < 0.0, 0.0, scores)  # NaN stays
                if HEADS != BLOCK_H:  # a key's infinity times a query of 0 would be NaN
                    scores = tl.where((heads < HEADS)[None, :], scores, 0.0)
                logits = tl.sum(scores * w[None, :], axis=1)
                if k_scale is not None:
                    logits = logits * scales
                logits = tl.where((keys >= first) & (keys < end), logits, float("-inf"))
                tl.store(to + row.to(tl.int64) * result_stride_s + keys, logits, mask=keys < seq_k)
        else:
            hidden = tl.full([BLOCK_N], float("-inf"), tl.float32)
            for step in range(count):
                tl.store(to + (first_row + step).to(tl.int64) * result_stride_s + keys, hidden, mask=keys < seq_k)


@triton.jit
def sortable(numbers):
    """Return float32 numbers as int32 of the same order; 0 and -0 are one number."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_tile(source, keys, first, end, seq_k, stride):
    """Return a tile of a row as sortable integers, and which of them count: in the row's range, above -inf, not NaN."""
    # What is masked follows from seq_k alone, a size that the compiler knows the divisors of: reads stay wide.
    numbers = tl.load(source + keys.to(tl.int64) * stride, mask=keys < seq_k, other=float("-inf")).to(tl.float32)
    valid = (numbers > float("-inf")) & ((keys >= first) & (keys < end))
    return sortable(numbers), valid


@triton.jit
def next_digit(source, begin, first, end, seq_k, stride, least, wanted, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the `wanted`-th largest number's bits from SHIFT on, and how many numbers that begin so are taken."""
    columns, digits = tl.arange(0, BLOCK_N), tl.arange(0, RADIX)
    counts = tl.full([RADIX], 0, tl.int32)
    for start in range(begin, end, BLOCK_N):
        numbers, counted = row_tile(source, start + columns, first, end, seq_k, stride)
        digit = (numbers >> SHIFT) & (RADIX - 1)
        if SHIFT == 24:
            digit = digit ^ 128  # the sign
        else:
            counted = counted & (((numbers ^ least) >> (SHIFT + 8)) == 0)
        # Others count as 0, since Triton 3.2's histogram has no mask: digit 0 is what remains if no other one is found.
        counts += tl.histogram(tl.where(counted, digit, 0), RADIX)
    from_here = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts  # numbers with this digit or a higher one
    digit = tl.maximum(tl.sum((from_here >= wanted).to(tl.int32), axis=0) - 1, 0)
    wanted = wanted - tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    if SHIFT == 24:
        least = (digit ^ 128) << 24
    else:
        least = least | (digit << SHIFT)
    return least, wanted


@triton.jit(do_not_specialize=["seq_q", "rows"])
def topk_rows(
    q, row_starts, row_ends, result,
    q_stride_b, q_stride_s, q_stride_d, result_stride_b, result_stride_s,
    seq_q, seq_k, tokens, rows,
    BLOCK_N: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Write result (B, Sq, tokens), int32: the places of each row's largest numbers in their order, then -1."""
    # The `tokens`-th largest of a row's numbers (q, (B, 1, Sq, Sk)) is found by its bytes, the highest first: a
    # histogram counts the numbers that begin with the bytes found so far. Of numbers equal to it the first are taken.
    if GRID == "persistent":
        rounds = tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        sequence, place = (row // seq_q).to(tl.int64), (row % seq_q).to(tl.int64)
        source = q + sequence * q_stride_b + place * q_stride_s
        to = result + sequence * result_stride_b + place * result_stride_s
        first, end = key_range(row, place, sequence, row_starts, row_ends, None, seq_q, seq_k, row < rows, 0)
        columns = tl.arange(0, BLOCK_N)
        begin = first // BLOCK_N * BLOCK_N
        least, wanted = LOWEST, tokens  # the threshold, and how many numbers equal to it are taken
        if end - first > tokens:
            for step in tl.static_range(4):
                least, wanted = next_digit(source, begin, first, end, seq_k, q_stride_d, least, wanted, 24 - 8 * step,
                                           BLOCK_N)  # fmt: skip
        taken = 0
        equals = 0
        for start in range(begin, end, BLOCK_N):
            keys = start + columns
            numbers, valid = row_tile(source, keys, first, end, seq_k, q_stride_d)
            equal = valid & (numbers == least)
            nth = equals + tl.cumsum(equal.to(tl.int32), axis=0)
            chosen = (valid & (numbers > least)) | (equal & (nth <= wanted))
            nth_chosen = taken + tl.cumsum(chosen.to(tl.int32), axis=0)
            tl.store(to + nth_chosen - 1, keys, mask=chosen)
            equals += tl.sum(equal.to(tl.int32), axis=0)
            taken += tl.sum(chosen.to(tl.int32), axis=0)
        for start in range(taken, tokens, BLOCK_N):
            empty = start + columns
            tl.store(to + empty, tl.full([BLOCK_N], -1, tl.int32), mask=empty < tokens)
