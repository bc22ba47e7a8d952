"""Backward passes by portattn's kernels: the gradients' operation, called with the tensors that the forward saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import torch

from portattn.api import dispatch, recompute
from portattn.api.execute import lookup, run_request
from portattn.api.request import request_from
from portattn.api.torch_ops import SIGNATURES, OperatorSignature, arguments_of
from portattn.config import Settings, current
from portattn.planning.gradients import own_path
from portattn.planning.kernel_specs import CORES
from portattn.schema.ops import BACKWARD, ROWS

Gradients = dict[str, torch.Tensor]


def may_have_kernels(op: str, q: torch.Tensor, v: torch.Tensor, backend: Any) -> bool:
    """Whether gradients of such a call may be computed by kernels, which take its result and its LSE: before anything
    is planned, by shapes that may be symbolic."""
    if op not in BACKWARD or max_width(op) < q.shape[-1] or max_width(op) < v.shape[-1]:
        return False
    return q.device.type != "meta" and own_path(backend or current().backend, q.device.type) is not None


@functools.cache
def max_width(op: str) -> int:
    """Widest head that the kernels of an operation's gradients take."""
    return CORES[BACKWARD[op]].max_head_dim


def gradients(
    op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any], out: torch.Tensor,
    lse: torch.Tensor, grad_out: Any, grad_lse: Any, asked: Collection[str], otherwise: str | None = None,
) -> Gradients | None:  # fmt: skip
    """The gradients that are asked for, by name; None where no kernel of portattn's runs here.

    tensors, values, lengths  of the forward, as a Request has them
    out, lse            of the forward, with every row's LSE
    grad_out, grad_lse  of the results, either None
    asked               names of tensors
    otherwise           a path that computes them if no kernel runs, or none takes such wide heads: "reference"

    Extra memory: delta (B, Hq, Sq) float32, and what a variant declares (the float32 dQ of gluon_backward); with a bias
    whose gradient is asked for another one in float32; where a plan says `parts=memory`, which is of float32 alone, 6
    bytes for each number of q, k, v and grad_out.
    """
    way = _WAYS[op]
    if way.unknown and any(tensors[place] is not None for place in way.unknown):
        return None
    settings = current()
    if otherwise is not None and not may_have_kernels(op, tensors[way.source["q"]], tensors[way.source["v"]], None):
        settings = msgspec.structs.replace(settings, backend=otherwise)
    fixed = way.values(tuple(values), tensors[0].device.type, settings, otherwise)
    if fixed is None:
        return None
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    given: list[Any] = [None] * way.count
    for place, source in way.copied:
        given[place] = tensors[source]
    at = way.at
    given[at["forward_out"]], given[at["forward_lse"]], given[at["grad_out"]] = out, lse, _rows(grad_out)
    if grad_lse is not None:
        given[at["grad_lse"]] = grad_lse.contiguous().resolve_neg()
    found: Gradients = {}
    for name, source, place in way.qkv:
        tensor = tensors[source]
        memory = torch.empty_like(tensor)
        found[name] = given[place] = memory if memory.stride(-1) == 1 else tensor.new_empty(tensor.shape)
    for name, own in way.summed:
        if name in asked:
            given[at[own]] = _memory(name, tensors[way.source[name]], lse)
    if lse.numel():
        ready, before = tuple(given), dispatch.last_plan_state()
        delta = lookup(way.op, ready, fixed, tuple(lengths))
        if delta is None:
            delta = run_request(request_from(way.op, ready, fixed, lengths))
        dispatch.note_backward(before)
        assert isinstance(delta, torch.Tensor)
    else:  # without rows nothing is launched, and there may be keys
        delta = lse
        for memory in (*found.values(), *(given[at[own]] for _, own in way.summed if given[at[own]] is not None)):
            memory.zero_()
    own_place = way.source
    if "bias" in asked:
        found["bias"] = _like(given[at["grad_bias"]], tensors[own_place["bias"]])
    if "alibi_slopes" in asked:
        beginnings = tensors[own_place["cu_seqlens_q"]] if "cu_seqlens_q" in own_place else None
        found["alibi_slopes"] = _slopes(tensors[own_place["alibi_slopes"]], given[at["grad_slopes"]], beginnings)
    if "sinks" in asked:
        found["sinks"] = _sinks(tensors[own_place["sinks"]], lse, delta)
    return found if len(found) == len(asked) else {name: tensor for name, tensor in found.items() if name in asked}


