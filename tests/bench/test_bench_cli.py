"""`portattn bench` where there is nothing to time, and its text."""

from __future__ import annotations

import json

import click.testing
import pytest
import torch
from tiny import shrunk

from portattn.bench import measure, peers, results, run
from portattn.bench.gate import Admitted
from portattn.bench.sets import SETS
from portattn.cli import bench as command
from portattn.cli import main


def bench(*arguments):
    return click.testing.CliRunner().invoke(main, ["bench", *arguments], prog_name="portattn")


def test_help_names_every_set_and_peer():
    text = " ".join(bench("--help").output.split())
    assert f"Sets: {', '.join(SETS)}, all." in text
    assert f"{', '.join(peers.PEERS)}, or none." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "decoed"), "--set is 'decoed', but must be one of seed, dense"),
        (("--only", "nothing"), "--only is 'nothing', but must match a case of seed"),
        (("--peer", "fa4"), "--peer is 'fa4', but must be one of sdpa, torch, flex, fa3, flashmla, none"),
        (("--peer-libs", "/no/such/folder"), "does not exist"),
    ],
)
def test_bad_input(arguments, message):
    called = bench(*arguments)
    assert called.exit_code == 2
    assert message in called.stderr


def test_without_a_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    called = bench("--set", "paged", "--set", "mla", "--json")
    assert called.exit_code == 2
    assert "no CUDA or ROCm device" in json.loads(called.stdout)["error"]["message"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is the CPU, on which every call takes 1 ms; cases are small."""
    timed = run.run_case
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a chip")
    monkeypatch.setattr(measure, "ceilings", lambda: measure.Ceilings(gemm_tflops=800.0, copy_tbs=4.0))
    monkeypatch.setattr(measure, "device_ms", lambda run: 1.0)
    monkeypatch.setattr(measure, "host_us", lambda run: 5.0)
    monkeypatch.setattr(measure, "graph_ms", lambda run: 1.0)
    monkeypatch.setattr(measure, "peak_extra_bytes", lambda run: 0)
    monkeypatch.setattr(run, "run_case", lambda case, device, *rest: timed(shrunk(case), torch.device("cpu"), *rest))


@pytest.mark.usefixtures("device")
def test_a_set_is_timed(tmp_path):
    called = bench("--set", "seed", "--only", "decode", "--peer", "none", "--out", str(tmp_path), "--json")
    assert called.exit_code == 0, called.output
    rows = json.loads(called.stdout)["rows"]
    assert [row["case"] for row in rows] == ["seed decode", "seed paged decode"]
    assert all(set(row["ms"]) == {"portattn", "portattn prepared"} for row in rows)
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == rows
    assert "seed decode" in bench("--set", "seed", "--only", "decode", "--peer", "torch").stdout


@pytest.mark.usefixtures("device")
def test_status_1_when_portattn_cannot_run():
    called = bench("--set", "seed", "--only", "decode", "--peer", "none", "--backend", "triton")
    assert called.exit_code == 1
    assert "portattn" in called.stdout


def test_text(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # a row is a line
    limits = measure.Ceilings(gemm_tflops=800.0, copy_tbs=4.0)
    case = SETS["decode"][0]
    times = {"portattn": 0.02, "fa3/vllm": 0.018}
    row = results.row(
        case, limits, Admitted(1e-3, errors=dict.fromkeys(times, 1e-4), refused={"sdpa-flash": "no"}), times
    )
    row["host_us"], row["graph_ms"], row["extra_bytes"] = {"portattn": 4.0}, {"portattn": 0.019}, {"portattn": 2**20}
    result = {
        "chip": "a chip", "toolchain": "triton==3.6.0", "torch": "2.11", "date": "today", "ceilings": limits,
        "libraries": {"/x/y.so": "loaded"}, "rows": [row],
    }  # fmt: skip
    command._show(result, [])
    text = capsys.readouterr().out
    assert "/x/y.so: loaded" in text
    assert "1.68 TB/s" in text
    assert "42% copy" in text
    assert "0.90× fa3; graph 19.0 µs; host 4.0 µs; +1.0 MiB" in text
    assert text.rstrip().endswith("no")
