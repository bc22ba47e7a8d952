"""Versions of what plans depend on beside Triton: drivers, runtimes, ptxas, on a machine with no accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import portattn.backends.ascend
import portattn.backends.cuda
import portattn.backends.rocm
from portattn.backends import BUILTIN
from portattn.backends.ascend import AscendBackend
from portattn.backends.cuda import CudaBackend
from portattn.backends.cuda.ptxas import releases, version_of
from portattn.backends.detection import version_in
from portattn.backends.rocm import RocmBackend
from portattn.planning.registry import parse_target
from portattn.schema.toolchain import COMPONENTS, Toolchain, installed_toolchain


@pytest.mark.parametrize("backend", BUILTIN, ids=lambda b: b.name)
def test_machine_components_of_this_machine(backend: Any) -> None:
    for name, version in backend.machine_components().items():
        assert name in COMPONENTS
        assert Version(version)


def test_cuda_machine_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)  \n"
        "GCC version:  gcc version 13.2.0\n"
    )
    monkeypatch.setattr(portattn.backends.cuda, "DRIVER_VERSION_FILE", file)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert CudaBackend().machine_components() == {"cuda": "13.0", "driver": "580.159.04"}
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert CudaBackend().machine_components() == {"driver": "535.104.05"}


def test_rocm_machine_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text("6.12.12\n")
    monkeypatch.setattr(portattn.backends.rocm, "DRIVER_VERSION_FILE", file)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484-123eb5128")
    assert RocmBackend().machine_components() == {"rocm": "6.4.43484", "driver": "6.12.12"}


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_ascend_machine_components(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / f"{portattn.backends.ascend.platform.machine()}-linux"
    folder.mkdir()
    (folder / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n")
    driver = tmp_path / "version.info"
    driver.write_text("Version=24.1.rc3\nascendhal_version=7.35.23\n")
    monkeypatch.setattr(portattn.backends.ascend, "DRIVER_VERSION_FILE", driver)
    monkeypatch.setenv(variable, str(tmp_path))
    assert AscendBackend().machine_components() == {"cann": "8.2.RC1", "driver": "24.1.rc3"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("12.8", "12.8"),
        ("6.4.43484-123eb5128", "6.4.43484"),
        ("8.2.RC1", "8.2.RC1"),
        ("8.0.0.alpha001", "8.0.0.alpha001"),
        ("8.3.RC1.alpha003", "8.3.RC1"),
        ("unknown", None),
        ("", None),
        (None, None),
    ],
)
def test_versions_are_pep_440(text: str | None, version: str | None) -> None:
    assert version_in(text) == version
    assert version is None or Version(version)


# ptxas


@pytest.mark.parametrize(
    ("toolchain", "arch", "version"),
    [
        ("triton==3.2.0", "sm_90", "12.4.99"),
        ("triton==3.3.1", "sm_90", "12.4.99"),
        ("triton==3.3.1", "sm_120", "12.8.61"),
        ("triton==3.5.1", "sm_100", "12.8.93"),
        ("triton==3.6.0", "sm_90", "12.8.93"),
        ("triton==3.6.0", "sm_100", "12.9.86"),
        ("triton==3.8.0", "sm_90", "12.9.86"),
        ("triton==3.8.0", "sm_120", "13.3.33"),
        ("triton==3.9.0", "sm_89", "12.9.86"),
        ("triton==3.9.0", "sm_90", "13.4.59"),
        ("triton==3.10.0", "sm_90", None),
        ("triton-ascend==3.2.0", "sm_90", None),
        ("none", "sm_90", None),
    ],
)
def test_ptxas_of_named_toolchains(toolchain: str, arch: str, version: str | None) -> None:
    assert parse_target(f"cuda:{arch}", toolchain).toolchain.component("ptxas") == version


def test_a_named_ptxas_is_kept() -> None:
    assert parse_target("cuda:sm_90", "triton==3.6.0,ptxas==13.3.33").toolchain.component("ptxas") == "13.3.33"


def test_releases_do_not_overlap() -> None:
    for version in (
        "3.2.0",
        "3.3.0",
        "3.3.1",
        "3.4.0",
        "3.5.0",
        "3.5.1",
        "3.6.0",
        "3.7.0",
        "3.7.1",
        "3.8.0",
        "3.9.0",
    ):
        chosen = [r for r in releases() if Toolchain(distribution="triton", version=version).within("triton", r.triton)]
        assert len(chosen) == 1
        assert chosen[0].source
        assert bool(chosen[0].blackwell) is bool(chosen[0].blackwell_from)


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_ptxas_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sm_90, sm_100 = (parse_target(f"cuda:{name}", "none").arch for name in ("sm_90", "sm_100"))
    here = Toolchain(distribution="triton", version="3.6.0", path=str(tmp_path))
    elsewhere = Toolchain(distribution="triton", version="3.6.0")
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)
    newer = program(tmp_path / "ptxas", "echo 'Cuda compilation tools, release 13.3, V13.3.33'")
    monkeypatch.setenv("TRITON_PTXAS_PATH", newer)
    assert CudaBackend().components(sm_90, here) == {"ptxas": "13.3.33"}
    assert CudaBackend().components(sm_90, elsewhere) == {"ptxas": "12.8.93"}
    assert CudaBackend().components(sm_100, here) == {"ptxas": "12.9.86"}
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", newer)
    assert CudaBackend().components(sm_100, here) == {"ptxas": "13.3.33"}


@pytest.mark.parametrize("text", ["exit 3", "echo ptxas", None])
def test_a_ptxas_that_does_not_run_is_passed_over(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path / "ptxas", text) if text else str(tmp_path / "missing")
    monkeypatch.setenv("TRITON_PTXAS_PATH", path)
    here = Toolchain(distribution="triton", version="3.6.0", path=str(tmp_path))
    assert CudaBackend().components(parse_target("cuda:sm_90", "none").arch, here) == {"ptxas": "12.8.93"}


@pytest.mark.skipif(
    installed_toolchain().distribution != "triton", reason="reads the installed community Triton's wheel"
)
def test_the_table_tells_the_truth_about_the_installed_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    folder = Path(installed_toolchain().path) / "backends" / "nvidia" / "bin"
    release = next((r for r in releases() if installed_toolchain().within("triton", r.triton)), None)
    if release is None or version_of(str(folder / "ptxas")) is None:
        pytest.skip(f"triton {installed_toolchain().version} is not listed, or its ptxas does not run on this machine")
    assert version_of(str(folder / "ptxas")) == release.ptxas
    assert (version_of(str(folder / "ptxas-blackwell")) or "") == release.blackwell
