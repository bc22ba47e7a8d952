"""Verdicts with planted compilers that fail, crash and hang; the range that one asks for, and [[verified]] tables."""

import datetime
from pathlib import Path

import msgspec
import pytest
from planted_probe import BOOM, OTHER, arms_of, child, plant

from portattn.errors import ArgumentError, DataError
from portattn.planning.quirk_files import load_quirk
from portattn.schema.toolchain import parse_range
from portattn.tools.quirks import probe, probe_results
from portattn.tools.quirks.probe_results import record, saw

IN, OUT = ">=3.2", ">=3.7"  # the toolchain is triton==3.6.0
PATH, NOTE = 'path = "reference"', 'note = "mind"'


def probed(folder, range_, control, off, on, seconds=60, **quirk):
    with child(folder, control, off, on) as worker:
        return probe.run(plant(folder, range_=range_, **quirk), "triton==3.6.0", worker=worker, seconds=seconds)


@pytest.mark.parametrize(
    ("range_", "control", "off", "on", "verdict", "asked"),
    [
        (IN, "pass", BOOM, "pass", "confirmed", ["control", "off", "on"]),
        (IN, "pass", "crash", "pass", "confirmed", ["control", "off", "on"]),
        (IN, "pass", "pass", "pass", "stale", ["control", "off"]),
        (IN, "pass", OTHER, "pass", "changed", ["control", "off"]),
        (IN, "pass", BOOM, BOOM, "ineffective", ["control", "off", "on"]),
        (IN, "pass", BOOM, OTHER, "ineffective", ["control", "off", "on"]),
        (IN, "pass", BOOM, "crash", "ineffective", ["control", "off", "on"]),
        (OUT, "pass", "pass", "pass", "absent", ["control", "off"]),
        (OUT, "pass", BOOM, "pass", "too narrow", ["control", "off", "on"]),
        (OUT, "pass", BOOM, BOOM, "inconclusive", ["control", "off", "on"]),
        (OUT, "pass", OTHER, "pass", "inconclusive", ["control", "off"]),
        (IN, OTHER, BOOM, "pass", "broken", ["control"]),
        (IN, BOOM, BOOM, "pass", "broken", ["control"]),
        (OUT, "crash", "pass", "pass", "broken", ["control"]),
    ],
)
def test_table(tmp_path, range_, control, off, on, verdict, asked):
    result = probed(tmp_path, range_, control, off, on)
    red = verdict in ("stale", "changed", "ineffective", "too narrow", "broken")
    assert (result.verdict, result.in_range, result.red) == (verdict, range_ == IN, red)
    assert arms_of(tmp_path) == asked


def test_hang_is_a_result(tmp_path):
    """A hang is what a `hang` quirk describes, and something else for any other."""
    result = probed(tmp_path, IN, "pass", "hang", "pass", seconds=2, symptom="hang", signature="")
    assert (result.verdict, result.off.word, result.off.outcome) == ("confirmed", "fail:signature", "hang")
    result = probed(tmp_path, IN, "pass", "hang", "pass", seconds=2)
    assert (result.verdict, result.off.word) == ("changed", "fail:timeout")


def test_crash_keeps_its_text(tmp_path):
    result = probed(tmp_path, IN, "pass", "crash", "pass", symptom="compiler-crash")
    assert (result.off.outcome, result.off.kind) == ("crash", "SIGABRT")
    assert result.reason == "SIGABRT: Assertion `boom' failed."


@pytest.mark.parametrize("words", ["ProtocolError: answered request 1", "ModuleNotFoundError: No module named 'x'"])
def test_what_says_nothing_about_the_compiler_is_told_whole(tmp_path, words):
    result = probed(tmp_path, IN, "pass", words.replace(": ", ":", 1), "pass")
    assert result.verdict == "unverified"
    assert result.reason.startswith(f"off arm: {words}, which says nothing about the compiler; never verified on")


def test_what_a_probe_sees_itself(tmp_path):
    """Without a signature only what the probe reports is the quirk's; what the compiler raises is something else."""
    seen = "BugFound:61 for 64"
    quiet = {"symptom": "wrong-result", "signature": ""}
    assert probed(tmp_path, IN, "pass", seen, "pass", **quiet).verdict == "confirmed"
    assert probed(tmp_path, IN, "pass", BOOM, "pass", **quiet).verdict == "changed"


def test_note_has_no_work_around_to_try_and_an_off_arm_may_be_asked_alone(tmp_path):
    result = probed(tmp_path, IN, "pass", BOOM, BOOM, effect=NOTE)
    assert (result.verdict, result.on.word) == ("confirmed", "not run")
    assert probed(tmp_path, OUT, "pass", BOOM, BOOM, effect=NOTE).verdict == "too narrow"
    with child(tmp_path, control=OTHER, off=BOOM) as worker:
        arm = probe.off(plant(tmp_path), "triton==3.6.0", worker=worker)
    assert (arm.matched, arms_of(tmp_path)) == (True, ["off"])


