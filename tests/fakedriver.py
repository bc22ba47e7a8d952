"""Triton's own CUDA driver on a machine without a device: over a libcuda.so.1 that records launches (fake_cuda.c).
Kernels are really compiled, and Triton's launcher really runs: what reaches the driver can be compared, byte for byte.
For a process of its own: `environment` gives it the library, `install` then makes Triton use it."""

import contextlib
import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import pytest
from packaging.version import Version

HERE = Path(__file__).parent
# Read before a test has a cache folder of its own.
_CACHE = os.environ.get("PORTATTN_CACHE_DIR") or platformdirs.user_cache_dir("portattn", appauthor=False)
LAB = Path(_CACHE) / "lab"


class Launch(NamedTuple):
    """A launch as the driver saw it. attributes: a bit for each id; parameters: their bytes one after the other."""

    grid: tuple[int, int, int]
    threads: int
    shared: int
    attributes: int
    function: int
    stream: int
    parameters: bytes


def build(folder: Path, include: Path) -> None:
    """Compile libcuda.so.1 into a folder. Raises CalledProcessError."""
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-w", f"-I{include}", str(HERE / "fake_cuda.c"), "-Wl,-soname,libcuda.so.1",
         "-o", str(folder / "libcuda.so.1")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # what Triton 3.2's own library is linked with


def keep_everywhere() -> None:
    from portattn.api.request import Request

    Request._on_accelerator = lambda self: True  # type: ignore[method-assign]


def triton_folders() -> dict[str, Path]:
    """Tritons that this Python can import, by version: the installed one, and those of this machine's lab."""
    import importlib.metadata

    found = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution("triton")
        found[installed.version] = Path(str(installed.locate_file("triton")))
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for folder in sorted(LAB.glob(f"triton-[0-9]*/lib/{python}/site-packages/triton")):
        found.setdefault(folder.parents[3].name.removeprefix("triton-"), folder)
    return found


def run_by_any(program: str, folders: pytest.TempPathFactory, *arguments: str) -> dict[str, Any]:
    """What a program prints by Triton 3.6, for which there are variants, if it is here; else by the newest that is."""
    found = triton_folders()
    if not found:
        pytest.skip("Triton is not installed, and the lab has none for this Python")
    version = "3.6.0" if "3.6.0" in found else max(found, key=Version)
    return run(program, folders.mktemp(program.partition("_")[0]), found[version], *arguments)


def run(program: str, folder: Path, triton: Path, *arguments: str) -> dict[str, Any]:
    """What a program of this folder prints as JSON, run with the library and a Triton; the test fails where it does."""
    build(folder, triton / "backends" / "nvidia" / "include")
    (folder / "site").mkdir()
    (folder / "site" / "triton").symlink_to(triton)
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = (str(folder / "site"), str(HERE), os.environ.get("PYTHONPATH", ""))
    variables = environment(folder) | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        env=inherited | variables | {"PORTATTN_CACHE_DIR": str(folder / "portattn")},
        cwd=HERE, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment(folder: Path) -> dict[str, str]:
    return {
        "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip


class Fake:
    """The library from Python's side."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.fake_record.restype = ctypes.POINTER(ctypes.c_ubyte)
        self._sizes: dict[int, int] = {}

    def describe(self, function: int, sizes: list[int]) -> None:
        self._sizes[function] = sum(sizes)
        self.library.fake_describe(ctypes.c_long(function), len(sizes), (ctypes.c_size_t * len(sizes))(*sizes))

    def launches(self) -> list[Launch]:
        count = ctypes.c_size_t()
        data = self.library.fake_record(ctypes.byref(count))
        left, found = bytes(data[: count.value]), []
        while left:
            *head, function, stream = struct.unpack("6I2q", left[:40])
            end = 40 + self._sizes[function]
            found.append(Launch(tuple(head[:3]), head[3], head[4], head[5], function, stream, left[40:end]))
            left = left[end:]
        self.library.fake_clear()
        return found


def install(stream: int = 7) -> Fake:
    """Make Triton compile for an sm_90 and launch through the library, which must be the one that is found."""
    fake = Fake()
    import triton
    from triton.backends.nvidia import driver

    active: Any = driver.CudaDriver.__new__(driver.CudaDriver)
    active.utils, active.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
    active.get_current_device, active.get_current_stream = lambda: 0, lambda device: stream
    active.get_device_capability = lambda device=None: (9, 0)
    triton.runtime.driver.set_active(active)
    assert os.environ["TRITON_LIBCUDA_PATH"]
    return fake
