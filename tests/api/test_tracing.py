"""A call that is being recorded or transformed raises: what came of it would be memory that nothing is written to."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opcalls import given, perform, pretend_accelerator, problem
from support import Device, random_call
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import portattn

OPS = ("attention", "varlen", "decode", "paged", "ragged", "sparse", "mla")


class Model(torch.nn.Module):
    def __init__(self, op: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.arguments = op, arguments

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        names = [name for name, value in self.arguments.items() if isinstance(value, torch.Tensor)]
        return perform(self.op, self.arguments | dict(zip(names, tensors, strict=True)))[0]


def a_model(name: str, device: Device) -> tuple[Model, tuple[torch.Tensor, ...]]:
    call = random_call(problem(name), seed=1, device=device.name)
    arguments = given(call)
    tensors = tuple(value for value in arguments.values() if isinstance(value, torch.Tensor))
    return Model(call.problem.op, arguments), tensors


def export(model: Model, tensors: tuple[torch.Tensor, ...]) -> Any:
    return torch.export.export(model, tensors, strict=False)


def by_proxies(mode: str) -> Callable[..., Any]:
    return lambda model, tensors: make_fx(model, tracing_mode=mode)(*tensors)


def by_jit(model: Model, tensors: tuple[torch.Tensor, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, tensors)


RECORDERS = {
    "torch.export": export, "make_fx, real": by_proxies("real"), "make_fx, fake": by_proxies("fake"),
    "make_fx, symbolic": by_proxies("symbolic"), "torch.jit.trace": by_jit,
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_recorded_call_raises(recorder: str, name: str, device: Device) -> None:
    model, tensors = a_model(name, device)
    expected = model(*tensors)
    with pytest.raises(portattn.TracingError) as error:
        RECORDERS[recorder](model, tensors)
    assert str(error.value).startswith(f"{model.op}: ")
    assert recorder.split(",")[0] in str(error.value)
    assert "cannot record this call" in str(error.value)
    torch.testing.assert_close(model(*tensors), expected, equal_nan=True)


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_recorded_run_of_a_handle_raises(recorder: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    q, k, v = (torch.randn(1, 2, 4, 16, device=device.name) for _ in range(3))
    handle = portattn.prepare("attention", q, k, v)
    expected = handle.run(q, k, v)

    class Run(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return handle.run(*tensors)

    with pytest.raises(portattn.TracingError, match="cannot record this call"):
        RECORDERS[recorder](Run(), (q, k, v))  # type: ignore[operator]
    assert torch.equal(handle.run(q, k, v), expected)


TRANSFORMS = {
    "vmap": torch.func.vmap, "grad": lambda f: torch.func.grad(lambda q: f(q).sum()),
    "jacrev": torch.func.jacrev, "jacfwd": torch.func.jacfwd, "functionalize": torch.func.functionalize,
}  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("path", ["auto", "reference"])
def test_a_transformed_call_raises(transform: str, path: str) -> None:
    """And no transform is left half done: the next call is right."""
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    expected = portattn.attention(q, k, v, backend=path)
    with pytest.raises(portattn.TracingError, match=r"attention: torch\.func .* cannot transform this call"):
        TRANSFORMS[transform](lambda q: portattn.attention(q, k, v, backend=path))(q)
    assert torch.equal(portattn.attention(q, k, v, backend=path), expected)


def test_strict_export_raises_too(device: Device) -> None:
    """By dynamo's own words, or ours: in no case a program."""
    model, tensors = a_model("attention", device)
    with pytest.raises((portattn.TracingError, torch._dynamo.exc.TorchDynamoException)):
        torch.export.export(model, tensors, strict=True)


def test_shapes_of_fake_tensors_are_still_told(device: Device) -> None:
    """Outside of a recording: who holds a fake tensor cannot take it for data."""
    q = torch.randn(1, 2, 4, 16)
    with FakeTensorMode() as mode:
        out = portattn.attention(*(mode.from_tensor(q) for _ in "qkv"))
    assert isinstance(out, torch._subclasses.FakeTensor)
    assert out.shape == q.shape
