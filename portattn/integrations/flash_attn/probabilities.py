"""What flash_attn calls S_dmask: the attention probabilities, negative where dropout drops them. For tests.

Plain torch in float32 over the whole score matrix, by the definition and the call's own LSE. No gradient goes through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portattn.api.dropout_mask import dropout_mask
from portattn.integrations.flash_attn.options import Window
from portattn.schema.problem_limits import MAX_SIZE


@dataclass(frozen=True)
class Scores:
    """What scores are made of, as `portattn.attention` has it: scale None for 1/√D, the mask at the bottom right."""

    scale: float | None
    causal: bool
    window: Window | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    chunk: int | None = None

    def arguments(self) -> dict[str, Any]:
        """By portattn's names."""
        return {
            "scale": self.scale, "causal": self.causal, "window": self.window, "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes, "chunk": self.chunk,
        }  # fmt: skip


@torch.no_grad()
def signed_probabilities(
    scores: Scores, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, dropout_p: float, seed: torch.Tensor
) -> torch.Tensor:
    """(B, Hq, Sq, Sk) in q's dtype, of q (B, Sq, Hq, D), k (B, Sk, Hk, D) and lse (B, Hq, Sq)."""
    full = lse.new_full((q.shape[0],), 1, dtype=torch.int64)
    return _signed(scores, q, k, lse, dropout_p, seed, full * q.shape[1], full * k.shape[1])


@torch.no_grad()
def signed_packed(
    scores: Scores,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    dropout_p: float,
    seed: torch.Tensor,
    beginnings: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
) -> torch.Tensor:
    """(B, Hq, max_seqlen_q, max_seqlen_k) of packed q (Tq, Hq, D), k (Tk, Hk, D) and lse (Hq, Tq); 0 beyond a
    sequence's rows and keys."""
    padded_q, lengths_q = _padded(q, beginnings[0], longest[0])
    padded_k, lengths_k = _padded(k, beginnings[1], longest[1])
    padded_lse, _ = _padded(lse.t(), beginnings[0], longest[0])
    return _signed(scores, padded_q, padded_k, padded_lse.transpose(1, 2), dropout_p, seed, lengths_q, lengths_k)


def _padded(rows: torch.Tensor, beginnings: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, longest, ...) of (T, ...), anything beyond each sequence's rows; and their lengths."""
    at = beginnings[:-1, None].long() + torch.arange(longest, device=rows.device)
    if not rows.shape[0]:
        return rows.new_zeros(*at.shape, *rows.shape[1:]), beginnings.diff()
    return rows[at.clamp(max=rows.shape[0] - 1)], beginnings.diff()


def _signed(
    scores: Scores,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    dropout_p: float,
    seed: torch.Tensor,
    lengths_q: torch.Tensor,
    lengths_k: torch.Tensor,
) -> torch.Tensor:
    batch, seq_q, heads, width = q.shape
    seq_k, group = k.shape[1], heads // k.shape[2]
    queries = q.float().transpose(1, 2).unflatten(1, (-1, group))  # (B, Hk, group, Sq, D)
    values = queries @ k.float().permute(0, 2, 3, 1)[:, :, None]
    values = values.flatten(1, 2) * (width**-0.5 if scores.scale is None else float(scores.scale))  # (B, Hq, Sq, Sk)
    if scores.softcap is not None:
        values = scores.softcap * torch.tanh(values / scores.softcap)
    row = torch.arange(seq_q, device=q.device)[None, :, None]
    key = torch.arange(seq_k, device=q.device)[None, None, :]
    here = row + (lengths_k - lengths_q)[:, None, None]  # (B, Sq, 1): the key at the row's own position
    seen = (row < lengths_q[:, None, None]) & (key < lengths_k[:, None, None])
    left, right = scores.window or (None, None)
    if scores.causal:
        seen = seen & (key <= here)
    if left is not None:
        seen = seen & (key >= here - min(left, MAX_SIZE))  # no position is further away, and int64 has an end
    if right is not None:
        seen = seen & (key <= here + min(right, MAX_SIZE))
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.float().expand(batch, heads)
        values = values - slopes[:, :, None, None] * (key - here).abs()[:, None]
    found = torch.where(seen[:, None], torch.exp(values - lse[..., None]), 0.0).to(q.dtype)
    kept = dropout_mask(seed, dropout_p, batch, heads, seq_q, seq_k)
    return torch.where(kept, found, -found)
