"""What a call is refused for before anything is launched: being recorded or transformed, tensors without memory.

None of them sees that a kernel fills its output; a kernel sees addresses alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor

from portattn.errors import ArgumentError, TracingError


def refuse_what_no_kernel_sees(op: str, tensors: Mapping[str, Any]) -> None:
    """Raise where a call is recorded or transformed (TracingError), or a tensor lies nowhere (ArgumentError).

    tensors  the call's, by name; what is no tensor is left to validation, and so are meta tensors and fake ones
    """
    refuse_tracing(op, tensors.values())
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and _lies_nowhere(tensor):
            limit = "must lie in memory: of a DTensor give the local tensor, of other wrappers what they wrap"
            raise ArgumentError(op, name, f"a {type(tensor).__name__} without memory of its own", limit)


def refuse_tracing(op: str, tensors: Iterable[Any]) -> None:
    """Raise TracingError where a call is being recorded, to be run again later, by torch.export, make_fx or jit.trace,
    or where torch.func transforms it (vmap, grad, jvp).

    What would be recorded of a kernel's call is that memory is allocated: the recorded program would return what lies
    there. Fake tensors alone, outside of a recording, are answered with fake tensors, which nobody can take for data.
    """
    recorder = "torch.jit.trace" if torch._C._get_tracing_state() is not None else _proxy_tracer()
    if recorder:
        raise TracingError(
            f"{op}: {recorder} cannot record this call: it is no torch operator, and a program recorded of it would "
            "return memory that nothing was written to. Call it outside of what is recorded, or keep it out of the "
            "graph by torch.compiler.disable under torch.compile"
        )
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if any(isinstance(tensor, torch.Tensor) and wrapped(tensor) for tensor in tensors):
        raise TracingError(
            f"{op}: torch.func (vmap, grad, vjp, jvp, functionalize) cannot transform this call: it is no torch "
            "operator. Give batches as the batch axis, and take gradients by requires_grad and backward()"
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
