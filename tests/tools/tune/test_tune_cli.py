"""`portattn tune`: what it says, what it writes, and its exit status."""

import json

import click.testing
import pytest
import torch
from faketunable import SMALL, FakeClock, FakeTunable, Made, NoWorker

from portattn.cli import main
from portattn.planning.data_files import load_tuning
from portattn.planning.registry import Registry, parse_target
from portattn.schema.tuning import Entry, Tuning
from portattn.tools import lab
from portattn.tools.tune.log import read
from portattn.tools.tune.records import CandidateRecord, CodeRecord, Outcome
from portattn.worker.client import Worker

WHERE = ("--target", "cuda:sm_90", "--toolchain", "triton==3.6.0")


def tune(*arguments, exits: int | None = None):
    result = click.testing.CliRunner().invoke(main, ["tune", *arguments], prog_name="portattn")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert exits in (None, result.exit_code), result.output
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (WHERE, "--set is 'nothing', but must be given, or --problem; sets: "),
        ((*WHERE, "--set", "decoed"), "--set is 'decoed', but must be one of"),
        ((*WHERE, "--set", "decode", "--only", "nothing"), "--only is 'nothing', but must match a case of decode"),
        ((*WHERE, "--set", "decode", "--op", "attention"), "--op is 'attention', but must be the op of a problem"),
        ((*WHERE, "--set", "decode", "--op", "sdpa"), "--op is 'sdpa', but must be one of attention"),
        ((*WHERE, "--problem", "attention"), "--problem is 'attention', but must be an op and NAME=VALUE words"),
        ((*WHERE, "--problem", SMALL, "--kernel", "dense"), "--kernel is 'dense', but must be one of dense_forward"),
        ((*WHERE, "--problem", SMALL, "--kernel", "mla_split"), "must serve an op of the problems"),
        (("--target", "cpu:generic", "--problem", SMALL), "--target is 'cpu:generic', but must be a chip"),
        ((*WHERE, "--problem", SMALL, "--budget", "0"), "'--budget': 0.0 is not in the range"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in tune(*arguments, exits=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_would_be_searched_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called = tune(*WHERE, "--problem", SMALL, "--kernel", "dense_forward", "--dry-run", "--json", exits=0)
    (row,) = json.loads(called.stdout)["classes"]
    assert row["problems"] == [SMALL]
    assert row["candidates"] > 10
    assert row["incumbent"]["launch"]["block_m"]
    few = tune(*WHERE, "--problem", SMALL, "--kernel", "dense_forward", "--dry-run", "--json", "--candidates", "3")
    assert json.loads(few.stdout)["classes"][0]["candidates"] == 4
    assert "dense_forward" in tune(*WHERE, "--problem", SMALL, "--dry-run").stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("here", ["no chip", "the chip"])
def test_compiling_only_keeps_what_compiles(tmp_path, monkeypatch, planted, here):
    """A planted compiler by which everything compiles for sm_90, and nothing for sm_120 without spills. Where the
    machine has the chip, nothing is timed because that is asked for."""
    monkeypatch.setattr(lab, "worker", lambda name: Worker(python=planted))
    common = ("--toolchain", "triton==3.6.0", "--problem", SMALL, "--candidates", "2", "--kernel", "dense_forward")
    if here == "the chip":
        common += ("--compile-only",)
        monkeypatch.setattr("portattn.cli.tune._device", lambda where: pytest.fail("a device is looked for"))
    else:
        monkeypatch.setattr("portattn.planning.registry.devices", lambda: (parse_target("cpu:generic"),))
    called = tune("--target", "cuda:sm_90", *common, "--out", str(tmp_path), "--json", exits=0)
    told = json.loads(called.stdout)
    assert (told["written"], told["out"], told["red"]) == ([], None, [])
    assert told["classes"][0]["measured"] is False
    assert told["origin"]["chip"].endswith("not present")
    assert "not measured" in (tmp_path / "sm_90.txt").read_text()
    spills = tune("--target", "cuda:sm_120", *common, "--out", str(tmp_path), exits=1)
    assert "no candidate compiles, fits and does not spill" in spills.stdout
    assert not (tmp_path / "sm_120.toml").exists()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """A device that is the CPU, a fake kernel and clock: returns the function that sets the kernel's candidates."""
    monkeypatch.setattr("portattn.cli.tune._device", lambda where: torch.device("cpu"))
    monkeypatch.setattr("portattn.tools.tune.race.DeviceSampleClock", lambda device_type: FakeClock())
    monkeypatch.setattr("portattn.tools.tune.records.timed_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("portattn.tools.tune.records.chip_name", lambda device: "a chip")
    monkeypatch.setattr(lab, "worker", lambda name: NoWorker())

    def plant(made: dict[int, Made]) -> FakeTunable:
        tunable = FakeTunable(made)
        monkeypatch.setattr("portattn.tools.tune.run.tunables", lambda target: [tunable])
        return tunable

    return plant


SHIPPED = Registry.load().tunings["cuda"]["sm_90"].entry


def new(tuning: Tuning) -> list[Entry]:
    return [entry for entry in tuning.entry if entry not in SHIPPED]


def test_a_timed_run_writes_toml_log_and_table(tmp_path, device):
    tunable = device({64: Made(100.0), 32: Made(50.0)})
    out = tmp_path / "made.toml"
    called = tune(*WHERE, "--problem", SMALL, "--out", str(out), "--json", exits=0)
    told = json.loads(called.stdout)
    assert told["written"] == [told["classes"][0]["name"]]
    assert told["classes"][0]["choice"]["launch"]["block_n"] == 32
    tuning = load_tuning(out, "cuda")
    assert [entry for entry in tuning.entry if entry in SHIPPED] == list(SHIPPED)
    (entry,) = new(tuning)
    assert (entry.kernel, entry.launch["block_n"], entry.provenance.chip) == ("dense_forward", 32, "a chip")
    records = read(tmp_path / "made.jsonl")
    assert {type(record) for record in records} >= {CodeRecord, CandidateRecord, Outcome}
    assert "chosen, measured: 64×32" in (tmp_path / "made.txt").read_text()
    # The file that there is now is where the next run begins.
    tunable.made[64] = Made(10.0)
    assert "chosen, measured: 64×64" in tune(*WHERE, "--problem", SMALL, "--out", str(out), exits=0).stdout
    assert len(load_tuning(out, "cuda").entry) == len(tuning.entry)
    assert len(list(tmp_path.glob("made-*.jsonl"))) == 1


def test_status_1_when_a_candidate_is_wrong(tmp_path, device):
    device({64: Made(100.0), 32: Made(1.0, "wrong")})
    called = tune(*WHERE, "--problem", SMALL, "--out", str(tmp_path), exits=1)
    assert "wrong: 64×32" in called.stdout
    assert "over the budget" in called.stdout


WIDE = SMALL.replace(",16 ", ",128 ")


def test_an_interrupted_run_goes_on(tmp_path, device):
    class Interrupted(FakeTunable):
        """Ctrl-C comes while the second class is looked at."""

        def build(self, problem, choice, target):
            self.made[32] = Made(50.0, "interrupt" if problem.head_dim == 128 and not self.over else "right")
            return super().build(problem, choice, target)

        over = False

    tunable = device({64: Made(100.0), 32: Made(50.0)})
    tunable.__class__ = Interrupted
    arguments = (*WHERE, "--problem", SMALL, "--problem", WIDE, "--out", str(tmp_path))
    assert "--resume goes on" in tune(*arguments, exits=130).stderr
    assert len(new(load_tuning(tmp_path / "sm_90.toml", "cuda"))) == 1
    tunable.over = True
    tunable.started.clear()
    called = tune(*arguments, "--resume", "--json", exits=0)
    assert [one["choice"]["launch"]["block_n"] for one in json.loads(called.stdout)["classes"]] == [32, 32]
    assert len(new(load_tuning(tmp_path / "sm_90.toml", "cuda"))) == 2
    assert len([r for r in read(tmp_path / "sm_90.jsonl") if isinstance(r, Outcome)]) == 2
    refused = tune(*WHERE, "--problem", SMALL, "--out", str(tmp_path), "--resume", exits=2)
    assert "it was begun with another classes" in refused.stderr
