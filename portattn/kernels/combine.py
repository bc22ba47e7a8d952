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
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
    GRID: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Merge (splits, rows, Dv) float32 partial results by their LSEs; one program a row, rows = B·Hq·Sq.

    CHUNK splits are read at a time and kept as in the online softmax, so that LSEs and results are one wait for memory.
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
        columns = tl.arange(0, BLOCK_DV)
        largest = float("-inf")
        total = 0.0
        acc = tl.full([BLOCK_DV], 0.0, tl.float32)
        for chunk in range(tl.cdiv(splits, CHUNK)):
            some = chunk * CHUNK + tl.arange(0, CHUNK)
            made = some < splits
            lses = tl.load(partial_lse + some.to(tl.int64) * rows + row, mask=made, other=float("-inf"))  # [CHUNK]
            part = tl.load(
                partial + (some.to(tl.int64) * rows + row)[:, None] * HEAD_DIM_V + columns[None, :],
                mask=made[:, None] & (columns < HEAD_DIM_V)[None, :],
                other=0.0,
            )  # [CHUNK, BLOCK_DV]
            new_largest = tl.maximum(largest, tl.max(lses, 0))
            base = tl.where(
                new_largest == float("-inf"), 0.0, new_largest
            )  # splits without keys: no NaN from -inf − -inf
            weight = tl.exp(lses - base)
            correction = tl.exp(largest - base)
            total = total * correction + tl.sum(weight, 0)
            acc = acc * correction + tl.sum(part * weight[:, None], 0)
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
            base = tl.where(largest == float("-inf"), 0.0, largest)
            natural = tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, total)))
            tl.store(lse + row, natural)
