"""S_dmask, as flash_attn returns it for tests: probabilities that are not normalised, negative where dropped.

Plain torch in float32 over the whole score matrix, by the definition. No gradient goes through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from portattn.api.dropout_mask import dropout_mask
from portattn.integrations.flash_attn.options import Window
from portattn.schema.problem_limits import MAX_SIZE
from portattn.validate.checks import Number


@dataclass(frozen=True)
class ScoreArguments:
    """What scores are made of, as `portattn.attention` has it: scale None for 1/√D, the mask at the bottom right."""

    scale: Number | None
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
    scores: ScoreArguments, q: torch.Tensor, k: torch.Tensor, dropout_p: float, seed: torch.Tensor
) -> torch.Tensor:
    """Return S_dmask (B, Hq, Sq, Sk) in q's dtype, of q (B, Sq, Hq, D) and k (B, Sk, Hk, D)."""
    full = seed.new_full((q.shape[0],), 1)
    return _signed(scores, q, k, dropout_p, seed, full * q.shape[1], full * k.shape[1])


@torch.no_grad()
def signed_packed(
    scores: ScoreArguments,
    q: torch.Tensor,
    k: torch.Tensor,
    dropout_p: float,
    seed: torch.Tensor,
    beginnings: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
) -> torch.Tensor:
    """Return S_dmask (B, Hq, max_seqlen_q, max_seqlen_k) of packed q (Tq, Hq, D) and k (Tk, Hk, D); 0 beyond a
    sequence's rows and keys."""
    padded_q, lengths_q = _padded(q, beginnings[0], longest[0])
    padded_k, lengths_k = _padded(k, beginnings[1], longest[1])
    return _signed(scores, padded_q, padded_k, dropout_p, seed, lengths_q, lengths_k)


def _padded(rows: torch.Tensor, beginnings: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, longest, ...) of (T, ...), anything beyond each sequence's rows; and their lengths."""
    at = beginnings[:-1, None].long() + torch.arange(longest, device=rows.device)
    if not rows.shape[0]:
        return rows.new_zeros(*at.shape, *rows.shape[1:]), beginnings.diff()
    return rows[at.clamp(max=rows.shape[0] - 1)], beginnings.diff()


def _signed(
    scores: ScoreArguments,
    q: torch.Tensor,
    k: torch.Tensor,
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
    values = values.masked_fill(~seen[:, None], -torch.inf)
    block = _get_block_size_n(q.device, width, True, scores.causal)
    found = torch.where(seen[:, None], torch.exp(values - _running_max(values, block)), 0.0).to(q.dtype)
    kept = dropout_mask(seed, dropout_p, batch, heads, seq_q, seq_k)
    return torch.where(kept, found, -found)


def _running_max(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return for each score the largest one of its block of columns and of all later columns.

    flash_attn's kernels go through blocks of keys from the last to the first, and keep the maximum of a row as it is
    when they come to a block.
    """
    keys = values.shape[-1]
    if not keys:
        return values
    padded = torch.nn.functional.pad(values, (0, -keys % block), value=-torch.inf)
    largest = padded.unflatten(-1, (-1, block)).amax(-1)
    return largest.flip(-1).cummax(-1).values.flip(-1).repeat_interleave(block, -1)[..., :keys]


def _get_block_size_n(device: torch.device | str, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Return the columns of a block of S_dmask, which flash_attn's kernels have for this width and chip."""
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if 96 < head_dim <= 128:
        kind = torch.device(device)
        capability = torch.cuda.get_device_capability(kind) if kind.type == "cuda" else (0, 0)
        if capability[0] == 8 and capability[1] > 0:
            return 64 if is_causal and not is_dropout else 32
        return 32 if is_dropout else 64
    return 64
