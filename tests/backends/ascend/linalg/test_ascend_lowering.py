"""Every core kernel as triton-ascend lowers it, executed on this CPU: what plans choose, and what they avoid."""

from pathlib import Path

import msgspec
import pytest
import torch

from portattn.backends.ascend import AscendBackend
from portattn.backends.ascend.linalg.executor import LinalgExecutor, Programs
from portattn.compile.ensure_compiled import compile_in
from portattn.launch import kernel_calls, meta_call
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.testing import canary
from portattn.testing.findings import Numerics
from portattn.tools.matrix import problems
from portattn.tools.matrix.problems import decode, dense, gradients, mla, packed_gradients, paged, sparse, varlen
from portattn.worker.client import Worker

pytestmark = pytest.mark.usefixtures("mlir")
TARGET = parse_target("ascend:ascend910b2", toolchain="triton-ascend==3.2.0")
CAUSAL = {"causal": "bottom_right"}
# Every kernel, and every feature once or more; sizes are scaled down by small_problems.
PROBLEMS = [
    dense("padded, LSE", dtype="fp16", head_dim=80, return_lse=True, seqlens_q=True, seqlens_k=True),
    dense("everything", dtype="bf16", head_dim=64, bias=True, mask=True, alibi_slopes=True, sinks=True, softcap=True,
          heads_k=4),
    dense("left-padded", dtype="fp32", head_dim=64, **CAUSAL, seqlens_q=True, seqlens_k=True, leftpad_q=True,
          leftpad_k=True),
    dense("two parts of a head", dtype="fp16", head_dim=576, head_dim_v=512, **CAUSAL),
    dense("unaligned", dtype="fp16", head_dim=40, aligned=False, causal="top_left"),
    varlen("window, softcap, LSE", dtype="bf16", head_dim=128, **CAUSAL, softcap=True, window_left=100,
           return_lse=True),
    varlen("ALiBi, sinks, GQA", dtype="fp16", head_dim=64, alibi_slopes=True, sinks=True, heads_k=4),
    decode("GQA, left-padded, LSE", dtype="fp16", head_dim=80, leftpad_k=True, return_lse=True),
    decode("bias, mask, queries", dtype="bf16", head_dim=64, seq_q=3, bias=True, mask=True, **CAUSAL),
    decode("splits", dtype="fp16", head_dim=64, num_splits=3, sinks=True, return_lse=True),
    decode("no group, mask by key", dtype="fp32", head_dim=64, heads_k=32, mask=True, mask_by_key=True),
    paged("a page a tile", dtype="fp16", head_dim=128, page_size=64),
    paged("a page a token", dtype="bf16", head_dim=80, page_size=1, alibi_slopes=True),
    paged("ragged", dtype="fp16", head_dim=64, page_size=48, total_q=1024, seq_q=512, **CAUSAL, window_left=100),
    paged("splits, mask", dtype="fp16", head_dim=64, page_size=16, num_splits=2, mask=True, return_lse=True),
    sparse("weights, LSE", dtype="fp16", head_dim=96, log_weights=True, return_lse=True),
    sparse("MagicPIG", dtype="bf16", head_dim=128, magicpig=True, page_size=16),
    sparse("splits, softcap, ALiBi, sinks", dtype="fp32", head_dim=64, softcap=True, alibi_slopes=True, sinks=True,
           num_splits=2),
    problems.blocks("sinks", dtype="fp16", head_dim=64, heads_q=6, heads_k=2, block_k=16, tokens=3, sinks=True),
    problems.block_gradients(dtype="bf16", head_dim=64, heads_q=6, heads_k=2, block_k=16, tokens=3, **CAUSAL),
    mla("queries", dtype="bf16", head_dim=576, head_dim_v=512, seq_q=2, **CAUSAL),
    mla("splits, a page a token", dtype="fp16", head_dim=288, head_dim_v=256, page_size=1, num_splits=2),
    gradients("padded, GQA", dtype="fp16", head_dim=80, heads_k=4, **CAUSAL, seqlens_q=True, seqlens_k=True,
              grad_lse=True),
    gradients("everything", dtype="bf16", head_dim=64, bias=True, mask=True, alibi_slopes=True, softcap=True,
              grad_bias=True, grad_slopes=True, dropout=True),
    packed_gradients("window", dtype="fp32", head_dim=64, **CAUSAL, window_left=100),
    decode("tree mask", dtype="bf16", head_dim=64, seq_q=5, tree_mask=True),
    dense("lists of blocks", dtype="fp16", head_dim=64, **CAUSAL, block_mask=True, block_q=64, block_k=32),
    paged("ragged, trees", dtype="fp16", head_dim=64, page_size=16, total_q=24, seq_q=9, tree_mask=True, **CAUSAL),
]  # fmt: skip
# Beside what plans choose today: what a quirk that is switched off, or another tuning, would choose.
OTHERS = [
    {"load": "pointer"}, {"load": "pointer", "k_tile": "transposed"}, {"exp": "exp2"}, {"mask_value": "finite"},
    {"grid": "tiles"}, {"pipeline": "rotated", "q_operand": "keep"}, {"select": "branch"}, {"page_loop": "flat_masked"},
]  # fmt: skip


@pytest.fixture(scope="module")
def executed() -> LinalgExecutor:
    return LinalgExecutor(120.0)