def test_cannot_run_here(tmp_path):
    quirk = plant(tmp_path)
    result = probe.run(quirk, "triton==3.5.0")  # no release that the lab makes
    said = "triton==3.5.0 is not here: `portattn lab create triton==3.5.0` makes it; never verified on triton==3.5.0"
    assert (result.verdict, result.reason) == ("unverified", said)
    with pytest.raises(probe.ProbeError, match="portattn lab create"):
        probe.off(quirk, "triton==3.5.0")
    table = '\n[[verified]]\ntoolchain = "triton==3.5.0"\ntarget = "rocm:gfx942"\nlevel = "compiles"\n'
    quirk = plant(tmp_path, more=f'{table}off = "fail:signature"\non = "pass"\ndate = 2026-11-01\n')
    assert probe.run(quirk, "triton==3.5.0").reason.endswith("last verified here on 2026-11-01")


def test_needs_a_device(tmp_path):
    quirk = plant(tmp_path, more='needs = "rocm:gfx942"\n')
    with child(tmp_path) as worker:
        result = probe.run(quirk, "triton==3.6.0", worker=worker)
    assert (result.verdict, arms_of(tmp_path)) == ("unverified", [])
    assert result.reason.startswith("needs rocm:gfx942")


def test_a_compiler_or_target_that_the_quirk_does_not_concern(tmp_path):
    with child(tmp_path) as worker:
        result = probe.run(plant(tmp_path), "triton-ascend==3.2.0", worker=worker)
    assert result.reason.startswith("triton-ascend==3.2.0 compiles nothing for rocm")
    with pytest.raises(ArgumentError, match="--target is 'rocm:gfx950', but rocm-0901-planted concerns rocm:gfx942"):
        probe.run(plant(tmp_path), "triton==3.6.0", "rocm:gfx950")


@pytest.mark.parametrize(
    ("signature", "text", "seen"),
    [
        ("boom", "at 3:4:\n/home/me/env/triton/x.py:3:4: error: boom in it\nmore", "x.py:3:4: error: boom in it"),
        (r"at tt\.new[^\n]*\nand boom", "it died\nat tt.new of %1\nand boom\nmore", "at tt.new of %1 and boom"),
    ],
    ids=["without paths of this machine", "over lines"],
)
def test_words_that_were_seen(tmp_path, signature, text, seen):
    quirk = plant(tmp_path)
    quirk = msgspec.structs.replace(quirk, evidence=msgspec.structs.replace(quirk.evidence, signature=signature))
    assert saw(quirk, probe.Arm(outcome="fail", text=text)) == seen


# ---- the range


@pytest.mark.parametrize(
    ("old", "version", "affected", "new"),
    [
        (">=3.4", "3.9.0", ["3.6.0", "3.8.0"], ">=3.4,<3.9.0"), (">=3.4,<3.9", "3.7.1", ["3.5.1"], ">=3.4,<3.7.1"),
        (">=3.4", "3.4.0", ["3.6.0", "3.5.1"], ">=3.5.1"),
        (">=3.4,<3.9", "3.6.0", ["3.5.1", "3.7.1"], ">=3.4,<3.9,!=3.6.0"), (">=3.4,<3.9", "3.6.0", [], ">=3.4,<3.6.0"),
        ("<3.9", "3.8.0", ["3.2.0"], "<3.8.0"), ("==3.7.*", "3.7.1", ["3.7.0"], ">=3.7,<3.7.1"),
    ],
)  # fmt: skip
def test_narrowed(old, version, affected, new):
    assert probe_results.narrow_range(old, version, affected) == new
    assert not parse_range(new).contains(version)
    assert all(parse_range(new).contains(v) for v in affected)


@pytest.mark.parametrize(
    ("range_", "last", "advice"),
    [
        ("==3.6.0", "3.9.0", "no probe showed it in ==3.6.0: retire rocm-0901-planted, or mend its probe"),
        (">=3.6", "3.9.0", "no probe showed it in >=3.6: retire rocm-0901-planted, or mend its probe"),
        (">=3.6.0,<3.7", "3.4.0", "no probe showed it in >=3.6.0,<3.7: retire rocm-0901-planted, or mend its probe"),
        ("==3.6.0", "3.6.0", "triton==3.6.0 does not have it any more: retire rocm-0901-planted, or mend its probe"),
    ],
)
def test_a_range_of_which_nothing_is_left_is_advised_to_nobody(tmp_path, range_, last, advice):
    table = f'\n[[verified]]\ntoolchain = "triton=={last}"\ntarget = "rocm:gfx942"\nlevel = "compiles"\n'
    saw = "fail:signature" if last == "3.6.0" else "pass"
    quirk = plant(tmp_path, range_=range_, more=f'{table}off = "{saw}"\non = "pass"\ndate = 2026-11-01\n')
    with child(tmp_path) as worker:
        stale = probe.run(quirk, "triton==3.6.0", worker=worker)
    assert (stale.verdict, stale.diff) == ("stale", advice)


@pytest.mark.parametrize(
    ("text", "some"),
    [
        ("", True), ("<3.9", True), (">3.5,<3.6", True), ("==3.7.*,!=3.7.0", True), (">=3.6,<3.7,!=3.6.0", True),
        (">=3.9.0,<3.9.0", False), ("==3.9.0,!=3.9.0", False), ("==3.7.1,>=3.8.0", False), ("==3.6.*,!=3.6.*", False),
    ],
)  # fmt: skip
def test_satisfiable(text, some):
    assert probe_results.satisfiable(text) is some


