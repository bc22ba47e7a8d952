"""Multiplications and additions are fused by portattn's word, whatever the default of the user's Triton is."""

from __future__ import annotations

from typing import Any

import pytest

from portattn.compile.ensure import compile_in
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.lowering import FUSED
from portattn.schema.problem import Problem
from portattn.schema.steps import Step
from portattn.schema.toolchain import installed
from portattn.worker.client import Worker


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["cuda:sm_80", "rocm:gfx942"])
def test_the_users_default_changes_no_code(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(op="attention", batch=1, heads_q=2, heads_k=2, seq_q=256, seq_k=256, head_dim=64, dtype="bf16")
    target = Registry.load().target(arch, str(installed()))
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


def test_a_launch_may_say_otherwise() -> None:
    """The writers' rotation does, to round as the reference."""
    fields: dict[str, Any] = {"head_dim": 64, "dtype": "bf16", "heads_q": 2, "heads_k": 2, "batch": 2}
    problem = Problem(op="append_kv", seq_q=1, seq_k=64, rotary="neox", rotary_dim=64, seqlens_k=True, **fields)
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    made = plan(problem, target, settings=Settings(backend="triton"))
    (launch,) = kernel_calls(made, meta_call(problem), 132)[0]
    assert launch.options()["enable_fp_fusion"] is False
    assert Step(None, (1,), {}, {"num_warps": 4}).options == FUSED | {"num_warps": 4}
    assert Step(None, (1,), {}, {"enable_fp_fusion": False}).options == {"enable_fp_fusion": False}
