"""Gradients of calls: by portattn's kernels, or by a path that torch differentiates, which recomputes the forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import torch

from portattn.api import dispatch
from portattn.api.execute import lookup, run_request
from portattn.api.request import Request, request_from, settings_for
from portattn.api.score_functions import made_once
from portattn.api.torch_ops import SIGNATURES, OperatorSignature, arguments_of
from portattn.config import Settings, current
from portattn.errors import PathUnavailable
from portattn.kernels.score_program import may_hide
from portattn.launch import cache
from portattn.launch.backward import rows_by_block
from portattn.planning.backend import PathRejection
from portattn.planning.core_path import backward_problem, own_names, own_path
from portattn.planning.kernel_specs import CORES, ceil_div
from portattn.reference.score_functions import lists_by_key
from portattn.schema.ops import BACKWARD, CAPTURED, CAPTURED_GRADIENTS, ROWS
from portattn.schema.problem import Problem

Gradients = dict[str, torch.Tensor]
_CAPTURED = frozenset(CAPTURED)
_SUMMED = ("alibi_slopes", "bias")  # their gradients are float32 in memory of their own
# Tensors that the gradients' operations alone have, in the order in which `gradients` makes them.
_MADE = (
    "forward_out", "forward_lse", "grad_out", "grad_lse", "grad_q", "grad_k", "grad_v", "grad_slopes", "grad_bias",
    "block_rows", "block_starts", "block_chunks", "block_queries", *CAPTURED_GRADIENTS,
)  # fmt: skip
# Saved after a node's arguments, and made for its backward pass, in native.c's order.
_SAVED, _OWN = ("forward_out", "forward_lse"), ("grad_out", "grad_q", "grad_k", "grad_v")


def may_have_kernels(op: str, q: torch.Tensor, v: torch.Tensor, backend: Any) -> bool:
    """Return whether kernels may compute a call's gradients. Nothing is planned yet, and shapes may be symbolic."""
    if op not in BACKWARD or max_width(op) < q.shape[-1] or max_width(op) < v.shape[-1]:
        return False
    return q.device.type != "meta" and own_path(backend or current().backend, q.device.type) is not None


def has_kernel(problem: Problem, device: torch.device, settings: Settings) -> bool:
    """Return whether a kernel is planned for the gradients of a problem, as the backward pass will ask for them."""
    backend = own_path(settings.backend, device.type)
    assert backend is not None
    try:
        asked = msgspec.structs.replace(backward_problem(problem), deterministic=_deterministic(settings))
        return bool(dispatch.plan_problem(asked, device, settings_for(asked.op, backend, validate=False)).key)
    except (PathRejection, PathUnavailable):
        return False


@functools.cache
def max_width(op: str) -> int:
    return CORES[BACKWARD[op]].max_head_dim


