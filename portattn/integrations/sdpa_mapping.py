"""Map torch's scaled_dot_product_attention arguments to `portattn.attention`'s, or refuse them; a call's route."""

from __future__ import annotations

import math
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from portattn.api.autocast import is_on
from portattn.api.call import graph_number
from portattn.api.transform_checks import called_while_traced, is_sure
from portattn.config import current
from portattn.errors import ArgumentError, FallbackWarning, PathUnavailable, warn_caller
from portattn.schema.plan import Plan, Rejection
from portattn.schema.problem_limits import MAX_HEAD_DIM

_EAGER = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (*_EAGER, FakeTensor, FunctionalTensor)
_NUMBERS = (float, int, torch.SymFloat)  # the last where a graph is made for any number
_LARGEST = torch.finfo(torch.float32).max
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class MappedCall:
    """A call of `portattn.attention`, with tensors (B, H, S, D) in any layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]  # its other arguments; `layout` is the result's memory order
    shape: tuple[int, ...]  # of the result: torch's batch axes, Hq, Sq, Dv

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.options["layout"] == "bshd":
            return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)
        return self.q, self.k, self.v

    def result(self, out: torch.Tensor) -> torch.Tensor:
        out = out.transpose(1, 2) if self.options["layout"] == "bshd" else out
        return out if _alike(out.shape, self.shape) else out.reshape(self.shape)


def _alike(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    if len(shape) != len(other):
        return False
    for a, b in zip(shape, other, strict=True):  # noqa: SIM110 - dynamo evaluates a generator's comparisons at once
        if not is_sure(a == b):
            return False
    return True


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call that is left to torch."""

    kind: str  # a word for the cause, of which one warning is given
    reason: str  # in words
    invalid: bool = False  # torch's definition raises for it, if not every kernel


class _RefusedError(Exception):
    def __init__(self, kind: str, reason: str, *, invalid: bool = False) -> None:
        self.refused = RefusedCall(kind, reason, invalid)


