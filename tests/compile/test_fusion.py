"""Multiplications and additions are fused by portattn's word, whatever the default of the user's Triton is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portattn.compile.compile_check import compile_in
from portattn.config import Settings
from portattn.launch import KernelCall, kernel_calls, meta_call, run
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.schema.toolchain import installed_toolchain
from portattn.worker.client import Worker

ROOT = Path(__file__).parent.parent.parent
# Launches by the options of another Step or of a KernelCall, or by a name that is made in the line before.
TAKEN_OVER = [
    "backends/cuda/hopper_forward/narrow_variant.py", "backends/cuda/hopper_forward/whole_variant.py",
    "backends/cuda/hopper_latent/variant.py", "portattn/launch/cached_launch.py", "portattn/launch/run.py",
    "portattn/schema/kernel_step.py",
]  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["cuda:sm_80", "rocm:gfx942"])
def test_the_users_default_changes_no_code(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(op="attention", batch=1, heads_q=2, heads_k=2, seq_q=256, seq_k=256, head_dim=64, dtype="bf16")
    target = Registry.load().target(arch, str(installed_toolchain()))
    made = plan(problem, target, settings=Settings(backend="triton"))
    (launch,) = kernel_calls(made, meta_call(problem), target.arch.cores)[0]
    found = []
    for default in ("1", "0"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
        with Worker() as worker:
            reply = compile_in(worker, launch, made, target, 120.0, "all")
        assert reply.outcome == "ok", reply
        found.append(dict(reply.facts))
    assert found[0] == found[1]


def writing(target: Target) -> KernelCall:
    fields: dict[str, Any] = {"head_dim": 64, "dtype": "bf16", "heads_q": 2, "heads_k": 2, "batch": 2}
    problem = Problem(op="append_kv", seq_q=1, seq_k=64, rotary="neox", rotary_dim=64, seqlens_k=True, **fields)
    made = plan(problem, target, settings=Settings(backend="triton"))
    (launch,) = kernel_calls(made, meta_call(problem), 132)[0]
    return launch


def test_a_launch_may_say_otherwise() -> None:
    """The writers' rotation does, to round as the reference."""
    assert writing(Registry.load().target("cuda:sm_90", "triton==3.6.0")).options()["enable_fp_fusion"] is False


def test_a_compiler_without_the_option_does_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    monkeypatch.setattr(run, "backend_options", lambda: {"cuda": {"maxnreg": int}})
    assert "enable_fp_fusion" not in writing(target).options()
    problem = Problem(op="attention", batch=1, heads_q=2, heads_k=2, seq_q=256, seq_k=256, head_dim=64, dtype="bf16")
    (launch,) = kernel_calls(plan(problem, target, settings=Settings(backend="triton")), meta_call(problem), 132)[0]
    assert "enable_fp_fusion" not in launch.options()


def is_grid(what: ast.Subscript) -> bool:
    if isinstance(what.slice, ast.Tuple):
        return ast.unparse(what.value) != "dict"
    return ast.unparse(what.slice).rpartition(".")[2] in ("grid", "programs")


def direct_launches() -> Iterator[tuple[str, ast.Call]]:
    """Every `kernel[grid](…)` of ours, and every Step, whose options are its fourth argument."""
    for path in sorted(path for folder in ("portattn", "backends") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            step = isinstance(node.func, ast.Name) and node.func.id == "Step" and "backends/cuda" in str(path)
            if step or (isinstance(node.func, ast.Subscript) and is_grid(node.func)):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_kernel_that_is_launched_by_itself_asks_for_it() -> None:
    found = dict(direct_launches())
    assert len(found) >= 14
    lacking = [place.partition(":")[0] for place, node in found.items() if "FUSED" not in ast.unparse(node)]
    assert sorted(lacking) == TAKEN_OVER
