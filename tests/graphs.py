"""Shared by the tests of graphs: modules that call an operation, and the ways to record one."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from opcalls import given, perform, problem
from support import Device, random_call
from torch.fx.experimental.proxy_tensor import make_fx


class Model(torch.nn.Module):
    """Calls an operation with its arguments, the tensors among them given anew in their order."""

    def __init__(self, op: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.arguments = op, arguments
        self.names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        return perform(self.op, self.arguments | dict(zip(self.names, tensors)))  # noqa: B905  # dynamo: no strict


def a_model(name: str, device: Device, **fields: Any) -> tuple[Model, tuple[torch.Tensor, ...]]:
    call = random_call(problem(name, **fields), seed=1, device=device.name)
    arguments = given(call)
    tensors = tuple(value for value in arguments.values() if isinstance(value, torch.Tensor))
    return Model(call.problem.op, arguments), tensors


def _compiled(dynamic: bool) -> Callable[..., Any]:
    def record(model: Model, tensors: tuple[torch.Tensor, ...]) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)

    return record


def _exported(strict: bool) -> Callable[..., Any]:
    return lambda model, tensors: torch.export.export(model, tensors, strict=strict).module()


def _by_proxies(mode: str) -> Callable[..., Any]:
    return lambda model, tensors: make_fx(model, tracing_mode=mode)(*tensors)


def by_jit(model: torch.nn.Module, tensors: tuple[torch.Tensor, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, tensors, check_trace=False)


RECORDERS: dict[str, Callable[..., Any]] = {
    "torch.export": _exported(False), "torch.export, strict": _exported(True), "make_fx, real": _by_proxies("real"),
    "make_fx, fake": _by_proxies("fake"), "make_fx, symbolic": _by_proxies("symbolic"), "torch.jit.trace": by_jit,
    "torch.compile": _compiled(False), "torch.compile, dynamic": _compiled(True),
}  # fmt: skip


def same(found: Any, expected: Any) -> bool:
    """Whether results are the same bit for bit (NaN for NaN), in the same memory order."""
    pairs = list(zip(_several(found), _several(expected), strict=True))
    return all(a.dtype == b.dtype and a.stride() == b.stride() for a, b in pairs) and all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs
    )


def _several(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)
