"""The log: whole lines, resumption, and the table for people."""

import msgspec
import pytest
from faketunable import choice

from portattn.errors import ArgumentError, DataError
from portattn.tools import display_text
from portattn.tools.tune.log import COLUMNS, History, TuneLog, latest, read, text
from portattn.tools.tune.race import Times
from portattn.tools.tune.records import CandidateRecord, CodeRecord, Interruption, Outcome, Trying

NAME = "dense_forward: causal"


def candidate(block_n=64, verdict="slower", **fields):
    return CandidateRecord(name=NAME, problem="p", choice=choice(block_n), verdict=verdict, **fields)


def test_lines_come_back_and_a_cut_one_is_left_out(tmp_path, origin):
    path = tmp_path / "a" / "log.jsonl"
    records = [
        CodeRecord(code="c", facts={"registers": 3}), candidate(),
        Outcome(name=NAME, choice=choice(64), replaces=True, measured=True),
    ]  # fmt: skip
    with TuneLog(path) as log:
        assert log.begin(origin(NAME)) is None
        for record in records:
            log.append(record)
    assert read(path) == [origin(NAME), *records]
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert read(path) == [origin(NAME), *records[:-1]]
    with TuneLog(path) as log:
        log.resume(origin(NAME))
        log.append(records[-1])
        with pytest.raises(ArgumentError, match="another run is writing there"):
            TuneLog(path)
    assert path.read_bytes() == whole


def test_an_earlier_log_is_kept(tmp_path, origin):
    path, earlier = tmp_path / "log.jsonl", []
    for number in range(3):
        with TuneLog(path) as log:
            kept = log.begin(origin(NAME, command=str(number)))
            assert (kept is None) == (number == 0)
            earlier += [] if kept is None else [kept]
    assert len({path.name for path in earlier}) == 2
    assert [read(path)[0].command for path in (*earlier, tmp_path / "log.jsonl")] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "changes", [{"kernels": "other"}, {"target": "cuda:sm_80"}, {"toolchain": "triton==3.5.0"}, {"measured": False}]
)
def test_another_runs_log_is_not_gone_on_with(tmp_path, origin, changes):
    path = tmp_path / "log.jsonl"
    with TuneLog(path) as log:
        with pytest.raises(ArgumentError, match="no such file"):
            log.resume(origin(NAME))
        log.begin(origin(NAME))
        before = path.read_bytes()
        with pytest.raises(ArgumentError, match=f"another {next(iter(changes))}"):
            log.resume(origin(NAME, **changes))
        with pytest.raises(ArgumentError, match="another classes"):
            log.resume(origin("another"))
    assert path.read_bytes() == before


def test_broken_lines_are_named(tmp_path, origin):
    path = tmp_path / "log.jsonl"
    with TuneLog(path) as log:
        log.begin(origin(NAME))
    for data, said in (
        (path.read_bytes() + b'{"kind": "candidate"}\n', r"log\.jsonl:2: not a line"), (b"", "first line"),
        (msgspec.json.encode(msgspec.structs.replace(origin(NAME), schema=7)) + b"\n", "schema version 7"),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(DataError, match=said):
            read(path)


def test_what_was_being_tried_when_the_process_ended_is_to_blame(origin):
    trying = Trying(name=NAME, problem="p", choice="k")
    for records, fatal in (
        ([trying], {("p", "k")}), ([trying, trying], {("p", "k")}), ([trying, candidate()], set()),
        ([trying, Interruption()], set()), ([candidate(32, "broke")], {("p", choice(32).key)}),
    ):  # fmt: skip
        assert History([origin(NAME), *records]).fatal == fatal


def test_the_table_has_the_last_word_on_each_the_fastest_first(origin):
    times = [Times(least=1.0, median=2.5, most=4.0), Times(least=10.0, median=20.5, most=40.0)]
    records = [
        origin(NAME),
        candidate(64, "slower", reason="probed", times=times[1], error=1e-3, mean_error=2e-4, registers=168, spills=0),
        candidate(32, "chosen", times=times[0], scratchpad_bytes=4096),
        candidate(16, "ruled out", reason="8 bytes spilled"),
        candidate(64, "kept", times=times[1], error=1e-3, mean_error=2e-4, registers=168, spills=0),
        Outcome(
            name=NAME, choice=choice(32), replaces=True, measured=True, incumbent=choice(64), ratio=0.1, noise=0.01
        ),
    ]
    assert [r.verdict for r in latest(records, NAME)] == ["chosen", "kept", "ruled out"]
    lines = text(records).splitlines()
    assert lines[0] == "cuda:sm_90, NVIDIA H200, triton==3.6.0, ptxas 12.8.93, 2026-11-22; timed"
    assert display_text.TILES in lines[:3]
    header = next(line for line in lines if line.startswith("problem"))
    assert all(column in header for column in COLUMNS)
    rows = [line.split() for line in lines if line.startswith("p ")]
    assert rows[0] == ["p", "64×32", "1.0", "2.5", "4.0", "4096", "chosen"]
    assert rows[1] == ["p", "64×64", "1.00e-03", "2.00e-04", "10.0", "20.5", "40.0", "168", "0", "kept"]
    assert not any("spilled" in line for line in lines)
    assert "1 chosen, 1 kept, 1 ruled out" in lines
    assert lines[-1] == "chosen, measured: 64×32 (0.100 of the incumbent's time, noise 1.0%)"
