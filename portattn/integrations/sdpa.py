"""portattn in the place of torch's scaled_dot_product_attention: a function, a block in which torch's own name is
served, and an implementation in torch's registry of flash attention.

What `portattn.attention` cannot take is torch's own, never silently: one FallbackWarning a cause, as the setting
`fallback` says, and `route` and `explain` tell beforehand. Input that torch refuses raises torch's error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from portattn.api import ops
from portattn.api.dynamo_disabled import leave_out, left_out
from portattn.api.transform_checks import are_transformed
from portattn.errors import ArgumentError, TracingError
from portattn.integrations.sdpa_flash import flash_impl, register_flash_impl
from portattn.integrations.sdpa_mapping import MappedCall, RefusedCall, lie_in_memory, map_call
from portattn.integrations.sdpa_routes import (
    OURS,
    WHO,
    Route,
    Serving,
    check_allowed,
    last_route,
    note,
    note_while_tracing,
    tell_while_tracing,
    torch_ran,
)

__all__ = [
    "Route",
    "explain",
    "flash_impl",
    "last_route",
    "register_flash_impl",
    "replaced",
    "route",
    "scaled_dot_product_attention",
]

# torch's own, whatever stands at torch.nn.functional by now.
_torchs = torch._C._nn.scaled_dot_product_attention
_functional: Any = torch.nn.functional


_serving = Serving()
_choosing = threading.Lock()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention, argument for argument, by `portattn.attention`.

    query       (..., Hq, L, E), two axes or more; float16, bfloat16 or float32 (others are torch's own)
    key, value  (..., H, S, E) and (..., H, S, Ev); axes before the last two broadcast, unless enable_gqa has their
                heads repeated
    attn_mask   broadcasts to (..., Hq, L, S): bool, True = attend; or added to the scores, in query's dtype or float32.
                It may require grad. A CausalBias of torch.nn.attention.bias is taken as what it says
    dropout_p   dropout on the probabilities; it draws other elements than torch's kernels do
    is_causal   query i sees keys 0..i (top-left)
    scale       factor on the scores; None for 1/√E
    enable_gqa  Hq may be a multiple of H

    Autocast casts the arguments as it does for torch's function. A row that may attend nothing gives 0. The result has
    query's memory order, (..., L, Hq, Ev) where query has it, as torch's fused kernels do.

    Returns (..., Hq, L, Ev) in query's dtype.

    In graphs and transforms it is portattn's operator where `portattn.attention` is: under torch.compile (with
    fullgraph, too), torch.export, make_fx and torch.func, with dropout, too. Forward mode is torch's own.

    Raises what torch raises for the same input; PathUnavailable where portattn cannot take the call and falling back
    is forbidden, by `fallback="error"` or a named `backend`.

    >>> import torch
    >>> from portattn.integrations import sdpa
    >>> q, k, v = torch.randn(2, 8, 3, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    >>> ours = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    >>> torch.allclose(ours, right, atol=1e-5)
    True
    """
    serve = _serve_traced if torch.compiler.is_dynamo_compiling() else _serve
    return serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _serve(*arguments: Any) -> torch.Tensor:
    """A call by portattn, or by torch. Arguments in torch's order."""
    if _serving.now:
        return _call_torch(arguments)
    _serving.now = True
    try:
        found = map_call(*arguments)
        if isinstance(found, MappedCall):
            try:
                out: Any = ops.attention(*found.tensors(), **found.options)
            except (ArgumentError, TracingError) as error:  # raised before anything is launched
                found = _refused(error)
            else:
                note(OURS)
                return found.result(out)
        return _hand_over(found, arguments)
    finally:
        _serving.now = False


def _serve_traced(*arguments: Any) -> torch.Tensor:
    """As _serve, while dynamo traces it: plain Python alone, and no error of an operator can be caught here. The graph
    has portattn's operator, or torch's. The route is told now, and not when the graph runs."""
    found = map_call(*arguments)
    if isinstance(found, MappedCall):
        note_while_tracing()
        out: Any = ops.attention(*found.tensors(), **found.options)
        return found.result(out)
    if not tell_while_tracing(WHO, found.kind, found.reason, found.invalid):
        return left_out["SDPA"](*arguments)  # and raise there
    return _by_torch(found, arguments)


leave_out(
    "SDPA", _serve, "portattn cannot take this call, and fallback='error' or a named backend forbids that torch runs it"
)


