"""Peers: found at run time, called as their libraries ask, and silent where they are not."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import peer_libraries
import pytest
import torch
from tiny import CASES, distinct

from portattn.bench import gate, peer_flashmla, peer_flex, peers
from portattn.bench.tensors import Tensors

CPU = torch.device("cpu")
FA3 = {"fa3/vllm", "fa3/upstream"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SDPA says why each kernel cannot run


def names(case):
    return set(peers.contenders(case, Tensors.random(case, CPU)))


def test_absent_libraries_are_not_listed():
    for case in distinct():
        assert not {name for name in names(case) if name.startswith(("fa3", "flashmla"))}


def test_only_those_wanted_are_listed():
    case = CASES["seed decode"]
    tensors = Tensors.random(case, CPU)
    assert peers.contenders(case, tensors, ()) == {}
    assert set(peers.contenders(case, tensors, ("sdpa",))) == {"sdpa-cudnn", "sdpa-flash", "sdpa-efficient"}


def test_what_torch_cannot_express_is_not_listed():
    assert names(CASES["seed paged decode"]) <= {"torch-varlen"}
    assert names(CASES["packed D=64"]) <= {"torch-varlen"}
    assert names(CASES["window S=16384 D=128 window=1024 causal"]) == {"flex"}
    assert names(CASES["mla B=128 H=128 S=4096"]) == set()
    assert names(CASES["seed sparse magicpig"]) == set()
    assert names(CASES["seed sparse paged"]) == {"torch-gather"}


@pytest.mark.parametrize("case", distinct(), ids=lambda case: case.name)
def test_each_is_called_as_it_asks(case, monkeypatch):
    """Through the gate: a wrong stride, length or convention gives a wrong result. CPU kernels stand for the others."""
    latent = case.op == "mla_attention"
    if latent:
        monkeypatch.setattr(peer_flashmla, "ROW", case.head_dim)
        monkeypatch.setattr(peer_flashmla, "RANK", case.head_dim_v)
        monkeypatch.setattr(peer_flashmla, "PAGE", case.page_size)
    with ExitStack() as stack:
        calls = stack.enter_context(peer_libraries.vllm_fa3())
        stack.enter_context(peer_libraries.upstream_fa3())
        stack.enter_context(peer_libraries.flashmla())
        tensors = Tensors.random(case, CPU)
        builds = peers.contenders(case, tensors, ("sdpa", "torch", "fa3", "flashmla"))
        admitted = gate.admit(case, tensors, builds)
    runs_here = {name for name in builds if name not in ("sdpa-cudnn", "sdpa-efficient", "torch-varlen")}
    assert set(admitted.contenders) == runs_here, admitted.refused
    flash = case.dtype != "fp32" and case.op != "sparse_attention"
    assert (set(builds) >= FA3) == flash
    assert ("flashmla" in builds) == latent
    assert ("fa3/vllm, schedule given" in builds) == (flash and case.reads_cache)
    given = [call["scheduler_metadata"] is not None for call in calls]
    assert given == ([False, True] if flash and case.reads_cache else [False] if flash else [])


@pytest.mark.parametrize(
    "name", ["dense bf16 D=64 S=1024 causal", "padded D=64 causal", "window S=16384 D=128 window=1024 causal"]
)
def test_flex_is_given_the_same_mask(name, monkeypatch):
    """Eagerly: compiling it is the benchmark's business."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = CASES[name]
    tensors = Tensors.random(case, CPU)
    admitted = gate.admit(case, tensors, peer_flex.contenders(case, tensors))
    assert admitted.refused == {}


def test_libraries_that_do_not_load_are_named(tmp_path: Path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    (tmp_path / "notes.txt").write_text("not looked at")
    loaded = peers.load(tmp_path)
    assert list(loaded) == [str(tmp_path / "broken.so")]
    assert "broken.so" in loaded[str(tmp_path / "broken.so")]
    assert peers.load(None) == {}
