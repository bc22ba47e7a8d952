"""`portattn matrix site`: what it writes, what it refuses, and what it says."""

import json

import pytest

from portattn.tools.matrix import results, site

pytestmark = pytest.mark.compiles  # plans need an installed Triton


@pytest.fixture
def run(portattn, tmp_path, monkeypatch, quick_cells):
    monkeypatch.setenv("PORTATTN_CACHE_DIR", str(tmp_path / "cache"))

    def make(name, *targets):
        out = str(tmp_path / name)
        line = ("matrix", "run", "--out", out, "--targets", ",".join(targets), "--ops", "dense*fp16*")
        called = portattn(*line)
        assert called.status == 3, called.err  # the lab is empty: no cell could be run
        return out

    return make


def test_a_site_of_one_run(portattn, run, tmp_path):
    out = tmp_path / "site"
    called = portattn("matrix", "site", run("one", "ascend910b1"), "--out", str(out), exits=0)
    assert "2 cells of 1 run: 2 NOT_RUN" in called.out
    assert "2 cells not run (ascend:ascend910b1): triton-ascend==3.2.0 is not in the lab" in called.out
    fill = "  fill: portattn matrix run --targets ascend:ascend910b1 --toolchain triton-ascend==3.2.0 --create"
    assert fill in called.out.splitlines()
    assert "badge: 2 amber" in called.out
    _, cells = results.read(tmp_path / "one" / results.NAME)
    assert {path.stem for path in (out / "cells").iterdir()} == {cell.id for cell in cells}
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == set(json.loads((out / site.MARKER).read_text())["files"])


def test_every_command_that_counts_cells_says_why_some_are_empty_and_what_fills_them(portattn, run, tmp_path):
    one, two = run("one", "ascend910b1"), run("two", "ascend910b2")
    lines = [
        ("run", "--targets", "ascend910b1", "--ops", "dense*fp16*", "--out", str(tmp_path / "three")), ("report", one),
        ("check", one), ("merge", one, two, "--out", str(tmp_path / "both")),
    ]  # fmt: skip
    for line in lines:
        called = portattn("matrix", *line)
        where = "ascend:ascend910b1" if line[0] != "merge" else "ascend:ascend910b1, ascend:ascend910b2"
        told = f"cells not run ({where}): triton-ascend==3.2.0 is not in the lab"
        [number] = [index for index, text in enumerate(called.out.splitlines()) if told in text]
        fill = called.out.splitlines()[number + 1]
        assert fill.startswith("  fill: portattn matrix run --targets ascend:ascend910b1"), line[0]
        assert fill.endswith("--toolchain triton-ascend==3.2.0 --create"), line[0]


def test_several_runs_are_merged_and_the_site_is_replaced(portattn, run, tmp_path):
    one, two, out = run("one", "ascend910b1"), run("two", "ascend910b2"), tmp_path / "site"
    portattn("matrix", "site", one, "--out", str(out))
    first = (out / "index.html").read_text()
    called = portattn("matrix", "site", one, two, "--out", str(out), "--json", exits=0)
    assert (called.json["runs"], called.json["cells"]) == (2, 4)
    assert called.json["badge"] == {"green": 0, "amber": 4, "red": 0}
    assert called.json["files"] == sum(path.is_file() for path in out.rglob("*"))
    assert called.json["conflicts"] == []
    assert "ascend910b2" in (out / "index.html").read_text()
    assert "ascend910b2" not in first


def test_an_earlier_run_is_the_history_of_its_cells(portattn, run, tmp_path):
    folder = run("one", "ascend910b1")
    run("one", "ascend910b1")
    [kept] = (tmp_path / "one").glob("results-*.jsonl")
    assert portattn("matrix", "site", folder, "--out", str(tmp_path / "site")).err == ""
    assert "Over time" in next((tmp_path / "site" / "cells").iterdir()).read_text()
    kept.write_text('{"type": "run", "schema": 1}\n')
    called = portattn("matrix", "site", folder, "--out", str(tmp_path / "site"), exits=0)
    assert f"left out of the history: {kept}:1: schema version 1" in called.err
    assert "Over time" not in next((tmp_path / "site" / "cells").iterdir()).read_text()


def test_a_folder_of_something_else_is_refused_before_anything_is_read(portattn, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    called = portattn("matrix", "site", str(tmp_path / "none"), "--out", str(tmp_path), "--json", exits=2)
    assert called.json["error"]["argument"] == "--out"
    assert "is not written over: it is not empty, and no site of this command" in called.json["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_bad_runs_and_places_are_one_error(portattn, run, tmp_path):
    out = str(tmp_path / "site")
    assert portattn("matrix", "site", "--out", out).status == 2
    assert "cannot be read" in portattn("matrix", "site", str(tmp_path / "none"), "--out", out, exits=2).err
    (tmp_path / "file").write_text("")
    called = portattn("matrix", "site", run("one", "ascend910b1"), "--out", str(tmp_path / "file" / "site"), exits=2)
    assert "--out" in called.err
    assert not (tmp_path / "site").exists()


def test_an_interrupt_leaves_the_earlier_site(portattn, run, tmp_path, monkeypatch):
    folder, out = run("one", "ascend910b1"), tmp_path / "site"
    portattn("matrix", "site", folder, "--out", str(out))
    before = (out / "index.html").read_bytes()
    real = site.pages

    def interrupted(*given):
        yield next(real(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(site, "pages", interrupted)
    assert "an earlier one is as it was" in portattn("matrix", "site", folder, "--out", str(out), exits=130).err
    assert (out / "index.html").read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_the_terminal_tells_a_cpus_numbers_from_a_chips(portattn, tmp_path):
    line = ("matrix", "run", "--out", str(tmp_path), "--targets", "cpu", "--ops", "dense full fp32*", "--json")
    called = portattn(*line, exits=0)
    assert called.json["labels"] == {"reference numbers on this CPU, not a chip's": 1}
    assert "runs (reference numbers on this CPU, not a chip's) cpu:generic" in called.err
    told = portattn("matrix", "report", str(tmp_path)).out
    assert "1 cell: 1 runs (reference numbers on this CPU, not a chip's)" in told
