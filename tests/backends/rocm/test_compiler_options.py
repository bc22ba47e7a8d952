"""Options of Triton's AMD back end as data: compared with the wheels' own files, and left out of launches that would
fail or be misled by them."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from packaging.specifiers import SpecifierSet

from portattn import Problem
from portattn.backends.rocm import RocmBackend, compiler_options
from portattn.planning import core_path
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.toolchain import Toolchain, installed_toolchain
from portattn.tools.lab import folders

LAB = ("3.2.0", "3.4.0", "3.9.0")


def compiler_file(version: str) -> Path:
    """Return backends/amd/compiler.py of a lab's environment, or of the installed Triton ("")."""
    if not version:
        spec = importlib.util.find_spec("triton")
        if spec is None or spec.origin is None or installed_toolchain().distribution != "triton":
            pytest.skip("no community Triton is installed")
        return Path(spec.origin).parent / "backends" / "amd" / "compiler.py"
    found = list(folders.root().glob(f"triton-{version}/lib/python*/site-packages/triton/backends/amd/compiler.py"))
    if not found:
        pytest.skip(f"no environment: portattn lab create triton=={version}")
    return found[0]


@pytest.mark.usefixtures("real_lab")
@pytest.mark.parametrize("version", [*LAB, ""])
def test_the_data_are_what_the_wheel_says(version: str) -> None:
    tree = ast.parse(compiler_file(version).read_text(encoding="utf-8"))
    release = version or installed_toolchain().version
    [options] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "HIPOptions"]
    fields = {
        node.target.id: ast.literal_eval(node.value)
        for node in options.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    for name, row in compiler_options().items():
        assert (name in fields) == SpecifierSet(row.triton).contains(release), name
        if name not in fields:
            continue
        defaults = [value for text, value in row.default.items() if SpecifierSet(text).contains(release)]
        assert defaults == [fields[name]], name
        assert type(fields[name]) is RocmBackend.options[name]
        assert (name in read) == SpecifierSet(row.acts).contains(release), name


def test_every_option_that_a_launch_may_have_has_a_row() -> None:
    assert set(compiler_options()) == set(RocmBackend.options)


@pytest.mark.parametrize(
    ("release", "given", "left", "words"),
    [
        ("3.6.0", {"wgp_cu_mode": "cu"}, {}, "lacks it (triton >=3.9 has it)"),
        ("3.9.0", {"wgp_cu_mode": "cu"}, {"wgp_cu_mode": "cu"}, ""),
        ("3.7.1", {"llvm_fn_attrs": "noinline", "kpack": 1}, {"kpack": 1}, "lacks it (triton >=3.8 has it)"),
        ("3.8.0", {"schedule_hint": "attention"}, {}, "does nothing with it (triton <3.8 does)"),
        ("3.6.0", {"schedule_hint": "attention"}, {"schedule_hint": "attention"}, ""),
    ],
)
def test_a_tuning_row_with_an_option_that_a_release_lacks(
    release: str, given: dict[str, Any], left: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = core_path._base

    def base(*arguments: Any) -> Any:
        found = made(*arguments)
        return msgspec.structs.replace(found, launch=found.launch.changed(given))

    monkeypatch.setattr(core_path, "_base", base)
    problem = Problem(batch=1, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64)
    found = plan(problem, parse_target("rocm:gfx1100", f"triton=={release}"))
    assert found.launch is not None
    assert {name: value for name, value in found.launch.options if name in given} == left
    notes = [note for note in found.notes if "is left out" in note]
    assert (notes != []) == bool(words)
    assert all(words in note and f"triton=={release}" in note for note in notes)


def test_an_unknown_release_keeps_its_options() -> None:
    unknown = Toolchain(distribution="flagtree", version="9.9")
    assert RocmBackend().lacks_option("wgp_cu_mode", unknown) == ""
    assert RocmBackend().lacks_option("other", SimpleNamespace()) == ""  # type: ignore[arg-type]