def map_call(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> MappedCall | RefusedCall:
    """Return portattn's call for torch's arguments, or the reason of a refusal. A row without keys gives 0 in both."""
    try:
        _check_tensors(query=query, key=key, value=value, attn_mask=attn_mask)
        dropout_p, is_causal = _number("dropout_p", dropout_p), _flag("is_causal", is_causal)
        scale, enable_gqa = None if scale is None else _number("scale", scale), _flag("enable_gqa", enable_gqa)
        causal: bool | str = "top_left" if is_causal else False
        if attn_mask is not None and _is_a(attn_mask, "torch.nn.attention.bias", "CausalBias"):
            causal, attn_mask = _marker(attn_mask, query, key, is_causal), None
        elif attn_mask is not None and is_causal:
            raise _RefusedError(
                "mask and is_causal", "attn_mask and is_causal are both given: torch raises, or some of its kernels "
                "apply both",
            )  # fmt: skip
        _check_plain(query=query, key=key, value=value, attn_mask=attn_mask)
        query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
        _check_alike(query, key, value)
        if not 0.0 <= dropout_p < 1.0:
            raise _RefusedError(
                "dropout_p", f"dropout_p is {dropout_p}, and portattn takes [0, 1)", invalid=dropout_p > 1
            )
        if scale is not None and not -_LARGEST <= scale <= _LARGEST:  # which NaN is not, either
            raise _RefusedError("scale", f"scale is {scale}, and portattn takes finite ones of float32's range")
        return _shaped(query, key, value, attn_mask, causal, float(dropout_p), scale, enable_gqa)
    except _RefusedError as error:
        return error.refused


def _check_tensors(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) and not (name == "attn_mask" and value is None):
            reason = f"{name} is a {type(value).__name__}, and portattn takes tensors"
            raise _RefusedError(f"type of {name}", reason, invalid=True)


def _number(name: str, value: Any) -> Any:
    try:
        number = graph_number("attention", name, value)
    except ArgumentError as error:
        raise _RefusedError(f"type of {name}", str(error)) from None
    if not isinstance(number, _NUMBERS) or isinstance(number, bool):
        raise _RefusedError(f"type of {name}", f"{name} is a {type(number).__name__}, and portattn takes numbers")
    return number


def _flag(name: str, value: Any) -> bool:
    flag = graph_number("attention", name, value)
    if type(flag) is not bool:
        raise _RefusedError(f"type of {name}", f"{name} is {flag!r}, and portattn takes True or False")
    return flag


def _marker(bias: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> str:
    if is_causal:
        raise _RefusedError("type", "is_causal is True beside a CausalBias", invalid=True)
    if (
        query.dim() < 2
        or key.dim() < 2
        or not _alike((bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2]))
    ):
        # torch reads the sizes of a lower right marker, and not of an upper left one.
        raise _RefusedError("CausalBias", "attn_mask is a CausalBias of other sizes than the scores")
    return "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"


def _check_plain(**tensors: torch.Tensor | None) -> None:
    """Check for dense tensors of classes with rules for portattn's operators; others define SDPA themselves."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN and not _is_distributed(tensor):
            raise _RefusedError("subclass", f"{name} is a {type(tensor).__name__}, and portattn takes plain tensors")
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise _RefusedError("layout", f"{name} is nested or sparse, and portattn takes dense tensors")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise _RefusedError("dual", f"{name} has a forward-mode tangent, and portattn has no forward-mode AD")


def lie_in_memory(tensors: tuple[torch.Tensor, ...]) -> bool:
    return all(type(tensor) is not FunctionalTensor and not _is_distributed(tensor) for tensor in tensors)


def _is_distributed(tensor: torch.Tensor) -> bool:
    return _is_a(tensor, "torch.distributed.tensor", "DTensor")


def _is_a(tensor: torch.Tensor, module: str, name: str) -> bool:
    """Return whether the tensor is of a class of torch's, without importing its module, which takes a second."""
    found = sys.modules.get(module)
    return found is not None and type(tensor) is getattr(found, name)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return the arguments as autocast casts them: SDPA runs in its dtype, and float64 stays."""
    device = tensors[0].device.type
    if not torch._C._is_any_autocast_enabled():  # of the three the quickest to ask
        return tensors
    if not is_on(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        floats = tensor is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64
        return tensor.to(dtype) if tensor is not None and floats and tensor.device.type == device else tensor

    return tuple(cast(tensor) for tensor in tensors)


def _check_alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if not query.dtype is key.dtype is value.dtype:
        raise _RefusedError("dtype", "query, key and value have several dtypes", invalid=True)
    if not query.device == key.device == value.device:
        raise _RefusedError("device", "query, key and value are on several devices", invalid=True)
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise _RefusedError("dimensions", "query, key or value has less than two dimensions", invalid=True)
    if is_sure(query.shape[-1] != key.shape[-1]):
        raise _RefusedError("sizes", "query and key have different widths", invalid=True)
    if is_sure(key.shape[-2] != value.shape[-2]):
        raise _RefusedError("sizes", "key and value have different numbers of rows", invalid=True)
    if query.dtype not in _DTYPES:
        reason = f"query is {query.dtype}, and portattn takes float16, bfloat16 and float32"
        raise _RefusedError("dtype", reason, invalid=not query.is_floating_point())


def _shaped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, causal: bool | str,
    dropout_p: float, scale: float | None, enable_gqa: bool,
) -> MappedCall:  # fmt: skip
    """Return the call with four axes each: the last batch axis is the heads, the others are one batch."""
    lead_q, lead_k, lead_v = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    if enable_gqa:
        lead_k, lead_v = _grouped(lead_q, lead_k, lead_v)
    lead = _broadcast("query, key and value", lead_q, lead_k, lead_v)
    heads, batches = (lead[-1], lead[:-1]) if lead else (1, ())
    # One head for all queries is a group of portattn's, not to be expanded.
    one = is_sure(_last(lead_k) == 1) and is_sure(_last(lead_v) == 1)
    heads_k = key.shape[-3] if enable_gqa else 1 if one else heads
    batch = math.prod(batches)

    def four(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        rows, width = tensor.shape[-2:]
        if _alike(tensor.shape, (batch, heads, rows, width)):
            return tensor
        return tensor.expand(*batches, heads, rows, width).reshape(batch, heads, rows, width)

    if is_sure(heads == 0) or is_sure(heads_k == 0):
        raise _RefusedError("no heads", "there are no heads")
    if any(is_sure(width == 0) or is_sure(width > MAX_HEAD_DIM) for width in (query.shape[-1], value.shape[-1])):
        # (Without their number, which may be symbolic.)
        raise _RefusedError("head_dim", f"query or value has no columns, or more than portattn's {MAX_HEAD_DIM}")
    q, k, v = four(query, heads), four(key, heads_k), four(value, heads_k)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "dropout_p": dropout_p, "layout": _layout(q)}
    if attn_mask is not None:
        name = "mask" if attn_mask.dtype is torch.bool else "bias"
        scores = (*_broadcast("query and key", lead_q, lead_k), query.shape[-2], key.shape[-2])
        options[name] = _masked(attn_mask, query, scores, batches)
    return MappedCall(q, k, v, options, (*lead, query.shape[-2], value.shape[-1]))


def _last(lead: torch.Size) -> int:
    return lead[-1] if lead else 1


def _grouped(lead_q: torch.Size, lead_k: torch.Size, lead_v: torch.Size) -> tuple[torch.Size, torch.Size]:
    if not (lead_q and lead_k and lead_v):
        raise _RefusedError("dimensions", "enable_gqa needs an axis of heads", invalid=True)
    heads_q, heads_k, heads_v = lead_q[-1], lead_k[-1], lead_v[-1]
    if is_sure(heads_q == 0) or is_sure(heads_k == 0) or is_sure(heads_v == 0):
        raise _RefusedError("no heads", "there are no heads")
    if is_sure(heads_q % heads_k != 0) or is_sure(heads_q % heads_v != 0):
        raise _RefusedError("sizes", "the query's heads are no multiple of the key's and the value's", invalid=True)
    if is_sure(heads_k != heads_v):
        raise _RefusedError("heads", "key and value have different numbers of heads, and portattn takes one number")
    return torch.Size((*lead_k[:-1], heads_q)), torch.Size((*lead_v[:-1], heads_q))


def _broadcast(names: str, first: tuple[int, ...], *others: tuple[int, ...]) -> tuple[int, ...]:
    """Return the broadcast shape. (torch.broadcast_shapes takes as long as all the rest of a mapping.)"""
    found = tuple(first)
    for other in others:
        if _alike(found, other):
            continue
        rank = max(len(found), len(other))
        pairs = zip((1,) * (rank - len(found)) + found, (1,) * (rank - len(other)) + tuple(other), strict=True)
        sizes = []
        for a, b in pairs:
            if is_sure(a == 1):
                sizes.append(b)
            elif is_sure(b == 1) or is_sure(a == b):
                sizes.append(a)
            elif is_sure(a != b):
                raise _RefusedError("sizes", f"the batch axes of {names} do not broadcast", invalid=True)
            else:  # as torch broadcasts sizes that depend on data
                torch._check(a == b)
                sizes.append(a)
        found = tuple(sizes)
    return found


def _layout(q: torch.Tensor) -> str:
    if type(q) in _EAGER and not torch.compiler.is_dynamo_compiling():
        return "bshd" if not q.is_contiguous() and q.transpose(1, 2).is_contiguous() else "bhsd"
    return "bshd" if not _is_contiguous(q) and _is_contiguous(q.transpose(1, 2)) else "bhsd"


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Return whether a graph's tensor is surely contiguous: its own method guards on data-dependent sizes and fails."""
    step: Any = 1
    dense: Any = 1  # torch counts an empty axis as one element, or not, where it cannot know whether it is empty
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not is_sure(size == 1) and not is_sure(stride == step) and not is_sure(stride == dense):
            return False
        # Only a symbolic size can be empty without a guard: dynamo of torch 2.11 has no sym_max of integers.
        step, dense = step * (torch.sym_max(size, 1) if isinstance(size, torch.SymInt) else max(size, 1)), dense * size
    return True


def _masked(
    attn_mask: torch.Tensor, query: torch.Tensor, scores: tuple[int, ...], batches: tuple[int, ...]
) -> torch.Tensor:
    """Return attn_mask with four axes that broadcast to (B, Hq, Sq, Sk), copied only if its own batches do."""
    if attn_mask.device != query.device:
        raise _RefusedError("device", "attn_mask is on another device than query", invalid=True)
    if attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        raise _RefusedError("dtype", f"attn_mask is {attn_mask.dtype} and query {query.dtype}", invalid=True)
    if attn_mask.dim() < 2:
        raise _RefusedError("attn_mask", "attn_mask has less than two dimensions, which some of torch's kernels refuse")
    given = attn_mask.shape
    misfits = len(given) > len(scores) or any(
        is_sure(size != 1) and is_sure(size != limit)
        for size, limit in zip(reversed(given), reversed(scores), strict=False)
    )
    if misfits:
        raise _RefusedError("attn_mask", "attn_mask does not broadcast to the scores", invalid=True)
    if len(given) <= 4 and len(batches) <= 1:
        return attn_mask
    heads = given[-3] if len(given) > 2 else 1
    if all(is_sure(size == 1) for size in given[:-3]):
        return attn_mask.reshape(1, heads, *given[-2:])
    return attn_mask.expand(*batches, heads, *given[-2:]).reshape(math.prod(batches), heads, *given[-2:])


WHO = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Route:
    """The route of a call, and its reason.

    Attributes:
        path: "portattn", or "torch" for torch's own kernels
        reason: why torch runs the call; empty for portattn
        plan: portattn's Plan of `attention`; None for torch, of `last_route`, and inside transforms
    """

    path: str
    reason: str = ""
    plan: Plan | None = None

    def explain(self) -> str:
        if self.path == "torch":
            return f"{WHO}: torch's own, because {self.reason}"
        return f"{WHO}: portattn" + ("" if self.plan is None else f"\n{self.plan.explain()}")


class Serving(threading.local):
    """Whether this thread serves a call: SDPA calls inside of it are torch's own."""

    now = False


OURS = Route("portattn")
_last_route: ContextVar[Route | None] = ContextVar("portattn_sdpa_route", default=None)
_warned: set[tuple[str, str]] = set()


def note(route: Route | None) -> None:
    _last_route.set(route)


def last_route() -> Route | None:
    """Return the route of the last call in this thread or task; None before any.

    portattn.last_plan() says how portattn ran it. A graph of torch.compile or torch.export runs without noting a route.

    Returns:
        A Route without its plan.

    Examples:
        >>> import torch
        >>> from portattn.integrations import sdpa
        >>> q = torch.randn(1, 2, 5, 16)
        >>> out = sdpa.scaled_dot_product_attention(q, q, q)
        >>> sdpa.last_route().path
        'portattn'
    """
    return _last_route.get()


def check_allowed(op: str, refused: RefusedCall) -> None:
    settings = current()
    if settings.fallback == "error" or settings.backend != "auto":
        cause = "fallback='error'" if settings.fallback == "error" else f"backend={settings.backend!r}"
        raise PathUnavailable(
            f"{op}: portattn cannot take this call, and {cause} forbids that torch runs it",
            [Rejection(path="portattn", reason=refused.reason)],
        )


def torch_ran(op: str, refused: RefusedCall) -> None:
    """Note that torch ran a call, and warn of it once a cause."""
    note(Route("torch", refused.reason))
    key = (op, refused.kind)
    if current().fallback == "warn" and key not in _warned:
        _warned.add(key)
        warn_caller(f"{op} runs on torch's own kernels, not portattn: {refused.reason}", FallbackWarning)


@called_while_traced
def note_while_tracing() -> bool:
    """Note that dynamo's graph has portattn's operator. Dynamo calls it while it traces."""
    note(OURS)
    return True


@called_while_traced
def tell_while_tracing(op: str, kind: str, reason: str, invalid: bool) -> bool:
    """Tell that dynamo's graph has torch's operator; return whether the settings allow it, which dynamo keeps."""
    refused = RefusedCall(kind, reason, invalid)
    if not refused.invalid:
        try:
            check_allowed(op, refused)
        except PathUnavailable:
            return False
    torch_ran(op, refused)
    return True


def forget_warnings() -> None:
    _warned.clear()
