"""Peers: found at run time, called as their libraries ask, and silent where they are not."""

import functools
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import peer_libraries
import peer_packages
import pytest
import torch
from tiny import CASES, distinct

from portattn.errors import ArgumentError
from portattn.tools.bench import gate, peers
from portattn.tools.bench.peers import PEERS, Peer, packages
from portattn.tools.bench.tensors import Tensors

CPU = torch.device("cpu")
SHORT = "short queries D=64 Sq=128 Sk=16384 causal"
FA3 = {"fa3/vllm", "fa3/upstream"}
SDPA = {"sdpa", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-math"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SDPA says why each kernel cannot run


def names(case):
    return set(peers.contenders(case, Tensors.random(case, CPU)))


def test_only_those_wanted_are_listed():
    case = CASES["seed decode"]
    tensors = Tensors.random(case, CPU)
    assert peers.contenders(case, tensors, ()) == {}
    assert set(peers.contenders(case, tensors, ("sdpa",))) == SDPA


def test_what_torch_cannot_express_is_not_listed():
    assert names(CASES["seed paged decode"]) <= {"torch-varlen"}
    assert names(CASES["packed D=64"]) <= {"torch-varlen"}
    assert names(CASES["window D=128 S=16384 window=1024 causal"]) == SDPA | {"flex"}
    assert names(CASES["mla B=128 H=128 S=4096"]) == set()
    assert names(CASES["seed sparse magicpig"]) == set()
    assert names(CASES["seed sparse paged"]) == {"torch-gather"}


@pytest.mark.parametrize("case", [case for case in distinct() if not case.backward], ids=lambda case: case.name)
def test_each_is_called_as_it_asks(case, monkeypatch):
    """Through the gate: a wrong stride, length or convention gives a wrong result. CPU kernels stand for the others."""
    latent = case.op == "mla_attention"
    if latent:
        shape = (case.head_dim, case.head_dim_v, case.page_size)
        monkeypatch.setattr("portattn.tools.bench.peers.LATENT", shape)
    with ExitStack() as stack:
        calls = stack.enter_context(peer_libraries.vllm_fa3())
        stack.enter_context(peer_libraries.upstream_fa3())
        stack.enter_context(peer_libraries.flashmla())
        tensors = Tensors.random(case, CPU)
        builds = peers.contenders(case, tensors, ("sdpa", "torch", "fa3", "flashmla"))
        admitted = gate.admit(case, tensors, builds)
    runs_here = {name for name in builds if name not in ("sdpa-cudnn", "sdpa-efficient", "torch-varlen")}
    assert set(admitted.contenders) == runs_here, admitted.refused
    flash = case.dtype != "fp32" and case.op != "sparse_attention" and not case.quantised
    assert (set(builds) >= FA3, "flashmla" in builds) == (flash, latent)
    assert ("fa3/vllm, schedule given" in builds) == (flash and case.reads_cache)
    given = [call["scheduler_metadata"] is not None for call in calls]
    assert given == ([False, True] if flash and case.reads_cache else [False] if flash else [])


@pytest.mark.parametrize(
    "name", ["dense bf16 D=64 S=1024 causal", "padded D=64 causal", "window D=128 S=16384 window=1024 causal", SHORT]
)
def test_flex_is_given_the_same_mask(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = CASES[name]
    tensors = Tensors.random(case, CPU)
    assert gate.admit(case, tensors, peers.flex(case, tensors)).refused == {}


def test_libraries_that_do_not_load_are_named(tmp_path: Path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    (tmp_path / "notes.txt").write_text("not looked at")
    loaded = packages.load(tmp_path)
    assert list(loaded) == ["broken.so"]
    assert "broken.so" in loaded["broken.so"]
    (tmp_path / "libcudart.so.99").write_bytes(b"no library")
    assert "libcudart.so.99" in packages.load(tmp_path)
    assert packages.load(None) == {}


def small_pages(peer: Peer) -> Peer:
    return replace(peer, contenders=functools.partial(peer.contenders, page=1))


# Package by package: what is installed in its place, its adapter, and the contenders that it must have for some case.
PACKAGES = {
    "flash_attn": (
        {"flash_attn": peer_packages.flash_attn("block_table", 1)}, small_pages(PEERS["flash_attn"]), {"flash_attn"},
    ),
    "flash_attn_interface": (
        {"flash_attn_interface": peer_packages.flash_attn("page_table", 1, with_lse=True)},
        PEERS["flash_attn_interface"], {"fa3/interface"},
    ),
    "flash_attn.cute": (peer_packages.cute(), PEERS["fa4"], {"fa4"}),
    "cudnn": (peer_packages.cute(), PEERS["cudnn-frontend"], {"cudnn-frontend"}),
    "flashinfer": (
        peer_packages.flashinfer(), PEERS["flashinfer"],
        {"flashinfer", "flashinfer/prefill", "flashinfer/decode", "flashinfer/decode, tensor cores"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_are_called_as_they_document(name, monkeypatch):
    """Every kind of case through the gate, with what each package computes by definition in its place."""
    modules, adapter, expected = PACKAGES[name]
    assert adapter.absent() == f"no package {name.partition('.')[0]} is installed"
    monkeypatch.setattr(packages, "WORKSPACE", 1 << 20)
    if name == "cudnn":  # tests' rows are narrow
        monkeypatch.setattr(packages, "WIDEST", 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    seen: set[str] = set()
    with peer_packages.installed(**modules):
        assert adapter.absent() == ""
        for case in distinct():
            if case.backward:  # test_bench_backward_rows.py
                continue
            if case.quantised and not adapter.quantised:
                continue
            tensors = Tensors.random(case, CPU)
            builds = adapter.contenders(case, tensors)
            before = tensors.k.clone()
            assert gate.admit(case, tensors, builds).refused == {}, case.name
            assert torch.equal(tensors.k, before), case.name
            seen |= set(builds)
    assert seen == expected


def test_a_package_that_does_not_import_is_absent(tmp_path, monkeypatch):
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('no GPU driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages.missing.cache_clear()
    try:
        assert PEERS["flashinfer"].absent() == "import flashinfer: RuntimeError: no GPU driver"
        assert peers.presence(("flashinfer", "sdpa"), {}) == {
            "flashinfer": "import flashinfer: RuntimeError: no GPU driver", "sdpa": "here",
        }  # fmt: skip
    finally:
        packages.missing.cache_clear()


def test_the_unfused_form_is_for_small_scores_only(monkeypatch):
    case = CASES["seed decode"]
    for less, there in ((0, True), (1, False)):
        monkeypatch.setattr(peers, "MATH_BYTES", 4 * case.batch * case.heads_q * case.seq_k - less)
        assert ("sdpa-math" in peers.sdpa(case, Tensors.random(case, CPU))) is there


PEER = """
import torch
from portattn.tools.bench.contenders import Contender, ours

def contenders(case, t):
    return {"seed": lambda: ours(case, t)} if case.name.startswith("seed") else {}
"""


def test_a_file_can_be_a_peer(tmp_path):
    file = tmp_path / "seed.py"
    file.write_text(PEER)
    name, peer = peers.from_file(file)
    assert name == "seed"
    case = CASES["seed decode"]
    assert set(peers.contenders(case, Tensors.random(case, CPU), (), {name: peer})) == {"seed"}
    assert peers.presence((), {name: peer}) == {"seed": "here"}
    assert peers.contenders(CASES["host decode"], Tensors.random(case, CPU), (), {name: peer}) == {}


@pytest.mark.parametrize(("text", "message"), [("1/0", "ZeroDivisionError"), ("x = 1", "must define contenders")])
def test_a_file_that_is_no_peer(tmp_path, text, message):
    file = tmp_path / "other.py"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        peers.from_file(file)
