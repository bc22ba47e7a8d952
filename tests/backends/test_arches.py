"""Arch tables of every backend, on a machine with no accelerator."""

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from packaging.version import Version

import portattn.backends.ascend
import portattn.backends.cuda
import portattn.backends.rocm
from portattn.backends import BUILTIN
from portattn.backends.ascend import AscendBackend
from portattn.backends.cuda import CudaBackend, releases, version_of
from portattn.backends.detection import version_in
from portattn.backends.rocm import RocmBackend
from portattn.planning.registry import Registry, load_arches, parse_target
from portattn.schema.lowering import DotPrecision
from portattn.schema.quirk import LEVELS
from portattn.schema.target import Arch
from portattn.schema.toolchain import COMPONENTS, Toolchain, installed_toolchain
from portattn.testing.executor import analyst, executors, lacks
from portattn.tools.matrix.cells import Cell
from portattn.worker.probe_harness import triton_target
from portattn.worker.serve import TASK

ARCHES = [(b, a) for b in BUILTIN for a in load_arches(b.folder).values()]
IDS = [f"{b.name}:{a.name}" for b, a in ARCHES]
# Fields that say something about the chip; where one is given its source is named.
STATED = (
    "names", "families", "devices", "traits", "core_threads", "core_registers", "register_unit", "reserved_memory",
    "warp_size", "registers", "matrix", "fp8", "toolchain", "refused", "cache_share",
)  # fmt: skip
SERVE = Path(__file__).parents[2] / "portattn" / "worker" / "serve.py"


def test_every_backend_has_arches_that_kernels_are_planned_for() -> None:
    assert len({(b.name, a.name) for b, a in ARCHES}) == len(ARCHES)
    for backend in BUILTIN:
        assert [a for b, a in ARCHES if b is backend and not a.refused], backend.name


@pytest.mark.parametrize(("backend", "arch"), ARCHES, ids=IDS)
def test_every_value_is_plausible_and_has_a_source(backend: Any, arch: Arch) -> None:
    assert arch.sources
    assert arch.title
    assert arch.cores > 0
    assert arch.max_programs > 0
    assert set(arch.dot_precisions) <= set(get_args(DotPrecision))
    assert arch.dot_precisions[0] == "ieee"  # what the planner takes where a tuning file's choice is not allowed
    assert arch.scratchpad_bytes % 1024 == 0
    assert all(hasattr(torch, f"float8_{name}") for name in arch.fp8)
    assert parse_target(f"{backend.name}:{arch.name}", toolchain="none").arch == arch
    named = " ".join(arch.sources)
    if backend.name != "cpu":
        assert (arch.scratchpad_bytes > 0) is (arch.scratchpad_kind != "none")
        stated = [name for name in STATED if getattr(arch, name)]
        for field in ("cores", "scratchpad_bytes", "max_programs", *stated):
            assert re.search(rf"\b{field}\b", named), f"{field} has no source"
        assert arch.families, "no quirk can name it with others of its kind"
    if backend.name in ("cuda", "rocm"):
        assert arch.matrix or arch.refused
        assert arch.warp_size in (32, 64)
        assert arch.registers in (255, 256, 512, 1024)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda:sm_90", ("cuda", 90, 32)), ("cuda:sm_120", ("cuda", 120, 32)), ("rocm:gfx942", ("hip", "gfx942", 64)),
        ("rocm:gfx1201", ("hip", "gfx1201", 32)), ("ascend:ascend910b2", ("npu", "Ascend910B2", 0)),
        ("ascend:ascend910_93", ("npu", "Ascend910_9382", 0)),
    ],
)  # fmt: skip
def test_tritons_names(name: str, expected: tuple[str, str | int, int]) -> None:
    target = parse_target(name, toolchain="none")
    assert next(b for b in BUILTIN if b.name == target.backend).triton_target(target.arch) == expected


def test_every_arch_has_a_triton_name() -> None:
    for backend, arch in ARCHES:
        if backend.core_path == "triton":
            kind, name, lanes = backend.triton_target(arch)
            assert name
            assert lanes == arch.warp_size
            assert kind == backend.triton_target(next(a for b, a in ARCHES if b is backend))[0]
            # What is run by hand, where portattn's data cannot be imported, reads the same line.
            assert triton_target(f"{backend.name}:{arch.name}") == (kind, name, lanes)
        else:
            with pytest.raises(NotImplementedError):
                backend.triton_target(arch)


def test_an_unknown_target_by_hand_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"--target is 'cuda:sm_1', but must be one of .*cuda:sm_90"):
        triton_target("cuda:sm_1")


