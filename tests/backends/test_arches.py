"""Arch tables of every backend, on a machine with no accelerator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from portattn.backends import BUILTIN
from portattn.planning.registry import load_arches, parse_target
from portattn.schema.lowering import DotPrecision
from portattn.schema.target import Arch
from portattn.schema.toolchain import installed_toolchain
from portattn.testing.executor import executors
from portattn.worker.probe import triton_target

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
    target = parse_target(f"{backend.name}:{arch.name}", toolchain="none")
    assert target.arch == arch
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
        ("cuda:sm_90", ("cuda", 90, 32)),
        ("cuda:sm_120", ("cuda", 120, 32)),
        ("rocm:gfx942", ("hip", "gfx942", 64)),
        ("rocm:gfx1201", ("hip", "gfx1201", 32)),
        ("ascend:ascend910b2", ("npu", "Ascend910B2", 0)),
        ("ascend:ascend910_93", ("npu", "Ascend910_9382", 0)),
    ],
)
def test_tritons_names(name: str, expected: tuple[str, str | int, int]) -> None:
    target = parse_target(name, toolchain="none")
    backend = next(b for b in BUILTIN if b.name == target.backend)
    assert backend.triton_target(target.arch) == expected


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
from portattn.worker.probe import triton_target
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
