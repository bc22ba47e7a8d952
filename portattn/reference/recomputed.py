"""The blockwise path under autograd, with memory that grows with S: what the forward pass leaves is some numbers a row,
and the backward pass computes probabilities anew (backward.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from portattn.reference.backward import Backward
from portattn.reference.rowblocks import RowTensor, Statistics
from portattn.reference.tiles import Tiling
from portattn.schema.call import TENSORS, Call
from portattn.schema.tensors import are_mapped

DIFFERENTIABLE = ("q", "k", "v", "q_rope", "log_weights", "alibi_slopes", "sinks", "bias")
Results = tuple[torch.Tensor, torch.Tensor]  # out and LSE


@dataclass(frozen=True)
class Steps:
    """The forward pass's functions.

    tiling    a call in tiles
    forward   out and LSE without gradients; fills statistics
    recorded  out and LSE in steps that autograd follows, for derivatives of the gradients
    """

    tiling: Callable[[Call], Tiling]
    forward: Callable[[Call, Statistics], Results]
    recorded: Callable[[Call], Results]


def is_possible(call: Call) -> bool:
    """Whether a call's probabilities can be computed anew: its dropout is that of a seed. And no transform of
    torch.func is under way, which wants more of a torch.autograd.Function than there is here."""
    drawn = call.dropout_p != 0.0 and call.dropout_seed is None
    return not drawn and not torch._C._are_functorch_transforms_active()


def run(call: Call, steps: Steps) -> Results:
    """out and LSE, differentiable."""
    # Of latent rows the values are columns of k.
    names = [name for name in DIFFERENTIABLE if name != "v" or call.problem.op != "mla_attention"]
    names = [name for name in names if getattr(call, name) is not None]
    out, lse = _Recomputed.apply(call, steps, names, *(getattr(call, name) for name in names))
    return out, lse


class _Recomputed(torch.autograd.Function):
    """A call, the forward pass's functions and names of tensors, then the tensors of those names -> out and LSE."""

    @staticmethod
    def forward(ctx: Any, call: Call, steps: Steps, names: list[str], *_: torch.Tensor) -> Results:
        plain = replace(call, problem=msgspec.structs.replace(call.problem, needs_grad=False))
        statistics = Statistics.empty(plain)
        out, lse = steps.forward(plain, statistics)
        # Lengths and masks too, so that writing to one before the backward pass is an error.
        given = {name: tensor for name in TENSORS if (tensor := getattr(call, name)) is not None}
        given = {name: tensor for name, tensor in given.items() if not tensor.is_inference()}
        rows = (statistics.largest, statistics.sum, statistics.out)
        kept = (*(None if r is None else r.values for r in rows), out if statistics.out is None else None)
        ctx.save_for_backward(*given.values(), *kept)
        absent: dict[str, Any] = dict.fromkeys(given)
        ctx.call, ctx.given = replace(call, **absent), list(given)
        ctx.steps, ctx.names = steps, names
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors  # asked for once: checkpointing gives each tensor once, and other hooks unpack it
        with _without_autocast(saved[0].device.type):
            return _Recomputed._gradients(ctx, saved, grad_out, grad_lse)

    @staticmethod
    def _gradients(
        ctx: Any, saved: tuple[Any, ...], grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> Any:
        *given, largest, total, out, result = saved
        call = replace(ctx.call, **dict(zip(ctx.given, given, strict=True)))
        wanted = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed]
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or are_mapped(grad_out, grad_lse):
            found = _by_autograd(call, ctx.steps.recorded, wanted, grad_out, grad_lse)
        else:
            rows = RowTensor.of(call, result) if out is None else RowTensor(out)
            statistics = Statistics(RowTensor(largest), RowTensor(total), rows)
            found = Backward(call, ctx.steps.tiling(call), statistics, wanted).run(grad_out, grad_lse)
        return None, None, None, *(found.get(name) for name in ctx.names)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """The forward ran without autocast; a backward pass that is begun inside a block of it must, too."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _by_autograd(
    call: Call,
    recorded: Callable[[Call], Results],
    wanted: list[str],
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The gradients by autograd, which can differentiate them, where it is to, and map them."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of their own: of two tensors one may be computed from the other, or both may be one.
        views = {name: getattr(call, name).view_as(getattr(call, name)) for name in wanted}
        call = replace(call, **views)
        if call.problem.op == "mla_attention":
            call.v = call.k[..., : call.problem.head_dim_v]
        pairs = zip(recorded(call), (grad_out, grad_lse), strict=True)
        reached = [(result, grad) for result, grad in pairs if grad is not None]
    found = torch.autograd.grad(
        [result for result, _ in reached],
        list(views.values()),
        [grad for _, grad in reached],
        create_graph=again,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(wanted, found, strict=True))
