"""Which arch a device is, by every backend, on a machine with no accelerator."""

import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from backend_packages import install_example
from places import DOCS

import portattn.backends.ascend
from portattn.backends import BUILTIN
from portattn.backends.ascend import AscendBackend
from portattn.backends.cuda import CudaBackend
from portattn.backends.rocm import RocmBackend
from portattn.cli import doctor
from portattn.planning import registry
from portattn.planning.registry import load_arches


def test_importing_the_backends_touches_no_framework():
    script = "import sys, portattn.backends; print([m for m in ('torch', 'torch_npu', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def gpu(monkeypatch):
    """A torch that has one GPU with the given runtime and properties; index 0 only."""

    def install(runtime, **properties):
        monkeypatch.setattr(torch.version, "cuda", "12.8" if runtime == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "6.4.43484-123eb5128" if runtime == "hip" else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

        def get(index):
            if index != 0:
                raise AssertionError("Invalid device id")
            return types.SimpleNamespace(**properties)

        monkeypatch.setattr(torch.cuda, "get_device_properties", get)

    return install


@pytest.mark.parametrize("backend", [CudaBackend(), RocmBackend()])
def test_no_device_no_initialisation(backend, monkeypatch):
    def never(*_):
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
    [  # sm_75 is known, and refused
        ((9, 0), "sm_90"), ((8, 7), "sm_86"), ((8, 8), "sm_86"), ((10, 3), "sm_103"), ((12, 1), "sm_121"),
        ((11, 0), "sm_110"), ((7, 5), "sm_75"), ((5, 2), None), ((10, 1), None), ((13, 0), None),
    ],
)  # fmt: skip
def test_cuda_capabilities(capability, arch, gpu):
    gpu("cuda", major=capability[0], minor=capability[1])
    assert CudaBackend().detect() == arch
    assert CudaBackend().detect(0) == arch
    assert CudaBackend().detect(3) is None
    assert RocmBackend().detect() is None


@pytest.mark.parametrize(
    ("gcn", "arch"),
    [  # gfx908 is known, and refused
        ("gfx942:sramecc+:xnack-", "gfx942"), ("gfx90a:sramecc+:xnack-", "gfx90a"), ("gfx1100", "gfx1100"),
        ("gfx1101", "gfx1101"), ("gfx1103", None), ("gfx908:sramecc+:xnack-", "gfx908"), ("gfx1032", "gfx1030"),
        ("gfx803", None),
    ],
)  # fmt: skip
def test_rocm_names(gcn, arch, gpu):
    gpu("hip", gcnArchName=gcn)
    assert RocmBackend().detect() == arch
    assert CudaBackend().detect() is None


