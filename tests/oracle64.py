"""Attention in float64, row by row in plain torch: what every vendor path is compared with."""

import math

import torch

from portattn.schema.call import Call
from portattn.schema.problem import Problem

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Losses of a call's results, by name.
LOSSES = {
    "out": lambda out, lse: out.square().sum(), "out and lse": lambda out, lse: out.square().sum() + lse.sin().sum(),
    "lse": lambda out, lse: lse.sin().sum(),
}  # fmt: skip


def visible_keys(
    seq_q: int, seq_k: int, causal: str, len_q: int | None = None, len_k: int | None = None
) -> torch.Tensor:
    """(Sq, Sk) bool: which keys a row attends. Rows from `len_q` on attend nothing, keys from `len_k` on are unseen."""
    len_q = seq_q if len_q is None else len_q
    len_k = seq_k if len_k is None else len_k
    seen = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    for row in range(len_q):
        if causal == "bottom_right":
            end = row + 1 + len_k - len_q
        elif causal == "top_left":
            end = row + 1
        else:
            end = len_k
        seen[row, : max(0, min(end, len_k))] = True
    return seen


def oracle(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    p = call.problem
    seen = torch.stack(
        [
            visible_keys(
                p.seq_q, p.seq_k, p.causal, None if call.seqlens_q is None else int(call.seqlens_q[b]),
                None if call.seqlens_k is None else int(call.seqlens_k[b]),
            ) for b in range(p.batch)
        ] or [torch.zeros(p.seq_q, p.seq_k, dtype=torch.bool)]
    )[: p.batch]  # fmt: skip
    return masked_attention(call.q.double().cpu(), call.k.double().cpu(), call.v.double().cpu(), call.scale, seen)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) in the dtype of q, k, v (B, H, S, D) with `seen` (B, Sq, Sk) bool; differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen[:, None].to(q.device), -math.inf)
    empty = ~seen.any(-1)[:, None].to(q.device)  # (B, 1, Sq)
    weights = torch.softmax(scores.masked_fill(empty[..., None], 0.0), dim=-1).masked_fill(empty[..., None], 0.0)
    # Keys that no row sees may hold NaN: they must not reach the output as 0 · NaN.
    unseen = ~seen.any(-2)[:, None, :, None].to(q.device)
    return weights @ v.masked_fill(unseen, 0.0), torch.logsumexp(scores, dim=-1)


def gradients(call: Call, loss: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return dQ, dK and dV of one of LOSSES, by autograd through plain torch in `dtype`."""
    p = call.problem
    given = [tensor.detach().cpu().to(dtype).requires_grad_() for tensor in (call.q, call.k, call.v)]
    seen = visible_keys(p.seq_q, p.seq_k, p.causal).expand(p.batch, -1, -1)
    out, lse = masked_attention(given[0], given[1], given[2], call.scale, seen)
    found = torch.autograd.grad(LOSSES[loss](out, lse), given, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(given, found, strict=True)]


def random_call(
    problem: Problem, *, seed: int = 0, device: str = "cpu", scale: float | None = None, dropout_p: float = 0.0,
    seqlens_q: list[int] | None = None, seqlens_k: list[int] | None = None,
) -> Call:  # fmt: skip
    """A call of random numbers for a problem, in its dtype and layout."""
    p, generator = problem, torch.Generator().manual_seed(seed)

    def tensor(heads: int, seq: int, dim: int) -> torch.Tensor:
        if p.layout == "bshd":
            made = torch.randn(p.batch, seq, heads, dim, generator=generator).to(DTYPES[p.dtype])
            made = made.to(device).transpose(1, 2)
        else:
            made = torch.randn(p.batch, heads, seq, dim, generator=generator).to(DTYPES[p.dtype]).to(device)
        return made.requires_grad_(p.needs_grad)

    def lengths(values: list[int] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    return Call(
        problem=p, q=tensor(p.heads_q, p.seq_q, p.head_dim), k=tensor(p.heads_k, p.seq_k, p.head_dim),
        v=tensor(p.heads_k, p.seq_k, p.head_dim_v), scale=1.0 / math.sqrt(p.head_dim) if scale is None else scale,
        seqlens_q=lengths(seqlens_q), seqlens_k=lengths(seqlens_k), dropout_p=dropout_p,
    )  # fmt: skip


def assert_close(ours: torch.Tensor, expected: torch.Tensor, call: Call) -> None:
    """max|ours − ref64| ≤ 2 · max|plain torch in the call's dtype − ref64| + tiny, and the same infinities."""
    assert ours.shape == expected.shape
    ours = ours.detach().double().cpu()
    expected = expected.detach()
    infinite = torch.isinf(expected)
    assert torch.equal(ours[infinite], expected[infinite])
    if infinite.all():
        return
    tiny = {"fp16": 1e-3, "bf16": 8e-3, "fp32": 2e-6}[call.problem.dtype]
    p = call.problem
    plain = torch.softmax(
        call.q.detach() @ call.k.detach().repeat_interleave(p.group, dim=1).transpose(-1, -2) * call.scale, dim=-1
    )
    exact = torch.softmax(
        call.q.detach().double() @ call.k.detach().double().repeat_interleave(p.group, dim=1).transpose(-1, -2)
        * call.scale, dim=-1,
    )  # fmt: skip
    rounding = 0.0
    if plain.numel() and plain.isfinite().all():
        v = call.v.detach().repeat_interleave(p.group, dim=1)
        rounding = float(((plain @ v).double() - exact @ v.double()).abs().max())
    assert float((ours[~infinite] - expected[~infinite]).abs().max()) <= 2 * rounding + tiny
