"""What keeps a call from being launched at once: that it is recorded, transformed or seen by a dispatch mode, and
tensors without memory of their own. Such a call goes through torch's dispatcher, as an operator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from portattn.errors import ArgumentError, TracingError
from portattn.launch.guards import in_mode

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PYTHON, _FUNCTIONAL = torch._C.DispatchKey.Python, torch._C.DispatchKey.Functionalize


def are_transformed(tensors: Iterable[Any]) -> bool:
    """Whether torch.func has some of the tensors, or forward-mode differentiation is under way."""
    given = list(_only(tensors))
    return have_tangents(given) or any(_wrapped(tensor) for tensor in given)


def transformed_or_traced() -> bool:
    """Whether a transform of torch.func, forward-mode differentiation or torch.jit.trace is under way."""
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    return torch._C._get_tracing_state() is not None


def have_tangents(values: Iterable[Any]) -> bool:
    """Whether forward-mode differentiation is under way, and some of the tensors among values have a tangent."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _only(values))


def are_dispatched(tensors: Iterable[Any]) -> bool:
    """Whether torch's dispatcher must see the call: something records it, or a tensor is more than memory."""
    return in_mode() or are_recorded(tensors)


def are_recorded(tensors: Iterable[Any]) -> bool:
    """Whether a call has no numbers yet: something records it, or a tensor is more than memory."""
    if torch._C._get_tracing_state() is not None or _proxy_tracer() or shapes_alone(()):
        return True
    return any(tensor.is_meta or _more_than_memory(tensor) for tensor in _only(tensors))


def _more_than_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's own code computes operators: a DTensor, a fake tensor, one that is being functionalized."""
    keys = torch._C._dispatch_keys(tensor)
    return bool(keys.has(_PYTHON) or keys.has(_FUNCTIONAL))


def _only(tensors: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (tensor for tensor in tensors if isinstance(tensor, torch.Tensor))


def check_has_storage(op: str, tensors: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a tensor that has elements and no address: its memory was given back, say.

    tensors  the call's, by name; what is no tensor is left to validation
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and _lies_nowhere(tensor):
            limit = "must lie in memory: of a wrapper give what it wraps"
            raise ArgumentError(op, name, f"a {type(tensor).__name__} without memory of its own", limit)


def refuse_what_no_kernel_sees(op: str, tensors: Mapping[str, Any]) -> None:
    """Raise TracingError for a prepared call in a trace or transform, ArgumentError for a tensor without storage.

    tensors  the call's, by name; meta and fake tensors, and arguments that are no tensors, are left to validation
    """
    refuse_tracing(op, tensors.values())
    check_has_storage(op, tensors)


def refuse_tracing(op: str, tensors: Iterable[Any]) -> None:
    """Raise TracingError where a handle's run is being recorded, to be run again later, by torch.export, make_fx or
    jit.trace, or where torch.func transforms it (vmap, grad, jvp).

    What would be recorded of it is that memory is allocated: the recorded program would return what lies there.
    """
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
    """Whether a call is answered with fake tensors: it has some, or a mode makes every tensor a fake one."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode is not None or any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _lies_nowhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements and no address: a subclass that wraps others, or memory that was given back."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return tensor.numel() > 0 and tensor.data_ptr() == 0


def _proxy_tracer() -> str:
    """The tracer that is recording torch's operators now; empty for none."""
    module = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if module is None:  # nothing has ever traced in this process
        return ""
    mode = module.get_proxy_mode()
    if mode is None:
        return ""
    exporting = getattr(torch.compiler, "is_exporting", lambda: False)()
    return "torch.export" if exporting else "make_fx, or torch.export,"


def is_sure(condition: Any) -> bool:
    """Return whether a comparison of sizes holds. It is False for sizes that depend on data, as far as nothing is known
    of them: a graph must not be specialised by them, and torch's operators check them when the graph runs."""
    if not torch.compiler.is_dynamo_compiling() and not isinstance(condition, torch.SymBool):
        return bool(condition)  # torch.jit.trace compares tensors
    from torch.fx.experimental import symbolic_shapes  # its import takes a second

    # Torch 2.6 has no guard_or_false.
    return bool(getattr(symbolic_shapes, "guard_or_false", symbolic_shapes.guard_size_oblivious)(condition))