@pytest.mark.parametrize("without", [True, False], ids=["child", "by hand"])
def test_targets_by_name_need_no_package(without: bool) -> None:
    """In a child under another toolchain's Python, and in a program that is run by hand."""
    script = f"""
import importlib.util, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("msgspec", "torch", "packaging"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
spec = importlib.util.spec_from_file_location("serve", {str(SERVE)!r})
serve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve)
if {without}:
    serve.import_without_package()
from portattn.worker.probe_harness import triton_target
print(triton_target("rocm:gfx942"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('hip', 'gfx942', 64)"


@pytest.mark.parametrize(("backend", "arch"), ARCHES, ids=IDS)
def test_no_device_is_of_two_arches(backend: Any, arch: Arch) -> None:
    own = load_arches(backend.folder).values()
    exact = [name for name in arch.devices if not set("*?[") & set(name)]
    for name in (*exact, *([] if arch.devices else [arch.name])):
        assert [other.name for other in own if other.is_device(name)] == [arch.name]


@pytest.mark.parametrize(("backend", "arch"), ARCHES, ids=IDS)
def test_every_arch_says_what_each_executor_makes_of_it(backend: Any, arch: Arch) -> None:
    """A row for it, or the reason why its code cannot be run so."""
    assert set(arch.executors) == set(executors(backend.name))
    for name, row in arch.executors.items():
        assert row, name
        assert isinstance(row.get("lacks", "a reason"), str)
        assert "lacks" not in row or len(row) == 1
        if "lacks" in row:
            assert str(row["lacks"]) in executors(backend.name)[name].declines(
                parse_target(f"{backend.name}:{arch.name}", toolchain="none")
            )


@pytest.mark.parametrize(("backend", "arch"), ARCHES, ids=IDS)
def test_every_arch_has_tuning_of_its_own_or_another_s(backend: Any, arch: Arch) -> None:
    tuned = {path.stem for path in (backend.folder / "tuning").glob("*.toml")}
    if backend.core_path == "triton" and not arch.refused:
        assert (arch.tuning or arch.name) in tuned
        assert not (arch.tuning and arch.name in tuned), "a file of its own is never read"


@pytest.mark.skipif(installed_toolchain().distribution != "triton", reason="asks the installed community Triton")
@pytest.mark.parametrize(("backend", "arch"), [(b, a) for b, a in ARCHES if "triton" in b.compilers])
def test_dot_precisions_are_what_the_installed_triton_allows(backend: Any, arch: Arch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    options = make_backend(GPUTarget(*backend.triton_target(arch))).parse_options({})
    own = {"bf16x6"}  # products of parts, which portattn makes by itself, whatever Triton calls so
    allowed = set(options.allowed_dot_input_precisions) & set(get_args(DotPrecision))
    assert set(arch.dot_precisions) - own == allowed - own


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
        ("12.8", "12.8"), ("6.4.43484-123eb5128", "6.4.43484"), ("8.2.RC1", "8.2.RC1"),
        ("8.0.0.alpha001", "8.0.0.alpha001"), ("8.3.RC1.alpha003", "8.3.RC1"), ("unknown", None), ("", None),
        (None, None),
    ],
)  # fmt: skip
def test_versions_are_pep_440(text: str | None, version: str | None) -> None:
    assert version_in(text) == version
    assert version is None or Version(version)


# ptxas


@pytest.mark.parametrize(
    ("toolchain", "arch", "version"),
    [
        ("triton==3.2.0", "sm_90", "12.4.99"), ("triton==3.3.1", "sm_90", "12.4.99"),
        ("triton==3.3.1", "sm_120", "12.8.61"), ("triton==3.5.1", "sm_100", "12.8.93"),
        ("triton==3.6.0", "sm_90", "12.8.93"), ("triton==3.6.0", "sm_100", "12.9.86"),
        ("triton==3.8.0", "sm_90", "12.9.86"), ("triton==3.8.0", "sm_120", "13.3.33"),
        ("triton==3.9.0", "sm_89", "12.9.86"), ("triton==3.9.0", "sm_90", "13.4.59"), ("triton==3.10.0", "sm_90", None),
        ("triton-ascend==3.2.0", "sm_90", None), ("none", "sm_90", None),
        ("triton==3.6.0,ptxas==13.3.33", "sm_90", "13.3.33"),  # a named one is kept
    ],
)  # fmt: skip
def test_ptxas_of_named_toolchains(toolchain: str, arch: str, version: str | None) -> None:
    assert parse_target(f"cuda:{arch}", toolchain).toolchain.component("ptxas") == version


def test_releases_do_not_overlap() -> None:
    for version in ("3.2.0", "3.3.0", "3.3.1", "3.4.0", "3.5.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0"):
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
def test_a_ptxas_that_does_not_run_is_passed_over(text, tmp_path, monkeypatch):
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


BACKENDS = list(Registry.load().backends)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_executor_s_names_lead_somewhere(backend: str) -> None:
    for name, executor in executors(backend).items():
        assert executor.level in LEVELS
        assert name in Cell.__struct_fields__
        for task, taken in ((executor.task, ["request", "enter"]), (executor.code_task, ["request", "arguments"])):
            if task:
                assert TASK.fullmatch(task)
                assert list(inspect.signature(pkgutil.resolve_name(task)).parameters) == taken
        for arch in executor.arches:
            assert arch in Registry.load().arches[backend]


def test_executors_are_found_by_name() -> None:
    assert [backend for backend in BACKENDS if "emulated" in executors(backend)] == ["rocm"]
    assert not executors("cpu")
    found = [backend for backend in BACKENDS if any(one.lowers_to for one in executors(backend).values())]
    assert found == ["ascend"]
    assert analyst(parse_target("ascend:ascend910b2", "triton-ascend==3.2.0")).asks == "text"
    assert analyst(parse_target("rocm:gfx942", "triton==3.6.0")) is None


def test_what_lacks_is_said_of_targets_of_other_backends_too() -> None:
    assert lacks("emulated", parse_target("rocm:gfx942", "triton==3.6.0")) == ""
    assert "sm_90 has no model here" in lacks("emulated", parse_target("cuda:sm_90", "triton==3.6.0"))
    assert "is no NVIDIA GPU" in lacks("older", parse_target("rocm:gfx942", "triton==3.6.0"))
    assert lacks("painted", parse_target("cuda:sm_90", "triton==3.6.0")).startswith("nothing runs the code of cuda:")


def test_backends_import_no_executor_before_they_are_asked() -> None:
    program = """
import sys
from portattn.planning.registry import Registry
Registry.load()
print([n for n in sys.modules if "executor" in n or "emulator" in n or ".linalg" in n or "ptx_compat" in n])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
