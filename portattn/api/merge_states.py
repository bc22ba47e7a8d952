"""merge_states: partial results of one set of queries, merged as if all keys had been attended at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from portattn.api.argument_errors import require, wrong_arguments
from portattn.api.signatures import operation
from portattn.api.transform_checks import are_dispatched, transformed_or_traced
from portattn.config import current
from portattn.errors import ArgumentError
from portattn.validate import values
from portattn.validate.checks import check_dense

OP = "merge_states"


@operation
def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *excess: NoReturn,
    **unknown: NoReturn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them: exact, in any order.

    Args:
        outs: N partial results, each (..., Sq, Dv), as (B, Hq, Sq, Dv), of one shape and floating-point dtype; or one
            tensor with N as its first axis. Of packed results (Tq, Hq, Dv) give out.transpose(0, 1)
        lses: their log-sum-exps, natural logarithm, float32: each outs' shape without the last axis

    Weights are exp(lseᵢ − max lse). A part that attended nothing (−inf) has weight 0, whatever its out holds. Give
    sinks to one part alone. Runs as torch operations on any device, and is differentiable.

    Returns:
        (out, lse): out (..., Sq, Dv) in outs' dtype, lse (..., Sq) float32. A row that no part attended gives 0 and
        −inf.

    Memory beyond the inputs: the results, and a few float32 tensors of one part's size. Parts are added one after the
    other in float32.

    Raises:
        ArgumentError: Shapes, dtypes or devices do not go together, or an LSE is +inf, as FlashAttention 2 gives it to
            a row without keys. LSEs are read on a CPU, and elsewhere with the setting validate="always"; not in graphs
            and transforms. An unread +inf gives NaN.
        UnknownArgument: A keyword is unknown.

    Examples:
        >>> import torch, portattn
        >>> q, k, v = torch.randn(3, 1, 4, 50, 64).unbind()
        >>> parts = [portattn.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(20), slice(20, 50))]
        >>> out, lse = portattn.merge_states([out for out, _ in parts], [lse for _, lse in parts])
        >>> torch.allclose(out, portattn.attention(q, k, v), atol=1e-6)
        True
    """
    if excess or unknown:
        raise wrong_arguments(OP, excess, unknown)
    require(OP, {"outs": outs, "lses": lses})
    for name, several in (("outs", outs), ("lses", lses)):
        check_dense(OP, name, several)
        if not isinstance(several, (torch.Tensor, Sequence)) or (
            isinstance(several, torch.Tensor) and not several.ndim
        ):
            limit = "must be a sequence of tensors, or one tensor of them"
            raise ArgumentError(OP, name, type(several).__name__, limit)
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ArgumentError(OP, "outs and lses", (len(outs), len(lses)), "must be as many, and at least one")
    first = outs[0]
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, tensor in (("outs", out), ("lses", lse)):
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(OP, f"{name}[{index}]", type(tensor).__name__, "must be a torch.Tensor")
            check_dense(OP, f"{name}[{index}]", tensor)
        if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
            given = (tuple(out.shape), out.dtype, str(out.device))
            limit = f"must be as outs[0], {(tuple(first.shape), first.dtype, str(first.device))}"
            raise ArgumentError(OP, f"outs[{index}]", given, limit)
        if out.ndim < 2 or not out.is_floating_point():
            kind = (tuple(out.shape), out.dtype)
            raise ArgumentError(OP, f"outs[{index}]", kind, "must be floating-point, (..., Sq, Dv)")
        if lse.dtype != torch.float32 or lse.shape != first.shape[:-1] or lse.device != first.device:
            given = (tuple(lse.shape), lse.dtype, str(lse.device))
            raise ArgumentError(
                OP, f"lses[{index}]", given, f"must be float32 {tuple(first.shape[:-1])} beside its out"
            )
    _check_finite(first, lses)
    largest = lses[0]
    for lse in lses[1:]:
        largest = torch.maximum(largest, lse)
    # Any base gives the same result; a constant one keeps gradients simple. −inf minus −inf would be NaN.
    base = torch.where(torch.isneginf(largest), 0.0, largest).detach()
    total = torch.zeros_like(base)
    acc = torch.zeros(first.shape, dtype=torch.float32, device=first.device)
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - base)
        nothing = torch.isneginf(lse)[..., None]
        acc = acc + out.float().masked_fill(nothing, 0.0) * weight[..., None]
        total = total + weight
    empty = total == 0.0
    merged = acc / torch.where(empty, 1.0, total)[..., None]
    lse = torch.where(empty, float("-inf"), base + torch.log(torch.where(empty, 1.0, total)))
    return merged.masked_fill(empty[..., None], 0.0).to(first.dtype), lse


def _check_finite(first: torch.Tensor, lses: Sequence[torch.Tensor]) -> None:
    """Raise ArgumentError for an LSE of +inf. Values are read back, unless the call is traced or transformed."""
    if torch.compiler.is_dynamo_compiling() or not values.reads(current(), first):
        return
    if transformed_or_traced() or are_dispatched(lses):
        return
    for index, lse in enumerate(lses):
        for place in torch.isposinf(lse).nonzero().tolist()[:1]:
            limit = (
                "must be below +inf: it is a sink of +inf, or FlashAttention 2's row without keys, which is −inf here"
            )
            limit += " (hint: lse.masked_fill(lse == inf, -inf))"
            raise ArgumentError(OP, f"lses[{index}]{place}", float("inf"), limit)
