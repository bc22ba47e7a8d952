"""A baseline is small, sorted text: it comes back as it was, one cell is one line, and damage is named."""

import difflib

import msgspec
import pytest

from portattn.errors import DataError
from portattn.testing.findings import KernelFacts, Numerics
from portattn.tools.compare.changes import compare
from portattn.tools.matrix.cells import Footnote, PlanSummary
from portattn.tools.matrix.problems import NamedProblem, decode, dense
from portattn.tools.matrix.results import read_baseline, write_baseline, write_data

NOTE = Footnote(id="cuda-0901-one", role="applied", sentence="x", upstream="none", sets={"num_stages": 1})


@pytest.fixture
def cells(cell):
    second = decode("GQA", dtype="bf16", head_dim=128)
    spilled = (KernelFacts(function="dense_forward", facts={"spills": 96, "registers": 255}),)
    return [
        cell(footnotes=(NOTE,), kernels=spilled, interpreter=Numerics(outcome="pass", where="i")),
        cell(named=second, target="rocm:gfx942", status="FAIL", level="declared", reason="wrong"),
        cell(named=second, status="NOT_RUN", level="declared", plan=None),
        cell(target="ascend:ascend910b2", toolchain="triton-ascend==3.2.0", level="lowering-checked"),
        cell(level="runs", label="sm_80 code on sm_90", target="cuda:sm_80"),
        cell(target="cpu:generic", level="declared", plan=PlanSummary(path="sdpa", core_taken=False)),
    ]


def kept(tmp_path, made):
    path = tmp_path / "baseline.toml"
    write_data(path, write_baseline(made).encode())
    return path


def test_it_comes_back_as_it_was(tmp_path, cells, seen):
    made = seen(cells, variables={"TRITON_X": 'a "quoted"\\ value\x7f\n'})
    back = read_baseline(kept(tmp_path, made))
    assert (back.set, back.problems, back.date) == (made.set, made.problems, made.date)
    (was,), (now,) = made.identities.values(), back.identities.values()
    assert (now.variables, now.id, now.commit, now.host) == (was.variables, was.id, was.commit, was.host)
    strip = {"reason": "", "why_not": {}}
    assert {e.place: e for e in back.entries} == {
        e.place: msgspec.structs.replace(e, **strip) for e in made.entries
    }  # fmt: skip
    diff = compare(back, made)
    assert (diff.compared, diff.changes) == (len(cells), ())
    assert compare(made, back).changes == ()


def test_the_order_of_cells_does_not_matter_and_a_change_of_a_cell_is_one_of_its_line(cells, seen):
    assert write_baseline(seen(cells)) == write_baseline(seen(cells[::-1]))
    before = write_baseline(seen(cells)).splitlines()
    better = [msgspec.structs.replace(cells[1], status="PASS", level="emulated"), *cells[:1], *cells[2:]]
    lines = list(difflib.unified_diff(before, write_baseline(seen(better)).splitlines(), n=0, lineterm=""))
    assert [line[0] for line in lines[3:]] == ["-", "+"]
    assert cells[1].name in lines[3]


def test_cells_of_several_origins_keep_them_and_names_may_hold_anything(tmp_path, cells, cell, seen):
    made = seen([*cells[:2], msgspec.structs.replace(cells[2], origin="another")])
    back = read_baseline(kept(tmp_path, made))
    assert {e.place: e.origin for e in back.entries} == {e.place: e.origin for e in made.entries}
    named = NamedProblem(name='a "b" \\ [c] = #d, é', problem=dense(dtype="fp16", head_dim=64).problem)
    assert [e.name for e in read_baseline(kept(tmp_path, seen([cell(named=named)]))).entries] == [named.name]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("schema = 1", "schema = 9", r"baseline.toml:3: schema version 9; this portattn reads version 1"),
        ("schema = 1", "", "no baseline"),
        ("cells = 6", "cells = 7", r"baseline.toml:\d+: has 6 cells, and says 7"),
        ('set = "quick"', 'set = "quick"\n<<<<<<< HEAD', r"baseline.toml:5: not TOML"),
        ('level = "runs"', 'level = "ran"', r"baseline.toml:\d+: .*ran"),
        ('level = "runs"', 'level = "runs", colour = "x"', r"unknown key `colour`"),
        ('op = "attention"', 'op = "attending"', "no operation is called 'attending'"),
        ('[columns."ascend:ascend910b2 with', '[columns."ascend:ascend910b2 and', r":\d+: .*is not `target with"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_its_line(tmp_path, cells, seen, old, new, complaint):
    path = kept(tmp_path, seen(cells))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=complaint):
        read_baseline(path)


def test_a_file_that_was_cut_off_anywhere_is_never_read_as_whole(tmp_path, cells, seen):
    with pytest.raises(DataError, match="cannot be read"):
        read_baseline(tmp_path / "no.toml")
    path = kept(tmp_path, seen(cells))
    data = path.read_bytes()
    for end in range(0, len(data) - 2, 7):
        path.write_bytes(data[:end])
        with pytest.raises(DataError):
            read_baseline(path)
