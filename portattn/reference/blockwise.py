"""The reference path: attention in plain torch, key block by key block, so that memory grows with S and not S².

Runs on every device torch runs on, and is differentiable by autograd. Independent of the kernels.
"""

from __future__ import annotations

import torch

from portattn.call import Call
from portattn.problem import Problem

# Scores held at a time: rows × keys × heads × batch elements of float32. 2**24 of them are 64 MiB.
SCORE_ELEMENTS = 2**24
KEY_BLOCK = 512


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out (B,Hq,Sq,Dv) in q's dtype, and LSE (B,Hq,Sq) float32 where the problem asks for it.

    Products run in float32 (on a CPU, where half-precision products are slow and less exact, and elsewhere too).
    With gradients, autograd keeps every block's probabilities: memory then grows with S².
    """
    p = call.problem
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    out, lse = torch.zeros_like(call.new_out()), call.new_lse()
    rows = max(min(p.seq_q, SCORE_ELEMENTS // max(p.batch * p.heads_q * min(KEY_BLOCK, p.seq_k or 1), 1)), 1)
    for row in range(0, p.seq_q, rows):
        stop = min(row + rows, p.seq_q)
        piece = _rows(call, row, stop)
        if p.needs_grad:
            pieces.append(piece)
        else:
            out[:, :, row:stop], lse[:, :, row:stop] = piece
    if p.needs_grad:
        # In-place assembly would record every slice; one concatenation is what autograd wants.
        if pieces:
            out, lse = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
        if p.seq_q == 0 or p.seq_k == 0:
            # No product has seen the inputs: sums over nothing make the zeros part of the graph, as SDPA's are.
            out = out + call.q[..., :0].sum() + call.k[..., :0].sum() + call.v[..., :0].sum()
    return out, lse if p.return_lse else None


def _bounds(
    length: torch.Tensor | None, pad: torch.Tensor | None, problem: Problem, size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and end row of each sequence, (B, 1, 1) int64, clamped to the storage."""
    first = torch.zeros(problem.batch, dtype=torch.long, device=device)
    if pad is not None:
        first = pad.long().clamp(0, size)
    end = torch.full_like(first, size)
    if length is not None:
        end = (first + length.long().clamp(min=0)).clamp(max=size)
    return first[:, None, None], end[:, None, None]


def _rows(call: Call, row: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query rows [row, stop): (B,Hq,rows,Dv) in q's dtype and their LSE (B,Hq,rows) float32."""
    p, device = call.problem, call.q.device
    q_first, q_end = _bounds(call.seqlens_q, call.leftpad_q, p, p.seq_q, device)
    k_first, k_end = _bounds(call.seqlens_k, call.leftpad_k, p, p.seq_k, device)
    count = stop - row
    # (B, Hk, group·rows, D): one product a key/value head, whatever the group.
    q = call.q[:, :, row:stop].float().reshape(p.batch, p.heads_k, p.group * count, p.head_dim)
    i = torch.arange(row, stop, device=device)[None, :, None]
    inside = (i >= q_first) & (i < q_end)
    # Padding can hold NaN, and the gradient of k takes 0·q from it.
    q = q.reshape(p.batch, p.heads_q, count, p.head_dim).masked_fill(~inside[:, None], 0.0).reshape(q.shape)
    shift = {"none": None, "bottom_right": k_end - q_end, "top_left": k_first - q_first}[p.causal]

    acc = q.new_zeros(p.batch, p.heads_k, p.group * count, p.head_dim_v)
    row_max = q.new_full((p.batch, p.heads_k, p.group * count, 1), float("-inf"))
    row_sum = q.new_zeros(p.batch, p.heads_k, p.group * count, 1)
    for start in range(0, p.seq_k, KEY_BLOCK):
        end = min(start + KEY_BLOCK, p.seq_k)
        j = torch.arange(start, end, device=device)[None, None, :]
        valid = (j >= k_first) & (j < k_end)
        keep = inside & valid
        if shift is not None:
            keep = keep & (j <= i + shift)
        keep = keep[:, None].expand(p.batch, p.group, count, end - start).flatten(1, 2)[:, None]
        unused = ~valid[:, 0, None, :, None]  # (B, 1, keys, 1): padding can hold NaN, and 0·NaN is NaN
        k = call.k[:, :, start:end].float().masked_fill(unused, 0.0)
        v = call.v[:, :, start:end].float().masked_fill(unused, 0.0)
        scores = (q @ k.transpose(-1, -2) * call.scale).masked_fill(~keep, float("-inf"))
        new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True)).detach()
        base = new_max.masked_fill(new_max == float("-inf"), 0.0)
        probabilities = torch.exp(scores - base)
        correction = torch.exp(row_max - base)
        row_sum = row_sum * correction + probabilities.sum(dim=-1, keepdim=True)
        if call.dropout_p:
            probabilities = torch.nn.functional.dropout(probabilities, call.dropout_p)
        acc = acc * correction + probabilities @ v
        row_max = new_max

    some = row_sum != 0  # NaN included: what was attended and is not a number must stay visible
    out = torch.where(some, acc / row_sum.masked_fill(~some, 1.0), 0.0)
    lse = torch.where(some, row_max + torch.log(row_sum.masked_fill(~some, 1.0)), float("-inf"))
    shape = (p.batch, p.heads_q, count)
    return out.reshape(*shape, p.head_dim_v).to(call.q.dtype), lse.reshape(shape)
