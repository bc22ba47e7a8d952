"""Two devices in host memory under any name: `install("npu")`, once a process; host_device.cpp is built if needed."""

from __future__ import annotations

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
SECONDS = 300


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
            command += [*(f"-I{folder}" for folder in INCLUDES), f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise RuntimeError(f"g++ did not build {SOURCE.name}:\n{done.stderr[-3000:]}")
            built.rename(path)  # several test processes may build at once
    return path


def install(name: str) -> types.ModuleType:
    """Name the devices and give torch its module of them, as a vendor's package does; return the module."""
    torch.ops.load_library(library())
    host = ctypes.CDLL(str(library()))
    host.host_device_current.restype = ctypes.c_int64
    host.host_device_register()
    torch.utils.rename_privateuse1_backend(name)
    module: Any = types.ModuleType(f"torch.{name}")

    def index_of(device: Any = None) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return host.host_device_current() if index is None else index

    def set_device(device: Any) -> None:
        host.host_device_set(ctypes.c_int64(index_of(device)))

    class device:  # noqa: N801 - torch's name
        def __init__(self, device: Any) -> None:
            self.index = index_of(device)

        def __enter__(self) -> None:
            self.before = host.host_device_current()
            set_device(self.index)

        def __exit__(self, *error: object) -> None:
            set_device(self.before)

    vars(module).update(
        device=device, set_device=set_device, current_device=host.host_device_current, device_count=lambda: 2,
        is_available=lambda: True, is_initialized=lambda: True, synchronize=torch.accelerator.synchronize,
        current_stream=lambda device=None: torch.accelerator.current_stream(index_of(device)),
        Stream=functools.partial(torch.Stream, device=name), Event=functools.partial(torch.Event, name),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16], _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )  # fmt: skip
    sys.modules[module.__name__] = module
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module
