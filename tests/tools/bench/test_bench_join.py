"""`portattn bench join`: parts that were measured apart become one result, or nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchfakes import a_run, figures, made
from click.testing import CliRunner

from portattn.cli import main
from portattn.tools.bench import results
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.firstcall import FirstCall

PAGED, DECODE = SETS["paged"], SETS["decode"]


def part(folder: Path, set_: str, cases, asked=(), **fields) -> Path:
    with results.Store(folder) as file:
        file.start()
        file.append(a_run(sets=(set_,), asked=tuple((set_, one.name) for one in (*cases, *asked)), **fields))
        for one in cases:
            file.append(made(set_, one, figures("portattn", 0.5, 0.6), figures("fa3/vllm", 0.5)))
    return folder


def run(*words: object):
    return CliRunner().invoke(main, ["bench", "join", *map(str, words)])


def test_parts_become_one(tmp_path: Path) -> None:
    parts = [
        part(tmp_path / "a", "paged", PAGED[:2], asked=PAGED[2:3]), part(tmp_path / "b", "decode", DECODE[:1]),
        part(tmp_path / "c", "paged", PAGED[3:4]),
    ]  # fmt: skip
    with results.Store(tmp_path / "b") as file:
        file.append(FirstCall(case="first paged", run=0, empty_s=2.0, kept_s=1.0, second_s=0.1))
    done = run(*parts, "--out", tmp_path / "whole", "--json")
    assert done.exit_code == 0, done.output
    whole = results.read(tmp_path / "whole")
    assert [(row.name, row.run) for row in whole.rows] == [
        (PAGED[0].name, 0), (PAGED[1].name, 0), (DECODE[0].name, 1), (PAGED[3].name, 2)
    ]  # fmt: skip
    assert [(call.case, call.run) for call in whole.first_calls] == [("first paged", 1)]
    assert len(whole.runs) == 3
    assert whole.left == [("paged", PAGED[2].name)]
    assert json.loads(done.stdout)["written"] == [
        str(tmp_path / "whole" / name) for name in ("bench.json", "bench.csv")
    ]
    with results.Store(tmp_path / "whole") as file:
        assert file.resume(a_run()).rows == whole.rows, "a run can go on with it"


@pytest.mark.parametrize("field", results.SAME)
def test_parts_of_other_things_are_refused(tmp_path: Path, field: str) -> None:
    other = {"core": True, "only_host": True, "rounds": 9}.get(field, "other")
    first, second = (
        part(tmp_path / "a", "paged", PAGED[:1]), part(tmp_path / "b", "decode", DECODE[:1], **{field: other}),
    )  # fmt: skip
    done = run(first, second, "--out", tmp_path / "whole")
    assert done.exit_code == 2
    assert f"its {field} is {other!r}" in done.output
    assert not (tmp_path / "whole").exists()


def test_a_case_that_two_have_measured_is_refused(tmp_path: Path) -> None:
    first, second = part(tmp_path / "a", "paged", PAGED[:2]), part(tmp_path / "b", "paged", PAGED[1:3])
    done = run(first, second, "--out", tmp_path / "whole")
    assert done.exit_code == 2
    assert repr(PAGED[1].name) in done.output
    assert str(first) in done.output


def test_what_lay_there_is_kept(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "paged", PAGED[:1])
    part(tmp_path / "whole", "decode", DECODE[:1])
    done = run(first, "--out", tmp_path / "whole")
    assert done.exit_code == 0
    assert "are now" in done.output
    assert [row.set for row in results.read(tmp_path / "whole").rows] == ["paged"]
    assert len(list((tmp_path / "whole").glob("rows-*.jsonl"))) == 1


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    first, second = part(tmp_path / "a", "paged", PAGED[:1]), part(tmp_path / "b", "decode", DECODE[:1])
    path = second / results.ROWS
    path.write_bytes(path.read_bytes().replace(b'"rounds_ms"', b'"rounds_us"'))
    done = run(first, second, "--out", tmp_path / "whole")
    assert done.exit_code == 2
    assert str(path) in done.output
    assert not (tmp_path / "whole").exists()
