"""Partial results, merged by their LSEs: combine merges shares of split keys, whose states store_rows stores;
merge_rows and merge_parts merge results of several ranks; pause waits some microseconds.

Dao et al., "Flash-Decoding" (2023)."""

import triton
import triton.language as tl

from portattn.kernels import records
from portattn.kernels.arguments import Output
from portattn.kernels.softmax import exponential, finalize, lowest, natural_lse, sink_score, store_state
from portattn.kernels.tiles import wait_for_kernel_before


@records.jit
def store_rows(
    acc, row_max, row_sum, to: Output, sinks, split, slot, slots, head, heads_q, q_row, seq_q, row_valid,
    EXP: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Store the valid part of [BLOCK_M, BLOCK_COLS] rows, from the state of their softmax.

    split        the share of the keys, with to.SPLIT
    slot, slots  the row's sequence and how many there are; 0 and 1 of packed queries
    head, q_row  the head and the row in Sq [BLOCK_M]; q_row is int64
    """
    acc = finalize(acc, row_sum)
    columns = tl.arange(0, to.BLOCK_COLS)
    o_base = to.out + slot.to(tl.int64) * to.stride_slot
    if to.SPLIT:
        o_base += split.to(tl.int64) * to.stride_split
    o_offsets = head.to(tl.int64) * to.stride_head + q_row * to.stride_row
    inside = row_valid[:, None] & (columns < to.COLS)[None, :]
    tl.store(o_base + o_offsets[:, None] + columns[None, :], acc.to(to.out.dtype.element_ty), mask=inside)
    if to.lse is not None:
        lse_rows = ((split * slots + slot).to(tl.int64) * heads_q + head) * seq_q + q_row
        if to.SPLIT:
            store_state(to.lse, lse_rows, row_max, row_sum, row_valid)
        else:
            tl.store(to.lse + lse_rows, natural_lse(row_max, row_sum, sinks, head, EXP, NATURAL), mask=row_valid)


@triton.jit
def with_sink(acc, row_max, row_sum, sinks, heads, counted, EXP: tl.constexpr, NATURAL: tl.constexpr):
    """Count the sink in acc [BLOCK_M, BLOCK_DV], maxima and sums of rows that have none yet.

    For probabilities in float16: against a sink that is far above all scores they would be its smallest numbers, or 0.

    sinks, heads, counted  as in init_softmax
    """
    sink = sink_score(tl.load(sinks + heads).to(tl.float32), EXP, NATURAL)
    some = row_sum != 0.0
    largest = tl.where(counted, tl.where(some, tl.maximum(row_max, sink), sink), row_max)
    kept = tl.where(some & counted, exponential(row_max - largest, EXP, NATURAL), 1.0)
    # As exp(inf - inf) is NaN, what equals the largest is not subtracted from it.
    added = tl.where(some & (sink != largest), exponential(sink - largest, EXP, NATURAL), 1.0)
    return acc * kept[:, None], largest, row_sum * kept + tl.where(counted, added, 0.0)


@triton.jit(do_not_specialize=["heads_q", "seq_q", "rows", "splits"])
def combine(
    partial, partial_state, out, lse, sinks,
    o_stride_b, o_stride_h, o_stride_s,
    heads_q, seq_q, rows, splits,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
    STATE: tl.constexpr, EXP: tl.constexpr, NATURAL: tl.constexpr, GRID: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge (splits, rows, Dv) float32 partial results by the states of their rows; one program a row, rows = B·Hq·Sq.
    With DEPENDENT a row may have several programs, each with BLOCK_DV of its columns, along the grid's second axis.

    STATE: what partial_state, float32, has of each row. "max_sum": (splits, rows, 2), the pairs of store_state, whose
    maxima are in the base that EXP and NATURAL say, the splitting kernel's. "lse": (splits, rows), natural logarithms
    of sums, -inf where nothing was attended. EXP is then "exp", and sinks None.
    A partial result that attended nothing has no weight, whatever it holds. sinks (Hq,): what the splitting kernel has
    counted in the first share; lse (rows) is natural.
    CHUNK splits are read at a time and kept as in the online softmax, so that states and results are one wait for
    memory, as far as the compiler has registers for them. DEPENDENT: the launch did not wait for the kernel that makes
    the partial results.
    """
    if DEPENDENT:
        wait_for_kernel_before()
    if GRID == "persistent":
        rounds = tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        columns = tl.arange(0, BLOCK_DV)
        if DEPENDENT:
            columns += tl.program_id(1) * BLOCK_DV
        total = (splits - splits).to(tl.float32)
        largest = total + lowest("finite")  # below every state: no difference of maxima is -inf − -inf
        acc = tl.full([BLOCK_DV], 0.0, tl.float32)
        for chunk in range(tl.cdiv(splits, CHUNK)):
            some = chunk * CHUNK + tl.arange(0, CHUNK)
            made = some < splits
            places = some.to(tl.int64) * rows + row  # [CHUNK]
            if STATE == "max_sum":
                maxima = tl.load(partial_state + places * 2, mask=made, other=0.0)
                sums = tl.load(partial_state + places * 2 + 1, mask=made, other=0.0)
            else:
                maxima = tl.load(partial_state + places, mask=made, other=float("-inf"))
                sums = tl.where(maxima == float("-inf"), 0.0, 1.0)
            part = tl.load(
                partial + places[:, None] * HEAD_DIM_V + columns[None, :],
                mask=made[:, None] & (columns < HEAD_DIM_V)[None, :],
                other=0.0,
            )  # [CHUNK, BLOCK_DV]
            nothing = sums == 0.0
            maxima = tl.where(nothing, lowest("finite"), maxima)
            new_largest = tl.maximum(largest, tl.max(maxima, 0))
            weight = sums * exponential(maxima - new_largest, EXP, NATURAL)
            correction = exponential(largest - new_largest, EXP, NATURAL)
            total = total * correction + tl.sum(weight, 0)
            weighted = tl.where(nothing[:, None], 0.0, part * weight[:, None])
            acc = acc * correction + tl.sum(weighted, 0)
            largest = new_largest
        empty = total == 0.0  # a NaN total stays NaN, as in `normalised`
        inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
        batch = row // (heads_q * seq_q)
        head = row // seq_q % heads_q
        o_base = (
            out
            + batch.to(tl.int64) * o_stride_b
            + head.to(tl.int64) * o_stride_h
            + (row % seq_q).to(tl.int64) * o_stride_s
        )
        tl.store(o_base + columns, (acc * inverse).to(out.dtype.element_ty), mask=columns < HEAD_DIM_V)
        if lse is not None:
            found = natural_lse(largest, total, sinks, head, EXP, NATURAL)
            if DEPENDENT:
                tl.store(lse + row, found, mask=tl.program_id(1) == 0)
            else:
                tl.store(lse + row, found)


@triton.jit
def weights(mine, other):
    """Return two parts' weights in their sum and the log-sum-exp of both, from the parts' log-sum-exps. A part at -inf
    attended nothing."""
    largest = tl.maximum(mine, other)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    kept, added = tl.exp(mine - base), tl.exp(other - base)
    total = kept + added
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    return kept * share, added * share, base + tl.log(total)


@triton.jit
def place_of(row, heads, rows, stride_b, stride_h, stride_s):
    """Return the offset of row `row` of (B, H, S)."""
    head = row // rows
    batch = head // heads
    return batch.to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h + (row % rows).to(tl.int64) * stride_s


@triton.jit(do_not_specialize=["heads", "rows", "count"])
def merge_rows(
    out, lse, part, part_lse,
    o_stride_b, o_stride_h, o_stride_s, l_stride_b, l_stride_h, l_stride_s,
    p_stride_b, p_stride_h, p_stride_s, pl_stride_b, pl_stride_h, pl_stride_s,
    heads, rows, count,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge part (B, H, S, WIDTH) into out, in place, and their log-sum-exps (B, H, S) float32.

    The sum is in float32, and is stored in out's dtype. count = B·H·S, BLOCK rows a program.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    there = row < count
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = there[:, None] & (columns < WIDTH)[None, :]
    at_lse = lse + place_of(row, heads, rows, l_stride_b, l_stride_h, l_stride_s)
    mine = tl.load(at_lse, mask=there, other=float("-inf"))
    at_other = part_lse + place_of(row, heads, rows, pl_stride_b, pl_stride_h, pl_stride_s)
    other = tl.load(at_other, mask=there, other=float("-inf"))
    kept, added, merged = weights(mine, other)
    at = (out + place_of(row, heads, rows, o_stride_b, o_stride_h, o_stride_s))[:, None] + columns[None, :]
    at_part = (part + place_of(row, heads, rows, p_stride_b, p_stride_h, p_stride_s))[:, None] + columns[None, :]
    ours = tl.load(at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK, BLOCK_WIDTH]
    theirs = tl.load(at_part, mask=inside, other=0.0).to(tl.float32)
    theirs = tl.where((other == float("-inf"))[:, None], 0.0, theirs)  # whatever it holds
    tl.debug_barrier()  # several threads may have read what one of them now overwrites
    tl.store(at, (ours * kept[:, None] + theirs * added[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(at_lse, merged, mask=there)


@triton.jit(do_not_specialize=["rows"])
def merge_parts(
    values, states, out, lse, rows,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, VALUES: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Merge PARTS partial results of each row, which lie as (PARTS, rows, …): one program a row.

    values  a part's row begins at every VALUES-th element, and has WIDTH of them
    states  the same memory as float32: a part's row ends with its LSE, STATES elements a row
    out, lse  (rows, WIDTH) in values' dtype and (rows,) float32, contiguous

    Every rank adds in the same order. A row that no part attended gives 0 and -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < WIDTH
    largest = tl.load(states + row * STATES + STATES - 1)
    for part in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, tl.load(states + (part * rows + row) * STATES + STATES - 1))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = 0.0
    acc = tl.zeros([BLOCK_WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        state = tl.load(states + (part * rows + row) * STATES + STATES - 1)
        weight = tl.exp(state - base)
        found = tl.load(values + (part * rows + row) * VALUES + columns, mask=inside, other=0.0).to(tl.float32)
        acc += tl.where(state == float("-inf"), 0.0, found * weight)
        total += weight
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    tl.store(out + row * WIDTH + columns, (acc / safe).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where(empty, float("-inf"), base + tl.log(safe)))


@triton.jit(do_not_specialize=["rounds"])
def pause(memory, value, rounds):
    """Compute `rounds` products, each of which needs the one before: some 8 cycles each on an H100 (12,000 in 51 µs).

    memory  any float tensor: nothing is read or written, which the compiler does not know
    value   0.0: so that it stays below 2
    """
    found = value
    for _ in range(rounds):
        found = found * 0.5 + 1.0
    tl.store(memory, found.to(memory.dtype.element_ty), mask=found > 3.0)
