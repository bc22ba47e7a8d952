"""`portattn matrix diff`, `merge`, `baseline`, `check`, `log`: what was lost makes the exit status 1."""

import errno
import os
from unittest.mock import Mock

import msgspec
import pytest
from quirk_files import plant

from portattn.planning.quirk_files import load_quirk
from portattn.planning.registry import Registry
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.matrix import results, run

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("quick_cells")]  # plans need an installed Triton
EXPECTED = """\
[[expected]]
target    = "cuda:sm_89"
problem   = "*"
signature = "planted refusal"
reason    = "the planted compiler refuses"
owner     = "tests"
expires   = {}
"""


@pytest.fixture
def made(portattn, monkeypatch, planted):
    """made("out", "sm_90,gfx942", …): a run with the planted compiler, under which sm_89 fails and sm_120 spills."""
    real = run.Options
    monkeypatch.setattr(
        run, "Options", lambda **options: real(**options | {"pythons": {str(installed_toolchain()): planted}})
    )

    def make(out, targets, *more, exits=None):
        line = ("matrix", "run", "--out", str(out), "--targets", targets, "--ops", "dense*fp16 D=64", "--no-emulate")
        return portattn(*line, *more, exits=exits)

    return make


@pytest.fixture
def with_quirk(monkeypatch, tmp_path):
    """Plant a quirk into the registry of this process: with_quirk("rocm-0901-x", effect, when)."""

    def add(quirk_id, effect, when=""):
        quirk = load_quirk(plant(tmp_path / "planted", quirk_id, effect, when))
        known = Registry.load()
        changed = msgspec.structs.replace(known, quirks=known.quirks | {quirk.id: quirk})
        monkeypatch.setattr(Registry, "load", staticmethod(lambda: changed))

    return add


def test_a_quirk_that_takes_all_of_rocm_is_red_and_named(portattn, made, with_quirk, tmp_path):
    """Every cell of the run passes, and `matrix run` alone is green: what is lost is seen beside an earlier run."""
    old, new, kept = (tmp_path / name for name in ("old", "new", "b.toml"))
    assert made(old, "gfx942,sm_90").status == 0
    assert portattn("matrix", "baseline", str(old), str(kept)).status == 0
    with_quirk("rocm-0901-takes", 'path = "reference"', 'toolchain = { triton = "<4" }')
    assert made(new, "gfx942,sm_90").status == 0
    called = portattn("matrix", "diff", str(old), str(new), exits=1)
    assert "cause: quirk rocm-0901-takes rules out the path triton" in called.out
    assert "2 cells compared" in called.out
    found = portattn("matrix", "diff", str(kept), str(new), "--json").json
    (change,) = found["changes"]
    assert (found["lost"], change["target"]) == (1, "rocm:gfx942")
    assert {"level", "core"} <= set(change["kinds"])
    assert change["causes"][0]["name"] == "rocm-0901-takes"
    checked = portattn("matrix", "check", str(new), "--baseline", str(kept), "--json", exits=1).json
    assert all("rocm-0901-takes" in one["causes"][0] for one in checked["findings"])
    assert "rocm-0901-takes" in made(tmp_path / "again", "gfx942,sm_90", "--baseline", str(kept), exits=1).out
    assert portattn("matrix", "diff", str(new), str(old)).status == 0, "what was lost is won back"


def test_a_missing_toolchain_is_red_where_it_is_asked_for_and_a_run_of_nothing_else_is_status_3(
    portattn, made, tmp_path
):
    line = ("--toolchain", "triton==3.2.0")
    assert made(tmp_path / "a", "sm_90", *line).status == 3
    assert made(tmp_path / "a", "sm_90", *line, "--fail-on", "not_run").status == 1
    assert portattn("matrix", "report", str(tmp_path / "a")).status == 0
    assert portattn("matrix", "report", str(tmp_path / "a"), "--fail-on", "not_run").status == 1
    assert portattn("matrix", "report", str(tmp_path / "a"), "--fail-on", "note").status == 3
    nothing = portattn("matrix", "check", str(tmp_path / "a"), exits=3)
    assert "portattn: nothing was run: not compiled here: " in nothing.err
    assert portattn("matrix", "check", str(tmp_path / "a"), "--baseline", str(tmp_path / "a")).status == 0
    assert portattn("matrix", "check", str(tmp_path / "a"), "--fail-on", "note,not_run").status == 1
    nothing = portattn("matrix", "check", str(tmp_path / "a"), "--fail-on", "new")
    assert nothing.status == 2, "a word that cannot do anything is not passed over"
    assert "needs --baseline" in nothing.err


