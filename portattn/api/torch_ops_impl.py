"""Implementations of the torch operators: eager, fake (shapes), vmap, autograd, and writes into caches.

A transform of torch.func reaches the Autograd key (`autograd_forward`, `autograd_backward`) once a level: each level is
a _SingleLevelFunction, as torch.func uses itself. It refuses register_autograd's ordinary Function (torch 2.13: "it
must override the setup_context staticmethod").
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._guards import TracingContext
from torch.autograd.function import _SingleLevelFunction

from portattn.api.backward import Gradients, gradient_builds, gradients, laid_out_like, may_have_kernels, no_gradient
from portattn.api.execute import lookup, run_request
from portattn.api.request import request_from
from portattn.api.score_functions import mask_blocks
from portattn.api.torch_ops import SIGNATURES, OperatorSignature
from portattn.api.transform_checks import have_tangents
from portattn.config import current, using
from portattn.errors import ArgumentError, TracingError, TracingWarning
from portattn.schema.ops import FEATURES
from portattn.validate.checks import refuse_gradients
from portattn.validate.quantized import result_dtype, value_width

# Operations whose batch axis a mapped axis can be folded into, and the tensors of theirs that always have a batch axis.
_FOLDED = frozenset({"attention", "decode_attention"})
_BATCH_FIRST = frozenset({"q", "k", "v", "k_cache", "v_cache", "k_block_scale", "v_block_scale"})


def vmap_forward(
    signature: OperatorSignature,
    operator: Callable[..., Any],
    size: int,
    in_dims: Sequence[Any],
    arguments: Sequence[Any],
) -> tuple[Any, Any]:
    """(Results with the mapped axis first, the places of that axis).

    size     of the mapped axis
    in_dims  where each argument has it; None where it has none"""
    places = _flat(in_dims, arguments)
    moved = [_first(value, dim) for value, dim in zip(arguments, places, strict=True)]
    mapped = [dim is not None for dim in places]
    folded = _fold(signature, size, moved, mapped) if size and signature.op in _FOLDED else None
    if folded is not None:
        out, lse = operator(*folded)
        return tuple(r if r.ndim == 1 else r.unflatten(0, (size, -1)) for r in (out, lse)), (0, _place(lse))
    each = [operator(*_at(moved, mapped, index)) for index in range(size)]
    if not each:  # an axis without elements: the shapes of one
        out, lse = operator(*_nothing(moved, mapped))
        return (out.new_empty((0, *out.shape)), lse.new_empty((0, *lse.shape))), (0, 0)
    return tuple(torch.stack(results) for results in zip(*each, strict=True)), (0, 0)


def vmap_backward(
    operator: Callable[..., Any], size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """As of `forward`, of the operator of gradients: each is stacked."""
    places = _flat(in_dims, arguments)
    moved = [_first(value, dim) for value, dim in zip(arguments, places, strict=True)]
    mapped = [dim is not None for dim in places]
    each = [operator(*_at(moved, mapped, index)) for index in range(size)]
    if not each:
        found = tuple(g.new_empty((0, *g.shape)) for g in operator(*_nothing(moved, mapped)))
    else:
        found = tuple(torch.stack(gradients) for gradients in zip(*each, strict=True))
    return found, (0,) * len(found)


def _flat(in_dims: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Return the axis of each argument, None for lists of numbers, which have one for each number."""
    return [dim if isinstance(a, torch.Tensor) else None for dim, a in zip(in_dims, arguments, strict=True)]


def _place(lse: torch.Tensor) -> int | None:
    return None if lse.ndim == 1 else 0  # one without elements stands for none


def _first(value: Any, dim: Any) -> Any:
    """Return the value with the mapped axis first. Lengths, tables, slopes and sinks must be contiguous."""
    if not isinstance(dim, int):
        return value
    return _contiguous(value.movedim(dim, 0))


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_floating_point() and value.ndim > 3 else value.contiguous()


def _at(values: Sequence[Any], mapped: Sequence[bool], index: int) -> list[Any]:
    return [value[index] if own else value for value, own in zip(values, mapped, strict=True)]


