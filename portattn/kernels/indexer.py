"""index_scores: the logits of a lightning indexer, Σ w·ReLU(q·k) over its heads. topk_rows: each row's k largest.

Formula: DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2.1. Selection: a search in registers, over a whole row
or the part of it above a sampled pivot.
"""

import triton
import triton.language as tl

from portattn.kernels.attend import operand
from portattn.kernels.split_bf16 import dot

LOWEST: tl.constexpr = tl.constexpr(-2139095041)  # -inf as `sortable` has it, and +inf
HIGHEST: tl.constexpr = tl.constexpr(2139095040)
LANES: tl.constexpr = tl.constexpr(32)
SAMPLE: tl.constexpr = tl.constexpr(4096)
SAMPLED: tl.constexpr = tl.constexpr(3)  # pivots that samples give, before bisection


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
def tile_places(BLOCK_N: tl.constexpr):
    """Return 0..BLOCK_N - 1 as a tile of four columns, the numbers that a thread reads at once."""
    return tl.arange(0, BLOCK_N // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def count_of(chosen):
    return tl.sum(tl.sum(chosen.to(tl.int32), axis=1), axis=0)


@triton.jit
def threshold(numbers, wanted, spare, low, reached):
    """Return the largest number that `wanted` of a tile's numbers reach; up to wanted + `spare` may reach the result.

    It is at least `low`, which about `reached` numbers reach, and at least `wanted` of them."""
    high = tl.max(tl.max(numbers, axis=1), axis=0)
    low = tl.minimum(low, high)
    reached = tl.maximum(reached, wanted)
    above, turn = 0, 0
    while low < high:
        # The next number to try is interpolated from both ends' counts, each fourth time in the middle: few steps for
        # most rows, and for none more than four times as many as numbers have bits.
        surplus = tl.maximum(reached - wanted - spare // 2, 0).to(tl.uint32).to(tl.float32)
        share = surplus / (reached - above).to(tl.uint32).to(tl.float32)
        half = ((high >> 1) - (low >> 1)).to(tl.uint32).to(tl.float32)  # of the distance, which may overflow
        step = tl.minimum(tl.minimum(tl.maximum(share, 0.0625), 0.9375) * half * 2.0, 1073741824.0)
        middle = tl.minimum(tl.maximum(low + step.to(tl.uint32).to(tl.int32), low + 1), high)
        middle = tl.where(turn % 4 == 3, (low | high) - ((low ^ high) >> 1), middle)
        count = count_of(numbers >= middle)
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count < wanted, middle - 1, tl.where(count <= wanted + spare, middle, high))
        reached = tl.where(count >= wanted, count, reached)
        above = tl.where(count < wanted, count, above)
        turn += 1
    return low


@triton.jit
def no_counts(BLOCK_N: tl.constexpr):
    """Return the counts of `ranks` before the first tile."""
    fours: tl.constexpr = BLOCK_N // 4
    width: tl.constexpr = fours if fours < LANES else LANES
    return tl.sum(tl.zeros([fours // width, width], tl.int32), axis=1)


@triton.jit
def ranks(marked, counts):
    """Return how many of a tile's numbers up to each one are marked, earlier tiles' `counts` included, and counts."""
    # A thread adds up its four marks, a warp its threads' sums, and every warp all warps' sums: one exchange between
    # warps, where a scan of the tile has one for each warp.
    marks = marked.to(tl.int32)
    fours: tl.constexpr = marks.shape[0]
    width: tl.constexpr = fours if fours < LANES else LANES
    lines = tl.reshape(tl.sum(marks, axis=1), [fours // width, width])
    sums = tl.sum(lines, axis=1)
    nth = tl.arange(0, fours // width)
    before = tl.sum(tl.where(nth[None, :] < nth[:, None], sums[None, :], 0) + counts[None, :], axis=1)
    before = tl.reshape(tl.cumsum(lines, axis=1) - lines + before[:, None], [fours])
    return tl.cumsum(marks, axis=1) + before[:, None], counts + sums


@triton.jit
def load_numbers(source, keys, seq_k, stride, READS: tl.constexpr):
    if READS == "inside":
        return tl.load(source + tl.minimum(keys, seq_k - 1).to(tl.int64) * stride)
    # The mask follows from seq_k alone, a size that the compiler knows the divisors of: reads stay wide. Callers drop
    # numbers from seq_k on, whatever these are.
    return tl.load(source + keys.to(tl.int64) * stride, mask=keys < seq_k)


@triton.jit
def take_from_row(source, to, pivot, wanted, room, first, end, seq_k, stride, BLOCK_N: tl.constexpr,
                  READS: tl.constexpr, EQUALS: tl.constexpr):  # fmt: skip
    """Store the keys of a row's numbers above a pivot, and of the first `wanted` equal to it, in order, up to `room`.

    The pivot is a `sortable` number. Without EQUALS only numbers above it are taken. Return how many were taken, and
    how many are equal."""
    least = (pivot ^ ((pivot >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    taken, equals = no_counts(BLOCK_N), no_counts(BLOCK_N)
    begin = first // BLOCK_N * BLOCK_N
    following = load_numbers(source, begin + tile_places(BLOCK_N), seq_k, stride, READS)
    for start in range(begin, end, BLOCK_N):
        keys = start + tile_places(BLOCK_N)
        if EQUALS:
            numbers = load_numbers(source, keys, seq_k, stride, READS).to(tl.float32)
        else:  # the next tile is on its way
            numbers = following.to(tl.float32)
            following = load_numbers(source, keys + BLOCK_N, seq_k, stride, READS)
        seen = (keys >= first) & (keys < end)
        chosen = seen & (numbers > least)
        if EQUALS:
            equal = seen & (numbers == least)
            nth, equals = ranks(equal, equals)
            chosen = chosen | (equal & (nth <= wanted))
        nth, taken = ranks(chosen, taken)
        tl.store(to - 1 + nth, keys, mask=chosen & (nth <= room))
    return tl.sum(taken, axis=0), tl.sum(equals, axis=0)


@triton.jit
def load_sortable(source, keys, first, end, seq_k, stride, READS: tl.constexpr):
    """Load a row's numbers as sortable integers; numbers out of the range and NaN are -inf."""
    numbers = load_numbers(source, keys, seq_k, stride, READS).to(tl.float32)
    counted = (numbers > float("-inf")) & (keys >= first) & (keys < end)
    return sortable(tl.where(counted, numbers, float("-inf")))


@triton.jit
def sampled_pivot(source, first, end, seq_k, stride, wanted, BLOCK_N: tl.constexpr, READS: tl.constexpr):
    """Return a number that about `wanted` numbers of a row reach, by a sample of the row."""
    size: tl.constexpr = BLOCK_N if BLOCK_N < SAMPLE else SAMPLE
    length = end - first
    groups = first + (tl.arange(0, size // 4).to(tl.int64) * length // (size // 4)).to(tl.int32)
    keys = (groups // 4 * 4)[:, None] + tl.arange(0, 4)[None, :]  # four are one read of 16 bytes
    rank = tl.minimum(tl.maximum(wanted * size // length, 1), size)
    numbers = load_sortable(source, keys, first, end, seq_k, stride, READS)
    return threshold(numbers, rank - rank // 16, rank // 8, LOWEST, size)


@triton.jit(do_not_specialize=["seq_q", "tokens", "rows"])
def topk_rows(
    q, row_starts, row_ends, result, candidates,
    q_stride_b, q_stride_s, q_stride_d, result_stride_b, result_stride_s,
    seq_q, seq_k, tokens, rows,
    BLOCK_N: tl.constexpr, LONG: tl.constexpr, READS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Write result (B, Sq, tokens), int32: the places of each row's largest numbers in their order, then -1.

    q (B, 1, Sq, Sk). LONG: rows may have more than BLOCK_N numbers; candidates (programs, BLOCK_N), int32, is memory.
    """
    # A row of BLOCK_N numbers is held in registers, and its `tokens`-th largest number is found by bisection. Of a
    # longer row the keys of numbers above a pivot become the tile. A sample gives the pivot; if so many numbers exceed
    # it that they fill no tile, or too few, bisection continues with passes over the row. If numbers equal to the pivot
    # are among the chosen ones, the pivot is the threshold, and no tile is needed.
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
        places = tile_places(BLOCK_N)
        begin = tl.minimum(first, seq_k) // 16 * 16
        keys = begin + places
        low, held, taken, written = LOWEST, 0, 0, 0
        if LONG:
            memory = candidates + tl.program_id(0).to(tl.int64) * BLOCK_N
            long = end - begin > BLOCK_N
            if long:
                # Between too few and too many: for 2,048 to 4,096 of 65,536 numbers and a sample of 4,096,
                # some four standard deviations from both.
                aim = tl.minimum(tokens, BLOCK_N) + tl.maximum(BLOCK_N - tokens, 0) * 7 // 16
                pivot, high = first - first + LOWEST, HIGHEST  # a tensor in the interpreter too
                searching, attempt = 1, 0
                while searching == 1:
                    if (end - first > tokens) & (attempt < SAMPLED):  # a row of fewer numbers needs no pivot
                        sampled = sampled_pivot(source, first, end, seq_k, q_stride_d, aim, BLOCK_N, READS)
                        pivot = tl.where(attempt == 0, sampled, tl.minimum(tl.maximum(sampled, pivot), high))
                    held, _ = take_from_row(source, memory, pivot, 0, BLOCK_N, first, end, seq_k, q_stride_d, BLOCK_N,
                                            READS, False)  # fmt: skip
                    if held <= tokens:
                        wanted = tl.where(pivot > LOWEST, tokens - held, 0)
                        taken, equals = take_from_row(source, to, pivot, wanted, tokens, first, end, seq_k, q_stride_d,
                                                      BLOCK_N, READS, True)  # fmt: skip
                        written = ((pivot == LOWEST) | (equals >= wanted)).to(tl.int32)
                        searching = 1 - written
                        high = pivot - 1
                        aim += aim // 4
                    else:
                        searching = (held > BLOCK_N).to(tl.int32)
                        low = pivot
                        aim -= aim // 4
                    # The middle, rounded up; for the next sample, the least number that is left.
                    middle = (low | high) - ((low ^ high) >> 1)
                    attempt += 1
                    pivot = tl.where(searching == 1, tl.where(attempt < SAMPLED, low + 1, middle), pivot)
            if READS == "masked":  # compilers that read whole tiles have programs of one thread, and no barrier
                tl.debug_barrier()  # before reading what other threads have stored
            stored = tl.load(memory + places, mask=long & (places < held), other=seq_k)
            keys = tl.where(long, stored, keys)
        if written == 0:
            numbers = load_sortable(source, keys, first, end, seq_k, q_stride_d, READS)
            counted = count_of(numbers > low)
            if counted > tokens:
                low = threshold(numbers, tokens, 0, low, counted)
            chosen = (numbers >= low) & (numbers > LOWEST)
            nth, counts = ranks(chosen, no_counts(BLOCK_N))
            taken = tl.sum(counts, axis=0)
            if taken > tokens:
                above = numbers > low
                nth, _ = ranks(chosen & (numbers == low), no_counts(BLOCK_N))
                first_equals = above | (chosen & (nth <= tokens - count_of(above)))
                nth, _ = ranks(first_equals, no_counts(BLOCK_N))
                tl.store(to - 1 + nth, keys, mask=first_equals)
                taken = tokens
            else:
                tl.store(to - 1 + nth, keys, mask=chosen)
        for start in range(0, tokens - taken, BLOCK_N):
            empty = start + tl.arange(0, BLOCK_N)
            tl.store(to + taken + empty, tl.full([BLOCK_N], -1, tl.int32), mask=empty < tokens - taken)
