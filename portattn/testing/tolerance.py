"""Whether a result is right: one oracle and one budget for the tests, the matrix and the benchmarks.

The budget: max|ours − ref64| ≤ 2·max|same-dtype torch − ref64| + tiny, where tiny is one unit in the last place of the
largest value in the output's dtype and four in float32, in which kernels compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from portattn.schema.call import TENSORS, Call
from portattn.schema.tensors import KV_DTYPE
from portattn.testing.dense_view import dense_view
from portattn.testing.oracle import oracle
from portattn.testing.random_calls import random_call
from portattn.testing.random_features import DTYPES

__all__ = [
    "DTYPES",
    "budget",
    "count_misplaced",
    "judge",
    "largest",
    "nan_filled_memory",
    "on_cpu",
    "random_call",
    "round_fraction",
    "same_dtype",
]  # fmt: skip
BUDGET_FACTOR = 2.0  # our error may be twice that of the same mathematics in torch, in the same dtype
FLOAT32_STEPS = 4.0  # units in the last place of float32 that come on top
# An LSE near 0 is a difference of scores that are not: its spacing is taken as that of values up to this, at least.
LSE_LEAST = 8.0
# What products of 8-bit operands may lose of the sum of their magnitudes: a chip adds 32 of them at once, each cut off
# 13 bits below the largest (NVIDIA's sm_90; docs/low-precision.md has measured errors), half a bit on average.
NARROW_SUM = 2.0**-9
SHIFTED = 256.0  # the largest probability of a row, where they are narrow: the format's range is below it
# Bits of an fp32 operand's fraction that a product on a device uses; the interpreter and `ieee` use all 23. The two
# tf32 parts of an operand hold 10 bits each, and one more by the second part's sign.
FRACTION_BITS = {"tf32": 10, "hf32": 10, "tf32x3": 21}


def judge(
    call: Call, out: torch.Tensor, lse: torch.Tensor | None, precision: str = "ieee", probabilities: str = "as_q"
) -> dict[str, int | float]:
    """Errors and budgets of a result: {error, budget, wrong, lse_error, lse_budget}.

    error, budget  largest |ours − oracle| over the elements of out that are finite in both, and what it may be
    wrong          elements of out and LSE that are finite where the oracle is not or the reverse, or −inf where it is
                   not or the reverse; and elements that are not 0 in rows with nothing to attend

    precision  of fp32 products (Lowering.dot_precision)
    probabilities  their format, where a path multiplies narrower ones than the results' (Variant.probabilities); its
                   products of keys are of that format too
    """
    call, out = on_cpu(call), out.detach().cpu()
    expected, expected_lse = oracle(call)
    same, same_lse = same_dtype(call, precision, probabilities=probabilities)
    view = dense_view(call)
    some = view.restored(view.some.expand(-1, call.problem.heads_q, -1), False)
    empty = torch.isneginf(expected_lse) | ~some  # a row that attends nothing has an LSE where there are sinks
    facts: dict[str, int | float] = {
        "error": largest(out.double() - expected),
        "budget": budget(out.dtype, expected, same),
        "wrong": count_misplaced(out, expected) + int((out[empty] != 0).sum()),
    }
    if lse is not None:
        lse = lse.detach().cpu()
        facts["lse_error"] = largest(lse.double() - expected_lse)
        facts["lse_budget"] = budget(torch.float32, expected_lse, same_lse, LSE_LEAST)
        if probabilities != "as_q":
            facts["lse_budget"] += NARROW_SUM * largest(view.products(view.q.abs(), view.k.abs())) * abs(call.scale)
        facts["wrong"] += count_misplaced(lse, expected_lse)
    return facts


def budget(dtype: torch.dtype, expected: torch.Tensor, same: torch.Tensor, least: float = 0.0) -> float:
    """What the error of a result of this dtype may be. same: torch's own result; least: values count as this large."""
    ulps = torch.finfo(dtype).eps + FLOAT32_STEPS * torch.finfo(torch.float32).eps
    return BUDGET_FACTOR * largest(same.double() - expected) + ulps * max(largest(expected), least)


def count_misplaced(ours: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements that are finite in only one of the two, or −inf in only one."""
    finite = torch.isfinite(ours) != torch.isfinite(expected)
    return int((finite | (torch.isneginf(ours) != torch.isneginf(expected))).sum())


def largest(values: torch.Tensor) -> float:
    """Largest magnitude of the finite elements; 0 where there are none."""
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def same_dtype(
    call: Call, precision: str = "ieee", rows: torch.Tensor | None = None, probabilities: str = "as_q"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition in torch, each step in the call's dtype; and the LSE of float32 scores.

    What comes on top of scaled products (softcap, ALiBi, bias, sinks, weights of tokens) is computed in float32, as is
    the softmax then, on scores that are in the call's dtype: kernels do the same, and the budget stays a tight one. A
    key's cosine, on which MagicPIG's probability depends much, is that of the float32 product.

    precision  fp32 operands of products have as many bits as it leaves them
    rows       compute only these query rows (int64 indices); not of packed queries
    probabilities  a narrower format that they are rounded to before they are normalised, the largest SHIFTED there
    """
    view = dense_view(call, rows)
    q, k, v = view.q, view.k, view.v
    if call.problem.kv_format != "as_q":  # the dequantised numbers in the results' dtype
        q, k, v = (operand.to(call.dtype) for operand in (q, k, v))
    bits = FRACTION_BITS.get(precision) if call.q.dtype is torch.float32 else None
    if bits is not None:
        q, k, v = (round_fraction(operand, bits) for operand in (q, k, v))
    exact = view.products(q.float(), view.k.float() if bits is None else k.float())
    scores = view.products(q, k) * call.scale
    if view.has_terms:
        scores = view.with_terms(scores.float(), exact, q, k)
    scores = scores.masked_fill(~view.keep, float("-inf"))
    weights = view.with_sinks(scores)
    weights = torch.softmax(weights, dim=-1) if probabilities == "as_q" else _narrow_softmax(weights, probabilities)
    weights = view.dropped(weights[..., : scores.shape[3]]).to(q.dtype).masked_fill(~view.some[..., None], 0.0)
    if bits is not None:
        weights = round_fraction(weights, bits)
    lse = view.lse(view.with_terms(exact * call.scale, exact, q, k))
    return view.restored(view.mixed(weights, v), 0.0), view.restored(lse, float("-inf"))


def _narrow_softmax(scores: torch.Tensor, kind: str) -> torch.Tensor:
    """Softmax, its numerators rounded to a narrow format as multiples of the largest."""
    base = scores.float().amax(dim=-1, keepdim=True)
    numbers = torch.exp(scores.float() - base.masked_fill(base.isinf(), 0.0))
    narrow = (numbers * SHIFTED).to(KV_DTYPE[kind]).float() / SHIFTED
    return narrow / numbers.sum(dim=-1, keepdim=True)


def round_fraction(values: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 values with only so many bits of their 23-bit fraction, rounded to the nearest."""
    dropped = 23 - bits
    half = 1 << (dropped - 1)
    return ((values.contiguous().view(torch.int32) + half) & ~((1 << dropped) - 1)).view(torch.float32)


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
