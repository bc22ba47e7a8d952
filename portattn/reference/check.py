"""Random calls, and whether a result is right: one oracle and one budget for the tests, the matrix and the benchmarks.

The budget: max|ours − ref64| ≤ 2·max|same-dtype torch − ref64| + tiny, where tiny is one unit in the last place of the
largest value in the output's dtype and four in float32, in which kernels compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import torch

from portattn.call import Call
from portattn.problem import Problem
from portattn.reference.oracle import allowed, oracle

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
BUDGET_FACTOR = 2.0  # our error may be twice that of the same mathematics in torch, in the same dtype
FLOAT32_STEPS = 4.0  # units in the last place of float32 that come on top
# An LSE near 0 is a difference of scores that are not: its spacing is taken as that of values up to this, at least.
LSE_LEAST = 8.0
# Bits of an fp32 operand's fraction that a product on a device uses; the interpreter and `ieee` use all 23. The two
# tf32 parts of an operand hold 10 bits each, and one more by the second part's sign.
FRACTION_BITS = {"tf32": 10, "hf32": 10, "tf32x3": 21}
TENSORS = ("q", "k", "v", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")


def judge(call: Call, out: torch.Tensor, lse: torch.Tensor | None, precision: str = "ieee") -> dict[str, int | float]:
    """Errors and budgets of a result: {error, budget, wrong, lse_error, lse_budget}.

    error, budget  largest |ours − oracle| over the elements of out that are finite in both, and what it may be
    wrong          elements of out and LSE that are finite where the oracle is not or the reverse, or −inf where it is
                   not or the reverse; and elements that are not 0 in rows with nothing to attend

    precision  of fp32 products (Lowering.dot_precision)
    """
    call, out = on_cpu(call), out.detach().cpu()
    expected, expected_lse = oracle(call)
    same, same_lse = same_dtype(call, precision)
    empty = torch.isneginf(expected_lse)
    facts: dict[str, int | float] = {
        "error": largest(out.double() - expected),
        "budget": budget(out.dtype, expected, same),
        "wrong": misplaced(out, expected) + int((out[empty] != 0).sum()),
    }
    if lse is not None:
        lse = lse.detach().cpu()
        facts["lse_error"] = largest(lse.double() - expected_lse)
        facts["lse_budget"] = budget(torch.float32, expected_lse, same_lse, LSE_LEAST)
        facts["wrong"] += misplaced(lse, expected_lse)
    return facts


def budget(dtype: torch.dtype, expected: torch.Tensor, same: torch.Tensor, least: float = 0.0) -> float:
    """What the error of a result of this dtype may be. same: torch's own result; least: values count as this large."""
    ulps = torch.finfo(dtype).eps + FLOAT32_STEPS * torch.finfo(torch.float32).eps
    return BUDGET_FACTOR * largest(same.double() - expected) + ulps * max(largest(expected), least)


