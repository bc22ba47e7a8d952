"""The entry of every eager call: cached launches, jagged tensors, torch's dispatcher, autocast, autograd.

A call that compilers, exporters or modes see is one node of their graph, its torch operator (in_graph)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from portattn.api import autocast, dispatch, torch_ops, training
from portattn.api.argument_errors import OPERATIONS
from portattn.api.autocast import cast
from portattn.api.execute import lookup, run_request, to_caller_layout
from portattn.api.request import Request, Result, checked_request, request_from
from portattn.api.torch_ops import RETURNS_LSE, SIGNATURES, arguments_of
from portattn.api.transform_checks import (
    are_dispatched,
    are_transformed,
    check_has_storage,
    is_sure,
    leave_out,
    left_out,
    refuse_what_no_kernel_sees,
    shapes_alone,
)
from portattn.errors import ArgumentError
from portattn.launch import cache
from portattn.launch.torch_compat import in_mode
from portattn.planning.planner import plan
from portattn.schema.ops import CAPTURED, ROWS
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.validate.checks import as_value

# Of operations that can drop: the places of dropout_p among the values, and of the seed among the tensors.
_DROPOUT = {
    op: (ROWS[op].fixed.index("dropout_p"), tuple(ROWS[op].tensors).index("dropout_seed"))
    for op in SIGNATURES
    if "dropout_p" in ROWS[op].fixed
}


def in_graph(op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any]) -> Result:
    """Call the operator with a Request's parts (request_from). Traced by dynamo: plain Python alone."""
    names, fixed = SIGNATURES[op].values, len(values)
    values = [graph_number(op, name, v) for name, v in zip(names[:fixed], values, strict=True)]
    lengths = [graph_number(op, name, v) for name, v in zip(names[fixed:], lengths, strict=True)]
    if op in _DROPOUT:
        share, seed = _DROPOUT[op]
        if values[share] and tensors[seed] is None:
            tensors = [*tensors[:seed], new_seed(tensors[0]), *tensors[seed + 1 :]]
    arguments = arguments_of(op, cast(op, tensors), values, lengths)
    out, lse = getattr(torch.ops.portattn, op)(*arguments)
    return (out, lse) if values[RETURNS_LSE[op]] else out


def graph_number(op: str, name: str, value: Any) -> Any:
    """Return `as_value`'s number; dynamo breaks the graph to read a number that the graph holds.

    Operators take no symbolic float, which dynamo makes of `.item()` with capture_scalar_outputs."""
    if not torch.compiler.is_dynamo_compiling():
        return as_value(op, name, value)
    if isinstance(value, float):
        known = is_sure(value >= 0.0) or is_sure(value <= 0.0)
    else:
        known = value is None or isinstance(value, (bool, int, str, tuple, list, torch.dtype))
    return value if known else left_out["number"](op, name, value)


leave_out(
    "number",
    as_value,
    "portattn reads this number when the graph runs: give a Python number, or multiply q by it, with scale=1.0",
)


def new_seed(q: torch.Tensor) -> torch.Tensor:
    """Return a seed for dropout, drawn on q's device: torch.manual_seed decides it, and nothing is read back."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


torch_ops.define()  # where torch was imported in a way that portattn's hooks do not see


def try_cached(
    op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...] = ()
) -> Result | None:
    """Return the result of a call whose call key and shape class are cached, else None. Dynamo traces the operator.

    Args:
        tensors, values, lengths: in a Request's order, `backend` and `validate` last among values; not validated
    """
    if torch.compiler.is_dynamo_compiling():
        if op == "attention" and are_jagged(*tensors[:3]):
            return call_jagged(tensors, values)
        return in_graph(op, tensors, values, lengths)
    found = lookup(op, tensors, values, lengths)
    if found is not None:
        return found
    if not torch._C._is_any_autocast_enabled():
        return None
    if autocast.is_on(tensors[0]) and cache.kinds(op, values) and not in_mode():
        cast = tuple(autocast.cast_now(op, tensors))
        with autocast.off(tensors[0].device.type):  # entries cached under autocast are keyed by the cast tensors
            found = lookup(op, cast, values, lengths)
    return found


def first_call(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...], lengths: tuple[Any, ...]) -> Result:
    """Validate, plan and run a call that is not cached. The arguments are `try_cached`'s."""
    if op == "attention" and are_jagged(*tensors[:3]):
        return call_jagged(tensors, values)
    return perform(checked_request(op, tensors, values, lengths))


def perform(request: Request) -> Result:
    """Run a request and return `out` in the caller's layout, with the LSE if it is requested.

    Calls that torch records or transforms, and tensor subclasses, go through torch's dispatcher."""
    tensors, values, lengths = request.parts
    # Plain tensors too, inside a transform of others: their results are wrapped there, without storage.
    if are_transformed(tensors) or are_dispatched(tensors) or torch._C._are_functorch_transforms_active():
        return in_graph(request.op, tensors, values, lengths)
    check_has_storage(request.op, request.named_tensors)
    if "dropout_seed" in request.tensors:
        draw_seed(request)
    if autocast.is_on(request.tensors["q"]):
        return _as_autocast(request)
    return run_with_autograd(request)


def _as_autocast(request: Request) -> Result:
    tensors, values, lengths = request.parts
    tensors = tuple(autocast.cast(request.op, tensors))
    with autocast.off(tensors[0].device.type):
        return run_with_autograd(request_from(request.op, tensors, values, lengths))


