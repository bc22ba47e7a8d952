"""A first compile makes its IR while the digest of Triton's own files is computed, and keeps its code where it would
have been kept without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import problem

from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.compile.compile_check import compile_fields
from portattn.launch import kernel_calls, meta_call
from portattn.launch.described import signatures
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.toolchain import installed_toolchain

CHILD = Path(__file__).with_name("early_ir_child.py")
pytestmark = pytest.mark.compiles


def asked(kind: str) -> dict[str, Any]:
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


@pytest.mark.parametrize("kind", ["core", "gluon"])
def test_ir_is_made_before_the_digest_and_kept_under_the_same_key(kind: str, tmp_path: Path) -> None:
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
    assert found["early"]["order"] == ["ir", "digest"]
    assert found["plain"]["order"] == ["ir"]
    assert len(found["early"]["kept"]) == 1
    assert found["early"]["kept"] == found["plain"]["kept"]