def test_runs_that_share_no_cell_are_not_compared(portattn, made, tmp_path):
    made(tmp_path / "whole", "sm_90")
    with results.Results(tmp_path / "begun") as file:  # as where the run ended before its first cell
        file.start(results.read(tmp_path / "whole" / results.NAME)[0])
    called = portattn("matrix", "diff", str(tmp_path / "begun"), str(tmp_path / "whole"), exits=3)
    assert "portattn: nothing was compared: the runs share no cell" in called.err


def test_a_stale_level_is_not_kept_by_resume(portattn, made, with_quirk, tmp_path):
    """A quirk changes between an interrupted run and --resume: its backend's cells are made again."""
    assert made(tmp_path, "gfx942,sm_90").status == 0
    first = {cell.target: cell for cell in results.read(tmp_path / results.NAME)[1]}
    with_quirk("rocm-0901-takes", 'path = "reference"')
    assert "1 cell made under other conditions: made again" in made(tmp_path, "gfx942,sm_90", "--resume", exits=0).err
    begun, cells = results.read(tmp_path / results.NAME)
    now = {cell.target: cell for cell in cells}
    assert now["cuda:sm_90"] == first["cuda:sm_90"]
    assert (first["rocm:gfx942"].level, now["rocm:gfx942"].level) == ("compiles", "declared")
    assert now["rocm:gfx942"].plan.path == "reference"
    assert {identity.id for identity in begun.identities} == {cell.origin for cell in cells}
    assert len(list(tmp_path.glob("results-*.jsonl"))) == 1


def test_expected_failures_of_a_run(portattn, made, tmp_path):
    listed = tmp_path / "expected.toml"
    listed.write_text(EXPECTED.format("2100-01-01"))
    out = tmp_path / "out"
    assert made(out, "sm_89,sm_90").status == 1
    assert "1 cell failed as expected" in made(out, "sm_89,sm_90", "--expected", str(listed), exits=0).out
    line = ("matrix", "check", str(out), "--expected", str(listed), "--json")
    assert portattn(*line).status == 0
    listed.write_text(EXPECTED.format("2100-01-01").replace("sm_89", "sm_90"))
    assert sorted(f["kind"] for f in portattn(*line).json["findings"]) == ["red", "unexpected_pass"]
    assert made(out, "sm_90", "--expected", str(tmp_path / "no.toml")).status == 2


def test_runs_of_several_machines_are_merged_and_kept(portattn, made, tmp_path):
    for host, targets in (("nvidia", "sm_90"), ("amd", "gfx942"), ("both", "sm_90,gfx942")):
        assert made(tmp_path / host, targets, "--host", host).status == 0
    names = [str(tmp_path / name) for name in ("nvidia", "amd", "both")]
    called = portattn("matrix", "merge", *names, "--out", str(tmp_path / "all"), "--json", exits=0)
    assert (called.json["cells"], called.json["several"], called.json["conflicts"]) == (2, 2, [])
    begun, cells = results.read(tmp_path / "all" / results.NAME)
    assert [identity.host.name for identity in begun.identities] == ["nvidia", "amd", "both"]
    assert all(f'id="c{cell.id}"' in (tmp_path / "all" / "index.html").read_text() for cell in cells)
    before = (tmp_path / "all" / results.NAME).read_bytes()
    assert portattn("matrix", "merge", *names, "--out", str(tmp_path / "all")).status == 0
    (kept,) = (tmp_path / "all").glob("results-*.jsonl")
    assert kept.read_bytes() == before

    _, (cell,) = results.read(tmp_path / "nvidia" / results.NAME)
    with results.Results(tmp_path / "nvidia") as file:
        file.replace(results.read(file.path)[0], [msgspec.structs.replace(cell, status="NOTE", level="declared")])
    called = portattn("matrix", "merge", *names, "--out", str(tmp_path / "all"), exits=1)
    assert "CONFLICT cuda:sm_90" in called.out
    assert "NOTE, path" in called.out
    assert "on nvidia (Linux" in called.out
    again = portattn("matrix", "site", str(tmp_path / "all"), "--out", str(tmp_path / "site"))
    assert again.status == 1, "the site of the merged run shows the conflict, too"
    assert "CONFLICT cuda:sm_90" in again.out


