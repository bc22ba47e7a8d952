"""portattn in the place of torch's scaled_dot_product_attention: a function, a block, and a flash implementation.

Calls that `portattn.attention` cannot take run on torch, with one FallbackWarning for each cause (setting `fallback`);
`route` and `explain` tell beforehand. Input that torch refuses raises torch's error.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from portattn.api import ops
from portattn.api.transform_checks import are_transformed, leave_out, left_out
from portattn.errors import ArgumentError, TracingError
from portattn.integrations.sdpa_flash import flash_impl, register_flash_impl
from portattn.integrations.sdpa_mapping import (
    OURS,
    WHO,
    MappedCall,
    RefusedCall,
    Route,
    Serving,
    check_allowed,
    last_route,
    lie_in_memory,
    map_call,
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
    "replacement",
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
    """Run torch's scaled_dot_product_attention, argument for argument, by `portattn.attention`.

    Autocast casts as for torch's function. A row with nothing to attend gives 0. The result has query's memory order,
    like torch's fused kernels'. In graphs (torch.compile with fullgraph, torch.export, make_fx) and torch.func's
    transforms the call is portattn's operator, with dropout too; forward mode is torch's own.

    Args:
        query: (..., Hq, L, E), two axes or more; float16, bfloat16 or float32 (others are torch's own)
        key, value: (..., H, S, E) and (..., H, S, Ev); axes before the last two broadcast, unless enable_gqa has their
            heads repeated
        attn_mask: broadcasts to (..., Hq, L, S): bool, True = attend; or added to the scores, in query's dtype or
            float32. It may require grad. A CausalBias of torch.nn.attention.bias is its causal mask
        dropout_p: dropout on the probabilities; it draws other elements than torch's kernels do
        is_causal: query i sees keys 0..i (top-left)
        scale: factor on the scores; None for 1/√E
        enable_gqa: Hq may be a multiple of H

    Returns:
        (..., Hq, L, Ev) in query's dtype.

    Raises:
        RuntimeError: torch refuses the same input; errors of torch keep their type.
        PathUnavailable: portattn cannot take the call, and `fallback="error"` or a named `backend` forbids falling
            back.

    Examples:
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
    """Serve a call while dynamo traces it: no operator's error can be caught, and the route is noted now."""
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
    """Return the call as refused by portattn.attention itself: a mask to be negated, forward-mode derivatives."""
    if isinstance(error, ArgumentError):
        return RefusedCall(error.argument, str(error))
    return RefusedCall("tracing", str(error))


def _hand_over(refused: RefusedCall, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Return torch's result or raise its error; raise PathUnavailable if falling back is forbidden."""
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
    """Return the route that a call of `scaled_dot_product_attention` would take, and why. Nothing is launched.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as there: query (..., Hq, L, E)

    Returns:
        A Route: `path`, `reason`, and portattn's `plan`. The plan is None under torch.func's transforms or
        functionalization, and for DTensors: it is made when the operator runs.

    Raises:
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        QuirkConflict: The registry contradicts itself.

    Examples:
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
    """Return in words the route that a call of `scaled_dot_product_attention` would take, and why.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as there: query (..., Hq, L, E)

    Returns:
        The text of the Route; with portattn's plan, several lines.

    Raises:
        PathUnavailable: A named path cannot run the call, or falling back is forbidden.
        QuirkConflict: The registry contradicts itself.

    Examples:
        >>> import torch
        >>> from portattn.integrations import sdpa
        >>> q = torch.randn(1, 2, 5, 16)
        >>> print(sdpa.explain(q, q, q, dropout_p=1.0))
        scaled_dot_product_attention: torch's own, because dropout_p is 1.0, and portattn takes [0, 1)
    """
    found = route(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return found.explain()


class _Blocks:
    """Open blocks of all threads: the first puts portattn's function in place, the last restores torch's."""

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
            # A function that other code has put there since stays.
            if self.open == 0 and _functional.scaled_dot_product_attention is scaled_dot_product_attention:
                _functional.scaled_dot_product_attention = self.before


_blocks = _Blocks()


@contextlib.contextmanager
def replacement() -> Iterator[None]:
    """Replace torch.nn.functional.scaled_dot_product_attention by portattn's inside a block, in all threads.

    Code that looks the name up in torch.nn.functional is served (nn.MultiheadAttention, models, checkpointed code that
    runs again in a backward); a name imported before (`from torch.nn.functional import ...`) stays torch's. Blocks nest
    and may overlap in several threads; the last to end restores. torch.compile compiles code from outside the block
    again.

    Returns:
        The context manager.

    Examples:
        >>> import torch
        >>> from portattn.integrations import sdpa
        >>> q = torch.randn(1, 2, 5, 16)
        >>> with sdpa.replacement():
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> sdpa.last_route().path
        'portattn'
    """
    _blocks.enter()
    try:
        yield
    finally:
        _blocks.leave()


def __getattr__(name: str) -> Any:
    if name == "replaced":
        warnings.warn(f"{__name__}.replaced is now named replacement", DeprecationWarning, stacklevel=2)
        return replacement
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
