"""Rows and what follows from their figures; cells that are run with a clock that needs no device."""

import itertools
from unittest.mock import Mock

import msgspec
import pytest
import torch
from benchfakes import LIMITS, FakeClock, figures, made, run_case
from tiny import CASES

from portattn.tools.bench import run
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.results import DeviceState, Figures
from portattn.tools.bench.run import BenchOptions, run_cells

CPU = torch.device("cpu")
ALONE = BenchOptions(rounds=3, wanted=())
# 4 GB of keys and values: 1 ms at 4 TB/s. 8 GFLOP: 10 µs at 800 TFLOP/s.
DECODE = Case(
    name="decode", op="decode_attention", batch=1, heads_q=4, heads_k=4, seq_q=1, seq_k=7812500, head_dim=32,
    dtype="fp32",
)  # fmt: skip
DENSE = msgspec.structs.replace(DECODE, name="dense", op="attention", seq_q=1000, seq_k=1000)


def test_figures_of_rows_that_memory_or_computing_bounds():
    assert (DECODE.read_bytes(), DECODE.flops()) == (8e9, 4e9)
    row = made(
        "decode", DECODE, figures("portattn", 4.0, 5.0, 4.0), figures("portattn prepared", 2.5, 2.5, 2.5),
        figures("fa3/vllm", 5.0, 5.0, 5.0), figures("fa3/vllm, schedule given", 4.5, 9.0, 4.5),
        figures("sdpa-flash", 8.0, 8.0, 8.0), figures("sdpa-math", 0.1, 0.1, 0.1), Figures(name="flex", refused="no"),
    )  # fmt: skip
    assert (row.floor_ms, row.limit) == (pytest.approx(2.0), "copy")
    ours, prepared = row.figures("portattn"), row.figures("portattn prepared")
    assert (ours.ms, ours.tbs, ours.of_floor) == (4.0, pytest.approx(2.0), pytest.approx(0.5))
    assert ours.tflops == pytest.approx(1.0)
    # The fastest by its median; of what is there for reference alone nothing is held against us.
    assert row.best_peer == "fa3/vllm, schedule given"
    # Round by round: 4.5/4, 9/5, 4.5/4.
    assert (ours.ratio, prepared.ratio) == (pytest.approx(4.5 / 4), pytest.approx(1.8))
    assert row.figures("fa3/vllm").ratio is None
    assert ours.spread == pytest.approx(0.25)
    assert not row.failed
    # A row that is bound by computing.
    assert DENSE.flops() == 2 * 4 * 1000 * 1000 * 64
    row = made("x", DENSE, figures("portattn", DENSE.flops() / 400e9))
    assert (row.limit, row.figures("portattn").of_floor) == ("gemm", pytest.approx(0.5))
    assert row.figures("portattn").tbs is row.figures("portattn").ratio is None
    assert row.best_peer == ""


def test_graphs_have_a_best_peer_of_their_own():
    row = made(
        "x", DECODE, figures("portattn", 4.0, graph_ms=(2.0, 2.0)), figures("fa3/vllm", 5.0, graph_ms=(4.0, 3.0)),
        figures("sdpa-cudnn", 3.0, graph_ms=(6.0, 6.0)),
    )  # fmt: skip
    assert (row.best_peer, row.best_graph) == ("sdpa-cudnn", "fa3/vllm")
    assert row.figures("portattn").ratio == pytest.approx(0.75)
    assert row.figures("portattn").graph_ratio == pytest.approx(1.75)


def test_a_case_is_gated_and_timed():
    case, clock = CASES["seed paged decode"], FakeClock(0.5)
    row = run_case("seed", case, clock, LIMITS, ALONE)
    assert [f.name for f in row.contenders] == ["portattn", "portattn prepared"]
    ours = row.figures("portattn")
    assert (ours.rounds_ms, ours.graph_ms) == ((0.5, 0.5, 0.5), (0.5,) * run.GRAPH_ROUNDS)
    assert (ours.host_us.median, ours.extra_bytes, ours.path) == (5.0, 64, "sdpa")
    assert {timing for _, timing, _ in clock.turns} == {"do_bench"}
    assert row.plan[0].startswith("paged_attention")
    assert not row.failed
    # What cannot be captured has a reason.
    clock.graphs = RuntimeError("operation not permitted when stream is capturing\nmore")
    row = run_case("seed", case, clock, LIMITS, ALONE)
    assert row.figures("portattn").graph_ms == ()
    assert row.figures("portattn").no_graph == "operation not permitted when stream is capturing"
    assert "longer than" in run_case("seed", case, FakeClock(5.0), LIMITS, ALONE).figures("portattn").no_graph


