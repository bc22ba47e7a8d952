"""`portattn ci`: what another compiler breaks is red with its cause, and what it does not is green and short."""

import re
from unittest.mock import Mock

import pytest
from places import ROOT
from quirk_files import plant

from portattn.config import settings
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import executor
from portattn.tools.compare import report, sides
from portattn.tools.compare.report import FAIL_ON, LESS_SURE
from portattn.tools.matrix import results, run
from portattn.tools.matrix.problems import quick

BUMP = ("ci", "--from", "triton==3.6.0", "--to", "triton==3.9.0")
BOTH = ("--targets", "cuda:sm_90,rocm:gfx942")


@pytest.fixture(autouse=True)
def _no_runner(monkeypatch):
    for name in (report.ACTIONS, report.SUMMARY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def takes_rocm(tmp_path):
    """A folder with a quirk of the user's own, which takes the core kernels from all of ROCm."""
    folder = tmp_path / "own"
    plant(folder, "rocm-0901-takes", 'path = "reference"', 'toolchain = { triton = "<4" }')
    return folder


def test_an_upgrade_that_loses_no_path_is_green_and_says_what_is_less_sure(portattn):
    called = portattn(*BUMP, *BOTH, exits=0)
    cells_ = 2 * len(quick())
    assert called.out.splitlines()[-1] == (
        f"Nothing is lost: {cells_} cells of 2 targets compared by their plans; nothing was compiled, and spills were "
        "not looked at"
    )
    assert "gluon_forward on cuda:sm_90   carries over" in called.out
    assert re.search(r"schedules that were timed: [1-9]\d* of \d+ carry over", called.out)
    assert "docs/" not in called.out, "another library has no use for portattn's own pages"
    found = portattn(*BUMP, *BOTH, "--json").json
    assert "docs/" not in str(found)
    changes = {entry["id"]: entry["change"] for entry in found["upgrade"]["entries"]}
    assert changes["any-0001-no-block-pointers"] == "newly applies"
    assert changes["rocm-0007-guarded-loop"] == "falls away"
    assert (found["lost"], found["losses"], found["compiled"]) == (0, [], False)


def test_the_full_set_says_what_it_is_doing(portattn, monkeypatch):
    monkeypatch.setattr("portattn.cli.ci.MANY", 100)
    called = portattn(*BUMP, "--full", "--targets", "gfx942", exits=0)
    assert re.fullmatch(r"planning (\d+) cells of before\nplanning \1 cells of after\n", called.err)
    assert portattn(*BUMP, "--targets", "gfx942").err == ""


def test_ctrl_c_while_plans_are_made(portattn, monkeypatch, tmp_path):
    monkeypatch.setattr(sides, "planned_cell", Mock(side_effect=KeyboardInterrupt))
    called = portattn(*BUMP, *BOTH, "--summary", str(tmp_path / "s.md"))
    assert (called.status, called.out, called.err) == (130, "", "interrupted\n")
    assert not (tmp_path / "s.md").exists()


def test_two_calls_do_not_keep_their_runs_in_one_folder_at_once(portattn, tmp_path):
    with results.Results(tmp_path / "out" / "after", "ci"):
        called = portattn(*BUMP, *BOTH, "--out", str(tmp_path / "out"))
    assert called.status == 2
    assert "--out" in called.err


def test_a_downgrade_below_a_version_gate_is_red_with_the_quirk_and_what_to_do(portattn):
    called = portattn("ci", "--from", "triton==3.6.0", "--to", "triton==3.5.1", *BOTH, "--json", exits=1)
    losses = called.json["losses"]
    assert {one["quirk"] for one in losses} == {"cuda-0016-gluon-aggregates"}
    assert all(one["kinds"] == ["variant"] and one["targets"] == ["cuda:sm_90"] for one in losses)
    lost = [name for one in losses for name in one["problems"]]
    assert len(lost) == len(set(lost)) == 8
    assert all("rules out the path" in one["cause"] for one in losses)
    assert all("portattn quirks probe cuda-0016" in one["todo"] for one in losses)


def test_a_quirk_of_ones_own_that_takes_all_of_rocm_is_red_and_named(portattn, takes_rocm):
    called = portattn(*BUMP, "--targets", "rocm", "--quirk-folder", str(takes_rocm), exits=1)
    assert "LOST  core: path triton → reference" in called.out
    assert "quirk rocm-0901-takes rules out the path triton" in called.out
    assert f"narrow `[when]` of {takes_rocm}/rocm/rocm-0901-takes.toml" in called.out
    assert portattn(*BUMP, "--targets", "cuda", "--quirk-folder", str(takes_rocm)).status == 0, "it is ROCm's alone"
    assert portattn(*BUMP, "--targets", "rocm").status == 0, "and not there without the folder"
    flat = portattn(*BUMP, "--targets", "gfx942", "--quirk-folder", str(takes_rocm / "rocm"))
    assert flat.status == 1, "the files may lie in the folder itself"
    same = portattn("ci", "--from", "triton==3.6.0", "--to", "triton==3.6.0", "--targets", "gfx942", "--quirk-folder",
                    str(takes_rocm))  # fmt: skip
    assert same.status == 1, "what it costs, whatever the compiler"


def test_quirks_in_a_folder_and_in_one_inside_it_are_both_read(portattn, takes_rocm, tmp_path):
    plant(tmp_path, "cuda-0901-takes", 'path = "reference"')
    (tmp_path / "cuda" / "cuda-0901-takes.toml").rename(takes_rocm / "cuda-0901-takes.toml")
    called = portattn(*BUMP, "--targets", "gfx942,sm_80", "--quirk-folder", str(takes_rocm), "--json")
    assert {one["quirk"] for one in called.json["losses"]} >= {"cuda-0901-takes", "rocm-0901-takes"}


def test_a_folder_that_no_backend_is_called_is_refused(portattn, takes_rocm):
    (takes_rocm / "rocm").rename(takes_rocm / "amd")
    called = portattn(*BUMP, "--quirk-folder", str(takes_rocm), exits=2)
    assert "has amd/rocm-0901-takes.toml, but a folder in it must be" in called.err


def test_shapes_of_ones_own_are_compared_in_place_of_a_set(portattn, takes_rocm, tmp_path):
    shapes, kept = ("--shapes", str(ROOT / "examples" / "ci" / "shapes.toml")), str(tmp_path / "b.toml")
    line = (*BUMP, *BOTH, "--out", str(tmp_path / "out"))
    called = portattn(*line, *shapes, "--quirk-folder", str(takes_rocm), "--json", exits=1)
    assert {name for one in called.json["losses"] for name in one["problems"]} == set(called.json["problems"])
    assert (called.json["problems"][0], called.json["compared"]) == ("prefill", 4)
    portattn(*line, exits=0)
    both = (str(tmp_path / "out" / "before"), str(tmp_path / "shaped"))
    portattn(*BUMP, *BOTH, *shapes, "--out", both[1], exits=0)
    assert (tmp_path / "shaped" / "after" / "index.html").exists()
    portattn("matrix", "merge", both[0], f"{both[1]}/before", "--out", str(tmp_path / "all"), exits=0)
    portattn("matrix", "baseline", str(tmp_path / "all"), kept, exits=0)
    again = ("ci", "--to", "triton==3.9.0", "--baseline", kept)
    assert portattn(*again, "--quick", "--json", exits=0).json["compared"] == 2 * len(quick())
    assert portattn(*again, *shapes, "--json", exits=0).json["compared"] == 4
    portattn("matrix", "baseline", f"{both[1]}/before", kept, exits=0)
    assert "is of a file, and needs it: --shapes FILE" in portattn(*again, exits=2).err


def test_a_bump_that_changes_nothing_is_green_and_short(portattn, tmp_path):
    same = ("ci", "--from", "triton==3.9.0", "--to", "triton==3.9.0", "--targets", "gfx950")
    called = portattn(*same, "--summary", str(tmp_path / "s.md"), exits=0)
    assert sum(not line.startswith("  ") for line in called.out.splitlines()) <= 7  # without the quirks that stay
    assert "LOST" not in called.out
    assert "changed" not in called.out
    text = (tmp_path / "s.md").read_text(encoding="utf-8")
    said = f"**Nothing is lost: {len(quick())} cells of 1 target compared by their plans; nothing was compiled, and "
    assert f"{said}spills were not looked at.**" in text
    assert "| lost |" not in text
    assert len(text.splitlines()) <= 20


def test_contradicting_quirks_leave_no_plan(portattn, tmp_path):
    for stages in (1, 2):
        plant(tmp_path / "own", f"cuda-090{stages}-x", f"launch = {{ num_stages = {stages} }}", 'arch = ["sm_80"]')
    called = portattn(*BUMP, "--targets", "sm_80", "--quirk-folder", str(tmp_path / "own"), "--json", exits=1)
    loss = next(one for one in called.json["losses"] if "no plan" in one["what"])
    assert "cuda-0901-x and cuda-0902-x" in loss["what"]
    assert loss["cause"] == "quirks cuda-0901-x and cuda-0902-x contradict each other: there is no plan"
    assert loss["quirk"] == "cuda-0901-x"
    files = (tmp_path / "own" / "cuda" / f"cuda-090{n}-x.toml" for n in (1, 2))
    assert loss["todo"] == f"narrow `[when]` of {' or '.join(map(str, files))}, or take the entry out"


def test_a_quirk_of_ones_own_that_contradicts_a_known_one_is_the_cause(portattn, tmp_path):
    plant(tmp_path / "own", "cuda-0901-x", 'lowering = { load = "block_ptr" }')  # any-0001 sets it back on 3.9.0
    called = portattn(*BUMP, "--targets", "sm_80", "--quirk-folder", str(tmp_path / "own"), "--json", exits=1)
    assert called.json["losses"]
    for one in called.json["losses"]:
        assert set(one["cause"].split()) >= {"cuda-0901-x", "any-0001-no-block-pointers", "contradict"}
        assert one["quirk"] == "cuda-0901-x"
        file = tmp_path / "own" / "cuda" / "cuda-0901-x.toml"
        assert one["todo"] == f"narrow `[when]` of {file}, or take the entry out"


def test_less_sure_is_red_where_it_is_asked_for(portattn):
    unseen = ("ci", "--from", "triton==3.6.0", "--to", "triton==3.7.0")  # nobody has run it on a chip
    assert "gluon_forward on cuda:sm_90   is tried by its canaries" in portattn(*unseen, "--targets", "sm_90").out
    for kind in LESS_SURE:
        called = portattn(*unseen, "--targets", "sm_90,gfx942", "--fail-on", kind, "--json")
        assert called.status == 1, kind
        assert {tuple(one["kinds"]) for one in called.json["losses"]} == {(kind,)}
    probed = portattn("ci", "--from", "triton==3.9.0", "--to", "triton==3.6.0", "--targets", "sm_90", "--fail-on",
                      "canaries,schedules")  # fmt: skip
    assert probed.status == 0, "with 3.6.0 both are there"


def test_every_word_of_the_help_is_one_and_the_others_are_red_by_themselves(portattn):
    text = " ".join(portattn("ci", "--help").out.split())
    listed = re.search(r"Further changes that are red: (.*?)\. Repeat", text)[1]
    words = set(re.findall(r"\w+", listed)) - {"and", "the", "less", "sure"}
    assert words == set(FAIL_ON) - {"gone", "level", "core", "variant", "interpreter", "speed"}


def test_versions_nobody_knows_are_planned_and_said(portattn):
    called = portattn("ci", "--from", "triton==3.9.0", "--to", "triton==3.99", "--targets", "gfx942", exits=0)
    assert "note: triton==3.99 is no known release" in called.out
    assert "nobody is known to have run it" in called.out
    own = portattn("ci", "--from", "triton==3.6.0", "--to", "triton==3.6.0+git1234", "--targets", "sm_90", "--json")
    assert {one["after"] for one in own.json["upgrade"]["variants"]} == {"tried"}, "3.6.0's evidence is not its own"
    dev = portattn("ci", "--from", "triton==3.6.0", "--to", "triton==3.7.0.dev20260101", "--targets", "gfx942")
    assert "comes before 3.7.0 in the ranges" in dev.out


def test_a_compiler_that_is_not_in_the_lab_names_the_lab(portattn, tmp_path):
    with settings(cache_dir=str(tmp_path / "other")):
        called = portattn("ci", "--from", "triton==3.2.0", "--to", "triton==3.4.0", "--targets", "sm_90", "--compile")
    assert called.status == 2
    assert f"nor in the lab, {tmp_path / 'other' / 'lab'}: `portattn lab create triton==3.2.0`" in called.err


def test_quirks_whose_id_is_taken_and_folders_without_any_are_refused(portattn, tmp_path):
    (tmp_path / "empty").mkdir()
    plant(tmp_path / "taken", "any-0001-no-block-pointers", 'path = "reference"')
    for name, words in (("empty", "must have quirk files"), ("taken", "whose id is taken: any-0001-no-block-pointers")):
        assert words in portattn(*BUMP, "--quirk-folder", str(tmp_path / name), exits=2).err


@pytest.fixture
def kept(portattn, tmp_path):
    same = ("ci", "--from", "triton==3.6.0", "--to", "triton==3.6.0", *BOTH)
    assert portattn(*same, "--problems", "dense*,MLA*", "--out", str(tmp_path / "out")).status == 0
    assert portattn("matrix", "baseline", str(tmp_path / "out" / "after"), str(tmp_path / "b.toml")).status == 0
    return tmp_path / "b.toml"


def test_a_baseline_in_place_of_the_old_side(portattn, kept, takes_rocm, tmp_path):
    line = ("ci", "--baseline", str(kept), "--to")
    green = portattn(*line, "triton==3.9.0", "--json", exits=0)
    assert (green.json["before"], green.json["targets"]) == ("triton==3.6.0", ["rocm:gfx942", "cuda:sm_90"][::-1])
    assert green.json["compared"] == 2 * len(green.json["problems"]) == 2 * 6
    assert portattn(*line, "triton==3.5.1").status == 1
    red = portattn(*line, "triton==3.6.0", "--quirk-folder", str(takes_rocm), exits=1)
    assert "quirk rocm-0901-takes rules out the path triton" in red.out
    assert "must be a compiler of" in portattn(*line, "triton==3.9.0", "--from", "triton==3.4.0", exits=2).err
    assert portattn(*line, "triton==3.9.0", "--full").status == 2, "of another set"
    text = kept.read_text(encoding="utf-8")
    kept.write_text(text.replace('"dense full fp32 D=64" = ', '"dense no more" = '), encoding="utf-8")
    assert "LOST  gone: the cell is gone" in portattn(*line, "triton==3.9.0", exits=1).out
    named = portattn(*line, "triton==3.9.0", "--problems", "dense*", "--targets", "gfx942")
    assert named.status == 1, "a glob that it fits asks for it"
    assert "LOST  gone: the cell is gone" in named.out
    assert portattn(*line, "triton==3.9.0", "--problems", "dense*", "--targets", "cuda").status == 1
    assert portattn(*line, "triton==3.9.0", "--problems", "MLA*").status == 0, "that one was not asked for"


def test_a_baseline_of_compiled_cells_is_compared_by_what_plans_say(portattn, kept):
    text = kept.read_text(encoding="utf-8")
    kept.write_text(text.replace('status = "NOT_RUN", level = "declared"', 'level = "measured"'), encoding="utf-8")
    assert 'level = "measured"' in kept.read_text(encoding="utf-8")
    assert portattn("ci", "--baseline", str(kept), "--to", "triton==3.9.0").status == 0, "no level is lost unseen"


@pytest.fixture
def compilers(monkeypatch, planted, tmp_path):
    """Two planted compilers: under 3.9.0 sm_90 is refused, under 3.6.0 it is not."""
    newer = tmp_path / "newer-compiler"
    with open(planted, encoding="utf-8") as file:
        text = file.read()
    assert 'arch == "89"' in text
    newer.write_text(text.replace('arch == "89"', 'arch == "90"'), encoding="utf-8")
    newer.chmod(0o755)
    pythons = {"triton==3.6.0": planted, "triton==3.9.0": str(newer)}
    real = run.Options
    monkeypatch.setattr(run, "Options", lambda **options: real(**options | {"pythons": pythons}))
    monkeypatch.setattr(sides, "missing", lambda sides: [])
    monkeypatch.setattr(executor, "interpreter_missing", lambda: "left out by this test")


COMPILE = (*BUMP, "--problems", "dense*fp32*", "--compile", "--no-emulate")


def test_compilers_that_are_not_here_compare_nothing(portattn, monkeypatch):
    monkeypatch.setattr(sides, "missing", lambda sides: [])  # as where they go between this check and the compiles
    called = portattn(
        "ci", "--from", "triton==3.3.1", "--to", "triton==3.2.0", *COMPILE[len(BUMP) :], "--targets", "sm_90", exits=3
    )
    assert "Nothing could be compiled: 1 cell of 1 target" in called.out
    assert "portattn: nothing was compiled: not compiled here: " in called.err


@pytest.mark.compiles
def test_compiled_a_refusal_of_the_new_compiler_is_red_and_can_be_expected(portattn, compilers, tmp_path):
    called = portattn(*COMPILE, *BOTH, "--out", str(tmp_path / "out"), "--json", exits=1)
    (loss,) = called.json["losses"]
    assert (loss["kinds"], loss["targets"]) == (["level"], ["cuda:sm_90"])
    assert "compiles → ERROR" in loss["what"]
    assert "planted refusal" in loss["what"]
    assert "toolchain triton==3.6.0 → triton==3.9.0" in loss["cause"]
    assert "2 cells of 2 targets compiled and compared" in called.json["verdict"]
    assert "[4/4]" in called.err, "progress"
    expected = tmp_path / "expected.toml"
    expected.write_text(
        '[[expected]]\ntarget = "cuda:sm_90"\nproblem = "*"\nsignature = "planted refusal"\nreason = "planted"\n'
        'owner = "tests"\nexpires = 2026-12-31\n'
    )
    excused = (*COMPILE, "--targets", "sm_90", "--expected", str(expected))
    assert portattn(*excused, "--today", "2026-12-31").status == 0
    assert "expired" in portattn(*excused, "--today", "2027-01-01", exits=1).out
    again = portattn("ci", "--from", "triton==3.9.0", "--to", "triton==3.9.0", *COMPILE[5:], "--targets", "sm_90")
    assert again.status == 0, "as red as before is not lost"
    assert portattn("ci", "--from", "triton==3.9.0", "--to", "triton==3.9.0", *COMPILE[5:], "--targets", "sm_90",
                    "--fail-on", "red").status == 1  # fmt: skip


@pytest.mark.compiles
def test_ctrl_c_keeps_what_was_finished(portattn, compilers, monkeypatch, tmp_path):
    real = sides.execute

    def interrupted(specs, options, done):
        real(specs[:1], options, done)
        raise KeyboardInterrupt

    monkeypatch.setattr(sides, "execute", interrupted)
    called = portattn(*COMPILE, *BOTH, "--out", str(tmp_path / "out"), exits=130)
    assert called.out == ""
    assert f"interrupted; what was finished is in {tmp_path / 'out'}" in called.err
    assert "1 of 2 cells are missing" in portattn("matrix", "check", str(tmp_path / "out" / "before")).out


def test_a_compiler_that_is_missing_is_made_where_that_is_asked_for(portattn, monkeypatch):
    made = []
    monkeypatch.setattr(
        "portattn.cli.lab.create_all", lambda names: (made.extend(names), dict.fromkeys(names, "no room"))
    )
    missing = next(name for name in ("triton==3.3.1", "triton==3.4.0") if name != str(installed_toolchain()))
    called = portattn(
        "ci", "--from", str(installed_toolchain()), "--to", missing, "--compile", "--create", "--targets", "sm_90"
    )
    assert (made, called.status) == ([missing], 2)
    assert "no room" in called.err


def test_on_a_runner_there_is_a_summary_and_annotations(portattn, takes_rocm, monkeypatch, tmp_path):
    step = tmp_path / "step.md"
    step.write_text("earlier\n", encoding="utf-8")
    monkeypatch.setenv(report.SUMMARY, str(step))
    line = (*BUMP, "--targets", "gfx942", "--quirk-folder", str(takes_rocm))
    assert "::" not in portattn(*line).out, "a summary's file alone is no runner"
    monkeypatch.setenv(report.ACTIONS, "true")
    called = portattn(*line)
    text = step.read_text(encoding="utf-8")
    assert text.startswith("earlier\n## portattn ci: triton==3.6.0 → triton==3.9.0")
    assert text.count("## portattn ci") == 2, "each call appends"
    annotations = [one for one in called.out.splitlines() if one.startswith("::")]
    assert len(annotations) == 1
    assert annotations[0].startswith("::error title=portattn ci%3A triton==3.6.0 to triton==3.9.0::core: path triton")
    assert "%0Aquirk rocm-0901-takes rules out" in annotations[0]
    as_json = portattn(*line, "--json", "--summary", str(tmp_path / "own.md"))
    assert as_json.json["lost"] == 1, "standard output is one document"
    assert "::error title=" in as_json.err
    assert step.read_text(encoding="utf-8").count("## portattn ci") == 2, "--summary takes its place"
    assert (tmp_path / "own.md").read_text(encoding="utf-8").startswith("## portattn ci")


def test_a_full_summary_and_one_that_cannot_be_written_are_said(portattn, monkeypatch, tmp_path):
    step = tmp_path / "step.md"
    monkeypatch.setenv(report.SUMMARY, str(step))
    step.write_bytes(b"x" * (report.LIMIT - 100))
    assert "the step's summary is full" in portattn(*BUMP, "--targets", "gfx942", exits=0).err
    assert step.stat().st_size == report.LIMIT - 100
    monkeypatch.setenv(report.SUMMARY, str(tmp_path))
    assert "the summary cannot be written" in portattn(*BUMP, "--targets", "gfx942", exits=2).err
