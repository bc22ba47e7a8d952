"""The reference path: attention in plain torch, key block by key block, so that memory grows with S and not S².

Runs every op and feature on every device torch runs on, never waits for an accelerator to read a length back, and is
differentiable by autograd, twice and more often too. Independent of the kernels.
"""

from __future__ import annotations

import math

import torch

from portattn.reference import recomputed
from portattn.reference.extents import Reach
from portattn.reference.keyblocks import key_heads
from portattn.reference.rowblocks import RowBlock, RowBlockResults, Statistics
from portattn.reference.scoreterms import finite_sinks, has_terms, with_terms
from portattn.reference.tiles import Tiling, dropout_keep_mask
from portattn.schema.call import TENSORS, Call

# Scores held at a time: rows × keys × heads × batch elements of float32. 2**24 of them are 64 MiB; on a CPU fewer are
# faster, as they stay in its caches: 8 MiB.
SCORE_ELEMENTS = 2**24
CPU_SCORE_ELEMENTS = 2**21
KEY_BLOCK = 512


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out in q's dtype and LSE float32 where the problem asks for it, shaped as Call.new_out and Call.new_lse say.

    Products run in float32 (on a CPU, where half-precision products are slow and less exact, and elsewhere too). Key
    blocks that no row of a row block can see, by causal mask, window and lengths, are not visited; of lengths on an
    accelerator that is not known. A call in float64, which only a Call made by hand can be, is computed in float64.

    Gradients are computed block by block too, from each row's largest score and sum (recomputed.py), so memory grows
    with S in training as well. Autograd records every step instead, and keeps every block's probabilities, where more
    than that is wanted of it: second derivatives, transforms of torch.func, and dropout without a seed.
    """
    if not call.problem.needs_grad:
        out, lse = _forward(call)
    elif recomputed.is_possible(call):
        out, lse = recomputed.run(call, recomputed.Steps(tiling_of, _forward, _recorded))
    else:
        out, lse = _recorded(call)
    return out, lse if call.problem.return_lse else None


def tiling_of(call: Call) -> Tiling:
    elements = SCORE_ELEMENTS if call.q.device.type != "cpu" else min(SCORE_ELEMENTS, CPU_SCORE_ELEMENTS)
    return Tiling(call, KEY_BLOCK, elements, rows=KEY_BLOCK)


def _recorded(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of steps that autograd follows."""
    out, lse = _forward(call)
    if not any(seen.begin < seen.end for _, seen in tiling_of(call).row_blocks()):
        # No product has seen the inputs: sums over nothing make the zeros part of the graph, as SDPA's are.
        for tensor in (getattr(call, name) for name in TENSORS):
            if tensor is not None and tensor.is_floating_point():
                out = out + tensor[..., :0].sum()
    return out, lse


