"""combine: merges the partial results of rows whose keys were split over programs.

Dao et al., "Flash-Decoding" (2023).
"""

import triton
import triton.language as tl

from portattn.kernels.dependent import wait_for_kernel_before


@triton.jit(do_not_specialize=["heads_q", "seq_q", "rows", "splits"])
def combine(
    partial, partial_lse, out, lse,
    o_stride_b, o_stride_h, o_stride_s,
    heads_q, seq_q, rows, splits,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    GRID: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge (splits, rows, Dv) float32 partial results by their LSEs; one program a row, rows = B·Hq·Sq.

    DEPENDENT: the launch did not wait for the kernel that makes the partial results.
    """
    if DEPENDENT:
        wait_for_kernel_before()
    if GRID == "persistent":
        rounds = tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))
    else:
        rounds: tl.constexpr = 1
    for turn in range(rounds):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        every = tl.arange(0, BLOCK_SPLITS)
        columns = tl.arange(0, BLOCK_DV)
        lses = tl.load(
            partial_lse + every.to(tl.int64) * rows + row, mask=every < splits, other=float("-inf")
        )  # [BLOCK_SPLITS]
        largest = tl.max(lses, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.sum(tl.exp(lses - base), 0)
        acc = tl.full([BLOCK_DV], 0.0, tl.float32)
        for chunk in range(tl.cdiv(splits, CHUNK)):
            some = chunk * CHUNK + tl.arange(0, CHUNK)
            weight = tl.exp(
                tl.load(partial_lse + some.to(tl.int64) * rows + row, mask=some < splits, other=float("-inf")) - base
            )  # [CHUNK]
            part = tl.load(
                partial + (some.to(tl.int64) * rows + row)[:, None] * HEAD_DIM_V + columns[None, :],
                mask=(some < splits)[:, None] & (columns < HEAD_DIM_V)[None, :],
                other=0.0,
            )  # [CHUNK, BLOCK_DV]
            acc += tl.sum(part * weight[:, None], 0)
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
            natural = tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, total)))
            tl.store(lse + row, natural)
