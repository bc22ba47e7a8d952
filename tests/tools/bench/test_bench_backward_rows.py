"""Backward cases: peers' gradients, rows, tables and goals, on the CPU."""

import types

import peer_packages
import pytest
import torch
from benchfakes import LIMITS, FakeClock, run_case
from tiny import CASES, distinct

import portattn
from portattn.tools.bench import contenders, gate, peers, releases, report
from portattn.tools.bench.contenders import CORE, OURS
from portattn.tools.bench.peers import PEERS
from portattn.tools.bench.run import BenchOptions
from portattn.tools.bench.tensors import Tensors

CPU = torch.device("cpu")
KINDS = {case.name: case for case in distinct() if case.backward}
DENSE = CASES["backward bf16 D=64 S=1024 causal"]
PACKED = CASES["backward packed D=128 causal"]
DROPPED = CASES["backward bf16 D=128 S=4096 causal dropout=0.1"]
GRADIENTS = ("q", "k", "v")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SDPA says why each kernel cannot run


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface", "fa4"])
def test_flash_packages_are_differentiated(name):
    """Through the gate, every case that they have; deterministic ones say so to them."""
    asked: list[bool] = []
    modules = {name: peer_packages.flash_attn("block_table", 1, with_lse="interface" in name, asked=asked)}
    if name == "fa4":
        modules = peer_packages.cute(asked)
    contender = "fa3/interface" if "interface" in name else name
    dropout = contender == "flash_attn"
    with peer_packages.installed(**modules):
        for case in KINDS.values():
            tensors = Tensors.random(case, CPU)
            builds = peers.contenders(case, tensors, (name,))
            assert set(builds) == (set() if case.dtype == "fp32" or (case.dropout and not dropout) else {contender})
            if not case.dropout:
                asked.clear()
                assert gate.admit(case, tensors, builds).refused == {}, case.name
                assert set(asked) == ({case.deterministic} if builds else set())


def test_fa3_may_lie_in_its_own_package():
    assert PEERS["flash_attn_interface"].absent() == "no package flash_attn_interface is installed"
    modules = {"flash_attn_3": types.SimpleNamespace()}
    modules["flash_attn_3__flash_attn_interface"] = peer_packages.flash_attn("page_table", 1)
    with peer_packages.installed(**modules):
        assert PEERS["flash_attn_interface"].absent() == ""
        tensors = Tensors.random(DENSE, CPU)
        builds = peers.contenders(DENSE, tensors, ("flash_attn_interface",))
        assert list(gate.admit(DENSE, tensors, builds).contenders) == ["fa3/interface"]


@pytest.mark.parametrize("name", [name for name, case in KINDS.items() if not case.dropout])
def test_flex_is_differentiated(name, monkeypatch):
    """Eagerly, with the whole scores, which autograd differentiates on a CPU as well; compiled, it is a GPU's alone."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda q, k, v: None)
    tensors = Tensors.random(KINDS[name], CPU)
    builds = peers.contenders(KINDS[name], tensors, ("flex",))
    assert list(gate.admit(KINDS[name], tensors, builds).contenders) == ["flex"]


def test_flex_keeps_what_its_backward_needs():
    """torch refuses a second run of a compiled backward that was given its forward's buffers to write over."""
    import torch._functorch.config as functorch

    assert functorch.donated_buffer
    tensors = Tensors.random(DENSE, CPU)
    around = peers._flex_compiled(DENSE, (tensors.q, tensors.k, tensors.v), None).around
    with around():
        assert not functorch.donated_buffer
    assert functorch.donated_buffer


def test_peers_without_gradients_have_no_part():
    assert set(peers.contenders(DENSE, Tensors.random(DENSE, CPU), ("sdpa",))) == {
        "sdpa", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient",
    }  # fmt: skip
    assert set(peers.contenders(DROPPED, Tensors.random(DROPPED, CPU), ("flex", "torch", "fa3"))) == set()
    assert set(peers.contenders(PACKED, Tensors.random(PACKED, CPU), ("sdpa", "torch", "flex"))) <= {
        "torch-varlen", "flex",
    }  # fmt: skip


class OtherBytes(FakeClock):
    """A call takes 1000 bytes more than its results."""

    def peak_extra_bytes(self, run):
        return sum(x.nbytes for x in run()) + 1000


def test_rows_have_the_memory_beyond_the_gradients():
    row = run_case("backward18", DENSE, OtherBytes(0.5), LIMITS, BenchOptions(rounds=2, wanted=("sdpa",)))
    assert {f.extra_bytes for f in row.contenders if not f.refused} == {1000}
    assert {f.name for f in row.contenders if not f.refused} == {OURS, "sdpa", "sdpa-flash"}
    mine = row.figures(OURS)
    assert mine.rounds_ms == (0.5, 0.5)
    assert mine.tflops == pytest.approx(DENSE.flops() / 0.5e9)
    assert mine.graph_ms == ()
    assert "autograd runs a backward" in mine.no_graph
    assert row.plan[0].startswith("attention")
    assert row.budget == 1.0
    assert not row.failed
    assert report.set_table([row]).count("+0.0 MiB") == 3


def test_the_core_is_timed_where_paths_are_not_told(monkeypatch):
    monkeypatch.setattr("portattn.tools.bench.contenders.CORE_PATH", "sdpa")
    row = run_case("backward18", DENSE, OtherBytes(), LIMITS, BenchOptions(rounds=2, wanted=(), core=True))
    assert [f.name for f in row.contenders if not f.refused] == [OURS, CORE]
    plan = portattn.plan("attention", *(getattr(Tensors.random(DENSE, CPU), name) for name in GRADIENTS))
    monkeypatch.setattr(contenders, "backward_plan", lambda pull: plan)
    clock = OtherBytes()
    row = run_case("backward18", DENSE, clock, LIMITS, BenchOptions(rounds=2, wanted=(), core=True))
    assert ([f.name for f in row.contenders], len({run for run, _, _ in clock.turns})) == ([OURS, CORE], 1)


@pytest.mark.interpreter
def test_a_release_process_compiles_a_case():
    session = releases.Session(CPU, FakeClock())
    assert session.compile(PACKED, "auto", False) == ""
    decode = CASES["seed decode"]
    assert session.compile(decode, "auto", False) == ""
    failed = session.compile(decode, "gluon_forward", False)
    assert failed.startswith("portattn prepared: ")
    assert "gluon_forward" in failed
