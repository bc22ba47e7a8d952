"""A torch_npu over devices in host memory: the wheel's schemas, kernels of the documented semantics beneath them.

FAKE_NPU_CHIP is the chip's name; FAKE_NPU_FAULT is STEP:ERROR or STEP:ERROR:INDEX, the function that raises the error,
for all devices or one. The step `import` is this module's import."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import host_device
import recorded_torch_npu
import torch

STEP, ERROR, INDEX = (os.environ.get("FAKE_NPU_FAULT", "") + "::").split(":")[:3]
calls: list[str] = []  # names of the operators that ran, in order


def fail_at(step: str, index: int | None = None) -> None:
    if step == STEP and INDEX in ("", str(index)):
        raise getattr(builtins, ERROR)(f"{step} of a stand-in")


fail_at("import")
npu: Any = host_device.install("npu")


def with_fault(name: str, answer: Any) -> Any:
    def ask(*given: Any) -> Any:
        index = npu.current_device() if given in ((), (None,)) else given[0]
        fail_at(name, index)
        return answer(index) if given else answer()

    return ask


def device_name(index: int = 0) -> str:
    if not 0 <= index < 2:
        raise AssertionError("Invalid NPU device id")
    return os.environ.get("FAKE_NPU_CHIP", "Ascend910B2")


npu.get_device_name = device_name
for name in ("is_available", "device_count", "get_device_name"):
    setattr(npu, name, with_fault(name, getattr(npu, name)))

KERNELS = recorded_torch_npu.RecordedTorchNpu()


def fusion_attention_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, *, scale_value: float,
    sparse_mode: int, atten_mask: torch.Tensor | None, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    seen = recorded_torch_npu.seen_keys(query, key, sparse_mode, atten_mask)
    found = recorded_torch_npu.fusion_gradients(query, key, value, dy, scale_value, seen)
    return (*found, torch.empty(0), torch.empty(0))


KERNELS.npu_fusion_attention_grad = fusion_attention_grad  # type: ignore[attr-defined]


def arguments(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, defaults included."""
    schema = getattr(torch.ops.npu, name).default._schema.arguments
    values = dict(zip((one.name for one in schema), given, strict=False)) | named
    return {one.name: values.get(one.name, one.default_value) for one in schema}


def on_devices(name: str) -> Any:
    """Return an operator of the devices: its kernel runs on the host, and results lie on the device of the query."""

    def run(*given: Any, **named: Any) -> Any:
        calls.append(name)
        values = arguments(name, given, named)
        device = values["query"].device
        with torch.inference_mode(False):  # the copies are like their tensors in this, too
            on_host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        found = getattr(KERNELS, name)(**on_host)
        return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in found)

    return run


class FusionAttention(torch.autograd.Function):
    """The vendor's formula: the gradient of the first output goes on as `dy`, those of the statistics are ignored."""

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], *values: Any) -> Any:
        ctx.given = dict(zip(names, values, strict=True))
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.npu.npu_fusion_attention(**ctx.given)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, *statistics: Any) -> Any:
        if dy is None:
            raise RuntimeError("npu_fusion_attention_grad: dy is an undefined tensor")
        given = {"scale_value" if name == "scale" else name: value for name, value in ctx.given.items()}
        taken = {one.name for one in torch.ops.npu.npu_fusion_attention_grad.default._schema.arguments}
        kept = {name: value for name, value in given.items() if name in taken}
        gradients = torch.ops.npu.npu_fusion_attention_grad(dy=dy, **kept)
        found = dict(zip(("query", "key", "value"), gradients, strict=False))
        return None, *(found.get(name) for name in ctx.given)


def fusion_with_autograd(*given: Any, **named: Any) -> Any:
    values = arguments("npu_fusion_attention", given, named)
    return FusionAttention.apply(tuple(values), *values.values())


library = torch.library.Library("npu", "DEF")
for line in Path(recorded_torch_npu.__file__).with_name("schemas.txt").read_text().splitlines():
    operator = library.define(line)
    if hasattr(KERNELS, operator):
        library.impl(operator, on_devices(operator), "PrivateUse1")
        globals()[operator] = getattr(torch.ops.npu, operator)
library.impl("npu_fusion_attention", fusion_with_autograd, "AutogradPrivateUse1")


def _autoload() -> None:
    """Called at `import torch` where a distribution names it as an entry point of torch.backends."""
