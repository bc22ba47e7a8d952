"""One error budget for the tests, the matrix and the benchmarks, against the oracle.

The budget: max|ours − ref64| ≤ 2·max|same-dtype torch − ref64| + tiny; tiny is one unit in the last place of the
largest value in the output's dtype and four in float32, in which kernels compute.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from portattn.errors import ArgumentError, DataError
from portattn.schema.call import TENSORS, Call
from portattn.schema.tensors import KV_DTYPE
from portattn.testing.oracle import dense_view, oracle
from portattn.testing.random_calls import random_call
from portattn.testing.random_tensors import DTYPES

__all__ = [
    "DTYPES",
    "bounds_of_rows",
    "budget",
    "count_misplaced",
    "differences",
    "judge",
    "largest",
    "nan_filled_memory",
    "on_cpu",
    "random_call",
    "read_results",
    "round_fraction",
    "rows_outside",
    "same_dtype",
]  # fmt: skip
# The contract across chips: units in the last place of a row's terms by which a result may lie from float64. Two chips'
# results lie within the sum of their bounds.
CONTRACT_ULPS = 2.0
SCORE_STEPS = 4.0  # a score's error in float32 units of its terms: products of 21 bits (tf32x3), and their sum
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
    """Return errors and budgets of a result: {error, budget, wrong, lse_error, lse_budget}.

    `error` is the largest |ours − oracle| over elements of out that are finite in both. `wrong` counts elements of out
    and LSE that are finite or −inf in only one of the two, and nonzero elements in rows with nothing to attend.
    `precision` is that of fp32 products; `probabilities` their format, and that of products of keys, if narrower than
    the results'."""
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
    """Return the error limit of a result of this dtype; `same` is torch's result, values count as at least `least`."""
    ulps = torch.finfo(dtype).eps + FLOAT32_STEPS * torch.finfo(torch.float32).eps
    return BUDGET_FACTOR * largest(same.double() - expected) + ulps * max(largest(expected), least)


def bounds_of_rows(call: Call) -> dict[str, torch.Tensor]:
    """Return how far each row of `out` and `lse`, (B, Hq, Sq) float64, may lie from float64 on any chip.

    A row's terms are its probabilities times the values' magnitudes. Their error is the rounding of probabilities and
    of the result, and that of the scores, whose terms are products of magnitudes. 8-bit products have no such bound."""
    if call.problem.q_format != "as_q":
        raise ValueError(f"{call.problem.op} over q of {call.problem.q_format} has no bound of its rows")
    view, single = dense_view(on_cpu(call)), torch.finfo(torch.float32).eps
    q, k = view.q.double(), view.k.double()
    products = view.products(q, k)
    scores = view.with_terms(products * call.scale, products, q, k)
    weights = torch.softmax(view.with_sinks(scores), dim=-1)[..., : scores.shape[3]].masked_fill(
        ~view.some[..., None], 0
    )
    terms = view.mixed(weights.nan_to_num(0.0), view.v.double().abs()).amax(dim=-1)
    sizes = view.products(q.abs(), k.abs()) * abs(call.scale) + scores.masked_fill(scores.isinf(), 0.0).abs()
    shift = SCORE_STEPS * single * (1.0 + sizes.masked_fill(~view.keep, 0.0).amax(dim=-1))
    found = {"out": terms * (torch.finfo(call.dtype).eps + shift), "lse": shift}
    return {name: CONTRACT_ULPS * view.restored(bound[..., None], 0.0)[..., 0] for name, bound in found.items()}


