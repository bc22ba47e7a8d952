"""results.jsonl: whole lines only, whatever interrupts; strict about its schema; nothing of an earlier run is lost."""

import contextlib
import datetime
import errno
import os

import msgspec
import pytest

from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.testing.findings import KernelFacts
from portattn.tools.matrix.cells import SCHEMA, snapshot
from portattn.tools.matrix.problems import decode
from portattn.tools.matrix.results import NAME, Results, merge, read, read_baseline, write_baseline
from portattn.tools.run_log import encode_record

TARGETS = ("cuda:sm_80", "cuda:sm_90", "rocm:gfx942")


@pytest.fixture
def cells(cell):
    return [cell(target=target, index=index) for index, target in enumerate(TARGETS)]


@contextlib.contextmanager
def filled(folder, made, cells):
    with Results(folder) as file:
        file.start(made)
        for cell in cells:
            file.append(cell)
        yield file


def test_cells_come_back_as_they_were_and_in_order(tmp_path, cells, run):
    one = run(cells)  # made once: a Run says the second at which it was made
    with filled(tmp_path, one, reversed(cells)) as file:
        assert read(file.path) == (one, cells)
        file.finish(one, list(reversed(cells)))
    lines = (tmp_path / NAME).read_bytes().splitlines()
    assert [msgspec.json.decode(line).get("index") for line in lines] == [None, 0, 1, 2]


def test_a_cut_off_last_line_is_left_out_and_resuming_drops_it(tmp_path, cells, run):
    with filled(tmp_path, run(cells), cells[:2]) as file:
        whole = file.path.read_bytes()
        file.path.write_bytes(whole + msgspec.json.encode(cells[2])[:-40])
        assert (read(file.path)[1], file.resume(run(cells)).cells) == (cells[:2], cells[:2])
        assert file.path.read_bytes() == whole
        file.append(cells[2])
        assert read(file.path)[1] == cells


def test_a_full_disk_is_said_and_costs_one_cell_at_most(tmp_path, cells, run, monkeypatch):
    real = os.write
    with filled(tmp_path, run(cells), cells[:1]) as file:
        monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:30]))
        with pytest.raises(DataError, match="free space"):
            file.append(cells[1])
    assert read(tmp_path / NAME)[1] == cells[:1]


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "page"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("planted")))
    with pytest.raises(OSError, match="planted"):
        write_whole(path, b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["page"])


@pytest.mark.parametrize("version", [0, SCHEMA + 1])
def test_another_schema_version_is_refused_with_file_and_line(tmp_path, cells, run, version):
    path = tmp_path / NAME
    other = msgspec.structs.replace(cells[0], schema=version)
    path.write_bytes(msgspec.json.encode(run(cells)) + b"\n" + msgspec.json.encode(other) + b"\n")
    with pytest.raises(DataError, match=rf"{NAME}:2: schema version {version}; .* reads version {SCHEMA}"):
        read(path)


def test_what_is_no_results_file_is_refused(tmp_path, cells, run):
    path, cell = tmp_path / NAME, msgspec.json.encode(cells[0])
    with pytest.raises(DataError, match="cannot be read"):
        read(path)
    path.write_bytes(cell + b"\n")
    with pytest.raises(DataError, match="where the cells come from"):
        read(path)
    path.write_bytes(msgspec.json.encode(run(cells)) + b"\n" + cell[:-1] + b',"colour":"red"}\n')
    with pytest.raises(DataError, match=r":2: .*colour"):
        read(path)


def test_starting_again_keeps_the_earlier_results(tmp_path, cells, run):
    kept = []
    for _ in range(3):
        with Results(tmp_path) as file:
            kept.append(file.start(run(cells)))
            file.append(cells[0])
    assert (kept[0], len({*kept[1:]})) == (None, 2)
    for path in kept[1:]:
        assert read(path)[1] == cells[:1]


def test_resuming_needs_the_same_run(tmp_path, cells, run):
    with Results(tmp_path) as file:
        with pytest.raises(ArgumentError, match="no such file"):
            file.resume(run(cells))
        file.start(run(cells))
        with pytest.raises(ArgumentError, match="other cells"):
            file.resume(run(cells[:2]))
        with pytest.raises(ArgumentError, match="other kernels"):
            file.resume(msgspec.structs.replace(run(cells), kernels="another digest"))


def keyed(cells, made):
    return [msgspec.structs.replace(cell, key=f"key of {cell.id}", origin=made.identity.id) for cell in cells]