def test_a_run_is_compared_with_what_it_was_asked_for(portattn, made, tmp_path):
    kept = tmp_path / "b.toml"
    made(tmp_path / "old", "sm_90,gfx942,sm_80")
    portattn("matrix", "baseline", str(tmp_path / "old"), str(kept))
    assert made(tmp_path / "new", "sm_90", "--baseline", str(kept)).status == 0
    assert portattn("matrix", "check", str(tmp_path / "new"), "--baseline", str(kept)).status == 1
    assert portattn("matrix", "check", str(tmp_path / "new"), "--baseline", str(kept), "--partial").status == 0
    assert portattn("matrix", "diff", str(kept), str(tmp_path / "new"), "--partial").status == 0
    both = made(tmp_path / "both", "sm_90", "--toolchain", str(installed_toolchain()), "--toolchain", "triton==3.2.0")
    assert both.status == 0
    portattn("matrix", "baseline", str(tmp_path / "both"), str(tmp_path / "both.toml"))
    assert made(tmp_path / "new", "sm_90", "--baseline", str(tmp_path / "both.toml")).status == 0, (
        "one compiler is asked"
    )
    kept.write_text(kept.read_text().replace("cuda:sm_90 with", "cuda:sm_9999 with"))
    called = made(tmp_path / "new", "cuda:sm_9*", "--baseline", str(kept))
    assert called.status == 1, "a target that has left the registry is gone"
    assert "the new run has no target cuda:sm_9999" in called.out
    other = portattn("matrix", "run", "--full", "--out", str(tmp_path / "x"), "--baseline", str(kept), exits=2)
    assert "is of the quick set" in other.err
    assert not (tmp_path / "x").exists()


def test_files_are_written_whole_or_not_at_all(portattn, made, tmp_path, monkeypatch):
    made(tmp_path / "run", "sm_90")
    kept = tmp_path / "b.toml"
    portattn("matrix", "baseline", str(tmp_path / "run"), str(kept))
    before = kept.read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    for line in (
        ("matrix", "baseline", str(tmp_path / "run"), str(kept)),
        ("matrix", "merge", str(tmp_path / "run"), "--out", str(tmp_path / "all")),
    ):
        assert "No space left on device" in portattn(*line, exits=2).err
    monkeypatch.undo()
    assert kept.read_bytes() == before
    assert not list(tmp_path.glob("**/*.part"))
    assert not list((tmp_path / "all").glob("results*"))


def test_what_cannot_be_read_is_one_error(portattn, made, tmp_path):
    made(tmp_path / "run", "sm_90")
    path = tmp_path / "run" / results.NAME
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"PASS"', b'"FAIL"'))
    for command in (("diff", str(tmp_path / "run")), ("log", "*"), ("merge", "--out", str(tmp_path / "all"))):
        called = portattn("matrix", *command, str(tmp_path / "run"), exits=2)
        assert f"{results.NAME}:2: is not as it was written" in called.err
    path.write_bytes(data)
    assert "cannot be read" in portattn("matrix", "diff", str(tmp_path / "run"), str(tmp_path / "nothing"), exits=2).err
    (tmp_path / "empty").mkdir()
    for line in (("diff", str(path), str(tmp_path / "empty")), ("report", str(tmp_path / "empty"))):
        called = portattn("matrix", *line)
        assert (called.status, called.err) == (2, f"portattn: {tmp_path / 'empty'}: has no results.jsonl, as a folder "
                                                  "of `matrix run` or `matrix merge` has\n")  # fmt: skip
    assert portattn("matrix", "diff", str(path), str(path), "--fail-on", "nott").status == 2
    assert portattn("matrix", "baseline", str(path), str(tmp_path / "b.json")).status == 2