def test_enqueue_times_alone(monkeypatch):
    clock, told = FakeClock(), DeviceState(sm_mhz=1980.0)

    class Probe:
        """Whatever this machine has."""

        def read(self):
            return told, "580.1"

    monkeypatch.setattr(run, "DeviceProbe", Probe)
    row = run_case("host", CASES["host decode"], clock, None, BenchOptions(wanted=("sdpa",), only_host=True))
    assert [calls for _, _, calls in clock.turns] == [1] * len(clock.turns)  # one each, to know how many will do
    ours = row.figures("portattn")
    assert ours.host_us.median == row.figures("sdpa").host_us.median == 5.0
    assert ours.rounds_ms == ours.graph_ms == ()
    assert row.floor_ms is None
    assert row.state == told


def test_a_path_that_cannot_run_is_a_failure(monkeypatch):
    row = run_case("seed", CASES["seed decode"], FakeClock(), LIMITS, BenchOptions(backend="triton", wanted=()))
    assert all(f.refused for f in row.contenders)
    assert row.failed
    monkeypatch.setattr(run.Tensors, "random", Mock(side_effect=torch.OutOfMemoryError("no memory left")))
    row = run_case("seed", CASES["seed decode"], FakeClock(), LIMITS, ALONE)
    assert row.figures("portattn").refused == "no memory left"
    assert row.failed


def test_the_core_is_not_timed_twice(monkeypatch):
    """On a machine whose plan takes the core, both names have the figures of one contender."""
    monkeypatch.setattr("portattn.tools.bench.contenders.CORE_PATH", "sdpa")
    clock = FakeClock(2.0)
    row = run_case("seed", CASES["seed prefill causal"], clock, LIMITS, BenchOptions(rounds=2, wanted=(), core=True))
    assert [f.name for f in row.contenders] == ["portattn", "portattn core"]
    assert row.figures("portattn core").rounds_ms == row.figures("portattn").rounds_ms == (2.0, 2.0)
    assert len({run for run, _, _ in clock.turns}) == 1


def test_a_peer_that_breaks_when_it_is_timed_is_refused():
    calls = []

    class Breaks:
        def absent(self):
            return ""

        def contenders(self, case, t):
            def call():
                calls.append(None)
                if len(calls) > 2:
                    raise RuntimeError("out of workspace")
                return own.run()

            from portattn.tools.bench.contenders import ours

            own = ours(case, t)
            return {"breaks": lambda: Contender(call)}

    options = BenchOptions(rounds=2, wanted=(), others={"breaks": Breaks()})
    row = run_case("seed", CASES["seed decode"], FakeClock(), LIMITS, options)
    assert row.figures("breaks").refused == "failed when it was timed: out of workspace"
    assert row.figures("portattn").rounds_ms == (1.0, 1.0)
    assert not row.failed


def kept(rows):
    return lambda items: rows.extend(items.values())


def test_cells_end_with_the_budget(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("portattn.tools.bench.run.time.monotonic", lambda: clock[0])

    took = itertools.chain([25.0], itertools.repeat(5.0))

    def spent(*_):
        clock[0] += next(took)
        return {"": made("decode", DECODE, figures("portattn", 1.0))}

    monkeypatch.setattr(run, "run_case", spent)
    cells = [("decode", DECODE)] * 9
    rows: list = []
    # The first compiles. As long as that, the third would end beyond 53 s; as long as the median, the seventh does.
    assert run_cells(cells, {"": 0}, FakeClock(), LIMITS, ALONE, kept(rows), 53.0, CPU) == 6 == len(rows)
    clock[0] = 0.0
    assert run_cells(cells, {"": 0}, FakeClock(), LIMITS, ALONE, kept(rows), None, CPU) == 9


def test_first_calls_have_rows_of_their_own(monkeypatch):
    found = FirstCall(case="first decode", run=0, empty_s=2.0, kept_s=0.5, second_s=0.1)
    monkeypatch.setattr("portattn.tools.bench.firstcall.measure", lambda case, index: found)
    rows: list = []
    run_cells([("cold-start", CASES["first decode"])], {"": 0}, FakeClock(), LIMITS, ALONE, kept(rows), None, CPU)
    assert rows == [found]
