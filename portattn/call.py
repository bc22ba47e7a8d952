"""Call: the tensors and numbers of one call, beside its Problem. All tensors are (B, H, S, D) views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from portattn.problem import Problem


@dataclass(slots=True)
class Call:
    """One call, validated. `k` and `v` are the caches of a decode call.

    q                (B, Hq, Sq, D)
    k, v             (B, Hk, Sk, D), (B, Hk, Sk, Dv)
    scale            factor on the scores, 1/√D unless the caller named one
    seqlens_q/k      (B,) int32 on the same device: valid rows of each sequence; None for all
    leftpad_q/k      (B,) int32 on the same device: padding rows before the first valid one; None for none
    copied           q, k or v is a contiguous copy of the caller's (its rows lay too far apart for 32-bit offsets)
    dry              nothing will be launched: what the call allocates has no memory
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    seqlens_q: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    leftpad_q: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    dropout_p: float = 0.0
    copied: bool = False
    dry: bool = False

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor on q's device, of q's dtype unless another is named."""
        return self.q.new_empty(shape, dtype=dtype or self.q.dtype, device="meta" if self.dry else self.q.device)

    def new_out(self) -> torch.Tensor:
        """An uninitialised output (B, Hq, Sq, Dv) in q's dtype, laid out in memory as the caller's layout is."""
        p = self.problem
        if p.layout == "bshd":
            return self.empty(p.batch, p.seq_q, p.heads_q, p.head_dim_v).transpose(1, 2)
        return self.empty(p.batch, p.heads_q, p.seq_q, p.head_dim_v)

    def new_lse(self) -> torch.Tensor:
        """An uninitialised LSE (B, Hq, Sq) float32."""
        import torch

        p = self.problem
        return self.empty(p.batch, p.heads_q, p.seq_q, dtype=torch.float32)
