"""warps_apart for sm_90 as each release of Triton that this machine has compiles it, and how it is launched."""

from __future__ import annotations

from typing import Any

import pytest

from portattn import Plan, Problem
from portattn.compile.ensure import compile_in
from portattn.launch.kernelcall import KernelCall
from portattn.launch.meta import meta_call
from portattn.launch.run import kernel_calls
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.target import Target
from portattn.worker.client import Worker

CORES = 132
MOST_SPILLED = 32  # bytes a thread: tiles of 128 keys have 255 registers; 3.7.1 and 3.8.0 spill 24, the others nothing
ONE: dict[str, Any] = {
    "op": "decode_attention",
    "batch": 1,
    "heads_q": 32,
    "heads_k": 8,
    "seq_q": 1,
    "head_dim": 128,
    "dtype": "bf16",
}
FORMS = {
    "split": Problem(**ONE, seq_k=4096),
    "not split": Problem(**ONE | {"batch": 16}, seq_k=2048, seqlens_k=True, return_lse=True),
    "narrow": Problem(**ONE | {"batch": 8, "heads_q": 64, "heads_k": 16, "head_dim": 64}, seq_k=1024),
    "short": Problem(**ONE, seq_k=256),
    "pages": Problem(**ONE | {"op": "paged_attention", "batch": 64}, seq_k=8192, page_size=64, seqlens_k=True),
}


def launches(problem: Problem, target: Target) -> tuple[Plan, list[KernelCall]]:
    made = plan(problem, target)
    assert made.path == "triton"
    assert made.lowering is not None
    assert made.lowering.warps == "apart"
    return made, kernel_calls(made, meta_call(problem), CORES)[0]


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_a_release_compiles_it(release_compiler: Worker, release_target: Target, form: str) -> None:
    """Into asynchronous copies and whole matrices from shared memory; a split lets the merging begin."""
    made, (first, *merging) = launches(FORMS[form], release_target)
    assert bool(merging) == (form in ("split", "short"))
    reply = compile_in(release_compiler, first, made, release_target, 240.0, "all")
    assert reply.outcome == "ok", reply.message
    assert reply.facts["spills"] <= MOST_SPILLED
    ptx = str(reply.facts["ptx"])
    assert ("griddepcontrol.launch_dependents" in ptx) == bool(merging)
    assert "griddepcontrol.wait" not in ptx
    assert "cp.async" in ptx
    assert "ldmatrix" in ptx


def test_the_merging_kernel_has_programs_for_parts_of_a_row() -> None:
    _, (first, merging) = launches(FORMS["split"], parse_target("cuda:sm_90", "triton==3.6.0"))
    assert (first.function, first.constexprs["FOLLOWED"]) == ("warps_apart", True)
    assert (merging.function, merging.constexprs["DEPENDENT"]) == ("combine", True)
    assert merging.grid == (32, 4)
    assert merging.constexprs["BLOCK_DV"] * merging.grid[1] == 128
    assert dict(merging.launch.options) == {"launch_pdl": True}
    assert "launch_pdl" not in dict(first.launch.options)


@pytest.mark.parametrize(
    "fields", [{"softcap": True}, {"window_left": 100}, {"mask": True}, {"dtype": "fp32"}], ids=str
)
def test_what_it_does_not_take_runs_joint(fields: dict[str, Any]) -> None:
    made = plan(Problem(**ONE | fields, seq_k=4096), parse_target("cuda:sm_90", "triton==3.6.0"))
    assert made.lowering is not None
    assert made.lowering.warps == "joint"