def _nothing(values: Sequence[Any], mapped: Sequence[bool]) -> list[Any]:
    return [v.new_zeros(v.shape[1:]) if own else v for v, own in zip(values, mapped, strict=True)]


def _fold(signature: OperatorSignature, size: int, values: list[Any], mapped: Sequence[bool]) -> list[Any] | None:
    """Return the arguments with the mapped axis folded into the batch's, or None if a tensor has no batch axis."""
    found = list(values)
    if "dropout_seed" in signature.tensors and values[signature.tensors.index("dropout_seed")] is not None:
        return None  # what is dropped follows from a sequence's number in its batch
    q = values[0]
    batch = q.shape[1] if mapped[0] else q.shape[0]
    for place, name in enumerate(signature.tensors):
        value = values[place]
        if value is None:
            continue
        if name in _BATCH_FIRST:
            every = value if mapped[place] else value.expand(size, *value.shape)
        elif name in ("q_scale", "k_scale", "v_scale"):
            value = value if mapped[place] else value[None]
            if value.ndim < 3:  # one for all sequences, or one a head
                heads = values[1].shape[-2 if signature.value(values, "layout") == "bshd" else -3]
                value = value.reshape(value.shape[0], 1, -1).expand(-1, batch, heads)
            every = value.expand(size, *value.shape[1:])
        elif name in FEATURES and FEATURES[name].axes[0] in "bs":
            axes, value = FEATURES[name].axes, value if mapped[place] else value[None]
            if len(axes) == 4:  # of scores or blocks: broadcast
                while value.ndim <= len(axes):
                    value = value.unsqueeze(1)
                value = value.expand(size, batch, *value.shape[2:])
            elif value.ndim == len(axes) > 1:  # one for all sequences
                value = value.unsqueeze(1).expand(-1, batch, *value.shape[1:])
            if value.ndim < 2:
                return None  # the operation refuses each
            every = value.expand(size, *value.shape[1:])
        elif mapped[place]:  # sinks: one a head, for all sequences
            return None
        else:
            continue
        found[place] = _contiguous(every.reshape(size * every.shape[1], *every.shape[2:]))
    return found


Results = tuple[torch.Tensor, torch.Tensor]


def forward(signature: OperatorSignature, *arguments: Any) -> Results:
    """Return (out, lse); lse is a float32 tensor without elements if it is not requested."""
    parts = signature.split(_with_blocks(signature, arguments))
    if torch.is_grad_enabled():  # gradients are the operator's own
        with torch.no_grad():
            found = _found(signature.op, parts)
    else:
        found = _found(signature.op, parts)
    if isinstance(found, tuple):
        return found
    return found, found.new_empty(0, dtype=torch.float32)


