"""Gradients whose two kernels have tiles of their own, compiled for real: the shipped ones of sm_90, and on gfx942."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from portattn.compile.compile_check import compile_in, over_limit
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.problem import Problem
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import gates
from portattn.testing.findings import KernelFacts
from portattn.worker.client import Worker

pytestmark = pytest.mark.compiles
APART = {"block_m": 128, "block_n": 32, "num_warps": 4, "rows_m": 64, "rows_n": 64, "rows_warps": 8}


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
def test_both_kernels_compile_and_fit(
    arch: str, head_dim: int, causal: str, launch: dict[str, int], packed: bool
) -> None:
    fields: dict[str, Any] = {"op": "varlen_attention_backward", "total_q": 4096, "total_k": 4096} if packed else {}
    problem = Problem(
        **{"op": "attention_backward"} | fields, batch=1, heads_q=4, heads_k=4, seq_q=4096, seq_k=4096,
        head_dim=head_dim, dtype="bf16", causal=causal,
    )  # fmt: skip
    target = Registry.load().target(arch, str(installed_toolchain()))
    made = plan(problem, target, settings=Settings(backend="triton"))
    assert made.launch is not None
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
    matrix = [g for g in gates.check(made, target, tuple(found), Registry.load()) if g.name == "matrix instructions"]
    assert [(gate.function, gate.passed) for gate in matrix] == [("backward_keys", True), ("backward_rows", True)]
