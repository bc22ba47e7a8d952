"""What is timed: portattn itself, and peers that this machine happens to have. Peers are never dependencies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

import portattn
from portattn.bench.cases import TORCH_DTYPE, Case


@dataclass(slots=True)
class Tensors:
    """One case's inputs, (B, H, S, D), with int32 lengths where the case has them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seqlens_q: torch.Tensor | None
    seqlens_k: torch.Tensor | None

    @classmethod
    def random(cls, case: Case, device: torch.device, seed: int = 0) -> Tensors:
        generator = torch.Generator(device=device).manual_seed(seed)

        def tensor(heads: int, seq: int) -> torch.Tensor:
            shape = (case.batch, heads, seq, case.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(
                TORCH_DTYPE[case.dtype]
            )

        def lengths(capacity: int) -> torch.Tensor | None:
            return torch.tensor(case.seqlens(capacity), dtype=torch.int32, device=device) if case.lengths else None

        return cls(
            q=tensor(case.heads_q, case.seq_q),
            k=tensor(case.heads_k, case.seq_k),
            v=tensor(case.heads_k, case.seq_k),
            seqlens_q=lengths(case.seq_q) if case.op == "attention" else None,
            seqlens_k=lengths(case.seq_k),
        )


Run = Callable[[], torch.Tensor]


def ours(case: Case, t: Tensors, backend: str = "auto") -> Run:
    """portattn's own call, as a user writes it."""
    causal: bool | str = False if case.causal == "none" else case.causal
    if case.op == "attention":
        return lambda: portattn.attention(
            t.q, t.k, t.v, causal=causal, seqlens_q=t.seqlens_q, seqlens_k=t.seqlens_k, backend=backend
        )  # type: ignore[return-value]
    return lambda: portattn.decode_attention(t.q, t.k, t.v, t.seqlens_k, causal=causal, backend=backend)  # type: ignore[return-value]


def _sdpa(name: str) -> Callable[[Case, Tensors], Run | None]:
    def prepare(case: Case, t: Tensors) -> Run | None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mask = None
        is_causal = case.causal != "none" and case.seq_q == case.seq_k
        if case.causal != "none" and not is_causal:
            return None
        if case.lengths:
            # SDPA takes lengths only as a mask, and a mask only without is_causal.
            keys = torch.arange(case.seq_k, device=t.q.device)
            assert t.seqlens_k is not None
            mask = (keys[None, :] < t.seqlens_k[:, None])[:, None, None, :]
            if is_causal:
                rows = torch.arange(case.seq_q, device=t.q.device)
                mask = mask & (keys[None, :] <= rows[:, None])
                is_causal = False
        grouped = case.heads_q != case.heads_k
        kernel = getattr(SDPBackend, name)

        def run() -> torch.Tensor:
            with sdpa_kernel(kernel):
                return functional.scaled_dot_product_attention(
                    t.q, t.k, t.v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
                )

        return run

    return prepare


PEERS: dict[str, Callable[[Case, Tensors], Run | None]] = {
    "sdpa-cudnn": _sdpa("CUDNN_ATTENTION"),
    "sdpa-flash": _sdpa("FLASH_ATTENTION"),
    "sdpa-efficient": _sdpa("EFFICIENT_ATTENTION"),
}
