"""A torch_npu over devices in host memory: the wheel's schemas, kernels of the documented semantics beneath them.

FAKE_NPU_CHIP is the chip's name; FAKE_NPU_FAULT is STEP:ERROR or STEP:ERROR:INDEX, the function that raises the error,
for all devices or one. The step `import` is this module's import."""

import builtins
import functools
import os
from typing import Any

import host_device
import torch
from vendor_kernels import GRADIENT_OF, KERNELS, SCHEMAS, bind, differentiable

STEP, ERROR, INDEX = (os.environ.get("FAKE_NPU_FAULT", "") + "::").split(":")[:3]


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


def run_on_host(name: str, bound: dict[str, Any]) -> Any:
    """Run an operator's kernel on copies; results lie on the device of the query."""
    device = bound["query"].device
    with torch.inference_mode(False):  # the copies are like their tensors in this, too
        on_host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in bound.items()}
    found = KERNELS[name](**on_host)
    return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in found)


def run(name: str, *given: Any, **named: Any) -> Any:
    return run_on_host(name, bind(SCHEMAS[name], given, named))


def run_with_autograd(name: str, *given: Any, **named: Any) -> Any:
    return differentiable(run_on_host, name, bind(SCHEMAS[name], given, named))


library = torch.library.Library("npu", "DEF")
for name, schema in SCHEMAS.items():
    library.define(str(schema))
    if name in KERNELS:
        library.impl(name, functools.partial(run, name), "PrivateUse1")
        operator = name.removeprefix("npu::")
        globals()[operator] = getattr(torch.ops.npu, operator)
    if name in GRADIENT_OF:
        library.impl(name, functools.partial(run_with_autograd, name), "AutogradPrivateUse1")


def _autoload() -> None:
    """Called at `import torch` where a distribution names it as an entry point of torch.backends."""
