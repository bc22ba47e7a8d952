"""A torch_npu over devices in host memory: the vendor's schemas and formulas, kernels of the documented semantics.

FAKE_NPU_CHIP is the chip's name; FAKE_NPU_FAULT is ERROR or ERROR:INDEX, raised where a device's name is asked."""

import builtins
import os
from typing import Any

import host_device
import torch
import vendor_kernels

__version__ = "2.13.0"  # of the schemas
ERROR, _, INDEX = os.environ.get("FAKE_NPU_FAULT", "").partition(":")
KERNELS = vendor_kernels.VendorKernels()
npu: Any = host_device.install("npu")


def get_device_name(device: int | None = None) -> str:
    index = npu.current_device() if device is None else device
    if ERROR and INDEX in ("", str(index)):
        raise getattr(builtins, ERROR)("the driver does not answer")
    return os.environ.get("FAKE_NPU_CHIP", "Ascend910B2")


def on_devices(name: str) -> Any:
    """Return an operator whose kernel, and formula if gradients are recorded, run on copies in the host's memory."""

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = vendor_kernels.bind(vendor_kernels.SCHEMAS[f"npu::{name}"], args, kwargs)
        device = bound["query"].device
        with torch.inference_mode(False):  # a copy of a tensor that can be saved for a backward is one, too
            on_host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in bound.items()}
        schema = vendor_kernels.SCHEMAS[f"npu::{name}"].arguments
        placed = [on_host.pop(one.name) for one in schema if not one.kwarg_only]
        found = getattr(KERNELS, name)(*placed, **on_host)
        return tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in found)

    return run


npu.get_device_name = get_device_name
library = torch.library.Library("npu", "DEF")
for schema in vendor_kernels.SCHEMAS.values():
    name = library.define(str(schema).removeprefix("npu::"))
    library.impl(name, on_devices(name), "PrivateUse1")
    if schema.name in vendor_kernels.GRADIENT_OF:
        library.impl(name, on_devices(name), "AutogradPrivateUse1")
    globals()[name] = getattr(torch.ops.npu, name)


def _autoload() -> None:
    """Called at `import torch` where a distribution names it as an entry point of torch.backends."""
