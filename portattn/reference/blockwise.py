"""The reference path: attention in plain torch, key block by key block, so that memory grows with S and not S².

Runs every op and feature on every device torch runs on, never waits for an accelerator to read a length back, and is
differentiable by autograd. Independent of the kernels.
"""

from __future__ import annotations

import torch

from portattn.reference.extents import Extent, key_extent, query_extent
from portattn.reference.keyblocks import KeyBlock, key_blocks, key_heads, key_places
from portattn.reference.rowblocks import Results, RowBlock, load_rows
from portattn.reference.scoreterms import with_terms
from portattn.schema.call import TENSORS, Call

# Scores held at a time: rows × keys × heads × batch elements of float32. 2**24 of them are 64 MiB.
SCORE_ELEMENTS = 2**24
KEY_BLOCK = 512


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out in q's dtype and LSE float32 where the problem asks for it, shaped as Call.new_out and Call.new_lse say.

    Products run in float32 (on a CPU, where half-precision products are slow and less exact, and elsewhere too).
    With gradients, autograd keeps every block's probabilities: memory then grows with S².
    """
    p = call.problem
    q_extent, k_extent = query_extent(call), key_extent(call)
    places = key_places(call, k_extent)
    # Padded rows are results as well; of packed sequences only those that exist are.
    longest = q_extent.longest(p.seq_q) if p.packed else p.seq_q
    if p.batch == 0 or call.q.shape[2] == 0:
        longest = 0
    count = max(SCORE_ELEMENTS // max(p.batch * p.heads_q * min(KEY_BLOCK, places or 1), 1), 1)
    results = Results(call)
    for start in range(0, longest, count):
        rows = load_rows(call, q_extent, start, min(start + count, longest))
        results.add(rows, *_attend(call, rows, q_extent, k_extent))
    out, lse = results.finish()
    if p.needs_grad and (longest == 0 or places == 0):
        # No product has seen the inputs: sums over nothing make the zeros part of the graph, as SDPA's are.
        for tensor in (getattr(call, name) for name in TENSORS):
            if tensor is not None and tensor.is_floating_point():
                out = out + tensor[..., :0].sum()
    return out, lse if p.return_lse else None


def _attend(call: Call, rows: RowBlock, q_extent: Extent, k_extent: Extent) -> tuple[torch.Tensor, torch.Tensor]:
    """One block of query rows: (B,Hq,rows,Dv) in q's dtype and their LSE (B,Hq,rows) float32."""
    p = call.problem
    count, heads = rows.stop - rows.start, key_heads(call)
    shape = (p.batch, p.heads_q, count)
    # (B, H, group·rows, D): one product for all query heads that share keys.
    q = rows.q.reshape(p.batch, heads, -1, p.head_dim)
    # Where each query stands among the keys: (B, 1, rows, 1).
    shift = k_extent.first - q_extent.first if p.causal == "top_left" else k_extent.end - q_extent.end
    at = (rows.position + shift[:, None])[:, None, :, None]

    acc = q.new_zeros(*shape, p.head_dim_v)
    row_max = q.new_full((*shape, 1), float("-inf"))
    row_sum = q.new_zeros(*shape, 1)
    if call.sinks is not None:  # a score that has been seen already, and that brought no value
        sinks = call.sinks.float()[None, :, None, None].expand(*shape, 1)
        row_max = sinks.detach()
        row_sum = torch.exp(sinks - row_max.masked_fill(row_max == float("-inf"), 0.0))
    for keys in key_blocks(call, k_extent, KEY_BLOCK, SCORE_ELEMENTS):
        bias = None if call.bias is None else call.bias[:, :, rows.start : rows.stop, keys.start : keys.stop].float()
        distance = at - keys.position[:, :, None]  # (B, 1 or Hq, rows, keys)
        keep = _keep(call, rows, keys, distance, bias)
        # What no row attends can hold NaN, and 0·NaN is NaN in the output as well as in gradients.
        unused = ~keep.any(dim=2)  # (B, 1 or Hq, keys)
        if unused.shape[1] != 1:
            unused = unused.reshape(p.batch, heads, -1, keys.stop - keys.start).all(dim=2)
        k = keys.k.float().masked_fill(unused[..., None], 0.0)
        v = keys.v.float().masked_fill(unused[..., None], 0.0)
        products = (q @ k.transpose(-1, -2)).reshape(*shape, -1)
        scores = with_terms(call, rows, keys, k, products, distance, bias).masked_fill(~keep, float("-inf"))
        new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True)).detach()
        base = new_max.masked_fill(new_max == float("-inf"), 0.0)
        probabilities = torch.exp(scores - base)
        correction = torch.exp(row_max - base)
        row_sum = row_sum * correction + probabilities.sum(dim=-1, keepdim=True)
        if call.dropout_p:
            probabilities = torch.nn.functional.dropout(probabilities, call.dropout_p)
        values = probabilities.reshape(p.batch, heads, -1, keys.stop - keys.start) @ v
        acc = acc * correction + values.reshape(acc.shape)
        row_max = new_max

    some = (row_sum != 0) & rows.inside[:, None, :, None]  # NaN included: what was attended must stay visible
    out = torch.where(some, acc / row_sum.masked_fill(~some, 1.0), 0.0)
    lse = torch.where(some, row_max + torch.log(row_sum.masked_fill(~some, 1.0)), float("-inf"))
    return out.to(call.q.dtype), lse[..., 0]


def _keep(
    call: Call, rows: RowBlock, keys: KeyBlock, distance: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Which keys each row attends: bool (B, 1 or Hq, rows, keys). distance: the query's position less the key's."""
    p = call.problem
    keep = rows.inside[:, None, :, None] & keys.valid[:, :, None]
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