def _forward(call: Call, statistics: Statistics | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE.

    statistics  where each row's largest score, sum and output go
    """
    tiling, results = tiling_of(call), RowBlockResults(call)
    for rows, seen in tiling.row_blocks():
        out, row_max, row_sum, some = _attend(tiling, rows, seen)
        lse = row_max + torch.log(row_sum.masked_fill(~some, 1.0))
        if call.sinks is not None:  # +inf, which was counted as the largest number
            sinks = call.sinks.to(lse.dtype)[:, None, None]
            lse = lse + torch.where(sinks == math.inf, sinks, 0.0)
        lse = torch.where(some, lse, float("-inf"))[..., 0]
        if statistics is not None:
            statistics.put(rows, row_max, row_sum, out)
        results.add(rows, out.to(call.dtype), lse)
    return results.finish()


def _attend(
    tiling: Tiling, rows: RowBlock, seen: Reach
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One block of query rows: its output (B,Hq,rows,Dv); the largest score and the sum of exp(score - largest) of each
    row, and whether it has attended anything, (B,Hq,rows,1). In the dtype that is computed with."""
    call, p = tiling.call, tiling.call.problem
    count, heads = rows.stop - rows.start, key_heads(call)
    shape = (p.batch, p.heads_q, count)
    # (B·H, group·rows, D): one product for all query heads that share keys.
    q = rows.q.reshape(p.batch * heads, -1, p.head_dim)
    acc = q.new_zeros(p.batch * heads, q.shape[1], p.head_dim_v)
    row_max = q.new_full((*shape, 1), float("-inf"))
    row_sum = q.new_zeros(*shape, 1)

    def free(tensor: torch.Tensor) -> torch.Tensor | None:
        """Where a result may be written: into this tensor, which nobody else reads, unless autograd keeps it."""
        return None if p.needs_grad else tensor

    if call.sinks is not None:  # a score that has been seen already, and that brought no value
        sinks = finite_sinks(call, tiling.dtype)[None, :, None, None].expand(*shape, 1)
        # A NaN counts in the sum alone: a maximum of NaN would make NaN of the keys that a row does not attend.
        row_max = sinks.detach().nan_to_num(float("-inf"), float("inf"), float("-inf"))
        row_sum = torch.exp(sinks - row_max.masked_fill(row_max == float("-inf"), 0.0))
    scored, lowest = has_terms(call), torch.finfo(tiling.dtype).min
    scores_of = _Products(q, 1.0 if scored else call.scale, min(tiling.size, max(seen.end, 1)), p.needs_grad)
    for tile in tiling.tiles(rows, seen):
        scores = scores_of(tile.k).view(*shape, -1)
        if scored:
            scores = with_terms(call, rows, tile.keys, tile.k, scores, tile.distance, tile.bias)
        if tile.keep is not None:
            scores = scores.masked_fill(~tile.keep, float("-inf"))
        new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True)).detach()
        base = new_max.clamp(min=lowest)  # of rows that have seen nothing, whose maximum is -inf
        probabilities = torch.sub(scores, base, out=free(scores))
        probabilities = torch.exp(probabilities, out=free(probabilities))
        correction = torch.exp(row_max - base)
        row_sum = row_sum * correction + probabilities.sum(dim=-1, keepdim=True)
        if call.dropout_p and call.dropout_seed is not None:
            probabilities = probabilities.masked_fill(~dropout_keep_mask(call, rows, tile.keys), 0.0) / (
                1.0 - call.dropout_p
            )
        elif call.dropout_p:
            probabilities = torch.nn.functional.dropout(probabilities, call.dropout_p)
        acc = torch.mul(acc, correction.view(*acc.shape[:2], 1), out=free(acc))
        flat = probabilities.view(*acc.shape[:2], -1)
        acc = torch.baddbmm(acc, flat, tile.v.flatten(0, 1), out=free(acc))
        row_max = new_max

    acc = acc.view(*shape, -1)
    some = (row_sum != 0) & rows.inside[:, None, :, None]  # NaN included: what was attended must stay visible
    attended = some & (row_max != float("-inf"))  # of a sink of NaN and no key, the sum is NaN and the output 0
    return torch.where(attended, acc / row_sum.masked_fill(~attended, 1.0), 0.0), row_max, row_sum, some


class _Products:
    """scale · Q·Kᵀ of a row block with one key block after the other, in memory that all of them share unless autograd
    keeps them."""

    def __init__(self, q: torch.Tensor, scale: float, keys: int, needs_grad: bool) -> None:
        self.q, self.scale = q, scale
        # A factor of 0 would let a BLAS pass over NaN.
        self.memory = None if needs_grad or scale == 0.0 else q.new_empty(q.shape[0], q.shape[1], keys)

    def __call__(self, k: torch.Tensor) -> torch.Tensor:
        """(B·H, group·rows, keys) of K (B, H, keys, D)."""
        across = k.flatten(0, 1).transpose(1, 2)
        if self.memory is None:
            return torch.bmm(self.q, across) * self.scale
        shape = (*self.q.shape[:2], across.shape[2])
        into = self.memory.view(-1)[: math.prod(shape)].view(shape)
        return torch.baddbmm(into, self.q, across, beta=0.0, alpha=self.scale, out=into)
