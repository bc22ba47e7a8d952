"""combine: merges the partial results of rows whose keys were split over programs.

Dao et al., "Flash-Decoding" (2023).
"""

import triton
import triton.language as tl

from portattn.kernels.programmatic_launch import wait_for_kernel_before
from portattn.kernels.tiles import exponential, lowest, natural_lse


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