def _call_torch(arguments: tuple[Any, ...]) -> torch.Tensor:
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments
    return _torchs(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip


def _refused(error: ArgumentError | TracingError) -> RefusedCall:
    """A call that portattn.attention itself does not take: a mask to be negated, forward-mode derivatives."""
    if isinstance(error, ArgumentError):
        return RefusedCall(error.argument, str(error))
    return RefusedCall("tracing", str(error))


def _hand_over(refused: RefusedCall, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Let torch answer: its result, its error, or PathUnavailable where falling back is forbidden."""
    if not refused.invalid:
        check_allowed(WHO, refused)
    out = _by_torch(refused, arguments)
    torch_ran(WHO, refused)
    return out


def _by_torch(refused: RefusedCall, arguments: tuple[Any, ...]) -> torch.Tensor:
    if refused.invalid:
        # By torch's definition of SDPA, which checks. Its fused CPU kernel takes a value of other rows than key's.
        if torch.compiler.is_dynamo_compiling():  # it cannot enter a lock, and one thread compiles at a time
            return _by_definition(arguments)
        with _choosing:  # the flags that say which kernels may be taken are the process's
            return _by_definition(arguments)
    return _call_torch(arguments)


def _by_definition(arguments: tuple[Any, ...]) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _call_torch(arguments)


def route(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Route:
    """Which way a call of `scaled_dot_product_attention` would take, and why. Nothing is launched.

    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa  as there: query (..., Hq, L, E)

    Returns a Route: `path`, `reason`, and portattn's `plan`, which is None for what torch.func transforms, what is
    being functionalized, and DTensors: it is made when the operator runs.

    Raises PathUnavailable and QuirkConflict as `portattn.plan` does.

    >>> import torch
    >>> from portattn.integrations import sdpa
    >>> q = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    >>> sdpa.route(q, q, q).reason
    'query is torch.float64, and portattn takes float16, bfloat16 and float32'
    >>> half = q.half()
    >>> print(sdpa.route(half, half, half, is_causal=True).plan.problem)
    attention q (1,2,5,16) kv (1,2,5,16) fp16 causal top-left
    """
    found = map_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(found, MappedCall):
        tensors = found.tensors()
        transformed = are_transformed(tensors)
        if transformed or not lie_in_memory(tensors):
            return Route("portattn")
        try:
            return Route("portattn", plan=ops.plan("attention", *tensors, **found.options))
        except (ArgumentError, TracingError) as error:
            found = _refused(error)
    return Route("torch", found.reason + (", which torch refuses" if found.invalid else ""))


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """In words, which way a call of `scaled_dot_product_attention` would take, and why.

    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa  as there: query (..., Hq, L, E)

    Returns the text of the Route; with portattn's plan, several lines.

    Raises what `route` raises.

    >>> import torch
    >>> from portattn.integrations import sdpa
    >>> q = torch.randn(1, 2, 5, 16)
    >>> print(sdpa.explain(q, q, q, dropout_p=1.0))
    scaled_dot_product_attention: torch's own, because dropout_p is 1.0, and portattn takes [0, 1)
    """
    found = route(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return found.explain()


class _Blocks:
    """The blocks that are open, in all threads. The first puts our function in its place, the last takes it out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.before: Any = None

    def enter(self) -> None:
        with self.lock:
            if self.open == 0:
                self.before = _functional.scaled_dot_product_attention
                _functional.scaled_dot_product_attention = scaled_dot_product_attention
            self.open += 1

    def leave(self) -> None:
        with self.lock:
            self.open -= 1
            # Whoever has put another function there since keeps it.
            if self.open == 0 and _functional.scaled_dot_product_attention is scaled_dot_product_attention:
                _functional.scaled_dot_product_attention = self.before


_blocks = _Blocks()


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """A block in which torch.nn.functional.scaled_dot_product_attention is portattn's, in all threads.

    What looks the name up in torch.nn.functional is served: nn.MultiheadAttention, models that write
    F.scaled_dot_product_attention, what is checkpointed and computed again in a backward. A name that was imported
    before (`from torch.nn.functional import ...`) stays torch's own. Blocks nest, and may overlap in several threads;
    the last that ends restores. torch.compile compiles again inside what it compiled outside.

    Returns the context manager.

    Raises nothing of its own.

    >>> import torch
    >>> from portattn.integrations import sdpa
    >>> q = torch.randn(1, 2, 5, 16)
    >>> with sdpa.replaced():
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> sdpa.last_route().path
    'portattn'
    """
    _blocks.enter()
    try:
        yield
    finally:
        _blocks.leave()
