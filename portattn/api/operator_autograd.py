"""Gradients of the torch operators, in eager mode, in graphs and inside torch.func's transforms alike.

They stand at the operators' Autograd key. A transform of torch.func reaches that key once for each of its levels, so
each is differentiated as a level of its own: by _SingleLevelFunction, which torch.func itself differentiates a
torch.autograd.Function with. What torch.library's register_autograd makes is an ordinary Function, which torch.func
refuses there (torch 2.13: "it must override the setup_context staticmethod").
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.autograd.function import _SingleLevelFunction

from portattn.api.kernel_backward import may_have_kernels
from portattn.api.torch_ops import SIGNATURES, OperatorSignature
from portattn.api.transform_checks import have_tangents
from portattn.config import current, using
from portattn.errors import TracingError
from portattn.validate.checks import refuse_gradients


def forward(signature: OperatorSignature, *arguments: Any) -> Any:
    """The operator where something may be differentiated."""
    return _differentiable(_Forward, signature.op, "", arguments)


def backward(signature: OperatorSignature, *arguments: Any) -> Any:
    """The operator of the gradients, likewise: second derivatives are refused."""
    return _differentiable(_Backward, signature.op, "_backward", arguments)


def _differentiable(function: Any, op: str, suffix: str, arguments: Sequence[Any]) -> Any:
    if have_tangents(arguments):
        raise forward_mode(op)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
        if function is _Forward:
            _refuse(SIGNATURES[op], arguments)
        with _one_level():
            return function.apply(op, *arguments)
    return _below(op + suffix, arguments)


def _refuse(signature: OperatorSignature, arguments: Sequence[Any]) -> None:
    """Raise ArgumentError where the operation has no gradient, and not when one is computed."""
    backend = signature.value(arguments, "backend")
    named = dict(zip(signature.tensors, arguments, strict=False))
    refuse_gradients(signature.op, named, current().backend if backend is None else backend)


def _one_level() -> contextlib.AbstractContextManager[Any]:
    """Inside the block a _SingleLevelFunction may be called though torch.func's transforms are under way."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    from torch._functorch.autograd_function import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def _recorded(name: str, arguments: Sequence[Any]) -> Any:
    """As _below, inside of a torch.autograd.Function, which turns recording off: the next levels record as before."""
    recording = torch.enable_grad() if torch._C._are_functorch_transforms_active() else contextlib.nullcontext()
    with recording:
        return _below(name, arguments)


def _below(name: str, arguments: Sequence[Any]) -> Any:
    """The operator, past autograd; of transforms, past that of this level."""
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.portattn, name)(*arguments)


def kept_for_kernels(signature: OperatorSignature, arguments: Sequence[Any]) -> bool:
    """Whether the forward keeps its result and its LSE, since kernels may compute the gradients of them."""
    v = arguments[signature.tensors.index("v")] if "v" in signature.tensors else None
    return v is not None and may_have_kernels(signature.op, arguments[0], v, signature.value(arguments, "backend"))


class _Forward(_SingleLevelFunction):
    """The operation's name, then the operator's arguments -> (out, lse)."""

    @staticmethod
    def forward(op: str, *arguments: Any) -> Any:
        return _recorded(op, with_lse(op, arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        op, *arguments = inputs
        count = len(SIGNATURES[op].tensors)
        kept = tuple(output) if kept_for_kernels(SIGNATURES[op], arguments) else ()
        ctx.save_for_backward(*arguments[:count], *kept)
        ctx.op, ctx.others, ctx.kept = op, tuple(arguments[count:]), len(kept)
        ctx.settings = current()  # torch runs a backward pass in threads of its own
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
        """None for the name, and one value for each argument: the gradients that are asked for."""
        signature = SIGNATURES[ctx.op]
        saved = ctx.saved_tensors
        tensors, (out, lse) = (saved[:-2], saved[-2:]) if ctx.kept else (saved, (None, None))
        arguments = (*tensors, *ctx.others)
        if not signature.value(arguments, "return_lse"):
            grad_lse = None
        wanted = [bool(ctx.needs_input_grad[1 + place]) for place in signature.gradients]
        found: list[Any] = [None] * (len(arguments) + 1)
        if any(wanted) and not (grad_out is None and grad_lse is None):
            operator = getattr(torch.ops.portattn, f"{ctx.op}_backward")
            with using(ctx.settings):
                made = operator(grad_out, grad_lse, out, lse, wanted, *arguments)
            for place, needed, gradient in zip(signature.gradients, wanted, made, strict=True):
                found[1 + place] = gradient if needed else None
        return tuple(found)


def with_lse(op: str, arguments: Sequence[Any]) -> Sequence[Any]:
    """The operator's arguments, with the LSE asked for where kernels of its gradients take it."""
    signature = SIGNATURES[op]
    if not kept_for_kernels(signature, arguments):
        return arguments
    place = len(signature.tensors) + signature.values.index("return_lse")
    return (*arguments[:place], True, *arguments[place + 1 :])


class _Backward(_SingleLevelFunction):
    """The operation's name, then the arguments of the operator of gradients -> the gradients that are wanted."""

    @staticmethod
    def forward(op: str, *arguments: Any) -> Any:
        return _recorded(f"{op}_backward", arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise TracingError(
            f"{ctx.op}: second derivatives are computed by the reference alone: call it eagerly with "
            "backend='reference'. Parameters that require gradients ask for them inside of torch.func.grad: detach "
            "them, or call it under torch.no_grad()"
        )


def forward_mode(op: str) -> TracingError:
    return TracingError(
        f"{op}: forward-mode derivatives (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad) are not "
        "computed. Take gradients by reverse mode: torch.func.grad, vjp, jacrev, or backward()"
    )
