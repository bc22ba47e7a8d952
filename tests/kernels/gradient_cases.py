"""Small problems of gradients, and comparing what the kernels make of them with float64."""

from collections.abc import Callable
from typing import Any

import torch
from support import Device, random_call, run_core

from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.oracle import dense_view
from portattn.testing.tolerance import BUDGET_FACTOR, largest, on_cpu
from portattn.testing.verdict import judge

DENSE: dict[str, Any] = {
    "op": "attention_backward", "batch": 2, "heads_q": 2, "heads_k": 2, "seq_q": 19, "seq_k": 37, "head_dim": 16,
    "dtype": "fp32",
}  # fmt: skip
PACKED = DENSE | {"op": "varlen_attention_backward", "batch": 3, "total_q": 33, "total_k": 70}
GRADIENTS = ("grad_q", "grad_k", "grad_v", "grad_bias", "grad_slopes")


def check(device: Device, call: Call, lowering: dict[str, str] | None = None, cores: int = 3, **tile: int) -> None:
    delta, _ = run_core(device, call, lowering, tile, cores)
    assert delta.shape == call.new_out().shape
    # The interpreter multiplies in float32 whatever it is told.
    cut = device.name != "cpu" and (lowering or {}).get("dot_precision") == "tf32"
    facts = judge(call, delta, None, "tf32" if cut else "ieee")
    budget = max(facts["budget"], cut_off_budget(call)) if cut else facts["budget"]
    assert not facts["wrong"], f"{facts['wrong']} elements are not finite, or not 0 in padding"
    assert facts["error"] <= budget, f"error {facts['error']:.3g}, budget {budget:.3g}"


def cut_off_budget(call: Call) -> float:
    """What cut-off operands may cost: twice the largest error of gradients whose operands lose the lower 13 bits of
    their fraction, as tensor cores ignore them (PTX ISA, fragments of .tf32). The LSE is exact, so that it is not that
    of such scores."""

    def cut(values: torch.Tensor) -> torch.Tensor:
        return (values.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    exact, found = _gradients(call, torch.Tensor.double), _gradients(call, cut)
    return BUDGET_FACTOR * max(largest(one - other.double()) for one, other in zip(exact, found, strict=True))


def _gradients(call: Call, operand: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """dQ, dK and dV by the formulas of the kernels, of a call with a mask and lengths alone."""
    call = on_cpu(call)
    assert call.grad_out is not None
    assert call.forward_out is not None
    assert call.forward_lse is not None
    view = dense_view(call)
    q, k, v = (operand(x) for x in (view.q, view.k, view.v))
    nothing = ~view.some[..., None]
    grads = view.by_sequence(call.grad_out).masked_fill(nothing, 0.0)
    delta = (view.by_sequence(call.forward_out).masked_fill(nothing, 0.0) * grads).sum(-1, keepdim=True)
    if call.grad_lse is not None:
        delta = delta - view.by_sequence(call.grad_lse)[..., None].masked_fill(nothing, 0.0)
    scores = (view.products(q, k) * call.scale).masked_fill(~view.keep, float("-inf"))
    probabilities = torch.exp(scores - view.by_sequence(call.forward_lse)[..., None].masked_fill(nothing, 0.0))
    grads = operand(grads)
    ds = operand(probabilities * (view.products(grads, v) - delta))
    shared = q.shape[1] // k.shape[1]

    def across(of_scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (of_scores.transpose(-1, -2) @ rows).unflatten(1, (-1, shared)).sum(2)

    return [view.mixed(ds, k) * call.scale, across(ds, q) * call.scale, across(operand(probabilities), grads)]


def random(device: Device, seed: int = 0, base: dict[str, Any] = DENSE, **fields: Any) -> Call:
    options = {name: fields.pop(name) for name in ("strides", "poison", "extremes", "scale") if name in fields}
    return random_call(Problem(**(base | fields)), seed, device=device.name, **options)
