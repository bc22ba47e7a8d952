"""Every row of the design's verdict table, with planted compilers that fail, crash and hang."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_probe import BOOM, OTHER, arms_of, child, plant

from portattn.errors import ArgumentError
from portattn.tools.quirks import probe
from portattn.tools.quirks.probe.results import saw

IN, OUT = ">=3.2", ">=3.7"  # the toolchain is triton==3.6.0
PATH, NOTE = 'path = "reference"', 'note = "mind"'


def probed(
    folder: Path, range_: str, control: str, off: str, on: str, seconds: float = 60, **quirk: str
) -> probe.ProbeResult:
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
def test_table(tmp_path: Path, range_: str, control: str, off: str, on: str, verdict: str, asked: list[str]) -> None:
    result = probed(tmp_path, range_, control, off, on)
    assert result.verdict == verdict
    assert result.in_range is (range_ == IN)
    assert result.red is (verdict in ("stale", "changed", "ineffective", "too narrow", "broken"))
    assert arms_of(tmp_path) == asked


def test_hang_is_a_result(tmp_path: Path) -> None:
    """A hang is what a `hang` quirk describes, and something else for any other."""
    result = probed(tmp_path, IN, "pass", "hang", "pass", seconds=2, symptom="hang", signature="")
    assert (result.verdict, result.off.word, result.off.outcome) == ("confirmed", "fail:signature", "hang")
    result = probed(tmp_path, IN, "pass", "hang", "pass", seconds=2)
    assert (result.verdict, result.off.word) == ("changed", "fail:timeout")


def test_crash_keeps_its_text(tmp_path: Path) -> None:
    result = probed(tmp_path, IN, "pass", "crash", "pass", symptom="compiler-crash")
    assert (result.off.outcome, result.off.kind) == ("crash", "SIGABRT")
    assert result.reason == "SIGABRT: Assertion `boom' failed."


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("ProtocolError:answered request 1", "ProtocolError: answered request 1"),
        ("ModuleNotFoundError:No module named 'x'", "ModuleNotFoundError: No module named 'x'"),
    ],
)
def test_what_says_nothing_about_the_compiler_is_told_whole(tmp_path: Path, arm: str, words: str) -> None:
    result = probed(tmp_path, IN, "pass", arm, "pass")
    assert result.verdict == "unverified"
    assert result.reason.startswith(f"off arm: {words}, which says nothing about the compiler; never verified on")


def test_what_a_probe_sees_itself(tmp_path: Path) -> None:
    """Without a signature only what the probe reports is the quirk's; what the compiler raises is something else."""
    seen = "Seen:61 for 64"
    quiet = {"symptom": "wrong-result", "signature": ""}
    assert probed(tmp_path, IN, "pass", seen, "pass", **quiet).verdict == "confirmed"
    assert probed(tmp_path, IN, "pass", BOOM, "pass", **quiet).verdict == "changed"


def test_note_has_no_work_around_to_try(tmp_path: Path) -> None:
    result = probed(tmp_path, IN, "pass", BOOM, BOOM, effect=NOTE)
    assert (result.verdict, result.on.word) == ("confirmed", "not run")
    assert probed(tmp_path, OUT, "pass", BOOM, BOOM, effect=NOTE).verdict == "too narrow"


def test_off_alone(tmp_path: Path) -> None:
    with child(tmp_path, control=OTHER, off=BOOM) as worker:
        arm = probe.off(plant(tmp_path), "triton==3.6.0", worker=worker)
    assert arm.matched
    assert arms_of(tmp_path) == ["off"]


def test_cannot_run_here(tmp_path: Path) -> None:
    quirk = plant(tmp_path)
    result = probe.run(quirk, "triton==3.5.0")  # no release that the lab makes
    assert result.verdict == "unverified"
    assert result.reason == (
        "triton==3.5.0 is not here: `portattn lab create triton==3.5.0` makes it; never verified on triton==3.5.0"
    )
    with pytest.raises(probe.ProbeError, match="portattn lab create"):
        probe.off(quirk, "triton==3.5.0")


def test_unverified_says_since_when(tmp_path: Path) -> None:
    table = '\n[[verified]]\ntoolchain = "triton==3.5.0"\ntarget = "rocm:gfx942"\nlevel = "compiles"\n'
    quirk = plant(tmp_path, more=f'{table}off = "fail:signature"\non = "pass"\ndate = 2026-11-01\n')
    assert probe.run(quirk, "triton==3.5.0").reason.endswith("last verified here on 2026-11-01")


def test_needs_a_device(tmp_path: Path) -> None:
    quirk = plant(tmp_path, more='needs = "rocm:gfx942"\n')
    with child(tmp_path) as worker:
        result = probe.run(quirk, "triton==3.6.0", worker=worker)
    assert (result.verdict, arms_of(tmp_path)) == ("unverified", [])
    assert result.reason.startswith("needs rocm:gfx942")


def test_another_compiler(tmp_path: Path) -> None:
    with child(tmp_path) as worker:
        result = probe.run(plant(tmp_path), "triton-ascend==3.2.0", worker=worker)
    assert result.reason.startswith("triton-ascend==3.2.0 compiles nothing for rocm")


def test_target_that_the_quirk_does_not_concern(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--target is 'rocm:gfx950', but rocm-0901-planted concerns rocm:gfx942"):
        probe.run(plant(tmp_path), "triton==3.6.0", "rocm:gfx950")


def test_paths_of_this_machine_are_left_out(tmp_path: Path) -> None:
    quirk = plant(tmp_path)
    arm = probe.Arm(outcome="fail", text="at 3:4:\n/home/me/env/triton/x.py:3:4: error: boom in it\nmore")
    assert saw(quirk, arm) == "x.py:3:4: error: boom in it"


def test_words_that_run_over_lines_are_what_was_seen(tmp_path: Path) -> None:
    import msgspec

    quirk = plant(tmp_path)
    quirk = msgspec.structs.replace(
        quirk, evidence=msgspec.structs.replace(quirk.evidence, signature=r"at tt\.reshape[^\n]*\nand boom")
    )
    arm = probe.Arm(
        outcome="fail", kind="RuntimeError", text="RuntimeError: it died\nat tt.reshape of %1\nand boom\nmore"
    )
    assert saw(quirk, arm) == "at tt.reshape of %1 and boom"