def draw_seed(request: Request, draw: Callable[[torch.Tensor], torch.Tensor] = new_seed) -> None:
    """Draw a seed from torch's generator if the request drops without a seed. Nothing is validated yet."""
    share, q = request.values["dropout_p"], request.tensors["q"]
    if request.tensors["dropout_seed"] is None and isinstance(share, float) and share and isinstance(q, torch.Tensor):
        request.tensors["dropout_seed"] = draw(q)


def run_with_autograd(request: Request) -> Result:
    """Run a request, as a node of autograd's graph if kernels compute its gradients."""
    if not torch.is_grad_enabled():
        return run_request(request)
    kind, call = training.plan_training(request)
    return run_request(request, call) if kind is None else training.run(kind, request, call)


def fake_result(request: Request) -> Result | None:
    """Return a handle's result for fake tensors, or None for real ones. Raises on tensors that no kernel can read."""
    refuse_what_no_kernel_sees(request.op, request.named_tensors)
    if not shapes_alone(request.tensors.values()):
        return None
    call = request.build()
    return to_caller_layout(call, call.new_out(), call.new_lse() if call.problem.return_lse else None)


def plan_request(request: Request, target: Target | None = None) -> Plan:
    if "dropout_seed" in request.tensors:  # the plan is the same for any seed, and torch's generator stays as it is
        draw_seed(request, lambda q: torch.zeros(1, dtype=torch.int64, device=q.device))
    tensors, values, lengths = request.parts
    cast = autocast.cast(request.op, tensors)
    if cast is not tensors:
        request = request_from(request.op, cast, values, lengths)
    call = request.build()
    if target is not None:
        return plan(call.problem, target, settings=request.settings)
    return dispatch.plan_call(call, request.settings)


# attention of jagged nested tensors: varlen_attention takes their packed rows as they lie.
_JAGGED_OWN = ("q", "k", "v", "layout")
# Arguments that varlen_attention has, too; all others must be None.
_PACKED_TAKES = {*ROWS["varlen_attention"].parameters, *ROWS["varlen_attention"].fixed, "backend", "validate"}
_PACKED_TAKES -= {*CAPTURED, "score_mod", "mask_mod"}  # traced by now, with numbers of dense sequences


def are_jagged(q: Any, k: Any, v: Any) -> bool:
    return _is_jagged(q) and _is_jagged(k) and _is_jagged(v)


def _is_jagged(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_nested and tensor.layout is torch.jagged


def _named(tensors: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    row = ROWS["attention"]
    names = (*row.parameters, *row.fixed, "backend", "validate")
    return dict(zip(names, (*tensors, *values), strict=True))


def packed(tensors: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return varlen_attention's arguments for an attention call, in its row's order, with jagged q, k and v.

    The ragged axis of q is (B, Hq, *, D), or (B, *, Hq, D) with layout="bshd". The longest length comes from the
    tensors' metadata; without it their offsets are read back once. Raises ArgumentError for a tensor that is ragged
    elsewhere and for an argument that packed rows cannot have."""
    given = _named(tensors, values)
    bshd = given["layout"] == "bshd"
    axis = 1 if bshd else 2
    rows = {}
    for name in ("q", "k", "v"):
        tensor = given[name]
        if tensor.ndim != 4 or tensor._ragged_idx != axis:
            shape = "(B, *, H, D)" if bshd else "(B, H, *, D)"
            limit = f"must be {shape} with layout={given['layout']!r}, ragged at the star"
            raise ArgumentError("attention", name, tuple(tensor.shape), limit)
        if tensor.lengths() is not None:
            raise ArgumentError("attention", name, "jagged with holes", "must have no holes (hint: .contiguous())")
        rows[name] = tensor if bshd else tensor.transpose(1, 2)
    for name in given:
        if name not in {*_JAGGED_OWN, *_PACKED_TAKES} and given[name] is not None:
            value = tuple(given[name].shape) if isinstance(given[name], torch.Tensor) else given[name]
            raise ArgumentError("attention", name, value, "goes with dense tensors only, not with jagged ones")
    q, k, v = rows["q"], rows["k"], rows["v"]
    if k.offsets() is not v.offsets() and not _alike(k.offsets(), v.offsets()):
        raise ArgumentError("attention", "v", tuple(v.shape), "must have the sequences of k")
    return {
        "q": q.values(), "k": k.values(), "v": v.values(),
        "cu_seqlens_q": q.offsets().int(), "cu_seqlens_k": k.offsets().int(),
        "max_seqlen_q": q._get_max_seqlen(), "max_seqlen_k": k._get_max_seqlen(),
    } | {name: given[name] for name in given if name in _PACKED_TAKES and name not in _JAGGED_OWN}  # fmt: skip


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


def call_jagged(tensors: Sequence[Any], values: Sequence[Any]) -> Any:
    """Run attention of jagged tensors by varlen_attention; tensors and values are in the order of attention's row."""
    found = OPERATIONS["varlen_attention"](**packed(tensors, values))
    return _jagged_results(tensors[0], _named(tensors, values)["layout"], found)


def _jagged_results(q: torch.Tensor, layout: str, found: Any) -> Any:
    """Return varlen_attention's results as jagged tensors with q's sequences: out in q's layout, the LSE (B, Hq, *)."""
    q = q if layout == "bshd" else q.transpose(1, 2)
    out, lse = found if isinstance(found, tuple) else (found, None)
    ragged = _like(q, out)
    ragged = ragged if layout == "bshd" else ragged.transpose(1, 2)
    return ragged if lse is None else (ragged, _like(q, lse.transpose(0, 1)).transpose(1, 2))


def _like(q: Any, values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(
        values,
        q.offsets(),
        min_seqlen=q._get_min_seqlen(),
        max_seqlen=q._get_max_seqlen(),
    )