@pytest.mark.parametrize(
    ("old", "version", "new"),
    [
        (">=3.5.1,<3.7", "3.7.1", ">=3.5.1,<=3.7.1"), (">=3.5.1,<3.7", "3.4.0", ">=3.4.0,<3.7"),
        ("==3.7.1", "3.8.0", ">=3.7.1,<=3.8.0"), ("==3.7.1", "3.6.0", ">=3.6.0,<=3.7.1"),
        (">=3.4,!=3.6.0", "3.6.0", ">=3.4"), ("<3.4", "3.4.0", "<=3.4.0"),
    ],
)  # fmt: skip
def test_extended(old, version, new):
    assert probe_results.extend_range(old, version) == new
    assert parse_range(new).contains(version)


def test_diff_is_of_the_files_line(tmp_path):
    quirk = plant(tmp_path, range_=">=3.4,<3.9")
    with child(tmp_path) as worker:
        stale = probe.run(quirk, "triton==3.6.0", worker=worker)
    line = next(n for n, text in enumerate(Path(quirk.file).read_text().splitlines(), 1) if "toolchain" in text)
    assert stale.diff.splitlines() == [
        f"--- {quirk.file}:{line}", '-toolchain = { triton = ">=3.4,<3.9" }',
        '+toolchain = { triton = ">=3.4,<3.6.0" }',
    ]  # fmt: skip
    quirk = plant(tmp_path, range_=">=3.7")
    with child(tmp_path, off=BOOM) as worker:
        narrow = probe.run(quirk, "triton==3.6.0", worker=worker)
    assert narrow.diff.endswith('+toolchain = { triton = ">=3.6.0" }')
    with child(tmp_path, off=BOOM) as worker:
        assert probe.run(plant(tmp_path), "triton==3.6.0", worker=worker).diff == ""


# ---- [[verified]]


def result(folder, quirk, toolchain, **arms):
    with child(folder, **arms) as worker:
        return probe.run(quirk, toolchain, worker=worker)


def test_writes_one_table_for_each_toolchain(tmp_path):
    quirk = plant(tmp_path)
    before = Path(quirk.file).read_text()
    assert record(quirk, [result(tmp_path, quirk, f"triton==3.{minor}.0", off=BOOM) for minor in (4, 6)]) == 2
    assert Path(quirk.file).read_text().startswith(before), "comments and layout are kept"
    read = load_quirk(Path(quirk.file)).verified
    assert [(v.toolchain, v.target, v.level, v.off, v.on) for v in read] == [
        (f"triton==3.{minor}.0", "rocm:gfx942", "compiles", "fail:signature", "pass") for minor in (4, 6)
    ]
    assert (read[0].date, read[0].saw) == (datetime.date.today(), "RuntimeError: boom went the pass")


def test_probed_again_replaces(tmp_path):
    quirk = plant(tmp_path)
    record(quirk, [result(tmp_path, quirk, f"triton==3.{minor}.0", off=BOOM) for minor in (4, 6)])
    text = Path(quirk.file).read_text().replace("[[verified]]", "# by hand\n[[verified]]", 1)
    Path(quirk.file).write_text(text)
    record(quirk, [result(tmp_path, quirk, "triton==3.4.0", off="pass")])
    read = load_quirk(Path(quirk.file)).verified
    assert [(v.toolchain, v.off, v.on, bool(v.saw)) for v in read] == [
        ("triton==3.4.0", "pass", "not run", False), ("triton==3.6.0", "fail:signature", "pass", True),
    ]  # fmt: skip
    assert "# by hand" in Path(quirk.file).read_text()


def test_what_saw_nothing_is_not_recorded(tmp_path):
    quirk = plant(tmp_path, range_=">=3.7")
    before = Path(quirk.file).read_text()
    said_nothing = [
        result(tmp_path, quirk, "triton==3.6.0", control=OTHER), result(tmp_path, quirk, "triton==3.6.0", off=OTHER),
        probe.run(quirk, "triton==3.5.0"),
    ]  # fmt: skip
    assert [r.verdict for r in said_nothing] == ["broken", "inconclusive", "unverified"]
    assert (record(quirk, said_nothing), Path(quirk.file).read_text()) == (0, before)


def test_never_half_written(tmp_path):
    quirk = plant(tmp_path)
    found = result(tmp_path, quirk, "triton==3.6.0", off=BOOM)
    path = Path(quirk.file)
    broken = path.read_text().replace('symptom = "compile-error"', 'symptom = "no such"')
    path.write_text(broken)
    with pytest.raises(DataError, match="nothing was written"):
        record(quirk, [found])
    assert (path.read_text(), [p.name for p in path.parent.iterdir()]) == (broken, [path.name])
    path.write_text(broken.replace(quirk.id, "rocm-0902-other"))
    with pytest.raises(DataError, match="is 'rocm-0902-other' now"):
        record(quirk, [found])
