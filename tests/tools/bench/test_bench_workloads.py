"""Sets of scripts/bench_sets/ in small sizes on the CPU: right, wrong, failing and absent contenders; their files."""

import json
import sys
from typing import Any

import click.testing
import pytest
import torch

import portattn
from portattn.cli import main
from portattn.tools.bench import workloads

TREE = ("--set", "engines", "--only", "masks: tree")


def bench(*arguments):
    return click.testing.CliRunner().invoke(main, ["bench", *arguments], prog_name="portattn")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def rows_of(*arguments):
    called = bench(*arguments, "--tiny", "--json")
    assert called.exit_code == 0, called.output
    rows: list[dict[str, Any]] = json.loads(called.stdout)["rows"]
    return rows


def test_results_of_engines_are_checked():
    ours = [row for row in rows_of(*TREE) if row["contender"] == "portattn"]
    assert [row["right"] for row in ours] == [True]
    assert 0 < ours[0]["error"] <= ours[0]["budget"]
    assert "ms" not in ours[0], "without a GPU nothing is timed"


def test_what_is_said_of_graphs():
    for device, done in (("cpu", "called again, without a graph, with"), ("cuda", "replayed with")):
        how = workloads.Measure(device)
        said = [how.replay_note(right) for right in (True, False)]
        assert said == [f"{done} other lengths: right", f"{done} other lengths: WRONG"]


def fails(*given, **named):
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(("wrong", "said"), [(lambda out: out * 1.5, "WRONG"), (fails, "FAILED RuntimeError")])
def test_a_contender_that_is_wrong_or_fails(monkeypatch, tmp_path, wrong, said):
    monkeypatch.delenv("COLUMNS", raising=False)  # of pytest-xdist: the table would be cut
    real = portattn.paged_attention
    monkeypatch.setattr(portattn, "paged_attention", lambda *given, **named: wrong(real(*given, **named)))
    called = bench(*TREE, "--tiny", "--out", str(tmp_path))
    assert called.exit_code == 1
    assert said in called.stdout
    assert "WRONG: masks: tree_mask 64 x (16 of 4k), pages of 16, portattn: " in called.stderr
    again = bench("report", str(tmp_path / "engines.json"), "--markdown", str(tmp_path / "table.md"))
    assert again.exit_code == 0
    assert again.stdout.partition("written")[0] == called.stdout.partition("written")[0]
    assert said in (tmp_path / "table.md").read_text()


def test_an_absent_engine_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in [name for name in sys.modules if name.startswith("portattn.integrations.vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    called = bench("--set", "engines", "--tiny", "--only", "vllm: ")
    assert called.exit_code == 2
    assert "vllm: absent: Absent: vLLM's Python files:" in called.stdout
    assert "nothing was measured of engines" in called.stderr


def test_float8_forwards_have_an_error_and_a_path(monkeypatch):
    rows = rows_of("--set", "fp8-forward")
    assert [(row["contender"], "causal" in row["case"]) for row in rows] == [
        ("e4m3", False), ("bf16", False), ("e4m3", True), ("bf16", True)
    ]  # fmt: skip
    for row in rows:
        assert row["path"]
        assert row["error"] < (row["budget"] if row["contender"] == "e4m3" else 0.01)
    load_of = workloads.load

    def strict(path):
        module = load_of(path)
        module.MOST_RMS = 0.01
        return module

    monkeypatch.setattr(workloads, "load", strict)
    called = bench("--set", "fp8-forward", "--tiny", "--check")
    assert called.exit_code == 1
    assert "D=64 S=64, e4m3: error 0.0" in called.stderr


def test_every_cache_write_is_a_row(monkeypatch):
    rows = [row for row in rows_of("--set", "cache-write") if row["contender"] == "portattn"]
    assert (len(rows), {row["path"] for row in rows}) == (2 * 5, {"reference"})
    assert rows[0]["bytes"] == 2 * 4 * 8 * 128 * 4 + 4 * 8  # four tokens of K and V, read and written, and their slots
    real = portattn.write_pages

    def wrong(**given):
        real(**given)
        if given.get("backend") is None:
            given["v_pages"].view(torch.uint8)[0, 0, 0, 0] ^= 1

    monkeypatch.setattr(portattn, "write_pages", wrong)
    called = bench("--set", "cache-write", "--tiny", "--only", "decode, bf16")
    assert (called.exit_code, "decode, bf16, portattn: other bits than the reference's" in called.stderr) == (1, True)


def test_each_sparse_operation_has_rows(monkeypatch):
    rows = rows_of("--set", "sparse-latent")
    assert [row["contender"] for row in rows] == ["portattn", "portattn", "portattn", "torch", "portattn"]
    monkeypatch.setattr(portattn, "topk_indices", lambda logits, k: torch.zeros(len(logits), k))
    assert bench("--set", "sparse-latent", "--tiny", "--only", "topk").exit_code == 1


class Clock:
    """Each call takes 1 ms, a peer's 2."""

    def turn_ms(self, run, timing, calls, expected_ms):
        return 2.0 if run() == "peer" else 1.0

    def host_us(self, run, expected_ms):
        return type("Spread", (), {"median": 7.0})

    def graphed(self, contender):
        if contender.run() == "peer":
            raise RuntimeError("no capture")
        return contender.run


def test_contenders_take_turns_and_wrong_ones_none():
    how = workloads.Measure("cuda", clock=Clock())  # type: ignore[arg-type]
    how.synchronize = lambda: None  # type: ignore[method-assign]
    runs = {"portattn": lambda: "ours", "peer": lambda: "peer", "wrong": lambda: "wrong"}
    rows = {row["contender"]: row for row in how.rows("a case", runs, {"wrong": lambda: {"right": False}}, peer="peer")}
    assert rows["portattn"]["of_peer"] == 2.0
    assert (rows["portattn"]["graph_ms"], rows["portattn"]["host_us"]) == (1.0, 7.0)
    assert (rows["peer"]["ms"], rows["peer"]["graph_failed"]) == (2.0, "RuntimeError: no capture")
    assert "ms" not in rows["wrong"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "engines"), "no CUDA or ROCm device is here to time engines on; --tiny checks"),
        (("--set", "engines", "--set", "seed"), "--set is 'engines', but must not be one of engines, fp8-forward"),
        (("--set", "engines", "--tiny", "--backend", "triton"), "--backend is 'triton', but does not go with"),
        (("--set", "seed", "--tiny"), "--tiny is True, but goes with these sets alone: engines"),
    ],
)
def test_bad_input(arguments, message):
    called = bench(*arguments)
    assert (called.exit_code, message in called.stderr) == (2, True)


def test_time_is_shared(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(workloads.time, "monotonic", lambda: now[0])
    how = workloads.Measure("cpu", end=130.0)
    shares = how.shares(["a", "b", "c"])
    assert next(shares) == ("a", 110.0)
    now[0] = 104.0
    assert next(shares) == ("b", 117.0)
    now[0] = 131.0
    assert (list(shares), how.left) == ([], ["c"])