def _with_blocks(signature: OperatorSignature, arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the operator's arguments with the lists of blocks of its mask function, which symbolic sizes have not."""
    if signature.op != "attention" or signature.value(arguments, "mask_mod") is None:
        return arguments
    given = dict(zip((*signature.tensors, *signature.values), arguments, strict=True))
    lists = mask_blocks(*(given[name] for name in inspect.signature(mask_blocks).parameters))
    return list((given | dict(zip(("block_mask", "block_size"), lists, strict=True))).values())


def _found(op: str, parts: tuple[Any, ...]) -> Any:
    found = lookup(op, *parts)
    return run_request(request_from(op, *parts)) if found is None else found


def forward_shapes(signature: OperatorSignature, *arguments: Any) -> Results:
    """Return tensors without data of the results' sizes, maybe symbolic, after checking all that is known."""
    parts = signature.split(arguments)
    tensors, q = parts[0], arguments[0]
    sizes = [size for tensor in tensors if tensor is not None for size in (*tensor.shape, *tensor.stride())]
    if not any(isinstance(size, torch.SymInt) for size in (*sizes, *parts[2])):
        request_from(signature.op, *parts).build()
    latent = signature.row.latent
    k, v = (tensors[tuple(signature.row.tensors).index(name)] for name in ("k", "v"))
    dtype = result_dtype(q, v, signature.value(arguments, "out_dtype")) if "out_dtype" in signature.values else q.dtype
    out = q.new_empty((*q.shape[:-1], q.shape[-1] if latent else value_width(signature.op, q, k, v)), dtype=dtype)
    if not signature.value(arguments, "return_lse"):
        return out, q.new_empty(0, dtype=torch.float32)
    axes: tuple[Any, ...]
    if q.ndim == 3:
        axes = (q.shape[1], q.shape[0])
    elif "layout" in signature.values and signature.value(arguments, "layout") == "bshd":
        axes = (q.shape[0], q.shape[2], q.shape[1])
    else:
        axes = tuple(q.shape[:-1])
    return out, q.new_empty(axes, dtype=torch.float32)


def backward(
    signature: OperatorSignature,
    grad_out: Any,
    grad_lse: Any,
    out: Any,
    lse: Any,
    wanted: Sequence[bool],
    *arguments: Any,
) -> Any:
    made = by_kernels(signature, grad_out, grad_lse, out, lse, wanted, arguments)
    names = [signature.tensors[place] for place in signature.gradients]
    if made is None:
        return gradient_builds(signature, grad_out, grad_lse, wanted, arguments)
    places = zip(signature.gradients, names, wanted, strict=True)
    return tuple(
        _own_memory(arguments[place], made[name]) if needed else no_gradient(arguments)
        for place, name, needed in places
    )


def by_kernels(
    signature: OperatorSignature, grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Sequence[bool],
    arguments: Sequence[Any],
) -> Gradients | None:  # fmt: skip
    """Return gradients by parameter, or None if the forward saved nothing for kernels or none runs here."""
    if out is None or lse is None:
        return None
    asked = [signature.tensors[place] for place, needed in zip(signature.gradients, wanted, strict=True) if needed]
    arguments = _with_blocks(signature, arguments)
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        return gradients(signature.op, *signature.split(arguments), out, lse, grad_out, grad_lse, asked)


def _own_memory(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the strides of backward_shapes, which it nearly always has."""
    same = gradient.stride() == tensor.stride() or gradient.stride() == torch.empty_like(tensor, device="meta").stride()
    return gradient if same else laid_out_like(tensor, gradient)


def backward_shapes(
    signature: OperatorSignature,
    grad_out: Any,
    grad_lse: Any,
    out: Any,
    lse: Any,
    wanted: Sequence[bool],
    *arguments: Any,
) -> Any:
    places = zip(signature.gradients, wanted, strict=True)
    return tuple(torch.empty_like(arguments[place]) if needed else no_gradient(arguments) for place, needed in places)


def forward_vmapped(signature: OperatorSignature, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """Run the operator for vmap: the axis joins the batch axis, or the results of each index are stacked."""
    operator = getattr(torch.ops.portattn, signature.op)
    return vmap_forward(signature, operator, info.batch_size, in_dims, arguments)


def backward_vmapped(signature: OperatorSignature, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    operator = getattr(torch.ops.portattn, f"{signature.op}_backward")
    return vmap_backward(operator, info.batch_size, in_dims, arguments)


def autograd_forward(signature: OperatorSignature, *arguments: Any) -> Any:
    """Run the operator, as a node of autograd's graph if a tensor requires gradients."""
    return _differentiable(_Forward, signature.op, "", arguments)


def autograd_backward(signature: OperatorSignature, *arguments: Any) -> Any:
    """Run the gradients' operator likewise. Second derivatives are refused."""
    return _differentiable(_Backward, signature.op, "_backward", arguments)


def _differentiable(function: Any, op: str, suffix: str, arguments: Sequence[Any]) -> Any:
    if have_tangents(arguments):
        raise forward_mode(op)
    if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
        if function is _Forward:
            _refuse_gradients(SIGNATURES[op], arguments)
        with _one_level():
            return function.apply(op, *arguments)
    return _below(op + suffix, arguments)


def _refuse_gradients(signature: OperatorSignature, arguments: Sequence[Any]) -> None:
    """Raise ArgumentError if the operation has no gradient, before one is computed."""
    backend = signature.value(arguments, "backend")
    named = dict(zip(signature.tensors, arguments, strict=False))
    refuse_gradients(signature.op, named, current().backend if backend is None else backend)


def _one_level() -> contextlib.AbstractContextManager[Any]:
    """Return a block in which a _SingleLevelFunction may be called inside torch.func's transforms."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    from torch._functorch.autograd_function import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def _recorded(name: str, arguments: Sequence[Any]) -> Any:
    """Like `_below`, inside a torch.autograd.Function, which turns recording off: the next levels record as before."""
    recording = torch.enable_grad() if torch._C._are_functorch_transforms_active() else contextlib.nullcontext()
    with recording:
        return _below(name, arguments)


def _below(name: str, arguments: Sequence[Any]) -> Any:
    """Call the operator past autograd; inside a transform, past this level's."""
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.portattn, name)(*arguments)


def kept_for_kernels(signature: OperatorSignature, arguments: Sequence[Any]) -> bool:
    """Return whether the forward saves its result and LSE, since kernels may compute its gradients."""
    v = arguments[signature.tensors.index("v")] if "v" in signature.tensors else None
    return v is not None and may_have_kernels(signature.op, arguments[0], v, signature.value(arguments, "backend"))


class _Forward(_SingleLevelFunction):
    """A node: the operation's name and the operator's arguments -> (out, lse)."""

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
    """Return the operator's arguments, with the LSE requested if kernels of its gradients take it."""
    signature = SIGNATURES[op]
    if not kept_for_kernels(signature, arguments):
        return arguments
    place = len(signature.tensors) + signature.values.index("return_lse")
    return (*arguments[:place], True, *arguments[place + 1 :])


class _Backward(_SingleLevelFunction):
    """A node: the operation's name and the arguments of the gradients' operator -> the wanted gradients."""

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


def write(signature: OperatorSignature, *arguments: Any) -> None:
    parts = signature.split(arguments)
    with torch.no_grad():  # tensors that require gradients were refused before
        if lookup(signature.op, *parts) is None:
            run_request(request_from(signature.op, *parts))


def check_write(signature: OperatorSignature, *arguments: Any) -> None:
    """Check all that is known of arguments without data: nothing, if sizes are symbolic."""
    parts = signature.split(arguments)
    sizes = [size for tensor in parts[0] if tensor is not None for size in (*tensor.shape, *tensor.stride())]
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        request_from(signature.op, *parts).build()
    if TracingContext.try_get() is not None and not torch.compiler.is_exporting():
        _warn_of_views(signature, dict(zip(signature.tensors, arguments, strict=False)))


def _warn_of_views(signature: OperatorSignature, tensors: Mapping[str, Any]) -> None:
    """Warn of written arguments that are views of one tensor: torch 2.13 writes to wrong places, without an error, if
    they are made in the compiled function or begin elsewhere than when it was traced."""
    written = {name: tensors[name] for name in signature.written if tensors.get(name) is not None}
    storages = [tensor.untyped_storage()._cdata for tensor in written.values()]
    if len(set(storages)) < len(storages):
        warnings.warn(
            f"{signature.op} in a compiled function: {' and '.join(written)} are views of one tensor, which torch may "
            "fill wrongly (docs/graphs.md, what cannot be done): give it tensors of their own, or call it uncompiled",
            TracingWarning,
            stacklevel=2,
        )


def without_gradient(signature: OperatorSignature, *arguments: Any) -> None:
    """Run the operator below autograd. Raises ArgumentError if a tensor requires gradients, TracingError for jvp."""
    if have_tangents(arguments[: len(signature.tensors)]):
        raise forward_mode(signature.op)
    if torch.is_grad_enabled():
        for name, tensor in zip(signature.tensors, arguments, strict=False):
            if tensor is not None and tensor.requires_grad:
                limit = f"{signature.op} writes in place and has no gradient: call it under torch.no_grad()"
                raise ArgumentError(signature.op, f"{name}.requires_grad", True, limit)
    with torch._C._AutoDispatchBelowAutograd():
        getattr(torch.ops.portattn, signature.op)(*arguments)
