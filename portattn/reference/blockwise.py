"""The reference path: attention in plain torch, key block by key block, so that memory grows with S and not S².

Runs every op and feature on every device torch runs on, never waits for an accelerator to read a length back, and is
differentiable by autograd. Independent of the kernels.
"""

from __future__ import annotations

import math

import torch

from portattn.reference.extents import Extent, Reach, key_extent, query_extent, reach
from portattn.reference.keyblocks import KeyBlock, block_size, key_blocks, key_heads, key_places
from portattn.reference.rowblocks import Results, RowBlock, load_rows
from portattn.reference.scoreterms import has_terms, with_terms
from portattn.schema.call import TENSORS, Call

# Scores held at a time: rows × keys × heads × batch elements of float32. 2**24 of them are 64 MiB; on a CPU fewer are
# faster, as they stay in its caches: 8 MiB.
SCORE_ELEMENTS = 2**24
CPU_SCORE_ELEMENTS = 2**21
KEY_BLOCK = 512
LOWEST = torch.finfo(torch.float32).min


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out in q's dtype and LSE float32 where the problem asks for it, shaped as Call.new_out and Call.new_lse say.

    Products run in float32 (on a CPU, where half-precision products are slow and less exact, and elsewhere too). Key
    blocks that no row of a row block can see, by causal mask, window and lengths, are not visited; of lengths on an
    accelerator that is not known. With gradients, autograd keeps every block's probabilities: memory then grows with
    S².
    """
    p = call.problem
    elements = SCORE_ELEMENTS if call.q.device.type != "cpu" else min(SCORE_ELEMENTS, CPU_SCORE_ELEMENTS)
    q_extent, k_extent = query_extent(call), key_extent(call)
    places = key_places(call, k_extent)
    size = block_size(call, KEY_BLOCK, elements)
    # Padded rows are results as well; of packed sequences only those that exist are.
    longest = q_extent.longest(p.seq_q) if p.packed else p.seq_q
    if p.batch == 0 or call.q.shape[2] == 0:
        longest = 0
    count = max(elements // max(p.batch * p.heads_q * min(size, places or 1), 1), 1)
    if p.causal != "none" or p.window:
        count = min(count, KEY_BLOCK)  # the more rows, the more keys that only some of them see
    results, visited = Results(call), False
    for start in range(0, longest, count):
        rows = load_rows(call, q_extent, start, min(start + count, longest))
        seen = reach(call, q_extent, k_extent, rows.start, rows.stop, places)
        visited = visited or seen.begin < seen.end
        results.add(rows, *_attend(call, rows, q_extent, k_extent, seen, size))
    out, lse = results.finish()
    if p.needs_grad and not visited:
        # No product has seen the inputs: sums over nothing make the zeros part of the graph, as SDPA's are.
        for tensor in (getattr(call, name) for name in TENSORS):
            if tensor is not None and tensor.is_floating_point():
                out = out + tensor[..., :0].sum()
    return out, lse if p.return_lse else None


def _attend(
    call: Call, rows: RowBlock, q_extent: Extent, k_extent: Extent, seen: Reach, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of query rows: (B,Hq,rows,Dv) in q's dtype and their LSE (B,Hq,rows) float32."""
    p = call.problem
    count, heads = rows.stop - rows.start, key_heads(call)
    shape = (p.batch, p.heads_q, count)
    # (B·H, group·rows, D): one product for all query heads that share keys.
    q = rows.q.reshape(p.batch * heads, -1, p.head_dim)
    # Where each query stands among the keys: (B, 1, rows, 1).
    shift = k_extent.first - q_extent.first if p.causal == "top_left" else k_extent.end - q_extent.end
    at = (rows.position + shift[:, None])[:, None, :, None]

    acc = q.new_zeros(p.batch * heads, q.shape[1], p.head_dim_v)
    row_max = q.new_full((*shape, 1), float("-inf"))
    row_sum = q.new_zeros(*shape, 1)

    def free(tensor: torch.Tensor) -> torch.Tensor | None:
        """Where a result may be written: into this tensor, which nobody else reads, unless autograd keeps it."""
        return None if p.needs_grad else tensor

    if call.sinks is not None:  # a score that has been seen already, and that brought no value
        sinks = call.sinks.float()[None, :, None, None].expand(*shape, 1)
        row_max = sinks.detach()
        row_sum = torch.exp(sinks - row_max.masked_fill(row_max == float("-inf"), 0.0))
    scored = has_terms(call)
    scores_of = _Products(q, 1.0 if scored else call.scale, min(size, max(seen.end, 1)), p.needs_grad)
    for keys in key_blocks(call, k_extent, size, seen.begin, seen.end):
        k, v = keys.k.float(), keys.v.float()
        open_to_all = seen.all_begin <= keys.start and keys.stop <= seen.all_end
        bias = distance = keep = None
        if call.bias is not None:
            bias = call.bias[:, :, rows.start : rows.stop, keys.start : keys.stop].float()
        if call.alibi_slopes is not None or not open_to_all:
            distance = at - keys.position[:, :, None]  # (B, 1 or Hq, rows, keys)
        if not open_to_all or bias is not None or call.mask is not None:
            keep = _keep(call, rows, keys, distance, bias)
            # What no row attends can hold NaN, and 0·NaN is NaN in the output as well as in gradients.
            unused = ~keep.any(dim=2)  # (B, 1 or Hq, keys)
            if unused.shape[1] != 1:
                unused = unused.reshape(p.batch, heads, -1, keys.stop - keys.start).all(dim=2)
            if unused.device.type != "cpu" or unused.any():
                k, v = k.masked_fill(unused[..., None], 0.0), v.masked_fill(unused[..., None], 0.0)
        scores = scores_of(k).view(*shape, -1)
        if scored:
            scores = with_terms(call, rows, keys, k, scores, distance, bias)
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True)).detach()
        base = new_max.clamp(min=LOWEST)  # of rows that have seen nothing, whose maximum is -inf
        probabilities = torch.sub(scores, base, out=free(scores))
        probabilities = torch.exp(probabilities, out=free(probabilities))
        correction = torch.exp(row_max - base)
        row_sum = row_sum * correction + probabilities.sum(dim=-1, keepdim=True)
        if call.dropout_p:
            probabilities = torch.nn.functional.dropout(probabilities, call.dropout_p)
        acc = torch.mul(acc, correction.view(*acc.shape[:2], 1), out=free(acc))
        acc = torch.baddbmm(acc, probabilities.view(*acc.shape[:2], -1), v.flatten(0, 1), out=free(acc))
        row_max = new_max

    acc = acc.view(*shape, -1)
    some = (row_sum != 0) & rows.inside[:, None, :, None]  # NaN included: what was attended must stay visible
    out = torch.where(some, acc / row_sum.masked_fill(~some, 1.0), 0.0)
    lse = torch.where(some, row_max + torch.log(row_sum.masked_fill(~some, 1.0)), float("-inf"))
    return out.to(call.q.dtype), lse[..., 0]


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


def _keep(
    call: Call, rows: RowBlock, keys: KeyBlock, distance: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Which keys each row attends: bool (B, 1 or Hq, rows, keys).

    distance  the query's position less the key's; None where lengths, causal mask and window hide nothing
    """
    p = call.problem
    keep = rows.inside[:, None, :, None] & keys.valid[:, :, None]
    if distance is not None:
        if p.causal != "none":
            keep = keep & (distance >= 0)
        if p.window_left >= 0:
            keep = keep & (distance <= p.window_left)
        if p.window_right >= 0:
            keep = keep & (distance >= -p.window_right)
    if call.mask is not None:
        keep = keep & call.mask[:, :, rows.start : rows.stop, keys.start : keys.stop]
    if bias is not None:
        keep = keep & (bias != float("-inf"))
    return keep
