"""Lowering with another list of the adapter's passes: the crashes of older releases, on the binary of a newer one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from portattn.backends.ascend import AscendBackend
from portattn.worker.client import Reply, Worker

CRASHES = {
    "gathered": ({"k": "*fp16", "tokens": "*i32", "out": "*fp16", "stride": "i32"}, {"N": 16, "D": 64},
                 "AddPtrOp produced by unsupported operation"),
    "looked_up": ({"table": "*i32", "out": "*i32", "tokens": "i32"}, {"N": 32, "PAGE": 16}, "divBlock"),
}  # fmt: skip


ADAPTER = AscendBackend.adapter


@pytest.fixture(scope="module")
def compiler(ascend_compiler: Worker) -> Iterator[Worker]:
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    with Worker(python=ascend_compiler.python, environment=here) as worker:
        yield worker


def lowered(compiler: Worker, name: str, **fields) -> Reply:
    types, constants, _ = CRASHES[name]
    signature = {
        "module": "small_kernels", "function": name, "types": types, "constants": constants, "divisible": [],
        "small": [], "options": {},
    }  # fmt: skip
    target = ["npu", "Ascend910B2", 0]
    return compiler.request("compile", 120.0, signature=signature, target=target, adapter=ADAPTER, **fields)


@pytest.mark.parametrize("name", CRASHES)
def test_old_passes_abort_where_the_own_ones_do_not(compiler, name):
    assert lowered(compiler, name).outcome == "ok"
    old = lowered(compiler, name, passes="old")
    assert (old.outcome, old.stage) == ("error", "ttadapter")
    assert old.message.startswith("triton-adapter-opt died of signal 6\n")
    assert re.search(CRASHES[name][2], old.message)


def test_a_list_can_be_spelt_out(compiler):
    spelt = lowered(compiler, "looked_up", passes=["--triton-to-linalg=global-kernel=false named-ops=True"])
    assert "divBlock" in spelt.message


def test_an_unknown_list_is_refused(compiler):
    reply = lowered(compiler, "looked_up", passes="newest")
    assert (reply.outcome, reply.kind) == ("error", "ValueError")
    assert "passes is 'newest', but must be a list of options or one of old" in reply.message


def test_the_text_comes_on_request_only(compiler):
    assert "linalg" not in lowered(compiler, "looked_up").facts
    text = lowered(compiler, "looked_up", facts="text").facts["linalg"]
    assert "func.func @looked_up(" in text
