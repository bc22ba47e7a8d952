"""Two devices in host memory under any name: `install("npu")`, once a process; host_device.cpp is built if needed."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
TORCH = Path(torch.__file__).parent
INCLUDES = (TORCH / "include", TORCH / "include" / "torch" / "csrc" / "api" / "include")


def missing() -> str:
    """Return why the device cannot be built here; empty if it can."""
    if shutil.which("g++") is None:
        return "host_device.cpp is built by g++, which is not here"
    header = INCLUDES[0] / "ATen" / "core" / "Tensor.h"
    return "" if header.is_file() else f"torch {torch.__version__} comes without its headers"


def library() -> Path:
    """Return the built library, from a folder that is kept for this source and this torch."""
    made = hashlib.sha256(f"{torch.__version__} {TORCH} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "portattn" / "host_device"
    path = folder / f"{made}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / path.name
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            command = ["g++", "-shared", "-fPIC", "-O1", "-w", "-std=c++20", abi, str(SOURCE), "-o", str(built)]
            command += [*(f"-I{place}" for place in INCLUDES), f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"g++ did not build {SOURCE.name}:\n{done.stderr[-3000:]}"
            built.rename(path)  # several test processes may build at once
    return path


def install(name: str) -> Any:
    """Name the devices and give torch its module of them, as a vendor's package does; return the module."""
    torch.ops.load_library(library())
    ctypes.CDLL(str(library())).host_device_register()
    torch.utils.rename_privateuse1_backend(name)
    accelerator, module = torch.accelerator, types.ModuleType(f"torch.{name}")

    def index_of(device: Any = None) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return accelerator.current_device_index() if index is None else index

    vars(module).update(
        device=lambda device: accelerator.device_index(index_of(device)), current_device=lambda: index_of(),
        set_device=lambda device: accelerator.set_device_index(index_of(device)), device_count=lambda: 2,
        is_available=lambda: True, is_initialized=lambda: True, synchronize=accelerator.synchronize,
        current_stream=lambda device=None: accelerator.current_stream(index_of(device)),
        Stream=functools.partial(torch.Stream, device=name), Event=functools.partial(torch.Event, name),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16], _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )  # fmt: skip
    sys.modules[module.__name__] = module
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
