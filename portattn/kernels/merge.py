"""Merge partial results of one set of rows by their log-sum-exps: two of them, or the results of several ranks."""

import triton
import triton.language as tl


@triton.jit
def weights(mine, other):
    """What two parts count for in their sum, from their log-sum-exps, and that of both. A part at -inf attended
    nothing."""
    largest = tl.maximum(mine, other)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    kept, added = tl.exp(mine - base), tl.exp(other - base)
    total = kept + added
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    return kept * share, added * share, base + tl.log(total)


@triton.jit
def place_of(row, heads, rows, stride_b, stride_h, stride_s):
    """Where row `row` of (B, H, S) begins."""
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
