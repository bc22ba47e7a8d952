"""The oracle: attention by its definition, in float64, with the whole score matrix. For tests and canaries only."""

from __future__ import annotations

import torch

from portattn.call import Call


def allowed(call: Call, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Which key each query may attend: bool (B, rows, Sk). Rows and keys outside a sequence are False.

    rows  indices of the query rows wanted, int64; None for all Sq
    """
    p = call.problem
    device = call.q.device

    def bounds(length: torch.Tensor | None, pad: torch.Tensor | None, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.zeros(p.batch, dtype=torch.long, device=device) if pad is None else pad.long()
        end = torch.full((p.batch,), size, device=device) if length is None else first + length.long()
        return first[:, None, None], end[:, None, None]

    q_first, q_end = bounds(call.seqlens_q, call.leftpad_q, p.seq_q)
    k_first, k_end = bounds(call.seqlens_k, call.leftpad_k, p.seq_k)
    i = (torch.arange(p.seq_q, device=device) if rows is None else rows)[None, :, None]
    j = torch.arange(p.seq_k, device=device)[None, None, :]
    keep = (i >= q_first) & (i < q_end) & (j >= k_first) & (j < k_end)
    if p.causal == "bottom_right":
        keep &= j - k_end <= i - q_end
    elif p.causal == "top_left":
        keep &= j - k_first <= i - q_first
    return keep


def oracle(call: Call, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B,Hq,Sq,Dv) and LSE (B,Hq,Sq), both float64. Rows with nothing to attend: 0 and -inf.

    rows  compute only these query rows (int64 indices), so that a long problem can be spot-checked
    """
    p = call.problem
    keep = allowed(call, rows)[:, None]
    q = call.q if rows is None else call.q[:, :, rows]
    k = call.k.double().repeat_interleave(p.group, dim=1)
    v = call.v.double().repeat_interleave(p.group, dim=1)
    # A key that no query may attend can hold anything, NaN included.
    used = keep.any(dim=2)[..., None]  # (B, 1, Sk, 1)
    q = q.double().masked_fill(~keep.any(dim=3)[..., None], 0.0)
    scores = q @ k.masked_fill(~used, 0.0).transpose(-1, -2) * call.scale
    scores = scores.masked_fill(~keep, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return probabilities @ v.masked_fill(~used, 0.0), lse
