"""Workers: real cross-compiles in a child process, and modules that are planted to fail in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support import problem
from worker_children import SECONDS, process_of, running

from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.compile.ensure_compiled import compile_fields, compile_in, over_limit
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call, signature
from portattn.launch.kernelcall import signatures
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.toolchain import installed_toolchain
from portattn.worker.client import Worker


@pytest.fixture(scope="module")
def compiling_worker(tmp_path_factory):
    """A worker with a Triton cache of its own, so that what is asked is compiled and not found."""
    cache = tmp_path_factory.mktemp("triton-cache")
    with Worker(environment={"TRITON_CACHE_DIR": str(cache)}) as worker:
        yield worker


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("target", "matrix"), [("cuda:sm_80", "mma"), ("rocm:gfx942", "mfma")], ids=["sm_80", "gfx942"]
)
def test_a_real_compile_for_a_chip_that_is_not_here(compiling_worker, target, matrix):
    where = parse_target(target)
    p = problem(heads_q=8, seq_q=256, seq_k=256, head_dim=64, dtype="fp16", causal="bottom_right", seqlens_k=True)
    made = plan(p, where)
    if made.path != "triton":
        pytest.skip(f"no core kernel for {where}: {made.rejected[0].reason}")
    launches, _, _ = kernel_calls(made, meta_call(p), where.arch.cores)
    reply = compile_in(compiling_worker, launches[0], made, where, SECONDS, "full")
    assert reply.outcome == "ok", reply
    assert reply.facts[matrix] > 0
    assert reply.facts["registers"] > 0
    assert reply.facts["num_warps"] == made.launch.num_warps
    assert not over_limit(reply, where)


@pytest.mark.compiles
def test_a_kernel_that_does_not_compile(compiling_worker, tmp_path):
    """The compiler's own error comes back with its stage; the worker lives on."""
    where = parse_target("cuda:sm_80")
    p = problem(dtype="fp16", head_dim=64)
    made = plan(p, where)
    if made.path != "triton":
        pytest.skip(f"no core kernel for {where}: {made.rejected[0].reason}")
    launches, _, _ = kernel_calls(made, meta_call(p), 1)
    launches[0].constexprs["BLOCK_D"] = 48  # no power of two
    reply = compile_in(compiling_worker, launches[0], made, where, SECONDS, "basic")
    assert (reply.outcome, reply.kind) == ("error", "CompilationError")
    assert reply.stage == "parse" or "ttir" in reply.stage
    assert "power of 2" in reply.message + reply.log
    assert "Traceback" in reply.log
    assert running(compiling_worker)


PLANTED = {
    "aborts": ("import os, resource, sys\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
               "print('LLVM ERROR: unsupported', flush=True)\nos.abort()\n"),
    "hangs": "import time\ntime.sleep(60)\n", "raises": "raise ImportError('no such kernel')\n",
    "exits": "raise SystemExit(4)\n",
    "reads_env": ("from os import environ as e\n"
                  "raise RuntimeError(e['TRITON_PLANTED'] + e.get('TRITON_INTERPRET', '-'))"),
}  # fmt: skip


@pytest.fixture
def planted(tmp_path):
    """A real worker that can import kernel modules which fail on purpose."""
    for name, text in PLANTED.items():
        (tmp_path / f"{name}.py").write_text(text)
    with Worker(environment={"PYTHONPATH": str(tmp_path), "TRITON_PLANTED": "outer"}) as worker:
        yield worker


def compile_planted(worker, module, seconds=SECONDS, **fields):
    planted = {"module": module, "function": "f", "types": {}, "constants": {}, "divisible": [], "small": []}
    return worker.request("compile", seconds, signature=planted | {"options": {}}, target=["cuda", 80, 32], **fields)


