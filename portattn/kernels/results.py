"""What a program that decodes stores of its rows: results and LSE, or of a share of the keys the state to be merged."""

import triton
import triton.language as tl

from portattn.kernels.tiles import finalize, natural_lse, store_state


@triton.jit
def store_rows(
    acc, row_max, row_sum, out, lse, sinks, split, slot, slots, head, heads_q, q_row, seq_q, row_valid,
    o_stride_p, o_stride_b, o_stride_h, o_stride_s,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, SPLIT: tl.constexpr, EXP: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """Store the valid part of [BLOCK_M, BLOCK_DV] rows, from the state of their softmax.

    SPLIT: `out` is (splits, slots, Hq, Sq, Dv) and `lse` (splits, slots, Hq, Sq, 2), the states of `split`'s keys.
    Otherwise `out` is (slots, Hq, Sq, Dv) and `lse` (slots, Hq, Sq). lse: None if it is not asked for.
    slot, slots: the row's sequence and how many there are; 0 and 1 of packed queries.
    head, q_row: [BLOCK_M] the head and the row in Sq; q_row is int64.
    """
    acc = finalize(acc, row_sum)
    columns = tl.arange(0, BLOCK_DV)
    o_base = out + slot.to(tl.int64) * o_stride_b
    if SPLIT:
        o_base += split.to(tl.int64) * o_stride_p
    o_offsets = head.to(tl.int64) * o_stride_h + q_row * o_stride_s
    inside = row_valid[:, None] & (columns < HEAD_DIM_V)[None, :]
    tl.store(o_base + o_offsets[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        lse_rows = ((split * slots + slot).to(tl.int64) * heads_q + head) * seq_q + q_row
        if SPLIT:
            store_state(lse, lse_rows, row_max, row_sum, row_valid)
        else:
            tl.store(lse + lse_rows, natural_lse(row_max, row_sum, sinks, head, EXP, NATURAL), mask=row_valid)