def test_a_stale_cell_is_made_again_and_the_file_as_it_was_is_kept(tmp_path, cells, run):
    """A quirk of rocm changed between: its cell is stale, whatever level it had, and the others are kept."""
    made = run(cells)
    cells = keyed(cells, made)
    keys = {cell.id: cell.key for cell in cells}
    with filled(tmp_path, made, cells) as file:
        before = file.path.read_bytes()
        same = file.resume(made, keys)
        assert (same.cells, same.stale, same.copy, file.path.read_bytes()) == (cells, [], None, before)
        other = msgspec.structs.replace(made.identity, id="another", digests={"quirks/rocm": "another"})
        now = msgspec.structs.replace(made, identities=(other,))
        resumed = file.resume(now, keys | {cells[2].id: "another key"})
        assert (resumed.cells, resumed.stale, resumed.copy.read_bytes()) == (cells[:2], cells[2:], before)
        assert [one.id for one in resumed.run.identities] == ["another", made.identity.id], "whose cells are kept, too"
        assert read(file.path) == (resumed.run, cells[:2])


def test_a_cell_that_ran_out_of_time_is_made_again_with_another_limit(tmp_path, cells, run):
    made = run(cells)
    cells = keyed(cells, made)
    cells[1] = msgspec.structs.replace(cells[1], status="TIMEOUT", level="declared")
    keys = {cell.id: cell.key for cell in cells}
    longer = msgspec.structs.replace(made.identity, id="longer", seconds=600.0)
    with filled(tmp_path, made, cells) as file:
        assert file.resume(made, keys).stale == []
        assert file.resume(msgspec.structs.replace(made, identities=(longer,)), keys).stale == [cells[1]]


@pytest.mark.parametrize("name", ["start", "append", "finish", "resume"])
def test_a_disk_that_takes_nothing_is_one_error_that_names_the_file(tmp_path, cells, run, monkeypatch, name):
    made = run(cells)
    cells = keyed(cells, made)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with filled(tmp_path, made, cells[:1]) as file:
        before = file.path.read_bytes()
        monkeypatch.setattr(os, "write" if name == "append" else "fsync", full)
        act = {
            "start": lambda: file.start(made), "append": lambda: file.append(cells[1]),
            "finish": lambda: file.finish(made, cells), "resume": lambda: file.resume(made, {}),
        }  # fmt: skip
        with pytest.raises(DataError, match="No space left on device"):
            act[name]()
        monkeypatch.undo()
    kept = [path for path in tmp_path.glob("results*.jsonl") if path.read_bytes() == before]
    assert kept, "what was there is still there"
    assert not list(tmp_path.glob("*.part"))


def test_two_runs_do_not_share_a_folder_and_one_that_cannot_be_made_is_an_error_about_out(tmp_path):
    with Results(tmp_path), pytest.raises(ArgumentError, match="another run is writing there"):
        Results(tmp_path)
    with Results(tmp_path):
        pass  # free again once the first is done
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="--out"):
        Results(tmp_path / "file" / "folder")


# Results that no run of ours writes are refused with file and line: what is read is compared, merged and shown.


@pytest.fixture
def lines(run_of, cell):
    made, cells = run_of([cell(), cell(named=decode("GQA", dtype="bf16", head_dim=128))])
    return [made, *cells]


def written(folder, records):
    (folder / NAME).write_bytes(b"".join(map(encode_record, records)))
    return folder / NAME


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
def test_what_no_run_writes_is_refused(tmp_path, lines, change, line, said):
    assert len(read(written(tmp_path, lines))[1]) == 2
    with pytest.raises(DataError) as caught:
        read(written(tmp_path, change(*lines)))
    assert (caught.value.line, said in str(caught.value)) == (line, True)


def test_a_baseline_whose_date_has_no_zone_is_refused(tmp_path, lines):
    text = write_baseline(snapshot(lines[0], lines[1:], "x"))
    path = tmp_path / "b.toml"
    path.write_text(text)
    date = lines[0].date
    assert read_baseline(path).date == date
    for shown in (naive(date).isoformat(), date.date().isoformat()):
        path.write_text(text.replace(f"\ndate = {date.isoformat()}", f"\ndate = {shown}"))
        with pytest.raises(DataError, match="key 'date'"):
            read_baseline(path)
    assert date.utcoffset() == datetime.timedelta(0)


def test_runs_with_two_problems_of_one_name_are_not_merged(run_of, cell):
    other = cell(named=decode("GQA", dtype="bf16", head_dim=128))
    one, two = run_of([cell()]), run_of([replace(other, name=cell().name)], host="b")
    with pytest.raises(ArgumentError, match=r"run 1.*is another problem than that of run 0"):
        merge([one, two], ["run 0", "run 1"], "portattn matrix merge")