@pytest.mark.compiles
def test_crash_hang_and_error_are_told_apart(planted):
    reply = compile_planted(planted, "raises")
    assert (reply.outcome, reply.stage, reply.kind, reply.message) == (
        "error", "parse", "ImportError", "no such kernel",
    )  # fmt: skip
    first = process_of(planted)

    reply = compile_planted(planted, "aborts")
    assert (reply.outcome, reply.stage, reply.kind) == ("crash", "parse", "SIGABRT")
    assert reply.message == "LLVM ERROR: unsupported"  # what a compiler prints to stdout is log, not protocol
    assert "LLVM ERROR" in reply.log

    assert compile_planted(planted, "raises").outcome == "error"  # started again
    assert process_of(planted) != first
    assert "LLVM ERROR" not in compile_planted(planted, "raises").log  # each request's own part of the log

    # The limit must leave a loaded machine time to import Triton.
    reply = compile_planted(planted, "hangs", seconds=12)
    assert (reply.outcome, reply.stage, reply.kind) == ("hang", "parse", "timeout")
    assert "12 s" in reply.message
    assert compile_planted(planted, "exits").kind == "SystemExit"


@pytest.mark.compiles
def test_environment_is_passed_for_one_request_alone(planted):
    assert compile_planted(planted, "reads_env", env={"TRITON_PLANTED": "inner"}).message == "inner-"
    assert compile_planted(planted, "reads_env").message == "outer-"


def test_a_signature_is_plain_data():
    p = problem(dtype="bf16", seqlens_k=True, heads_q=4)
    made = plan(p, parse_target("cuda:sm_90", "triton==3.6.0"), settings=Settings(backend="triton"))
    launches, _, _ = kernel_calls(made, meta_call(p), 132)
    seen = signature(launches[0])
    assert msgspec.json.decode(msgspec.json.encode(seen), type=type(seen)) == seen
    assert seen.types["q"] == "*bf16"
    assert seen.types["seqlens_k"] == "*i32"
    assert seen.constants["seqlens_q"] is None
    assert seen.constants["q_stride_d"] == 1
    assert seen.types["heads_q"] == "i32"  # not specialised, though 4 is no special value either
    assert {"q", "k", "v", "out"} <= set(seen.divisible)
    assert "q" in seen.small
    assert seen.options["num_warps"] == made.launch.num_warps


CHILD = Path(__file__).with_name("early_ir_child.py")


def asked(kind):
    """The request to compile a kernel for sm_90."""
    release = installed_toolchain()
    if not release.within("triton", ">=3.6"):
        pytest.skip(f"IR is made early with Triton 3.6 and newer, and this is {release}")
    target = parse_target("cuda:sm_90", str(release))
    if kind == "gluon":
        p = Problem(
            batch=2, heads_q=4, heads_k=2, seq_q=512, seq_k=512, head_dim=64, dtype="bf16", causal="bottom_right"
        )
        launch, *_ = signatures(ForwardVariant(), meta_call(p))
        made = Plan(problem=p, target=target.name, toolchain=str(release), requested="auto", path="gluon_forward")
        return compile_fields(launch, made, target)
    p = problem(op="decode_attention", seq_q=1, seq_k=4096, head_dim=64)
    made = plan(p, target)
    launches, *_ = kernel_calls(made, meta_call(p), target.arch.cores)
    return compile_fields(launches[-1], made, target)


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["core", "gluon"])
def test_ir_is_made_before_the_digest_and_kept_under_the_same_key(kind, tmp_path):
    request = tmp_path / "request.json"
    request.write_bytes(msgspec.json.encode(asked(kind)))
    found = {}
    for how in ("early", "plain"):
        own = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / how)}
        own.pop("TRITON_INTERPRET", None)
        (tmp_path / how).mkdir()
        command = [sys.executable, str(CHILD), str(request), how, kind]
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        found[how] = json.loads(done.stdout.splitlines()[-1])
    assert (found["early"]["order"], found["plain"]["order"]) == (["ir", "digest"], ["ir"])
    assert (len(found["early"]["kept"]), found["early"]["kept"]) == (1, found["plain"]["kept"])