def gradients(
    op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any], out: torch.Tensor,
    lse: torch.Tensor, grad_out: Any, grad_lse: Any, asked: Collection[str], otherwise: str | None = None,
) -> Gradients | None:  # fmt: skip
    """Return the requested gradients by name, or None if no kernel of portattn's runs here.

    Extra memory: delta (B, Hq, Sq) float32; a variant's own, as gluon_backward's float32 dQ; a bias's gradient once
    more in float32; with `parts=memory` (float32 alone) 6 bytes for each number of q, k, v and grad_out; q and grad_out
    once more if a score function may hide rows.

    Args:
        tensors, values, lengths: the forward's, as a Request has them
        out, lse: the forward's results, with every row's LSE
        grad_out, grad_lse: either may be None
        asked: names of tensors
        otherwise: path that computes them if no kernel runs or takes such wide heads: "reference"
    """
    way = _WAYS[op]
    if [place for place in way.unknown if tensors[place] is not None]:
        return None
    settings = current()
    if not _CAPTURED.isdisjoint(asked) and _deterministic(settings):  # kernels add to them in any order
        return None
    if otherwise is not None and not may_have_kernels(op, tensors[way.source["q"]], tensors[way.source["v"]], None):
        settings = msgspec.structs.replace(settings, backend=otherwise)
    fixed = way.values(tuple(values), tensors[0].device.type, settings, otherwise)
    if fixed is None:
        return None
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    own_place = way.source
    if way.may_hide_rows(values):
        tensors, grad_out = way.without_hidden_rows(tensors, values, lse, grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous().resolve_neg()
    found: Gradients = {}
    for name, place in way.qkv:
        tensor = tensors[place]
        memory = torch.empty_like(tensor)
        found[name] = memory if memory.stride(-1) == 1 else tensor.new_empty(tensor.shape)
    summed = [_memory(name, tensors[own_place[name]], lse) if name in asked else None for name in _SUMMED]
    added = [_memory(name, tensors[own_place[name]], lse).zero_() if name in asked else None for name in CAPTURED]
    listed = way.listed(tensors, values) if way.lists_rows and lse.numel() else (None, None, None)
    lists = tensors[own_place["block_mask"]] if way.lists_queries else None
    queries = None if lists is None else made_once("by key", [lists], functools.partial(lists_by_key, lists))
    if lse.numel():
        # In the order of _MADE.
        made = out, lse, _rows(grad_out), grad_lse, *found.values(), *summed, *listed, queries, *added
        ready, before = way.order((*tensors, *made, None)), dispatch.last_plan_state()
        delta = lookup(way.op, ready, fixed, tuple(lengths))
        if delta is None:
            delta = run_request(request_from(way.op, ready, fixed, lengths))
        dispatch.note_backward(before)
        assert isinstance(delta, torch.Tensor)
    else:  # without rows nothing is launched, and there may be keys
        delta = lse
        for memory in (*found.values(), *(one for one in summed if one is not None)):
            memory.zero_()
    slopes, bias = summed
    if bias is not None:
        found["bias"] = _like(bias, tensors[own_place["bias"]])
    if slopes is not None:
        beginnings = tensors[own_place["cu_seqlens_q"]] if "cu_seqlens_q" in own_place else None
        found["alibi_slopes"] = _slopes(tensors[own_place["alibi_slopes"]], slopes, beginnings)
    for name, sums in zip(CAPTURED, added, strict=True):
        if sums is not None:
            found[name] = _like(sums, tensors[own_place[name]])
    if "sinks" in asked:
        found["sinks"] = _sinks(tensors[own_place["sinks"]], lse, delta)
    return found if len(found) == len(asked) else {name: tensor for name, tensor in found.items() if name in asked}


class _Way:
    """The gradients' operation of a forward, with the places of its tensors and of the forward's."""

    def __init__(self, forward: str) -> None:
        self.op = BACKWARD[forward]
        row, before = ROWS[self.op], ROWS[forward]
        names, self.source = list(row.tensors), {name: place for place, name in enumerate(before.tensors)}
        # Puts the forward's tensors, _MADE and None into the operation's order.
        places = self.source | {name: len(self.source) + place for place, name in enumerate(_MADE)}
        self.order = itemgetter(*(places.get(name, -1) for name in names))
        # Places of the forward's tensors that the operation lacks: its gradients would be wrong with them.
        self.unknown = [self.source[name] for name in before.tensors if name not in names]
        self.qkv = [(name, self.source[name]) for name in ("q", "k", "v")]
        self.lists_rows, self.lists_queries = "block_rows" in names, "block_queries" in names
        self._fixed, self._forward = row.fixed, (*before.fixed, "backend", "validate")
        self._mod, self._layout = (
            self._forward.index(name) if name in self._forward else None for name in ("score_mod", "layout")
        )
        self._known: dict[Any, Any] = {}
        self._last: tuple[Any, Any, Any] = (None, None, None)  # values, the rest of the key, the result

    def may_hide_rows(self, values: Sequence[Any]) -> bool:
        """Return whether a score function may hide all keys from a row: no mask tells, and 0·NaN of it is NaN."""
        program = None if self._mod is None else values[self._mod]
        return program is not None and may_hide(program)

    def without_hidden_rows(
        self, tensors: Sequence[Any], values: Sequence[Any], lse: torch.Tensor, grad_out: torch.Tensor
    ) -> tuple[list[Any], torch.Tensor]:
        """Return the tensors and the gradient with 0 in rows that attend nothing: kernels need not look for them."""
        hidden = lse == float("-inf")
        heads_first = self._layout is not None and values[self._layout] == "bhsd"
        hidden = (hidden if heads_first else hidden.mT)[..., None]
        found = list(tensors)
        found[self.source["q"]] = tensors[self.source["q"]].masked_fill(hidden, 0.0)
        return found, grad_out.masked_fill(hidden, 0.0)

    def native(
        self, arguments: Sequence[str], values: tuple[Any, ...], device_type: str, settings: Settings
    ) -> Callable[..., Any] | None:
        """Return native.c's function of a cached backward pass, for gradients of q, k and v; None if there is none.

        arguments: names of a node's arguments, tensors after the first. The function takes the saved tensors (these,
        out and the LSE), the lengths, which arguments' gradients are wanted, and out's gradient. It returns a gradient
        for each argument, or NotImplemented if `gradients` must compute them."""
        fixed = self.values(values, device_type, settings)
        known = {place: name for name, place in self.source.items()}
        if fixed is None or self.lists_rows or not {known[place] for place in self.unknown}.isdisjoint(arguments):
            return None
        if "block_mask" in arguments or self.may_hide_rows(values):
            return None
        places = {name: place for place, name in enumerate((*arguments[1:], *_SAVED, *_OWN))}
        own = {name.removeprefix("grad_"): place for place, name in enumerate(_OWN[1:])}
        return cache.native_backward(
            device_type, op=self.op, values=fixed, settings=settings, plans=vars(dispatch), last="_last_backward",
            order=tuple(places.get(name, -1) for name in ROWS[self.op].tensors),
            results=tuple(own.get(name, -1) for name in arguments),
        )  # fmt: skip

    def listed(self, tensors: Sequence[Any], values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the rows whose lists name each block of keys, their beginnings and their chunks."""
        named = dict(zip(self._forward, values, strict=True))
        q, k, indices, counts = (tensors[self.source[name]] for name in ("q", "k", "indices", "counts"))
        if named["layout"] == "bshd":
            q, k, indices = (tensor.transpose(1, 2) for tensor in (q, k, indices))
            counts = None if counts is None else counts.transpose(1, 2)
        blocks = ceil_div(k.shape[2], named["block_size"])
        return rows_by_block(indices, counts, blocks, q.shape[1] // k.shape[1])

    def values(
        self, values: tuple[Any, ...], device_type: str, settings: Settings, otherwise: str | None = None
    ) -> tuple[Any, ...] | None:
        """Return the operation's values for the forward's, or None if these name a path without a kernel."""
        backend = settings.backend
        deterministic = _deterministic(settings)
        rest = device_type, backend, deterministic, otherwise
        last = self._last
        if last[0] is values and last[1] == rest:  # a call key has one tuple of values
            known: tuple[Any, ...] | None = last[2]
            return known
        key = (values, tuple(map(type, values)), *rest)
        found = self._known.get(key, self)
        if found is self:
            named = dict(zip(self._forward, values, strict=True))
            named |= {"deterministic": deterministic, "return_lse": False, "validate": False}
            named["backend"] = own_path(named["backend"] or backend, device_type) or otherwise
            found = tuple(named[name] for name in (*self._fixed, "backend", "validate"))
            found = None if named["backend"] is None else found
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = found
        self._last = values, rest, found
        return found


def _deterministic(settings: Settings) -> bool:
    return settings.deterministic or settings.invariant or torch.are_deterministic_algorithms_enabled()


_MOST_KNOWN = 1024
_WAYS = {forward: _Way(forward) for forward in BACKWARD}


def native(op: str, *about: Any) -> Callable[..., Any] | None:
    return _WAYS[op].native(*about)


def compute_gradients(
    op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any], out: torch.Tensor,
    lse: torch.Tensor, grad_out: Any, grad_lse: Any, asked: Collection[str],
) -> Gradients:  # fmt: skip
    """Like `gradients`, but if no kernel runs, recompute the forward by a path that torch differentiates."""
    made = gradients(op, tensors, values, lengths, out, lse, grad_out, grad_lse, asked)
    if made is not None:
        return made
    return _by_name(op, asked, gradient_builds, (grad_out, grad_lse), (tensors, values, lengths))


def record_gradients(
    op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any], out: torch.Tensor,
    lse: torch.Tensor, grad_out: Any, grad_lse: Any, asked: Collection[str],
) -> Gradients:  # fmt: skip
    """Like `compute_gradients`, as a node of autograd's graph."""
    operator = getattr(torch.ops.portattn, f"{op}_backward")

    def record(signature: OperatorSignature, grad_out: Any, grad_lse: Any, wanted: Any, arguments: Any) -> Any:
        return operator(grad_out, grad_lse, out, lse, wanted, *arguments)

    return _by_name(op, asked, record, (grad_out, grad_lse), (tensors, values, lengths))


def _by_name(
    op: str, asked: Collection[str], compute: Callable[..., Any], grads: tuple[Any, Any], parts: tuple[Any, Any, Any]
) -> Gradients:
    signature = SIGNATURES[op]
    names = [signature.tensors[place] for place in signature.gradients]
    made = compute(signature, *grads, [name in asked for name in names], arguments_of(op, *parts))
    return {name: gradient for name, gradient in zip(names, made, strict=True) if name in asked}


def _rows(grad_out: torch.Tensor) -> torch.Tensor:
    """Return a gradient with contiguous rows: that of a sum has a stride of 0 along each axis."""
    strides = grad_out.stride()
    return grad_out if strides[-1] == 1 and 0 not in strides else grad_out.contiguous()


def _memory(name: str, tensor: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor's gradient, a bias's with four axes; of slopes for each row's part of it."""
    shape = lse.shape if name == "alibi_slopes" else tuple(tensor.shape)
    if name == "bias":
        shape = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    return torch.empty(shape, dtype=torch.float32, device=tensor.device)


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return gradient.view(tensor.shape).to(tensor.dtype)


def _slopes(slopes: torch.Tensor, parts: torch.Tensor, beginnings: torch.Tensor | None) -> torch.Tensor:
    """Return the slopes' gradient, (Hq,) or (B, Hq), from each row's part."""
    if beginnings is None:
        found = parts.sum(2)
        return _like(found.sum(0) if slopes.ndim == 1 else found, slopes)
    if slopes.ndim == 1:
        return _like(parts.sum(1), slopes)
    # Packed rows: differences of running sums are deterministic, and no length is read back. A NaN or an
    # infinity would stay in the sums of all later sequences: such elements are counted, and make their own sequence's
    # gradient NaN.
    finite = parts.isfinite()
    bounds = beginnings.long().clamp(0, parts.shape[1])
    found = _between(parts.double().where(finite, 0.0), bounds)
    return found.masked_fill(_between(~finite, bounds) > 0, float("nan")).transpose(0, 1).to(slopes.dtype)


def _between(parts: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return sums of (Hq, Tq) between bounds (B + 1,): (Hq, B)."""
    return torch.nn.functional.pad(parts.cumsum(1), (1, 0))[:, bounds].diff(dim=1)


def _sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the sinks' gradient, -P·delta summed over rows (B, Hq, Sq) or (Hq, Tq): a sink has no value."""
    found = -(sink_share(sinks, lse) * delta).sum(-1)
    return (found if lse.ndim == 2 else found.sum(0)).to(sinks.dtype)


def sink_share(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the sinks' probabilities, float32 (…, Hq, Sq) like the LSE: all of a row for a sink of +inf."""
    scores = sinks.float()[:, None]
    share = torch.exp(scores - lse).masked_fill(lse == float("-inf"), 0.0)
    return share.masked_fill((scores == float("inf")) & (lse == float("inf")), 1.0)


def gradient_builds(
    signature: OperatorSignature, grad_out: Any, grad_lse: Any, wanted: Sequence[bool], arguments: Sequence[Any]
) -> Any:
    given = list(arguments)
    inputs = []
    for place, needed in zip(signature.gradients, wanted, strict=True):
        if needed:
            given[place] = given[place].detach().requires_grad_()
            inputs.append(given[place])
    before = dispatch.last_plan_state()
    with _recording():
        found = by_torch(request_from(signature.op, *signature.split(given)))
        dispatch.note_backward(before)
        results = found if isinstance(found, tuple) else (found,)
        pairs = [(r, g) for r, g in zip(results, (grad_out, grad_lse), strict=False) if g is not None]
        pairs = [(r, g) for r, g in pairs if r.requires_grad]  # of calls without keys, nothing depends on anything
        made: Any = [None] * len(inputs)
        if pairs:
            made = torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    found_gradients = iter(made)
    places = zip(signature.gradients, wanted, strict=True)
    return tuple(
        laid_out_like(arguments[place], next(found_gradients)) if needed else no_gradient(arguments)
        for place, needed in places
    )


def by_torch(request: Request) -> Any:
    """Run a request by a path that torch differentiates: the requested path, a vendor's, or the reference."""
    if request.settings.backend not in ("auto", *own_names()):
        return run_request(request)
    for backend in ("vendor", "reference"):
        request.settings = msgspec.structs.replace(request.settings, backend=backend)
        try:
            return run_request(request)
        except PathUnavailable:
            if backend == "reference":
                raise
    raise AssertionError


def no_gradient(arguments: Sequence[Any]) -> torch.Tensor:
    return arguments[0].new_empty(0)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Record torch's operators inside the block, which torch does not do inside an operator."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def laid_out_like(tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient in memory of its own, with the strides of backward_shapes."""
    if gradient is None:
        return torch.zeros_like(tensor, requires_grad=False)
    return torch.empty_like(tensor, requires_grad=False).copy_(gradient)
