"""Which arch a device is, by every backend, on a machine with no accelerator."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import portattn.backends.ascend
from portattn.backends.ascend import AscendBackend
from portattn.backends.cuda import CudaBackend
from portattn.backends.rocm import RocmBackend


def test_importing_the_backends_touches_no_framework() -> None:
    script = "import sys, portattn.backends; print([m for m in ('torch', 'torch_npu', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch that has one GPU with the given runtime and properties; index 0 only."""

    def install(runtime: str, **properties: Any) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.8" if runtime == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "6.4.43484-123eb5128" if runtime == "hip" else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

        def get(index: int) -> Any:
            if index != 0:
                raise AssertionError("Invalid device id")
            return types.SimpleNamespace(**properties)

        monkeypatch.setattr(torch.cuda, "get_device_properties", get)

    return install


@pytest.mark.parametrize("backend", [CudaBackend(), RocmBackend()])
def test_no_device_no_initialisation(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise SystemError("a device was touched")

    monkeypatch.setattr(torch.cuda, "_lazy_init", never)
    monkeypatch.setattr(torch.cuda, "get_device_properties", never)
    monkeypatch.setattr(torch.cuda, "current_device", never)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, hip in ((None, None), ("12.8", None), (None, "6.4.1")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert backend.detect() is None
        assert backend.detect(0) is None


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((9, 0), "sm_90"),
        ((8, 7), "sm_86"),
        ((8, 8), "sm_86"),
        ((10, 3), "sm_103"),
        ((12, 1), "sm_121"),
        ((11, 0), "sm_110"),
        ((7, 5), "sm_75"),  # known, and refused
        ((5, 2), None),
        ((10, 1), None),
        ((13, 0), None),
    ],
)
def test_cuda_capabilities(capability: tuple[int, int], arch: str | None, gpu: Any) -> None:
    gpu("cuda", major=capability[0], minor=capability[1])
    assert CudaBackend().detect() == arch
    assert CudaBackend().detect(0) == arch
    assert CudaBackend().detect(3) is None
    assert RocmBackend().detect() is None


@pytest.mark.parametrize(
    ("gcn", "arch"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx1100", "gfx1100"),
        ("gfx1101", "gfx1101"),
        ("gfx1103", None),
        ("gfx908:sramecc+:xnack-", "gfx908"),  # known, and refused
        ("gfx1032", "gfx1030"),
        ("gfx803", None),
    ],
)
def test_rocm_names(gcn: str, arch: str | None, gpu: Any) -> None:
    gpu("hip", gcnArchName=gcn)
    assert RocmBackend().detect() == arch
    assert CudaBackend().detect() is None


def test_a_driver_that_fails_is_no_device(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    gpu("cuda", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert CudaBackend().detect() is None


def test_other_errors_are_not_swallowed(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("cuda")  # properties without `major`: a fault of ours, not of the machine
    with pytest.raises(AttributeError):
        CudaBackend().detect()


@pytest.mark.parametrize(
    ("device", "arch"),
    [
        ("Ascend910B1", "ascend910b1"),
        ("Ascend910B2C", "ascend910b2"),
        ("Ascend910B3", "ascend910b3"),
        ("Ascend910B4-1", "ascend910b4"),
        ("Ascend910_9382", "ascend910_93"),
        ("Ascend910_9362", "ascend910_93"),
        ("Ascend310P3", "ascend310p"),
        ("Ascend910B", None),
        ("Ascend910A", None),
        ("Ascend910ProB", None),
        ("Ascend910_9589", "ascend910_95"),
        ("Ascend950DT_9571", None),
        ("Ascend310B4", None),
    ],
)
def test_ascend_device_names(device: str, arch: str | None) -> None:
    assert AscendBackend().arch_of(device) == arch


def torch_npu_package(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    # Set before it is deleted: monkeypatch then takes out what the test imports, too.
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.delitem(sys.modules, "torch_npu")


NPU = """
class npu:
    @staticmethod
    def is_available(): return {available}
    @staticmethod
    def get_device_name(index=None):
        if index not in (None, 0): raise AssertionError("Invalid NPU device id")
        return "Ascend910B4-1"
"""


def test_ascend_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_package(tmp_path, NPU.format(available=True), monkeypatch)
    assert AscendBackend().detect() == "ascend910b4"
    assert AscendBackend().detect(5) is None


@pytest.mark.parametrize(
    "text",
    [
        NPU.format(available=False),
        "raise ImportError('libhccl.so: cannot open shared object file')",
        "raise OSError('libascendcl.so')",
        "raise RuntimeError('Failed to load the backend extension')",
    ],
)
def test_ascend_without_device_or_cann(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_package(tmp_path, text, monkeypatch)
    assert AscendBackend().detect() is None


def test_ascend_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portattn.backends.ascend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # importing it would raise ImportError
    assert AscendBackend().detect() is None
