"""The driver of triton-ascend for a host device that torch calls npu: kernels run as x86 code made from their linalg.

triton_ascend_site.py puts this file in the place of triton-ascend's backends/ascend/driver.py, and a program that hands
the linalg on in the place of CANN's bishengir-compile. So all of triton-ascend runs but its driver."""

import functools

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

CORES, ARCH = 24, "Ascend910B2"
launches = []  # of this process: (kernel, grid, accesses outside an argument's memory)


@functools.cache
def programs():
    """Return the process's programs; portattn imports Triton, which imports this file."""
    from portattn.backends.ascend.linalg.executor import Programs

    return Programs()


class NPUUtils:
    """What triton-ascend's compiler and Triton ask of the chip."""

    def get_arch(self):
        return ARCH

    def get_aicore_num(self):
        return CORES

    def get_device_properties(self, device):
        return {"max_shared_mem": 1, "num_aicore": CORES, "num_vectorcore": 2 * CORES}

    def load_binary(self, name, kernel, shared, device):
        return None, kernel.decode(), 0, 0


class NPULauncher:
    def __init__(self, source, metadata):
        names = source.fn.arg_names
        constant = {names[key] if isinstance(key, int) else key for key in source.constants}
        self.names = [names[key] if isinstance(key, int) else key for key in source.signature]
        self.takes = [name not in constant for name in self.names]

    def __call__(self, x, y, z, stream, text, packed, launch_metadata, enter_hook, exit_hook, *values):
        given = zip(self.names, self.takes, values, strict=True)
        arguments = {name: value for name, taken, value in given if taken}
        outputs = tuple(name for name, value in arguments.items() if isinstance(value, torch.Tensor))
        report = programs().launch(text, (x, y, z), arguments, outputs)
        launches.append((packed["kernel_name"], (x, y, z), [str(stray) for stray in report.strays]))


class NPUDriver(DriverBase):
    def __init__(self):
        self.utils, self.launcher_cls = NPUUtils(), NPULauncher
        super().__init__()

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("npu", ARCH, 0)

    def get_current_device(self):
        return torch.npu.current_device()

    def set_current_device(self, device):
        torch.npu.set_device(device)

    def get_current_stream(self, device=None):
        return 0

    def get_benchmarker(self):
        raise RuntimeError("kernels run as x86 code here: their times say nothing")

    def get_device_interface(self):
        return torch.npu