def misplaced(ours: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements that are finite in only one of the two, or −inf in only one."""
    finite = torch.isfinite(ours) != torch.isfinite(expected)
    return int((finite | (torch.isneginf(ours) != torch.isneginf(expected))).sum())


def largest(values: torch.Tensor) -> float:
    """Largest magnitude of the finite elements; 0 where there are none."""
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def same_dtype(
    call: Call, precision: str = "ieee", rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition in torch, each step in the call's dtype; and the LSE of float32 scores.

    precision  fp32 operands of products have as many bits as it leaves them
    rows       compute only these query rows (int64 indices)
    """
    keep = allowed(call, rows)[:, None]
    group = call.problem.group
    used, some = keep.any(dim=2)[..., None], keep.any(dim=3)[..., None]
    q = (call.q if rows is None else call.q[:, :, rows]).masked_fill(~some, 0.0)
    k = call.k.repeat_interleave(group, dim=1).masked_fill(~used, 0.0)
    v = call.v.repeat_interleave(group, dim=1).masked_fill(~used, 0.0)
    bits = FRACTION_BITS.get(precision) if call.q.dtype is torch.float32 else None
    if bits is not None:
        q, k, v = (rounded(operand, bits) for operand in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * call.scale).masked_fill(~keep, float("-inf"))
    probabilities = torch.softmax(scores, dim=-1).masked_fill(~some, 0.0)
    if bits is not None:
        probabilities = rounded(probabilities, bits)
    exact = (q.float() @ k.float().transpose(-1, -2) * call.scale).masked_fill(~keep, float("-inf"))
    return probabilities @ v, torch.logsumexp(exact, dim=-1)


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 values with only so many bits of their 23-bit fraction, rounded to the nearest."""
    dropped = 23 - bits
    half = 1 << (dropped - 1)
    return ((values.contiguous().view(torch.int32) + half) & ~((1 << dropped) - 1)).view(torch.float32)


def random_call(
    problem: Problem,
    seed: int = 0,
    *,
    device: str = "cpu",
    scale: float | None = None,
    strides: str = "plain",
    extremes: bool = False,
) -> Call:
    """Normal random q, k and v, random lengths and left paddings where the problem has them, NaN in all padding.

    strides   plain; spare (rows one element longer than wide, a base off by one element); transposed (the head
              dimension is not the contiguous one); sliced (every second row of a larger tensor); expanded (k and v
              share one batch, stride 0)
    extremes  the first sequence is as long as it can be, and of three the last is empty
    """
    generator = torch.Generator().manual_seed(seed)
    if scale is None:
        scale = (-1.0 if problem.negative_scale else 1.0) * problem.head_dim**-0.5
    p = msgspec.structs.replace(problem, negative_scale=scale < 0.0)
    dtype = DTYPES[p.dtype]

    def bounds(size: int, sized: bool, padded: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        pad = torch.randint(0, size // 2 + 1, (p.batch,), generator=generator, dtype=torch.int32)
        room = size - pad if padded else torch.full_like(pad, size)
        length = (torch.rand(p.batch, generator=generator) * (room + 1)).int()
        if extremes:
            length[:1] = room[:1]
            length[2::3] = 0
        return length if sized else None, pad if padded else None

    def tensor(
        heads: int, seq: int, dim: int, length: torch.Tensor | None, pad: torch.Tensor | None, shared: bool
    ) -> torch.Tensor:
        values = torch.randn(p.batch, heads, seq, dim, generator=generator).to(dtype)
        first = torch.zeros(p.batch, dtype=torch.int32) if pad is None else pad
        end = torch.full_like(first, seq) if length is None else first + length
        row = torch.arange(seq)[None]
        outside = (row < first[:, None]) | (row >= end[:, None])
        values.masked_fill_(outside[:, None, :, None], float("nan"))
        return _laid_out(values, p.layout, strides, shared, device)

    seqlens_q, leftpad_q = bounds(p.seq_q, p.seqlens_q, p.leftpad_q)
    seqlens_k, leftpad_k = bounds(p.seq_k, p.seqlens_k, p.leftpad_k)
    call = Call(
        problem=p,
        q=tensor(p.heads_q, p.seq_q, p.head_dim, seqlens_q, leftpad_q, False),
        k=tensor(p.heads_k, p.seq_k, p.head_dim, seqlens_k, leftpad_k, strides == "expanded"),
        v=tensor(p.heads_k, p.seq_k, p.head_dim_v, seqlens_k, leftpad_k, strides == "expanded"),
        scale=scale,
    )
    given = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "leftpad_q": leftpad_q, "leftpad_k": leftpad_k}
    for name, value in given.items():
        setattr(call, name, None if value is None else value.to(device))
    return call


def _laid_out(values: torch.Tensor, layout: str, strides: str, shared: bool, device: str) -> torch.Tensor:
    """The values as a (B, H, S, D) view with the strides asked for; memory between them holds NaN."""
    b, h, s, d = values.shape
    if shared:
        return values[:1].to(device).expand(b, h, s, d)

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=values.dtype, device=device)

    if strides == "spare":
        rows = (b, s, h) if layout == "bshd" else (b, h, s)
        view = empty(b * h * s * (d + 1) + 1)[1:].view(*rows, d + 1)[..., :d]
        view = view.transpose(1, 2) if layout == "bshd" else view
    elif strides == "transposed":
        view = empty(b, h, d, s).transpose(2, 3)
    elif strides == "sliced":
        view = empty(b, h, 2 * s, d)[:, :, ::2]
    elif layout == "bshd":
        view = empty(b, s, h, d).transpose(1, 2)
    else:
        view = empty(b, h, s, d)
    view.copy_(values)
    return view


def on_cpu(call: Call) -> Call:
    """The call with every tensor on the CPU."""
    return replace(call, **{name: t.detach().cpu() for name in TENSORS if (t := getattr(call, name)) is not None})


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Inside the block torch fills new memory with NaN (largest value for integers): what is left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
