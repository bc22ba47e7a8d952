"""Merging partial results in the kernel that makes them: the last program of a row tile to finish merges the tile's.

What `combine` does, without a second launch: worth it where a launch costs more than the tile's other programs save by
merging side by side. A program never waits for another, so any number of them may run at a time, in any order.
"""

import triton
import triton.language as tl


@triton.jit
def is_last(counter, programs):
    """Whether this program is the last of so many to come here; after that it sees all that the others have stored.

    counter  one int32, which is 0 before the first program and is left at 0; programs of two launches that may overlap
             must not share it
    """
    # The atomic is one thread's: what the other threads of the program have stored must have happened before it.
    tl.debug_barrier()
    ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = ticket == programs - 1
    tl.store(counter, 0, mask=last)  # nobody else comes any more
    return last


@triton.jit
def merge_rows(partial, partial_lse, out, lse, row, rows, out_rows, there, splits,
               HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
               CHUNK: tl.constexpr):  # fmt: skip
    """Merge (splits, rows, Dv) float32 partial results by their LSEs, of ROWS rows.

    row       numbers [ROWS] int64 among `rows`, (batch, head, query) in order; the LSE is as long
    out_rows  where the results begin, offsets [ROWS] from `out`
    there     which of them are rows [ROWS]
    lse       None where none is asked for

    CHUNK splits are read at a time and kept as in the online softmax, so that LSEs and partial results are one wait for
    memory and not two. The order of the sums is that of the splits, whichever was last.
    """
    columns = tl.arange(0, BLOCK_DV)
    inside = there[:, None] & (columns < HEAD_DIM_V)[None, :]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, BLOCK_DV], 0.0, tl.float32)
    for chunk in range(tl.cdiv(splits, CHUNK)):
        split = chunk * CHUNK + tl.arange(0, CHUNK)
        places = split.to(tl.int64)[:, None] * rows + row[None, :]  # [CHUNK, ROWS]
        made = (split < splits)[:, None] & there[None, :]
        # Other cores have written them: what this one's first cache may hold of such memory is old.
        lses = tl.load(partial_lse + places, mask=made, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + places[:, :, None] * HEAD_DIM_V + columns[None, None, :],
            mask=(split < splits)[:, None, None] & inside[None, :, :], other=0.0, cache_modifier=".cg",
        )  # [CHUNK, ROWS, BLOCK_DV]  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(lses, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # splits without keys: no NaN from -inf − -inf
        weight = tl.exp(lses - base[None, :])  # [CHUNK, ROWS]
        correction = tl.exp(largest - base)
        total = total * correction + tl.sum(weight, 0)
        acc = acc * correction[:, None] + tl.sum(part * weight[:, :, None], 0)
        largest = new_largest
    empty = total == 0.0  # a NaN total stays NaN, as in `normalised`
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_rows[:, None] + columns[None, :], result, mask=inside)
    if lse is not None:
        base = tl.where(largest == float("-inf"), 0.0, largest)
        natural = tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, total)))
        tl.store(lse + row, natural, mask=there)
