"""Files of results: a line a row while a run goes on, whole documents at its end, and what is refused."""

import json
from pathlib import Path

import msgspec
import pytest
from benchfakes import a_result, a_run, figures, host, made
from click.testing import CliRunner
from places import DOCS

from portattn.cli import main
from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.tools.bench import comparison, results, workloads
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.report import document

CASE = SETS["paged"][0]
ROW = made("paged", CASE, figures("portattn", 0.5, 0.6, host_us=host(4.0), graph_ms=(0.4,)), figures("fa3/vllm", 0.5))
CALL = FirstCall(case="first paged", run=0, empty_s=2.0, kept_s=1.0, second_s=0.1)


def begun(folder):
    with results.Store(folder) as file:
        assert file.start() is None
        for item in (a_run(), ROW, CALL):
            file.append(item)
    return folder / results.ROWS


def test_lines_and_documents_hold_the_same(tmp_path):
    path = begun(tmp_path)
    result = results.read(path)
    assert (result.runs, result.rows, result.first_calls) == ([a_run()], [ROW], [CALL])
    assert result.sets == ["paged", "cold-start"]
    assert result.done == {("paged", CASE.name), ("cold-start", "first paged")}
    file = tmp_path / "bench.json"
    write_whole(file, msgspec.json.encode(document(result)))
    assert results.read(file) == result
    path.unlink()
    assert results.read(tmp_path) == result


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = begun(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + msgspec.json.encode(ROW)[:50])
    assert len(results.read(path).rows) == 1
    with results.Store(tmp_path) as file:
        assert (len(file.resume(a_run()).rows), path.read_bytes()) == (1, whole)
        file.append(ROW)
    assert len(results.read(path).rows) == 2


# tests/testing/test_bound.py reads bound.json.
KEPT = sorted({*(DOCS / "performance").glob("*.json*")} - {DOCS / "performance" / "bound.json"})


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_committed_results_stay_readable(path):
    if path.name.startswith("releases"):
        assert comparison.read(path).cases
    else:
        assert (workloads.read(path) or results.read(path)).rows


def test_earlier_rows_are_kept(tmp_path):
    path = begun(tmp_path)
    before = path.read_bytes()
    with results.Store(tmp_path) as file:
        kept = [file.start(), file.start(), file.start()]
    assert (len(set(kept)), kept[0].read_bytes(), path.read_bytes()) == (3, before, b"")


def test_nothing_to_go_on_with_and_a_folder_that_another_run_has(tmp_path):
    with results.Store(tmp_path) as file:
        with pytest.raises(ArgumentError, match="no such file to go on with"):
            file.resume(a_run())
        with pytest.raises(ArgumentError, match="another run is writing there now"):
            results.Store(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", msgspec.json.encode(a_run(schema=4)).decode() + "\n", "schema version 4"),
        ("rows.jsonl", "", "holds no run"),
        ("rows.jsonl", '{"type": "row"}\n', "rows.jsonl:1: not a line of bench results"),
        ("rows.jsonl", '{"type": "cell"}\n', "rows.jsonl:1: not a line of bench results"),
        ("bench.json", "{}", "no results of portattn bench"),
        ("bench.json", '{"schema": 2}', "schema version 2; this portattn reads version 3"),
    ],
)
def test_what_cannot_be_read(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        results.read(tmp_path / name)


def test_an_error_that_is_infinite_is_none():
    row = made("paged", CASE, msgspec.structs.replace(figures("portattn", 1.0), error=float("inf")))
    assert msgspec.json.decode(msgspec.json.encode(row), type=type(row)) == row
    assert a_result(row).failed is False


# `portattn bench join`: parts that were measured apart become one result, or nothing is written.


PAGED, DECODE = SETS["paged"], SETS["decode"]


def part(folder: Path, set_: str, cases, asked=(), **fields) -> Path:
    with results.Store(folder) as file:
        file.start()
        file.append(a_run(sets=(set_,), asked=tuple((set_, one.name) for one in (*cases, *asked)), **fields))
        for one in cases:
            file.append(made(set_, one, figures("portattn", 0.5, 0.6), figures("fa3/vllm", 0.5)))
    return folder


def run(*words: object, exits: int | None = None):
    called = CliRunner().invoke(main, ["bench", "join", *map(str, words)])
    assert exits in (None, called.exit_code), called.output
    return called


def test_parts_become_one(tmp_path: Path) -> None:
    parts = [
        part(tmp_path / "a", "paged", PAGED[:2], asked=PAGED[2:3]), part(tmp_path / "b", "decode", DECODE[:1]),
        part(tmp_path / "c", "paged", PAGED[3:4]),
    ]  # fmt: skip
    with results.Store(tmp_path / "b") as file:
        file.append(FirstCall(case="first paged", run=0, empty_s=2.0, kept_s=1.0, second_s=0.1))
    done = run(*parts, "--out", tmp_path / "whole", "--json", exits=0)
    whole = results.read(tmp_path / "whole")
    assert [(row.name, row.run) for row in whole.rows] == [
        (PAGED[0].name, 0), (PAGED[1].name, 0), (DECODE[0].name, 1), (PAGED[3].name, 2)
    ]  # fmt: skip
    assert [(call.case, call.run) for call in whole.first_calls] == [("first paged", 1)]
    assert (len(whole.runs), whole.left) == (3, [("paged", PAGED[2].name)])
    assert json.loads(done.stdout)["written"] == [str(tmp_path / "whole" / "bench.json")]
    with results.Store(tmp_path / "whole") as file:
        assert file.resume(a_run()).rows == whole.rows, "a run can go on with it"


@pytest.mark.parametrize("field", results.SAME)
def test_rows_of_another_thing_are_neither_gone_on_with_nor_joined(tmp_path: Path, field: str) -> None:
    begun(tmp_path)
    other = {"core": True, "only_host": True, "rounds": 9}.get(field, "other")
    with results.Store(tmp_path) as file, pytest.raises(ArgumentError, match=f"its {field} is"):
        file.resume(a_run(**{field: other}))
    first, second = (
        part(tmp_path / "a", "paged", PAGED[:1]), part(tmp_path / "b", "decode", DECODE[:1], **{field: other}),
    )  # fmt: skip
    assert f"its {field} is {other!r}" in run(first, second, "--out", tmp_path / "whole", exits=2).output
    assert not (tmp_path / "whole").exists()


def test_what_lay_there_is_kept(tmp_path: Path) -> None:
    first = part(tmp_path / "a", "paged", PAGED[:1])
    part(tmp_path / "whole", "decode", DECODE[:1])
    assert "are now" in run(first, "--out", tmp_path / "whole", exits=0).output
    assert [row.set for row in results.read(tmp_path / "whole").rows] == ["paged"]
    assert len(list((tmp_path / "whole").glob("rows-*.jsonl"))) == 1


def test_a_case_that_two_have_measured_and_a_damaged_part_are_named(tmp_path: Path) -> None:
    first, second = part(tmp_path / "a", "paged", PAGED[:2]), part(tmp_path / "b", "paged", PAGED[1:3])
    said = run(first, second, "--out", tmp_path / "whole", exits=2).output
    assert (repr(PAGED[1].name) in said, str(first) in said) == (True, True)
    path = second / results.ROWS
    path.write_bytes(path.read_bytes().replace(b'"rounds_ms"', b'"rounds_us"'))
    assert str(path) in run(first, second, "--out", tmp_path / "whole", exits=2).output
    assert not (tmp_path / "whole").exists()
