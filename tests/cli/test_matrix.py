"""`portattn matrix`: what it writes, what it says, and that nothing is lost."""

import pytest

from portattn.cli import output
from portattn.config import settings
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.lab import LabError, toolchains
from portattn.tools.matrix import results, run

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick_cells")]  # plans need an installed Triton
RUN = ("--targets", "ascend910b1,ascend910b2", "--ops", "dense*fp16*")  # 4 cells, and nothing that compiles here


def test_run_and_report(portattn, tmp_path):
    out = str(tmp_path / "matrix")
    called = portattn("matrix", "run", "--out", out, *RUN, exits=3)
    assert "4 cells: 4 NOT_RUN" in called.out
    assert "portattn: nothing was run: not compiled here: " in called.err
    assert "[4/4]" in called.err  # progress, a line a cell, on standard error
    made, cells = results.read(tmp_path / "matrix" / results.NAME)
    assert [cell.id for cell in cells] == list(made.cells)
    page = (tmp_path / "matrix" / "index.html").read_text()
    assert all(f'id="c{cell.id}"' in page for cell in cells)

    (tmp_path / "matrix" / "index.html").unlink()
    assert portattn("matrix", "report", out, "--json").json["statuses"] == {"NOT_RUN": 4}
    assert (tmp_path / "matrix" / "index.html").read_text() == page
    elsewhere = tmp_path / "page.html"
    assert portattn("matrix", "report", out, "--html", str(elsewhere)).status == 0
    assert elsewhere.read_text() == page
    assert portattn("matrix", "report", out, "--html", str(tmp_path / "no" / "page.html")).status == 2


def test_red_cells_are_status_1_and_on_the_page(portattn, tmp_path, monkeypatch, planted):
    real = run.Options
    monkeypatch.setattr(
        run, "Options", lambda **options: real(**options | {"pythons": {str(installed_toolchain()): planted}})
    )
    called = portattn(
        "matrix", "run", "--out", str(tmp_path), "--targets", "sm_89,sm_90", "--ops", "dense*fp32*", "--json", exits=1
    )
    assert (called.json["statuses"], called.json["levels"]) == ({"ERROR": 1, "PASS": 1}, {"compiles": 1})
    assert called.json["red"][0]["target"] == "cuda:sm_89"
    assert "planted refusal" in (tmp_path / "index.html").read_text()


SPILLED = "scheduled_forward: 512 bytes spilled, none allowed; the tile was chosen with triton==3.6.0"


@pytest.fixture
def _spills(monkeypatch):
    """What compiles for sm_90 spills with a release that its schedule was not chosen with."""
    real = run._Maker.look

    def look(self):
        spills = self.target.arch.name == "sm_90"
        return {"status": "NOTE", "level": "declared", "reason": SPILLED} if spills else real(self)

    monkeypatch.setattr(run._Maker, "look", look)


@pytest.mark.usefixtures("_spills")
def test_a_note_says_why_and_so_does_a_cell_that_was_not_run(portattn, tmp_path):
    line = ("matrix", "run", "--out", str(tmp_path), "--targets", "sm_90,ascend910b2", "--problems", "dense*fp32*")
    notes = [text for text in portattn(*line, exits=0).out.splitlines() if text.startswith("NOTE ")]
    assert notes == [f"NOTE            cuda:sm_90  {installed_toolchain()}  dense full fp32 D=64: {SPILLED}"]
    found = portattn(*line, "--json").json
    assert found["statuses"] == {"NOTE": 1, "NOT_RUN": 1}
    (note,), (absent,) = found["note"], found["not_run"]
    assert note == {
        "target": "cuda:sm_90", "toolchain": str(installed_toolchain()), "name": "dense full fp32 D=64",
        "status": "NOTE", "reason": SPILLED,
    }  # fmt: skip
    assert (absent["target"], absent["status"]) == ("ascend:ascend910b2", "NOT_RUN")
    assert "`portattn lab create triton-ascend==3.2.0` makes it" in absent["reason"]
    assert found["red"] == []
    report = portattn("matrix", "report", str(tmp_path), "--json").json
    assert (report["note"], report["not_run"]) == (found["note"], found["not_run"])


@pytest.mark.usefixtures("_spills")
def test_a_note_that_is_red_or_expected_is_not_said_twice(portattn, tmp_path):
    line = ("matrix", "run", "--out", str(tmp_path / "out"), "--targets", "sm_90", "--ops", "dense*fp32*")
    assert portattn(*line, "--fail-on", "note", exits=1).out.count(SPILLED) == 1
    listed = tmp_path / "expected.toml"
    listed.write_text(
        '[[expected]]\ntarget = "*"\nproblem = "*"\nsignature = "spilled"\nreason = "known"\nowner = "kernels"\n'
        'expires = 2999-01-01\nstatus = "NOTE"\n'
    )
    assert SPILLED not in portattn(*line, "--expected", str(listed)).out