def test_a_driver_that_fails_is_no_device(gpu, monkeypatch):
    def broken(_):
        raise RuntimeError("The NVIDIA driver on your system is too old")

    gpu("cuda", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert CudaBackend().detect() is None


def test_other_errors_are_not_swallowed(gpu, monkeypatch):
    gpu("cuda")  # properties without `major`: a fault of ours, not of the machine
    with pytest.raises(AttributeError):
        CudaBackend().detect()


@pytest.mark.parametrize(
    ("device", "arch"),
    [
        ("Ascend910B1", "ascend910b1"), ("Ascend910B2C", "ascend910b2"), ("Ascend910B3", "ascend910b3"),
        ("Ascend910B4-1", "ascend910b4"), ("Ascend910_9382", "ascend910_93"), ("Ascend910_9363", "ascend910_93"),
        ("Ascend310P3", "ascend310p"), ("Ascend910B", None), ("Ascend910A", None), ("Ascend910ProB", None),
        ("Ascend910_9589", "ascend910_95"), ("Ascend950DT_9581", "ascend910_95"), ("Ascend310B4", None),
        ("Ascend950PR_9579", "ascend910_95"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_ascend_device_names(device: str, arch: str | None) -> None:
    assert AscendBackend().arch_of(device) == arch


@pytest.mark.parametrize(
    ("device", "arch"),
    [
        ("Ascend910B9", "ascend910b2"), ("Ascend910B3C", "ascend910b3"), ("Ascend910_9399", "ascend910_93"),
        ("Ascend950PR_9999", "ascend910_95"),
    ],
)  # fmt: skip
def test_an_unknown_chip_of_a_known_family_is_planned_as_its_family(
    device: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one warning that names both; the second device is as the first."""
    monkeypatch.setattr("portattn.planning.backend._warned_of", set())
    with pytest.warns(UserWarning, match=rf"^{device} is no chip .* planned as {arch}, a chip of its family$"):
        assert AscendBackend().arch_of(device) == arch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AscendBackend().arch_of(device) == arch


def torch_npu_package(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    # Set before it is deleted: monkeypatch then takes out what the test imports, too.
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.delitem(sys.modules, "torch_npu")
    first_import = portattn.backends.ascend._import_error
    monkeypatch.setattr(portattn.backends.ascend, "_import_error", first_import.__wrapped__)


NPU = """
def told(step, answer):
    if step == {step!r}: raise {error}("half configured")
    return answer

told("import torch_npu", None)
class npu:
    @staticmethod
    def is_available(): return told("torch_npu.npu.is_available()", {available})
    @staticmethod
    def get_device_name(index=None):
        if index not in (None, 0): raise AssertionError("Invalid NPU device id")
        return told("torch_npu.npu.get_device_name()", "Ascend910B4-1")
"""


def npu_text(step: str = "", error: str = "", available: bool = True) -> str:
    return NPU.format(step=step, error=error, available=available)


def test_ascend_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_package(tmp_path, npu_text(), monkeypatch)
    found = AscendBackend()
    assert (found.detect(), found.describe(), found.trouble()) == ("ascend910b4", "Ascend910B4-1", "")
    assert (found.detect(5), found.describe(5)) == (None, "")
    assert found.trouble(5) == "torch_npu.npu.get_device_name(5) raised AssertionError: Invalid NPU device id"


def test_ascend_without_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu_package(tmp_path, npu_text(available=False), monkeypatch)
    assert (AscendBackend().detect(), AscendBackend().trouble()) == (None, "")


@pytest.mark.parametrize(
    "step", ["import torch_npu", "torch_npu.npu.is_available()", "torch_npu.npu.get_device_name()"]
)
@pytest.mark.parametrize("error", ["RuntimeError", "OSError", "ImportError", "AssertionError", "AttributeError"])
def test_cann_that_is_half_configured_raises_nothing(
    step: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither detection nor the list of devices; `portattn doctor` has the error."""
    torch_npu_package(tmp_path, npu_text(step, error), monkeypatch)
    registry.detect_target.cache_clear()
    try:
        assert AscendBackend().detect() is None
        assert [target.name for target in registry.devices()] == ["cpu:generic"]
        (told,) = [item.value for item in doctor.backends().items if item.name == "ascend"]
    finally:
        registry.detect_target.cache_clear()
    assert told == f"not detected: {step} raised {error}: half configured"


def test_ascend_without_torch_npu(monkeypatch):
    monkeypatch.setattr(portattn.backends.ascend.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # importing it would raise ImportError
    assert AscendBackend().detect() is None


PAGE = DOCS / "backends.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_refused_arches_are_on_the_page():
    refused = [name for backend in BUILTIN for name, arch in load_arches(backend.folder).items() if arch.refused]
    line = re.search(r"Known and refused, with the reason in the plan: (.*?)\. ", TEXT, re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", line[1])) == sorted(refused)


def test_every_vendor_path_is_on_the_page():
    for backend in BUILTIN:
        for path in backend.vendor:
            assert f"### `{path.name}`\n" in TEXT


@pytest.fixture
def example(tmp_path):
    return install_example(tmp_path)


def python(script, folder):
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_what_the_page_says(example):
    console = re.search(r'^\$ python -c "\n(.*?)^"\n(.*?)^```', TEXT, re.MULTILINE | re.DOTALL)
    assert python(console[1], example) == console[2]


FLAGS = """
import msgspec
from portattn import Problem, target
from portattn.planning.planner import plan
where = target('acme:acme1', toolchain='none')
for flags in ({}, {'return_lse': True}, *({name: True} for name in NAMES), {'window_left': 4}, {'causal': 'top_left'}):
    asked = Problem(batch=1, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64, **flags)
    made = plan(asked, where)
    print(made.path, *(no.reason for no in made.rejected), sep=': ')
"""
NAMES = ("mask", "bias", "softcap", "alibi_slopes", "sinks", "dropout", "needs_grad", "seqlens_k", "leftpad_q")


def test_the_example_takes_what_it_declares_and_nothing_else(example):
    """It planned masks, biases, windows and dropout, and ignored them, before features were denied by default."""
    lines = python(f"NAMES = {NAMES}\n{FLAGS}", example).splitlines()
    assert lines[:2] == ["acme_attention", "acme_attention"]
    for name, line in zip((*NAMES, "window", "causal_top_left"), lines[2:], strict=True):
        assert line == f"reference: does not declare that it takes {name}"
