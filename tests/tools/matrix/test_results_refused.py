"""Results that no run of ours writes are refused with file and line: what is read is compared, merged and shown."""

from __future__ import annotations

import datetime

import msgspec
import pytest

from portattn.errors import ArgumentError, DataError
from portattn.testing.findings import KernelFacts
from portattn.tools.matrix import baseline
from portattn.tools.matrix.cells import snapshot
from portattn.tools.matrix.problems import decode
from portattn.tools.matrix.results import NAME, merge, read
from portattn.tools.run_log import encode_record


@pytest.fixture
def lines(run_of, cell):
    """A run and two cells, as its file has them."""
    made, cells = run_of([cell(), cell(named=decode("GQA", dtype="bf16", head_dim=128))])
    return [made, *cells]


@pytest.fixture
def written(tmp_path):
    """written([record, …]): a file of these lines."""

    def write(records):
        (tmp_path / NAME).write_bytes(b"".join(map(encode_record, records)))
        return tmp_path / NAME

    return write


replace = msgspec.structs.replace


def naive(moment):
    return moment.replace(tzinfo=None)


def spilled(cell, value):
    return replace(cell, kernels=(KernelFacts(function="dense_forward", facts={"spills": value}),))


REFUSED = {
    "a second run": (lambda run, one, two: [run, one, run, two], 3, "line of a second run"),
    "the run last": (lambda run, one, two: [one, two, run], 1, "where the cells come from, is missing"),
    "a cell twice": (
        lambda run, one, two: [run, replace(one, status="FAIL", reason="wrong"), two, one], 4,
        "is of a cell that the file has already (line 2): cuda:sm_90  triton==3.6.0  dense",
    ),
    "another problem of one name": (
        lambda run, one, two: [run, one, replace(two, name=one.name)], 3, "is of a cell that the file has already",
    ),
    "a cell that is not listed": (
        lambda run, one, two: [replace(run, cells=run.cells[:1]), one, two], 3, "which the run does not list in line 1",
    ),
    "a run's date without a zone": (lambda run, one, two: [replace(run, date=naive(run.date)), one], 1, "timezone"),
    "a cell's date without a zone": (lambda run, one, two: [run, replace(one, date=naive(one.date))], 2, "timezone"),
    "text for a figure": (lambda run, one, two: [run, one, spilled(two, "abc")], 3, "are 'abc', and must be a number"),
    "half a byte": (lambda run, one, two: [run, spilled(one, 1.5)], 2, "its spills of dense_forward are 1.5"),
    "text in another's figure": (
        lambda run, one, two: [run, replace(one, others=(spilled(one, "abc"),))], 2, "must be a number",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "line", "said"), REFUSED.values(), ids=REFUSED)
def test_what_no_run_writes_is_refused(written, lines, change, line, said):
    path = written(lines)
    assert len(read(path)[1]) == 2
    with pytest.raises(DataError) as caught:
        read(written(change(*lines)))
    assert caught.value.line == line
    assert said in str(caught.value)


def test_a_baseline_whose_date_has_no_zone_is_refused(tmp_path, lines):
    text = baseline.write(snapshot(lines[0], lines[1:], "x"))
    path = tmp_path / "b.toml"
    path.write_text(text)
    date = lines[0].date
    assert baseline.read(path).date == date
    for shown in (naive(date).isoformat(), date.date().isoformat()):
        path.write_text(text.replace(f"\ndate = {date.isoformat()}", f"\ndate = {shown}"))
        with pytest.raises(DataError, match="key 'date'"):
            baseline.read(path)
    assert date.utcoffset() == datetime.timedelta(0)


def test_runs_with_two_problems_of_one_name_are_not_merged(run_of, cell):
    other = cell(named=decode("GQA", dtype="bf16", head_dim=128))
    one, two = run_of([cell()]), run_of([replace(other, name=cell().name)], host="b")
    with pytest.raises(ArgumentError, match=r"run 1.*is another problem than that of run 0"):
        merge([one, two], ["run 0", "run 1"], "portattn matrix merge")
