"""Checks for calls that go through torch's dispatcher, as an operator: recorded or transformed calls, active dispatch
modes, and tensors without memory of their own.

Dynamo does not trace functions that `leave_out` names: it breaks the graph and calls them, as `left_out["run"](...)`.
torch.compiler.disable imports dynamo, which takes a second: they are disabled after its import (portattn/__init__.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from portattn.errors import ArgumentError, TracingError
from portattn.launch.torch_compat import in_mode

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PYTHON, _FUNCTIONAL = torch._C.DispatchKey.Python, torch._C.DispatchKey.Functionalize


def are_transformed(tensors: Iterable[Any]) -> bool:
    """Return whether torch.func wraps a tensor, or a tensor has a tangent."""
    given = list(_only(tensors))
    return have_tangents(given) or any(_wrapped(tensor) for tensor in given)


def transformed_or_traced() -> bool:
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._get_tracing_state() is not None


def have_tangents(values: Iterable[Any]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _only(values))


def are_dispatched(tensors: Iterable[Any]) -> bool:
    """Return whether torch's dispatcher must see the call: a mode is active, or `are_recorded`."""
    return in_mode() or are_recorded(tensors)


def are_recorded(tensors: Iterable[Any]) -> bool:
    """Return whether a call has no numbers yet: it is recorded, or a tensor is more than memory."""
    if torch._C._get_tracing_state() is not None or _proxy_tracer() or shapes_alone(()):
        return True
    return any(tensor.is_meta or _more_than_memory(tensor) for tensor in _only(tensors))


def _more_than_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's own code computes operators: a DTensor, a fake or functionalized tensor."""
    keys = torch._C._dispatch_keys(tensor)
    return bool(keys.has(_PYTHON) or keys.has(_FUNCTIONAL))


def _only(tensors: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


def check_has_storage(op: str, tensors: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a tensor that has elements and no address, as after its memory was given back."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and _lies_nowhere(tensor):
            limit = "must lie in memory: of a wrapper give what it wraps"
            raise ArgumentError(op, name, f"a {type(tensor).__name__} without memory of its own", limit)


def refuse_what_no_kernel_sees(op: str, tensors: Mapping[str, Any]) -> None:
    """Raise TracingError for a prepared call in a trace or transform, ArgumentError for a tensor without storage."""
    refuse_tracing(op, tensors.values())
    check_has_storage(op, tensors)


def refuse_tracing(op: str, tensors: Iterable[Any]) -> None:
    """Raise TracingError if a handle's run is recorded (torch.export, make_fx, jit.trace) or torch.func transforms it.

    The recorded program would hold the allocation of results alone, and return uninitialised memory."""
    recorder = "torch.jit.trace" if torch._C._get_tracing_state() is not None else _proxy_tracer()
    if recorder:
        raise TracingError(
            f"{op}: {recorder} cannot record the run of a handle, which launches kernels itself. Call "
            f"portattn.{op} there: it is recorded as one operator"
        )
    if are_transformed(tensors):
        raise TracingError(
            f"{op}: torch.func cannot transform the run of a handle. Call portattn.{op} there, which it can"
        )


def shapes_alone(tensors: Iterable[Any]) -> bool:
    """Return whether a call returns fake tensors: it has some, or a mode makes every tensor fake."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode is not None or any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _lies_nowhere(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements and no address: a wrapper subclass, or memory that was given back."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return tensor.numel() > 0 and tensor.data_ptr() == 0


def _proxy_tracer() -> str:
    """Return the tracer that is recording torch's operators, or ""."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if module is None:  # nothing has ever traced in this process
        return ""
    mode = module.get_proxy_mode()
    if mode is None:
        return ""
    exporting = getattr(torch.compiler, "is_exporting", lambda: False)()
    return "torch.export" if exporting else "make_fx, or torch.export,"


def is_sure(condition: Any) -> bool:
    """Return whether a comparison of sizes surely holds: data-dependent sizes must not specialise a graph."""
    if not torch.compiler.is_dynamo_compiling() and not isinstance(condition, torch.SymBool):
        return bool(condition)  # torch.jit.trace compares tensors
    from torch.fx.experimental import symbolic_shapes  # its import takes a second

    # Torch 2.6 has no guard_or_false.
    return bool(getattr(symbolic_shapes, "guard_or_false", symbolic_shapes.guard_size_oblivious)(condition))


left_out: dict[str, Callable[..., Any]] = {}
_reasons: dict[str, str] = {}
_disabled: set[str] = set()
_constant: list[Callable[..., Any]] = []
F = TypeVar("F", bound=Callable[..., Any])


def leave_out(name: str, function: Callable[..., Any], reason: str) -> None:
    """Have dynamo leave a function alone; its error gives the reason if it may not break the graph."""
    left_out[name], _reasons[name] = function, reason
    _apply_if_dynamo_is_here()


def called_while_traced(function: F) -> F:
    """Have dynamo call a function while it traces, and put its result into the graph (assume_constant_result)."""
    _constant.append(function)
    _apply_if_dynamo_is_here()
    return function


def _apply_if_dynamo_is_here() -> None:
    module = sys.modules.get("torch._dynamo")
    if module is not None and hasattr(module, "disable"):
        apply_all()


def apply_all() -> None:
    """Disable the registered functions, once dynamo is imported."""
    from torch._dynamo import assume_constant_result, disable

    while _constant:
        assume_constant_result(_constant.pop())

    takes_reason = "reason" in inspect.signature(disable).parameters  # since torch 2.8
    for name in _reasons.keys() - _disabled:
        left_out[name] = disable(left_out[name], **({"reason": _reasons[name]} if takes_reason else {}))
        _disabled.add(name)
