"""The environments of this machine's own lab, as far as they are made: each compiles, and is what the registry says."""

import pytest

from portattn.compile.ensure_compiled import compile_in
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.tools import lab
from portattn.tools.matrix.problems import dense

pytestmark = [pytest.mark.usefixtures("real_lab"), pytest.mark.compiles]
SECONDS = 300.0
COMMUNITY = [name for name in lab.toolchains() if name.startswith("triton==")]


def made(toolchain):
    found = lab.find(toolchain)
    if found is None:
        pytest.skip(f"needs `portattn lab create {toolchain}`")
    return found


@pytest.mark.parametrize("toolchain", COMMUNITY)
def test_it_has_the_ptxas_that_plans_expect(toolchain):
    versions = made(toolchain).versions
    for arch in ("sm_90", "sm_100"):
        expected = parse_target(f"cuda:{arch}", toolchain).toolchain.component("ptxas")
        assert expected in (versions["ptxas"], versions.get("ptxas-blackwell")), arch
    assert parse_target("cuda:sm_80", toolchain).toolchain.component("ptxas") == versions["ptxas"]


@pytest.mark.parametrize("toolchain", COMMUNITY)
def test_it_compiles_machine_code_for_nvidia_and_amd(toolchain, tmp_path):
    made(toolchain)
    problem = dense(dtype="fp16", head_dim=64).problem
    with lab.worker(toolchain, environment={"TRITON_CACHE_DIR": str(tmp_path)}) as worker:
        for name, matrix in (("cuda:sm_80", "mma"), ("rocm:gfx942", "mfma")):
            target = parse_target(name, toolchain)
            planned = plan(problem, target, Registry.load())
            assert planned.lowering is not None, planned.rejected
            launch = kernel_calls(planned, meta_call(problem), target.arch.cores)[0][0]
            reply = compile_in(worker, launch, planned, target, SECONDS, "full")
            assert reply.outcome == "ok", (name, reply)
            assert reply.facts[matrix] > 0
            assert reply.facts["registers"] > 0
            assert "spills" in reply.facts
            assert reply.toolchain == toolchain.partition("==")[2]


def test_triton_ascend_lowers_to_linalg(tmp_path):
    toolchain = "triton-ascend==3.2.0"
    assert made(toolchain).python_version < "3.12"
    target, problem = parse_target("ascend:ascend910b2", toolchain), dense(dtype="fp16", head_dim=64).problem
    planned = plan(problem, target, Registry.load())
    assert planned.lowering is not None, planned.rejected
    launch = kernel_calls(planned, meta_call(problem), target.arch.cores)[0][0]
    with lab.worker(toolchain, environment={"TRITON_CACHE_DIR": str(tmp_path)}) as worker:
        reply = compile_in(worker, launch, planned, target, SECONDS, "full")
    assert reply.outcome == "ok", reply
    assert reply.facts["matmul"] >= 2
    assert reply.facts["leftover_tt"] == 0