class _Way:
    """The gradients' operation of a forward.

    op      name of the operation
    count   number of its tensors
    at      name -> place of its tensors
    copied  (place, place in the forward) of tensors that are the forward's too
    qkv     (name, place in the forward, place of the gradient) of q, k and v
    summed  (name, name of the tensor that takes the gradient's parts) of optional gradients
    source  name -> place of the forward's tensors
    unknown places in the forward of tensors that the operation lacks: with one of them its gradient is wrong
    """

    def __init__(self, forward: str) -> None:
        self.op = BACKWARD[forward]
        row, before = ROWS[self.op], ROWS[forward]
        names, self.source = list(row.tensors), {name: place for place, name in enumerate(before.tensors)}
        self.count, self.at = len(names), {name: place for place, name in enumerate(names)}
        self.copied = [(place, self.source[name]) for place, name in enumerate(names) if name in self.source]
        self.unknown = [self.source[name] for name in before.tensors if name not in self.at]
        self.qkv = [(name, self.source[name], self.at[f"grad_{name}"]) for name in ("q", "k", "v")]
        summed = (("alibi_slopes", "grad_slopes"), ("bias", "grad_bias"))
        self.summed = [(name, own) for name, own in summed if own in self.at]
        self._fixed, self._forward = row.fixed, (*before.fixed, "backend", "validate")
        self._known: dict[Any, Any] = {}
        self._last: tuple[Any, Any, Any] = (None, None, None)  # values, the rest of the key, the result

    def values(
        self, values: tuple[Any, ...], device_type: str, settings: Settings, otherwise: str | None = None
    ) -> tuple[Any, ...] | None:
        """Map the forward's values to the operation's; without `otherwise` None if they name a path without a kernel.

        settings  in force
        """
        backend = settings.backend
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        rest = device_type, backend, deterministic, otherwise
        last = self._last
        if last[0] is values and last[1] == rest:  # a kind of call has one tuple of values
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


_MOST_KNOWN = 1024
_WAYS = {forward: _Way(forward) for forward in BACKWARD}


def compute_gradients(
    op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any], out: torch.Tensor,
    lse: torch.Tensor, grad_out: Any, grad_lse: Any, asked: Collection[str],
) -> Gradients:  # fmt: skip
    """As `gradients`; where no kernel runs, by a path that torch differentiates, which computes the forward anew."""
    made = gradients(op, tensors, values, lengths, out, lse, grad_out, grad_lse, asked)
    if made is not None:
        return made
    return _by_name(op, asked, recompute.gradient_builds, (grad_out, grad_lse), (tensors, values, lengths))


def record_gradients(
    op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any], out: torch.Tensor,
    lse: torch.Tensor, grad_out: Any, grad_lse: Any, asked: Collection[str],
) -> Gradients:  # fmt: skip
    """As `computed`, as a node of autograd's graph."""
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
    """Its rows contiguous: the gradient of a sum has a stride of 0 along each axis."""
    return grad_out if grad_out.stride(-1) == 1 and 0 not in grad_out.stride() else grad_out.contiguous()


def _memory(name: str, tensor: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Where the kernels put the gradient of a bias, or each row's part of that of the slopes."""
    shape = lse.shape if name == "alibi_slopes" else (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    return torch.empty(shape, dtype=torch.float32, device=tensor.device)


def _like(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return gradient.view(tensor.shape).to(tensor.dtype)


def _slopes(slopes: torch.Tensor, parts: torch.Tensor, beginnings: torch.Tensor | None) -> torch.Tensor:
    """Slopes' gradient of each row's part: (Hq,), or (B, Hq)."""
    if beginnings is None:
        found = parts.sum(2)
        return _like(found.sum(0) if slopes.ndim == 1 else found, slopes)
    if slopes.ndim == 1:
        return _like(parts.sum(1), slopes)
    # Of packed rows, by differences of running sums: the same ones each time, and no length is read back. A NaN or an
    # infinity would stay in the sums of all later sequences: such elements are counted, and make their own sequence's
    # gradient NaN.
    finite = parts.isfinite()
    bounds = beginnings.long().clamp(0, parts.shape[1])
    found = _between(parts.double().where(finite, 0.0), bounds)
    return found.masked_fill(_between(~finite, bounds) > 0, float("nan")).transpose(0, 1).to(slopes.dtype)


def _between(parts: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Sums of (Hq, Tq) between bounds (B + 1,): (Hq, B)."""
    return torch.nn.functional.pad(parts.cumsum(1), (1, 0))[:, bounds].diff(dim=1)


def _sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """A sink has a share of each row's softmax and no value: -P·delta, summed over rows (B, Hq, Sq), or (Hq, Tq)."""
    found = -(sink_share(sinks, lse) * delta).sum(-1)
    return (found if lse.ndim == 2 else found.sum(0)).to(sinks.dtype)


def sink_share(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the sinks' probabilities, shaped as the LSE (…, Hq, Sq), float32: all of a row for a sink of +inf."""
    scores = sinks.float()[:, None]
    share = torch.exp(scores - lse).masked_fill(lse == float("-inf"), 0.0)
    return share.masked_fill((scores == float("inf")) & (lse == float("inf")), 1.0)
