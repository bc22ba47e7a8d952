"""Rows, what follows from their times, and the files; the clocks are stand-ins."""

from __future__ import annotations

import csv
import json

import msgspec
import pytest
import torch
from tiny import CASES

from portattn.bench import measure, results, run
from portattn.bench.cases import Case
from portattn.bench.gate import Admitted

LIMITS = measure.Ceilings(gemm_tflops=800.0, copy_tbs=4.0)
# 4 GB of keys and values: 1 ms at 4 TB/s. 8 GFLOP: 10 µs at 800 TFLOP/s.
DECODE = Case(
    name="decode",
    op="decode_attention",
    batch=1,
    heads_q=4,
    heads_k=4,
    seq_q=1,
    seq_k=7812500,
    head_dim=32,
    dtype="fp32",
)
DENSE = msgspec.structs.replace(DECODE, name="dense", op="attention", seq_q=1000, seq_k=1000)


def test_figures_of_a_memory_bound_row():
    assert (DECODE.read_bytes(), DECODE.flops()) == (8e9, 4e9)
    times = {
        "portattn": 4.0,
        "portattn prepared": 2.5,
        "fa3/vllm": 5.0,
        "fa3/vllm, schedule given": 4.5,
        "sdpa-flash": 8.0,
    }
    admitted = Admitted(1e-3, errors=dict.fromkeys(times, 1e-4), refused={"flex": "no"})
    row = results.row(DECODE, LIMITS, admitted, times)
    assert (row["floor_ms"], row["limit"]) == (pytest.approx(2.0), "copy")
    assert row["tbs"]["portattn"] == pytest.approx(2.0)
    assert row["copy_fraction"]["portattn"] == row["floor_fraction"]["portattn"] == pytest.approx(0.5)
    assert row["tflops"]["portattn"] == pytest.approx(1.0)
    # A library counts with the fastest way in which it was called.
    assert row["peer_ms"] == {"fa3": 4.5, "sdpa-flash": 8.0}
    assert row["best_peer"] == "fa3"
    assert row["ratio"] == {"portattn": pytest.approx(4.5 / 4), "portattn prepared": pytest.approx(4.5 / 2.5)}


def test_figures_of_a_compute_bound_row():
    assert DENSE.flops() == 2 * 4 * 1000 * 1000 * 64
    row = results.row(DENSE, LIMITS, Admitted(1e-3), {"portattn": DENSE.flops() / 400e9})
    assert row["limit"] == "gemm"
    assert row["floor_fraction"]["portattn"] == pytest.approx(0.5)
    assert row["tbs"] == row["copy_fraction"] == row["ratio"] == {}
    assert row["best_peer"] is None


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "interleaved_ms", lambda runs, rounds: {name: float(rounds) for name in runs})
    monkeypatch.setattr(measure, "host_us", lambda run: 5.0)
    monkeypatch.setattr(measure, "peak_extra_bytes", lambda run: 64)
    monkeypatch.setattr(measure, "graph_ms", lambda run: 0.25)


@pytest.mark.usefixtures("clocks")
def test_a_case_is_gated_and_timed(monkeypatch):
    case = CASES["seed paged decode"]
    row = run.run_case(case, torch.device("cpu"), 3, LIMITS, wanted=())
    assert row["ms"] == {"portattn": 3.0, "portattn prepared": 3.0}
    assert row["host_us"]["portattn prepared"] == 5.0
    assert row["graph_ms"]["portattn"] == 0.25
    assert row["extra_bytes"]["portattn"] == 64
    assert row["plan"][0].startswith("paged_attention")
    assert not results.ours_failed({"rows": [row]})

    def waits(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(measure, "graph_ms", waits)
    row = run.run_case(case, torch.device("cpu"), 3, LIMITS, wanted=())
    assert row["graph_ms"] == {}
    assert row["no_graph"]["portattn"].startswith("operation not permitted")


@pytest.mark.usefixtures("clocks")
def test_a_path_that_cannot_run_is_a_failure(monkeypatch):
    row = run.run_case(CASES["seed decode"], torch.device("cpu"), 1, LIMITS, backend="triton", wanted=())
    assert set(row["refused"]) == {"portattn", "portattn prepared"}
    assert row["ms"] == row["ratio"] == {}
    assert results.ours_failed({"rows": [row]})

    def full(*_):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(run.Tensors, "random", full)
    row = run.run_case(CASES["seed decode"], torch.device("cpu"), 1, LIMITS)
    assert row["refused"] == {"portattn": "no memory left"}
    assert results.ours_failed({"rows": [row]})


def test_files_hold_every_figure(tmp_path):
    times = {"portattn": 4.0, "fa3/vllm": 5.0}
    row = results.row(DECODE, LIMITS, Admitted(1e-3, errors=dict.fromkeys(times, 1e-4), refused={"flex": "no"}), times)
    row["host_us"] = {"portattn": 3.0}
    result = {"schema": results.SCHEMA, "ceilings": LIMITS, "rows": [row]}
    as_json, as_csv = results.write(result, tmp_path / "new", "bench")
    read = json.loads(as_json.read_text())
    assert read["ceilings"] == {"gemm_tflops": 800.0, "copy_tbs": 4.0}
    assert read["rows"][0]["ms"] == times
    with as_csv.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["contender"] for line in lines] == ["portattn", "fa3/vllm", "flex"]
    assert float(lines[0]["copy_fraction"]) == pytest.approx(0.5)
    assert (lines[0]["host_us"], lines[1]["host_us"]) == ("3.0", "")
    assert (lines[2]["refused"], lines[2]["ms"]) == ("no", "")
    assert lines[0]["limit"] == "copy"