def test_toolchains_without_an_environment_say_how_to_make_one(portattn, tmp_path):
    line = ("matrix", "run", "--out", str(tmp_path), "--targets", "sm_90,ascend910b2", "--problems", "dense*fp32*")
    portattn(*line, "--toolchain", "triton==3.2", "--toolchain", "triton==3.3.1", "--json", exits=3)
    made, cells = results.read(tmp_path / results.NAME)
    assert made.toolchains == ("triton==3.2.0", "triton==3.3.1", "triton-ascend==3.2.0")
    for cell in cells:
        assert cell.status == "NOT_RUN"
        assert f"`portattn lab create {cell.toolchain}` makes it" in cell.reason
    page = (tmp_path / "index.html").read_text()
    assert "1 problem × 2 targets × 3 compilers" in page
    assert "<small>3.3.1</small>" in page  # two columns of one chip are told apart
    assert portattn(*line, "--all-toolchains").status == 0, "one of the toolchains is installed"
    assert results.read(tmp_path / results.NAME)[0].toolchains == toolchains()


@pytest.mark.usefixtures("_spills")
def test_a_lab_that_is_not_there_is_named_with_what_makes_it(portattn, tmp_path):
    line = ("matrix", "run", "--out", str(tmp_path / "out"), "--targets", "sm_90", "--ops", "dense*fp32*", "--json")
    with settings(cache_dir=str(tmp_path / "other")):
        called = portattn(*line, "--toolchain", "triton==3.2.0")
    assert called.status == 0
    (said,) = [text for text in called.err.splitlines() if "PORTATTN_CACHE_DIR" in text]
    assert f"no whole environment of triton==3.2.0 in the lab {tmp_path / 'other' / 'lab'}" in said
    assert "`portattn lab create triton==3.2.0`" in said
    here = portattn(*line)
    assert (here.status, here.json["statuses"]) == (0, {"NOTE": 1})
    assert "PORTATTN_CACHE_DIR" not in here.err, "the installed compiler is no lab's"


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_a_cache_folder_that_is_a_file_is_named_with_its_value_and_limit(portattn, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("")
    given = str(file / below)
    line = ("matrix", "run", "--out", str(tmp_path / "out"), "--targets", "sm_90", "--ops", "dense*fp32*")
    for command in (
        (*line, "--toolchain", "triton==3.2.0"),
        ("ci", "--from", "triton==3.2.0", "--to", "triton==3.4.0", "--targets", "sm_90", "--compile"),
        ("lab", "list"),
    ):
        with settings(cache_dir=given):
            called = portattn(*command)
        assert called.status == 2, command
        assert called.err == (
            f"portattn: PORTATTN_CACHE_DIR (setting cache_dir) is {given!r}, but must be a folder, or a path where one "
            f"can be made: {file} is no folder\n"
        )


def test_environments_are_made_first_and_a_run_that_would_lack_one_does_not_begin(portattn, tmp_path, monkeypatch):
    asked = []

    def create(name, say, **_):
        asked.append(name)
        raise LabError(f"{name}: planted")

    monkeypatch.setattr("portattn.tools.lab.creating.create", create)
    line = ("matrix", "run", "--out", str(tmp_path / "out"), "--targets", "sm_90", "--ops", "dense*fp32*", "--create")
    called = portattn(*line, "--toolchain", "triton==3.2.0", "--toolchain", "triton==3.3.1", exits=2)
    assert asked == ["triton==3.2.0", "triton==3.3.1"]
    assert "triton==3.2.0: planted" in called.err
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_keeps_its_cells_and_goes_on(portattn, tmp_path, monkeypatch):
    line = ("matrix", "run", "--out", str(tmp_path), "--jobs", "1", *RUN)
    count = output.ProgressCounter.matrix_cell

    def interrupted(self, cell):
        count(self, cell)
        if self.count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(output.ProgressCounter, "matrix_cell", interrupted)
    assert "interrupted after 2 of 4 cells" in portattn(*line, exits=130).err
    first = results.read(tmp_path / results.NAME)[1]
    assert len(first) == 2
    assert "interrupted: 2 of 4" in (tmp_path / "index.html").read_text()

    monkeypatch.setattr(output.ProgressCounter, "matrix_cell", count)
    assert portattn(*line, "--resume").status == 3
    cells = results.read(tmp_path / results.NAME)[1]
    assert cells[:2] == first  # not made again
    assert len(cells) == 4
    other = portattn("matrix", "run", "--out", str(tmp_path), "--targets", "ascend910b3", "--resume", exits=2)
    assert "begun with other cells" in other.err


def test_running_again_keeps_the_earlier_results(portattn, tmp_path):
    line = ("matrix", "run", "--out", str(tmp_path), *RUN)
    portattn(*line)
    before = (tmp_path / results.NAME).read_bytes()
    called = portattn(*line)
    (kept,) = tmp_path.glob("results-*.jsonl")
    assert kept.read_bytes() == before
    assert str(kept) in called.err


def test_out_that_is_a_file_is_an_error(portattn, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "--out" in portattn("matrix", "run", "--out", str(tmp_path / "file"), *RUN, exits=2).err
    assert (tmp_path / "file").read_text() == "mine"


def test_results_of_another_schema_are_refused(portattn, tmp_path):
    (tmp_path / results.NAME).write_text('{"type": "run", "schema": 99}\n')
    assert f"{results.NAME}:1: schema version 99" in portattn("matrix", "report", str(tmp_path), exits=2).err
    assert not (tmp_path / "index.html").exists()
