"""`portattn bench` on a device that is the CPU, with a clock that needs none; its reports from files."""

import json
import math
import types
from unittest.mock import Mock

import click.testing
import pytest
import torch
from benchfakes import FakeClock, a_result, a_run, figures, made
from places import tables
from tiny import shrunk

from portattn.cli import main
from portattn.tools.bench import firstcall, gate, peers, releases, results, rounds, run, workloads
from portattn.tools.bench.cases import SETS

TABLES = tables(__file__)


def bench(*arguments, exits: int | None = None):
    """Run `portattn bench`; the test fails if its exit status is not `exits`."""
    called = click.testing.CliRunner().invoke(main, ["bench", *arguments], prog_name="portattn")
    assert exits in (None, called.exit_code), called.output
    return called


def test_help_names_every_set_and_peer():
    text = "".join(bench("--help").output.split())  # names are broken at their hyphens
    assert f"Sets:{','.join(SETS)},all." in text
    assert f"{','.join(peers.PEERS)},ornone." in text
    assert f"(scripts/bench_sets/):{','.join(workloads.WORKLOADS)}." in text


@pytest.mark.parametrize(("arguments", "message"), TABLES["bad_input"])
def test_bad_input(arguments, message):
    assert message in bench(*arguments, exits=2).stderr


