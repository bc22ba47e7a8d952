"""What takes two processes to see: one compile for both. And options of launches that no default of a user changes."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from portattn.compile.ensure_compiled import compile_in, over_limit
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call, run
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.problem import Problem
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import findings
from portattn.testing.findings import KernelFacts
from portattn.worker.client import Worker

SECONDS = 120.0  # a limit against hangs, for what takes a few

# A compiler that notes each request, and answers once both processes have asked: whoever asks second waits for the
# first one's answer, or has been waiting for it.
COMPILER = """\
#!{python}
import json, sys, time
from pathlib import Path
for line in sys.stdin:
    with open({requests!r}, "a") as file:
        file.write(line)
    asked = json.loads(line)["id"]
    print(json.dumps({{"id": asked, "stage": "ttgir"}}), flush=True)
    while len(list(Path({folder!r}).glob("*.asks"))) < 2:
        time.sleep(0.05)
    time.sleep(2.0)
    facts = {{"scratchpad_bytes": 1024, "num_warps": 4}}
    print(json.dumps({{"id": asked, "version": 2, "ok": True, "facts": facts}}), flush=True)
"""
# Plans a kernel for an H100, says that it asks, and asks whether it compiles. Workers run under sys.executable.
PROCESS = """\
import os, sys
from pathlib import Path
import torch
from portattn import Problem
from portattn.compile import ensure_compiled
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
folder, compiler = sys.argv[1:]
problem = Problem(batch=2, heads_q=2, heads_k=2, seq_q=64, seq_k=64, head_dim=64, dtype="fp16")
target = parse_target("cuda:sm_90", "triton==3.6.0")
made = plan(problem, target, settings=Settings(backend="triton"))
launches, _, _ = kernel_calls(made, meta_call(problem), 132)
ensure_compiled.new_worker = lambda: ensure_compiled.Worker(python=compiler)
settings = Settings(cache_dir=folder, compile_seconds=60.0)
Path(folder, f"{os.getpid()}.asks").touch()
failed = ensure_compiled.ensure_all(made, launches, lambda launch: None, torch.empty(0), target, settings)
sys.exit(failed.reason if failed else 0)
"""


def test_who_waited_for_another_processs_compile_does_not_compile_again(tmp_path):
    """Both find no record, one compiles, and the other looks once more when it is its turn."""
    compiler, requests = tmp_path / "compiler", tmp_path / "requests.jsonl"
    compiler.write_text(COMPILER.format(python=sys.executable, requests=str(requests), folder=str(tmp_path)))
    compiler.chmod(0o755)
    command = [sys.executable, "-c", PROCESS, str(tmp_path), str(compiler)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    assert [json.loads(line)["task"] for line in requests.read_text().splitlines()] == ["compile"]


ROOT = Path(__file__).parent.parent.parent
# Launches by the options of another Step or of a KernelCall, or by a name that is made in the line before.
TAKEN_OVER = [
    "backends/cuda/hopper_forward/other_variants.py", "backends/cuda/hopper_forward/other_variants.py",
    "backends/cuda/hopper_indexer/variant.py", "backends/cuda/hopper_latent/variant.py",
    "portattn/launch/cached_launch.py", "portattn/launch/run.py", "portattn/schema/lowering.py",
]  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["cuda:sm_80", "rocm:gfx942"])
def test_the_users_default_changes_no_code(arch, monkeypatch):
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


def writing(target):
    fields: dict[str, Any] = {"head_dim": 64, "dtype": "bf16", "heads_q": 2, "heads_k": 2, "batch": 2}
    problem = Problem(op="append_kv", seq_q=1, seq_k=64, rotary="neox", rotary_dim=64, seqlens_k=True, **fields)
    made = plan(problem, target, settings=Settings(backend="triton"))
    (launch,) = kernel_calls(made, meta_call(problem), 132)[0]
    return launch


def test_a_launch_may_say_otherwise():
    assert writing(Registry.load().target("cuda:sm_90", "triton==3.6.0")).options()["enable_fp_fusion"] is False


def test_a_compiler_without_the_option_does_not_get_it(monkeypatch):
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    monkeypatch.setattr(run, "backend_options", lambda: {"cuda": {"maxnreg": int}})
    assert "enable_fp_fusion" not in writing(target).options()
    problem = Problem(op="attention", batch=1, heads_q=2, heads_k=2, seq_q=256, seq_k=256, head_dim=64, dtype="bf16")
    (launch,) = kernel_calls(plan(problem, target, settings=Settings(backend="triton")), meta_call(problem), 132)[0]
    assert "enable_fp_fusion" not in launch.options()


def is_grid(what):
    if isinstance(what.slice, ast.Tuple):
        return ast.unparse(what.value) != "dict"
    return ast.unparse(what.slice).rpartition(".")[2] in ("grid", "programs")


def direct_launches():
    """Every `kernel[grid](…)` of ours, and every Step, whose options are its fourth argument."""
    for path in sorted(path for folder in ("portattn", "backends") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            step = isinstance(node.func, ast.Name) and node.func.id == "Step" and "backends/cuda" in str(path)
            if step or (isinstance(node.func, ast.Subscript) and is_grid(node.func)):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_kernel_that_is_launched_by_itself_asks_for_it():
    found = dict(direct_launches())
    assert len(found) >= 14
    lacking = [place.partition(":")[0] for place, node in found.items() if "FUSED" not in ast.unparse(node)]
    assert sorted(lacking) == TAKEN_OVER


APART = {"block_m": 128, "block_n": 32, "num_warps": 4, "rows_m": 64, "rows_n": 64, "rows_warps": 8}


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("arch", "head_dim", "causal", "launch"),
    [
        ("cuda:sm_90", 64, "none", {}),
        ("cuda:sm_90", 256, "bottom_right", {}),
        ("rocm:gfx942", 64, "bottom_right", APART),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_both_kernels_compile_and_fit(arch, head_dim, causal, launch, packed):
    fields: dict[str, Any] = {"op": "varlen_attention_backward", "total_q": 4096, "total_k": 4096} if packed else {}
    problem = Problem(
        **{"op": "attention_backward"} | fields, batch=1, heads_q=4, heads_k=4, seq_q=4096, seq_k=4096,
        head_dim=head_dim, dtype="bf16", causal=causal,
    )  # fmt: skip
    target = Registry.load().target(arch, str(installed_toolchain()))
    made = plan(problem, target, settings=Settings(backend="triton"))
    made = msgspec.structs.replace(made, launch=made.launch.changed(launch))
    assert len(made.specialised[1].kernels()) == 2, "this test is about two tiles"
    found = []
    with Worker() as worker:
        for one in kernel_calls(made, meta_call(problem), target.arch.cores)[0]:
            reply = compile_in(worker, one, made, target, 120.0, "full")
            assert reply.outcome == "ok", (one.function, reply)
            assert not over_limit(reply, target), one.function
            assert reply.facts["num_warps"] == one.options()["num_warps"]
            found.append(KernelFacts(function=one.function, facts=dict(reply.facts)))
    assert [kernel.function for kernel in found] == ["backward_delta", "backward_keys", "backward_rows"]
    matrix = [
        g for g in findings.check_gates(made, target, tuple(found), Registry.load()) if g.name == "matrix instructions"
    ]
    assert [(gate.function, gate.passed) for gate in matrix] == [("backward_keys", True), ("backward_rows", True)]
