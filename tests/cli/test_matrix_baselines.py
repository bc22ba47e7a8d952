"""What a baseline must be, and what of it a run is compared with: a comparison of nothing is an error, and not green.
Runs are made by hand: nothing is compiled."""

import msgspec
import pytest
from handmade import make_cell, make_run

from portattn.tools.matrix import results
from portattn.tools.matrix.problems import SETS

pytestmark = pytest.mark.compiles  # plans need an installed Triton

QUICK = {named.name: named for named in SETS["quick"]()}
DENSE, DECODE = QUICK["dense causal bf16 D=128 GQA"], QUICK["decode bf16 D=128 GQA"]
ALONE = next(named for named in SETS["full"]() if named.name not in QUICK)  # of the full set


@pytest.fixture
def folder(tmp_path):
    """folder("a", [cell, …], lacks=1): a run on the disk, without its last cells."""

    def make(name, cells, lacks=0, problems="quick"):
        made, cells = make_run(cells)
        with results.Results(tmp_path / name) as file:
            file.replace(msgspec.structs.replace(made, problems=problems), cells[: len(cells) - lacks])
        return str(tmp_path / name)

    return make


@pytest.fixture
def amd():
    return [make_cell(named=named, target="rocm:gfx942") for named in (DENSE, DECODE)]


HAS = "it has rocm:gfx942 with triton==3.6.0 (dense causal bf16 D=128 GQA, decode bf16 D=128 GQA)"


@pytest.mark.parametrize(
    "line",
    [
        ("matrix", "run", "--targets", "sm_90", "--out", "{out}", "--baseline", "{old}"),
        ("matrix", "run", "--targets", "gfx942", "--ops", "varlen*", "--out", "{out}", "--baseline", "{old}"),
        ("ci", "--to", "triton==3.9.0", "--targets", "sm_90", "--out", "{out}", "--baseline", "{old}"),
        ("ci", "--to", "triton==3.9.0", "--problems", "varlen*", "--out", "{out}", "--baseline", "{old}"),
        ("matrix", "check", "{new}", "--partial", "--baseline", "{old}"),
        ("matrix", "diff", "--partial", "{old}", "{new}"),
    ],
    ids=["run: target", "run: problem", "ci: target", "ci: problem", "check", "diff"],
)
def test_a_baseline_of_which_nothing_is_compared_is_refused(portattn, folder, amd, tmp_path, line):
    places = {"old": folder("old", amd), "new": folder("new", [make_cell(named=DENSE)]), "out": str(tmp_path / "out")}
    called = portattn(*(part.format(**places) for part in line))
    assert (called.status, called.out) == (2, "")
    assert "has none of the requested cells, so that nothing would be compared" in called.err
    assert HAS in called.err
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_is_no_baseline(portattn, folder, amd, tmp_path):
    old, new, out = folder("old", amd, lacks=1), folder("new", amd), str(tmp_path / "out")
    for line in (
        ("matrix", "run", "--targets", "gfx942", "--out", out, "--baseline", old),
        ("matrix", "check", new, "--baseline", old),
        ("ci", "--to", "triton==3.9.0", "--out", out, "--baseline", old),
    ):
        called = portattn(*line)
        assert (called.status, called.out) == (2, ""), line
        assert "--baseline" in called.err
        assert "it was interrupted, and lacks 1 cell" in called.err
    assert not (tmp_path / "out").exists()
    refused = portattn("matrix", "baseline", old, str(tmp_path / "b.toml"), exits=2)
    assert "it was interrupted, and lacks 1 cell" in refused.err
    assert not (tmp_path / "b.toml").exists()


def test_a_diff_does_not_take_an_interrupted_run_for_a_part(portattn, folder, amd):
    old, new = folder("old", amd), folder("new", amd, lacks=1)
    called = portattn("matrix", "diff", "--partial", old, new)
    assert (called.status, called.out) == (2, "")
    assert "was interrupted, and lacks 1 cell" in called.err
    assert portattn("matrix", "diff", old, new).status == 1, "as a whole, the cell is gone"
    assert "it lacks 1 cell, and none can be missed" in portattn("matrix", "diff", new, old, exits=0).err


def test_a_run_of_one_set_has_not_lost_the_other_ones_problems(portattn, folder, amd, tmp_path):
    cells = [*amd, make_cell(named=ALONE, target="rocm:gfx942")]
    old = folder("old", cells, problems="quick, full")
    line = ("ci", "--from", "triton==3.6.0", "--to", "triton==3.6.0", "--baseline", old, "--json")
    assert portattn(*line, "--quick", exits=0).json["compared"] == 2
    gone = make_cell(
        named=msgspec.structs.replace(DECODE, name="decode that is gone"), target="rocm:gfx942", id="f" * 16
    )
    folder("old", [*cells, gone], problems="quick, full")
    lost = portattn(*line, "--quick")
    assert lost.status == 1, "a problem that neither set has is gone"
    assert [one["problems"] for one in lost.json["losses"]] == [["decode that is gone"]]


@pytest.mark.parametrize("text", ["x = " + "[" * 3000 + "]" * 3000, f"x = {'9' * 5000}"], ids=["deep", "digits"])
def test_files_that_are_damaged_are_one_error(portattn, folder, amd, tmp_path, text):
    bad, new = tmp_path / "bad.toml", folder("new", amd)
    bad.write_text(text)
    (tmp_path / "quirks").mkdir()
    (tmp_path / "quirks" / "rocm-0901-x.toml").write_text(text)
    for line in (
        ("matrix", "check", new, "--baseline", str(bad)),
        ("matrix", "check", new, "--expected", str(bad)),
        ("matrix", "diff", str(bad), new),
        ("ci", "--to", "triton==3.9.0", "--baseline", str(bad)),
        ("ci", "--from", "triton==3.6.0", "--to", "triton==3.9.0", "--quirk-folder", str(tmp_path / "quirks")),
    ):
        called = portattn(*line)
        assert (called.status, called.out) == (2, ""), line
        assert "not TOML" in called.err
        assert len(called.err.splitlines()) == 1


def test_a_site_whose_marker_is_damaged_is_not_written_over(portattn, folder, amd, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "site.json").write_text("[" * 100_000)
    called = portattn("matrix", "site", folder("new", amd), "--out", str(tmp_path / "site"), exits=2)
    assert "its site.json is not of this command" in called.err