def test_without_a_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    called = bench("--set", "paged", "--set", "mla", "--json", exits=2)
    assert "no device with events is here" in json.loads(called.stdout)["error"]["message"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A device that is the CPU, on which every call takes 1 ms; cases are small."""
    timed, fake = run.run_case, FakeClock()
    properties = types.SimpleNamespace(multi_processor_count=132, total_memory=1, uuid=None, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a chip")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(results, "this_target", lambda: "cuda:sm_90")
    monkeypatch.setattr(rounds, "DeviceClock", lambda device_type: fake)
    monkeypatch.setattr(firstcall, "measure", lambda case, index: firstcall.FirstCall(case=case.name, run=index))

    def on_the_cpu(set_, case, indices, device, *rest):
        return timed(set_, shrunk(case), indices, torch.device("cpu"), *rest)

    monkeypatch.setattr(run, "run_case", on_the_cpu)
    return fake


SEED = ("--set", "seed", "--only", "decode", "--peer", "none")


@pytest.mark.usefixtures("device")
def test_a_set_is_timed(tmp_path):
    called = bench(*SEED, "--out", str(tmp_path), "--json", "--commit", "c0ffee", "--rounds", "2", exits=0)
    told = json.loads(called.stdout)
    assert [row["case"]["name"] for row in told["rows"]] == ["seed decode", "seed paged decode"]
    for row in told["rows"]:
        assert [f["name"] for f in row["contenders"]] == ["portattn", "portattn prepared"]
        assert all(f["rounds_ms"] == [1.0, 1.0] for f in row["contenders"])
    (made_,) = told["runs"]
    assert (made_["chip"], made_["commit"], made_["sets"]) == ("a chip", "c0ffee", ["seed"])
    assert made_["ceilings"] == {"gemm_tflops": 800.0, "copy_tbs": 4.0}
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == told["rows"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3
    text = bench(*SEED[:-1], "torch").stdout
    assert "seed decode" in text


@pytest.mark.filterwarnings("ignore::UserWarning")  # SDPA says why each kernel cannot run
@pytest.mark.usefixtures("device")
def test_backward_sets_are_timed_and_gone_on_with(tmp_path):
    chosen = ("--set", "backward18", "--set", "backward_more", "--only", "D=128 S=4096 causal", "--peer", "sdpa")
    where = ("--out", str(tmp_path), "--rounds", "1")
    once = bench(*chosen, *where, "--json", "--budget", "0.0001", exits=0)
    first = json.loads(once.stdout)["rows"]
    assert len(first) == 1
    assert "1/4]" in once.stderr
    assert "3 cells are left" in once.stderr
    left = json.loads(once.stdout)["left"]
    assert len(left) == 3
    assert {"set": first[0]["set"], "case": first[0]["case"]["name"]} not in left
    assert left == json.loads((tmp_path / "bench.json").read_text())["left"]
    told = json.loads(bench(*chosen, *where, "--json", "--resume", exits=0).stdout)
    assert (told["rows"][0], told["left"]) == (first[0], [])
    cases = [case for name in ("backward18", "backward_more") for case in SETS[name] if chosen[5] in case.name]
    assert sorted(row["case"]["name"] for row in told["rows"]) == sorted(case.name for case in cases)
    for row in told["rows"]:
        assert row["checked"] == "6 of 6 sequences and key/value heads, every row and key"
        assert row["seconds"] >= row["reference_s"] + row["timing_s"] + sum(f["admit_s"] for f in row["contenders"])
        timed = [f for f in row["contenders"] if not f["refused"]]
        assert {"portattn", "sdpa"} <= {f["name"] for f in timed}
        assert any(f["name"] == "portattn unordered" for f in timed) == row["case"]["deterministic"]
        assert {f["extra_bytes"] for f in timed} == {0}  # the clock's 64 bytes are less than the gradients
    assert "portattn" in bench("report", str(tmp_path), exits=0).stdout


@pytest.mark.usefixtures("device")
def test_several_sets_with_a_budget_take_turns(tmp_path):
    bench(
        "--set", "decode", "--set", "host", "--only", "B=1 H=32/8 S=1024" , "--set", "paged", "--peer", "none",
        "--budget", "1000", "--out", str(tmp_path), "--rounds", "1", exits=0,
    )  # fmt: skip
    assert [row.set for row in results.read(tmp_path).rows] == ["decode", "paged", "paged", "paged"]


@pytest.mark.usefixtures("device")
def test_jobs_compile_first_what_is_still_to_be_measured(tmp_path, monkeypatch):
    asked = []

    def prime_releases(several, cases, backend, core, processes, done, seconds):
        (release,) = several
        asked.append(([case.name for case in cases], backend, core, release.folder, processes, seconds))
        for case in cases:
            done(release, case, "" if "paged" in case.name else "portattn: too wide")
        return len(asked) == 1

    def measured(case, index):
        return firstcall.FirstCall(case=case.name, run=index, empty_s=1.0, kept_s=0.5)

    monkeypatch.setattr(firstcall, "measure", measured)
    monkeypatch.setattr(releases, "prime_releases", prime_releases)
    sets = ("--set", "cold-start", *SEED, "--rounds", "1", "--out", str(tmp_path), "--jobs", "3")
    called = bench(*sets)
    for part in ("1/2]", "seed decode: portattn: too wide", "seed paged decode: compiled"):
        assert part in called.stderr
    assert called.exit_code == 0, called.output
    assert "not all was compiled" not in called.stderr
    assert "not all was compiled" in bench(*sets, "--resume", "--budget", "100").stderr
    assert asked == [
        (["seed decode", "seed paged decode"], "auto", False, "", 3, math.inf), ([], "auto", False, "", 3, 50.0),
    ]  # fmt: skip


@pytest.mark.usefixtures("device")
def test_an_end_before_the_first_row_leaves_earlier_figures(tmp_path, monkeypatch):
    assert bench(*SEED, "--out", str(tmp_path)).exit_code == 0
    before = (tmp_path / "bench.json").read_bytes()
    monkeypatch.setattr(run, "run_cells", Mock(side_effect=KeyboardInterrupt))
    called = bench(*SEED, "--out", str(tmp_path), exits=130)
    assert (tmp_path / "bench.json").read_bytes() == before
    assert "written" not in called.stdout


@pytest.mark.usefixtures("device")
def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    cells = run.run_cells

    def interrupted(left, *rest, **named):
        cells(left[:1], *rest, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_cells", interrupted)
    assert "seed decode" in bench(*SEED, "--out", str(tmp_path), exits=130).stdout
    assert [row.name for row in results.read(tmp_path / "bench.json").rows] == ["seed decode"]
    monkeypatch.setattr(run, "run_cells", cells)
    told = json.loads(bench(*SEED, "--out", str(tmp_path), "--resume", "--json", exits=0).stdout)
    assert [(row["case"]["name"], row["run"]) for row in told["rows"]] == [("seed decode", 0), ("seed paged decode", 1)]
    assert len(told["runs"]) == 2
    again = bench(*SEED, "--out", str(tmp_path), "--resume", "--rounds", "9", exits=2)
    assert "its rounds is 5 and this run's is 9" in again.stderr


@pytest.mark.usefixtures("device")
def test_a_lost_device_ends_the_run_and_keeps_its_rows(tmp_path, monkeypatch):
    timed = run.run_case

    def breaks(set_, case, *rest):
        if "paged" in case.name:
            raise gate.DeviceLost("fa3/vllm", RuntimeError("illegal address"), "sticky")
        return timed(set_, case, *rest)

    monkeypatch.setattr(run, "run_case", breaks)
    assert "--resume goes on behind it" in bench(*SEED, "--out", str(tmp_path), exits=1).stderr
    result = results.read(tmp_path)
    assert [row.name for row in result.rows] == ["seed decode", "seed paged decode"]
    assert "illegal address" in result.rows[1].figures("fa3/vllm").refused
    assert not result.rows[1].failed  # portattn did not break it


@pytest.mark.usefixtures("device")
def test_status_1_when_portattn_cannot_run_and_the_core_is_a_row_of_its_own():
    assert "portattn" in bench(*SEED, "--backend", "triton", exits=1).stdout
    called = bench(*SEED, "--core-only", "--json", exits=1)  # the CPU has no core
    contenders = json.loads(called.stdout)["rows"][0]["contenders"]
    assert [f["name"] for f in contenders] == ["portattn", "portattn prepared", "portattn core"]
    assert [bool(f["refused"]) for f in contenders] == [False, False, True]


@pytest.mark.usefixtures("device")
def test_enqueue_times_alone():
    told = json.loads(bench("--set", "host", "--host", "--peer", "sdpa", "--json", exits=0).stdout)
    assert told["runs"][0]["ceilings"] is None
    assert {f["host_us"]["median"] for row in told["rows"] for f in row["contenders"] if f["host_us"]} == {5.0}


@pytest.mark.usefixtures("device")
def test_a_file_brings_a_peer(tmp_path):
    file = tmp_path / "seed.py"
    file.write_text(
        "from portattn.tools.bench.contenders import ours\n"
        "def contenders(case, t):\n    return {'seed': lambda: ours(case, t)}\n"
    )
    told = json.loads(bench(*SEED, "--peer-file", str(file), "--json", exits=0).stdout)
    assert (told["rows"][0]["best_peer"], told["runs"][0]["peers"]) == ("seed", {"seed": "here"})
    (tmp_path / "fa3.py").write_text(file.read_text())
    assert "known already" in bench(*SEED, "--peer-file", str(tmp_path / "fa3.py")).stderr


def saved(folder, ours=1.0, theirs=1.2):
    rows = [
        made("decode", case, figures("portattn", ours, ours), figures("fa3/vllm", theirs, theirs))
        for case in SETS["decode"]
    ]
    with results.Store(folder) as file:
        file.start()
        for item in (a_run(), *rows):
            file.append(item)
    return a_result(*rows)


def test_report_needs_no_device(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # a row is a line
    saved(tmp_path / "run")
    called = bench("report", str(tmp_path / "run"), "--markdown", str(tmp_path / "doc" / "a.md"), exits=0)
    for part in ("a chip, triton==3.6.0, torch 2.11", "1.20× fa3/vllm", "flex: no package"):
        assert part in called.stdout
    assert "## decode" in (tmp_path / "doc" / "a.md").read_text()
    told = json.loads(bench("report", str(tmp_path / "run" / "rows.jsonl"), "--json").stdout)
    assert told["summaries"][0]["worst"] == pytest.approx(1.2)
    assert told["written"] == []


def test_compare(tmp_path):
    saved(tmp_path / "a")
    saved(tmp_path / "b", ours=2.0, theirs=2.4)
    saved(tmp_path / "c", ours=1.1)
    same = bench("compare", str(tmp_path / "a"), str(tmp_path / "b"), exits=0)
    assert "decode, portattn: +0.0% over 6 cells" in same.stdout
    told = json.loads(bench("compare", str(tmp_path / "a"), str(tmp_path / "c"), "--json", exits=1).stdout)
    assert (len(told["slower"]), told["sets"][0]["change"]) == (6, pytest.approx(1 / 1.1))
    assert bench("compare", str(tmp_path / "a"), str(tmp_path / "c"), "--tolerance", "0.1").exit_code == 0
    with results.Store(tmp_path / "none") as file:
        file.start()
        file.append(a_run())
    nothing = bench("compare", str(tmp_path / "a"), str(tmp_path / "none"), exits=3)
    assert "portattn: nothing was compared: BEFORE and AFTER share no case" in nothing.stderr


def test_an_answer_of_nvidia_smi():
    state, driver = results.parse_device_state("1980, 2619, 612.30, [N/A], 61, 570.86.15\n")
    assert (state.sm_mhz, state.power_w, state.power_limit_w, driver) == (1980.0, 612.3, None, "570.86.15")
    assert results.parse_device_state("No devices were found") is results.parse_device_state("") is None


def test_commands_hold_no_places_of_files():
    argv = ["/usr/bin/portattn", "bench", "--set", "seed", "--peer-libs", "/tmp/some/libs"]
    assert results.command(argv) == "portattn bench --set seed --peer-libs libs"