def run(made: Plan, executed: LinalgExecutor, compiler: Worker, runner: Worker) -> Numerics:
    return executed.check(made, TARGET, compiler, runner)


def changed(made: Plan, lowering: dict[str, str]) -> Plan:
    return msgspec.structs.replace(made, lowering=msgspec.structs.replace(made.lowering, **lowering))


@pytest.mark.parametrize("named", PROBLEMS, ids=lambda n: n.name)
def test_what_a_plan_chooses_is_right(named, executed, ascend_compiler, runner):
    made = plan(named.problem, TARGET)
    assert made.path == "triton"
    seen = run(made, executed, ascend_compiler, runner)
    assert seen.outcome == "pass", seen.reason
    assert 0 < seen.error <= seen.budget


@pytest.mark.parametrize("problem", canary.CASES["topk_indices"], ids=str)
def test_selections_are_right(problem, executed, ascend_compiler, runner):
    seen = run(plan(problem, TARGET), executed, ascend_compiler, runner)
    assert seen.outcome == "pass", seen.reason


def test_the_problems_touch_every_kernel_and_every_choice_that_differs():
    plans = [plan(named.problem, TARGET) for named in PROBLEMS]
    # What fills a cache is compared bit by bit, by the matrix.
    assert {made.kernel for made in plans} == {kernel.name for op, kernel in CORES.items() if not ROWS[op].writes}
    loops = {made.lowering.page_loop for made in plans if made.kernel in ("paged_split", "mla_split")}
    assert loops == {"per_page", "flat_masked"}
    assert {made.launch.splits > 1 for made in plans} == {True, False}


@pytest.mark.parametrize("lowering", OTHERS, ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()))
def test_other_choices_are_right_too(lowering, executed, ascend_compiler, runner):
    for named in (PROBLEMS[5], PROBLEMS[8], PROBLEMS[11]):
        made = plan(named.problem, TARGET)
        if all(name in CORES[named.problem.op].choices for name in lowering):
            seen = run(changed(made, lowering), executed, ascend_compiler, runner)
            assert seen.outcome == "pass", (named.name, seen.reason)


@pytest.mark.parametrize("view", ["rows", "transposed"])
def test_the_wrong_k_tile_of_a_transposed_view_is_seen(view, in_child, ascend_compiler):
    """The compiler makes it without a word (quirk ascend-0006): a check that lets this pass would see nothing."""
    keys, first, block, width = 80, 64, 32, 16
    request = {
        "module": "small_kernels", "function": "k_tile",
        "types": {"k": "*fp32", "out": "*fp32", "keys": "i32", "first": "i32"},
        "constants": {"BLOCK": block, "WIDTH": width, "VIEW": view}, "divisible": [], "small": [], "options": {},
    }  # fmt: skip
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    with Worker(python=ascend_compiler.python, environment=here) as compiler:
        npu = {"target": ["npu", "Ascend910B2", 0], "adapter": AscendBackend.adapter}
        reply = compiler.request("compile", 120.0, signature=request, facts="text", **npu)
    assert reply.outcome == "ok", reply.message  # it says nothing

    def launched() -> torch.Tensor:
        out = torch.full((width, block), 7.0)
        arguments = {"k": k, "out": out, "keys": keys, "first": first}
        Programs().launch(str(reply.facts["linalg"]), (1,), arguments, ("out",))
        return out

    k = torch.randn(keys, width)
    expected = torch.zeros(width, block)
    expected[:, : keys - first] = k[first:].T
    assert torch.equal(in_child(launched), expected) == (view == "rows")


@pytest.mark.parametrize("named", [PROBLEMS[8], PROBLEMS[12], PROBLEMS[15]], ids=lambda n: n.name)
def test_reads_past_the_end_are_seen_where_nothing_is_clamped(named, executed, ascend_compiler, runner):
    made = plan(named.problem, TARGET)
    assert made.lowering.reads == "inside"
    seen = run(changed(made, {"reads": "masked"}), executed, ascend_compiler, runner)
    assert seen.outcome == "fail", seen.reason
    assert "outside its memory" in seen.reason
    assert seen.error <= seen.budget  # nothing else gives it away


def lowered(made: Plan, compiler: Worker) -> set[str]:
    found: set[str] = set()
    for launch in kernel_calls(made, meta_call(made.problem), TARGET.arch.cores)[0]:
        reply = compile_in(compiler, launch, made, TARGET, 120.0, "text")
        assert reply.outcome == "ok", reply.message
        found |= {lint.name for lint in LinalgExecutor(120.0).analyze(reply, launch, TARGET)[1]}
    return found


def test_lints_on_real_kernels(ascend_compiler):
    rows = plan(paged("", dtype="fp16", head_dim=64, page_size=1).problem, TARGET)
    assert lowered(rows, ascend_compiler) >= {"row-loop"}
    assert "scalar-loop" in lowered(changed(rows, {"k_tile": "transposed"}), ascend_compiler)
    plain = plan(dense(dtype="fp16", head_dim=64).problem, TARGET)
    assert lowered(plain, ascend_compiler) == set()
    large = msgspec.structs.replace(plain.launch, block_m=128, block_n=128)
    assert lowered(msgspec.structs.replace(plain, launch=large), ascend_compiler) == {"unified-buffer"}