def rows_outside(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> int:
    """Return how many rows of `out` and `lse` lie farther from float64 than bounds_of_rows allows."""
    bounds, (expected, expected_lse) = bounds_of_rows(call), oracle(on_cpu(call))
    apart = (out.detach().cpu().double() - expected).abs().nan_to_num(0.0, 0.0).amax(dim=-1)
    outside = apart > bounds["out"]
    if lse is not None:
        outside |= (lse.detach().cpu().double() - expected_lse).abs().nan_to_num(0.0, 0.0) > bounds["lse"]
    return int(outside.sum())


def read_results(path: Path) -> dict[str, torch.Tensor]:
    """Read tensors by name from a .pt, .npz or .safetensors file. Raises DataError."""
    if path.exists() and not path.is_file():
        raise DataError(path, None, "cannot be read: only regular files are")
    try:
        if path.suffix == ".npz":
            found = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
        elif path.suffix == ".safetensors":
            found = dict(importlib.import_module("safetensors.torch").load_file(path))
        else:
            found = dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # noqa: BLE001 -- of a damaged file these libraries raise what they like
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError(path, None, f"must be tensors by name, .pt, .npz or .safetensors: {why}") from None
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise DataError(path, None, f"{name!r} is a {type(tensor).__name__}, and must name a tensor")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
            raise DataError(path, None, f"{name} must be a dense tensor of real numbers")
    return found


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor of two machines' results, as a share of the bound; inf if misplaced.

    A tensor NAME has its rows' bound in NAME.bound, without the last axis; without one, a row's largest number stands
    for its terms. Raises ArgumentError where names or shapes differ."""
    names = {name for name in (*ours, *theirs) if not name.endswith(".bound")}
    if missing := sorted(names - (ours.keys() & theirs.keys())):
        raise ArgumentError("verify", "--compare", missing[0], "must be in both files")
    found = {}
    for name in sorted(names):
        pair = ours[name].double(), theirs[name].double()
        if pair[0].shape != pair[1].shape:
            shapes = tuple(pair[0].shape), tuple(pair[1].shape)
            raise ArgumentError("verify", "--compare", f"{name} {shapes}", "must have one shape in both files")
        allowed = torch.zeros(())
        for dump, values in zip((ours, theirs), pair, strict=True):
            bound = dump.get(f"{name}.bound")
            if bound is None:
                eps = torch.finfo(dump[name].dtype).eps if dump[name].is_floating_point() else 0.0
                bound = CONTRACT_ULPS * eps * values.nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=-1)
            if bound.shape not in (values.shape, values.shape[:-1]):
                limit = f"must be {tuple(values.shape)}, or that without the last axis"
                raise ArgumentError("verify", "--compare", f"{name}.bound {tuple(bound.shape)}", limit)
            allowed = allowed + (bound if bound.ndim == values.ndim else bound[..., None])
        apart = (pair[0] - pair[1]).abs().masked_fill(pair[0] == pair[1], 0.0)
        # No bound proves a difference where it is 0 or no number.
        proved = torch.isfinite(allowed) & (allowed > 0)
        share = torch.where(apart > 0, torch.where(proved, apart / allowed, math.inf), 0.0)
        wrong = count_misplaced(*pair) or bool((share.isinf() | (pair[0].isnan() != pair[1].isnan())).any())
        found[name] = math.inf if wrong else largest(share)
    return found


def count_misplaced(ours: torch.Tensor, expected: torch.Tensor) -> int:
    finite = torch.isfinite(ours) != torch.isfinite(expected)
    return int((finite | (torch.isneginf(ours) != torch.isneginf(expected))).sum())


def largest(values: torch.Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def same_dtype(
    call: Call, precision: str = "ieee", rows: torch.Tensor | None = None, probabilities: str = "as_q"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention by its definition in torch, each step in the call's dtype, and the LSE of float32 scores.

    Terms on top of scaled products and then the softmax are float32, on scores in the call's dtype, as in kernels: the
    budget stays tight. MagicPIG's probability depends much on a key's cosine, which is that of the float32 product.
    `precision` limits the bits of fp32 operands; probabilities of a narrower format are rounded before normalisation,
    the largest being SHIFTED there."""
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
    """Return the softmax with numerators rounded to a narrow format as multiples of the largest."""
    base = scores.float().amax(dim=-1, keepdim=True)
    numbers = torch.exp(scores.float() - base.masked_fill(base.isinf(), 0.0))
    narrow = (numbers * SHIFTED).to(KV_DTYPE[kind]).float() / SHIFTED
    return narrow / numbers.sum(dim=-1, keepdim=True)


def round_fraction(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Round float32 values to `bits` bits of their 23-bit fraction."""
    dropped = 23 - bits
    half = 1 << (dropped - 1)
    return ((values.contiguous().view(torch.int32) + half) & ~((1 << dropped) - 1)).view(torch.float32)


def on_cpu(call: Call) -> Call:
    return replace(call, **{name: t.detach().cpu() for name in TENSORS if (t := getattr(call, name)) is not None})


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Make torch fill new memory with NaN (the largest value for integers) in the block: unwritten memory shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
