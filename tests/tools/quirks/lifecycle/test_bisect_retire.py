"""Bisecting: both ends by few probes, honest about what could not be run, and about bugs that come and go."""

import datetime

import msgspec
import pytest
import quirk_files

from portattn.errors import ArgumentError, PortattnError
from portattn.planning.registry import Registry, find_backends
from portattn.schema.quirk import ProbeRun
from portattn.schema.toolchain import parse_range
from portattn.tools import lab
from portattn.tools.quirks import bisect_retire
from portattn.tools.quirks import probe as probing
from portattn.tools.quirks.probe import Arm

RELEASES = tuple(t for t in lab.toolchains() if t.startswith("triton=="))


def planted(tmp_path, range_: str = "", backend: str = "rocm"):
    when = f'toolchain = {{ triton = "{range_}" }}' if range_ else ""
    path = quirk_files.plant(tmp_path, f"{backend}-0901-planted", 'path = "vendor"', when=when)
    return Registry.read(find_backends(), tmp_path).quirks[path.stem]


class Probe:
    """In the place of probing.off: bad versions fail with the signature; `missing` cannot run; `odd` ones are else."""

    def __init__(self, bad: str = "", missing: str = "", odd: str = "") -> None:
        self.words = {
            f"triton=={v}": word for word, vs in (("bad", bad), ("missing", missing), ("odd", odd)) for v in vs.split()
        }
        self.asked: list[str] = []

    def __call__(self, quirk, toolchain: str) -> Arm:
        self.asked.append(toolchain)
        word = self.words.get(toolchain, "good")
        if word == "missing":
            raise PortattnError(f"{toolchain} is not here: `portattn lab create {toolchain}` makes it")
        if word == "good":
            return Arm(outcome="pass")
        return Arm(outcome="fail", kind="RuntimeError", text="boom\nmore", matched=word == "bad")


ALL = " ".join(t.partition("==")[2] for t in RELEASES)
CASES = {
    # bad versions, range in the entry -> range that is found, ends
    "3.5.1 3.6.0": (">=3.5.1,<3.7", "3.4.0", "3.5.1", "3.6.0", "3.7.1"),
    "3.2.0 3.3.1": ("<3.4", "", "3.2.0", "3.3.1", "3.4.0"), "3.9.0": (">=3.9.0", "3.8.0", "3.9.0", "3.9.0", ""),
    "3.4.0": (">=3.4.0,<3.5", "3.3.1", "3.4.0", "3.4.0", "3.5.1"), ALL: ("", "", "3.2.0", "3.9.0", ""),
}  # fmt: skip


@pytest.mark.parametrize("known", ["", ">=3.4,<3.7", "==3.6.0"])
@pytest.mark.parametrize("bad", CASES)
def test_both_ends_are_found(bad: str, known: str, tmp_path) -> None:
    probe = Probe(bad)
    made = bisect_retire.bisect(planted(tmp_path, known), RELEASES, probe)
    range_, *ends = CASES[bad]
    assert made.range == range_
    assert [made.last_good_before, made.first_bad, made.last_bad, made.first_good] == [
        f"triton=={end}" if end else "" for end in ends
    ]
    assert made.monotone
    assert len(probe.asked) == len(set(probe.asked)), "nothing is probed twice"
    assert [t.toolchain for t in made.tested] == [t for t in RELEASES if t in probe.asked]
    # The range has exactly the bad ones of those that were tested.
    for tested in made.tested:
        version = tested.toolchain.partition("==")[2]
        assert parse_range(made.range).contains(version) is (tested.seen == "bad")


def test_few_probes_are_enough(tmp_path) -> None:
    few, every = Probe("3.5.1 3.6.0"), Probe("3.5.1 3.6.0")
    bisect_retire.bisect(planted(tmp_path, ">=3.5.1,<3.7"), RELEASES, few)
    made = bisect_retire.bisect(planted(tmp_path, ">=3.5.1,<3.7"), RELEASES, every, every=True)
    assert (len(few.asked) < len(RELEASES), every.asked, made.range) == (True, list(RELEASES), ">=3.5.1,<3.7")


def test_a_bug_that_comes_back_is_said_and_every_one_tested(tmp_path) -> None:
    probe = Probe("3.2.0 3.6.0 3.7.1")
    made = bisect_retire.bisect(planted(tmp_path, ">=3.6,<3.8"), RELEASES, probe)
    assert not made.monotone
    assert (len(probe.asked), made.range) == (len(RELEASES), "<3.8,!=3.3.1,!=3.4.0,!=3.5.1")
    odd = Probe("3.3.1 3.6.0 3.9.0")
    made = bisect_retire.bisect(planted(tmp_path, "==3.6.0"), RELEASES, odd, every=True)
    assert not made.monotone
    assert made.says.startswith(
        "not monotone: it is gone in triton==3.4.0, triton==3.5.1, triton==3.7.1, triton==3.8.0"
    )
    assert made.range == ">=3.3.1,!=3.4.0,!=3.5.1,!=3.7.1,!=3.8.0"
    # So is one whose bad end outside the range makes it look in between.
    probe = Probe("3.3.1 3.9.0")
    made = bisect_retire.bisect(planted(tmp_path, ">=3.3,<3.4"), RELEASES, probe)
    assert (made.monotone, len(probe.asked)) == (False, len(RELEASES))
    assert made.range.startswith(">=3.3.1,!=3.4.0")


def test_what_cannot_be_run_is_passed_over(tmp_path) -> None:
    probe = Probe(bad="3.5.1 3.6.0", missing="3.4.0 3.9.0 3.2.0", odd="3.7.1")
    made = bisect_retire.bisect(planted(tmp_path, ">=3.5,<3.7"), RELEASES, probe)
    assert (made.last_good_before, made.first_bad) == ("triton==3.3.1", "triton==3.5.1")
    assert (made.last_bad, made.first_good) == ("triton==3.6.0", "triton==3.8.0")
    # No wider than what was seen: 3.7.1 failed otherwise, and is in no range.
    assert made.range == ">=3.5.1,<3.7"
    seen = {t.toolchain: t for t in made.tested}
    assert seen["triton==3.9.0"].seen == "skipped"
    assert "portattn lab create" in seen["triton==3.9.0"].detail
    if "triton==3.7.1" in seen:
        assert seen["triton==3.7.1"].seen == "other"


@pytest.mark.parametrize(
    ("bad", "odd", "range_", "good"),
    [
        ("3.5.1 3.6.0", "3.2.0 3.3.1 3.4.0", ">=3.5.1,<3.7", ("", "triton==3.7.1")),
        ("3.5.1 3.6.0", "3.7.1 3.8.0 3.9.0", ">=3.5.1,<3.7", ("triton==3.4.0", "")),
        ("3.4.0 3.6.0", "3.2.0 3.3.1 3.5.1 3.7.1 3.8.0 3.9.0", ">=3.4.0,<3.7,!=3.5.1", ("", "")),
    ],
)
def test_what_fails_otherwise_is_no_part_of_the_range(tmp_path, bad: str, odd: str, range_: str, good) -> None:
    made = bisect_retire.bisect(planted(tmp_path, "==3.6.0"), RELEASES, Probe(bad, odd=odd), every=True)
    assert (made.range, made.last_good_before, made.first_good) == (range_, *good)
    assert made.monotone, "to fail otherwise is not to be without the bug"
    named = ", ".join(f"triton=={version}" for version in odd.split())
    assert f"fails otherwise, which is no part of the range: {named}" in made.says
    assert not {f"triton=={version}" for version in odd.split()} & set(made.untested)
    for tested in made.tested:
        assert parse_range(made.range).contains(tested.toolchain.partition("==")[2]) is (tested.seen == "bad")


def test_a_failure_that_is_recorded_and_ends_otherwise_now_stays(tmp_path) -> None:
    quirk = recorded(tmp_path, ">=3.4,<3.7", "3.4.0 3.6.0")
    made = bisect_retire.bisect(quirk, RELEASES, Probe("3.6.0", odd="3.3.1 3.4.0 3.5.1"), every=True)
    assert made.range == ">=3.4.0,<3.7,!=3.5.1"


def test_seen_nowhere(tmp_path) -> None:
    made = bisect_retire.bisect(planted(tmp_path), RELEASES, Probe())
    assert (made.says, made.range, made.last_bad) == ("seen nowhere", "", "")
    none = bisect_retire.bisect(planted(tmp_path), RELEASES, Probe(missing=ALL))
    assert none.says == "seen nowhere: none of them can be run here"


def recorded(tmp_path, range_: str, failures: str, target: str = "rocm:gfx942"):
    quirk = planted(tmp_path, range_)
    blocks = [
        ProbeRun(
            toolchain=f"triton=={v}", target=target, level="compiles", off="fail:signature", on="pass",
            date=datetime.date(2026, 11, 20),
        )
        for v in failures.split()
    ]  # fmt: skip
    return msgspec.structs.replace(quirk, verified=tuple(blocks))


def test_releases_that_nobody_tested_are_named(tmp_path) -> None:
    made = bisect_retire.bisect(planted(tmp_path, ">=3.5,<3.7"), RELEASES, Probe("3.5.1 3.6.0"))
    assert made.untested == ("triton==3.5.0", "triton==3.7.0")
    assert "not tested, and between these: triton==3.5.0, triton==3.7.0" in made.says
    alone = bisect_retire.bisect(planted(tmp_path, "==3.8.0"), ("triton==3.7.1", "triton==3.8.0"), Probe("3.8.0"))
    assert (alone.untested, alone.says) == ((), "")
    probe = Probe("3.4.0 3.6.0", missing="3.5.1")
    assert "triton==3.5.1" in bisect_retire.bisect(planted(tmp_path, "==3.6.0"), RELEASES, probe, every=True).untested


@pytest.mark.parametrize("missing", ["3.5.1 3.6.0", "3.5.1", ""])
def test_a_recorded_failure_stays_in_the_range(tmp_path, missing: str) -> None:
    quirk = recorded(tmp_path, ">=3.5,<3.7", "3.5.1 3.6.0")
    made = bisect_retire.bisect(quirk, RELEASES, Probe("" if missing else "3.5.1", missing=missing), every=True)
    assert made.range == ">=3.5.1,<3.7"
    assert parse_range(made.range).contains("3.6.0")
    seen = {one.toolchain: one for one in made.tested}
    for one in (seen[f"triton=={version}"] for version in missing.split()):
        assert (one.seen, one.detail) == ("recorded", "failed on 2026-11-20, by the entry's file")
    gone = {"3.5.1 3.6.0": (), "3.5.1": ("triton==3.6.0",), "": ("triton==3.6.0",)}[missing]
    assert made.contradicts == gone
    assert ("contradicts the entry's file" in made.says) is bool(gone)


def test_a_recorded_failure_of_another_chip_is_another_matter(tmp_path) -> None:
    quirk = recorded(tmp_path, ">=3.5,<3.7", "3.6.0", target="rocm:gfx950")
    for chip, found in (("gfx942", (">=3.5.1,<3.6", ())), ("gfx950", (">=3.5.1,<3.7", ("triton==3.6.0",)))):
        made = bisect_retire.bisect(quirk, RELEASES, Probe("3.5.1"), every=True, target=f"rocm:{chip}")
        assert (made.range, made.contradicts) == found


def test_a_release_that_a_report_names_counts(tmp_path) -> None:
    """The lab has no 3.5.0."""
    quirk = planted(tmp_path, "==3.5.0")
    quirk = msgspec.structs.replace(quirk, evidence=msgspec.structs.replace(quirk.evidence, seen_on=("triton==3.5.0",)))
    made = bisect_retire.bisect(quirk, RELEASES, Probe())
    assert (made.first_bad, made.last_bad, made.range) == ("triton==3.5.0", "triton==3.5.0", ">=3.5.0,<3.5.1")


@pytest.mark.parametrize(
    ("tried", "missing", "range_"),
    [
        ("3.5.1 3.6.0", "", ">=3.5.1,<3.7"), ("3.3.1 3.4.0", "", ">=3.3.1,<3.5"), ("3.8.0 3.9.0", "", ">=3.8.0"),
        ("3.2.0 3.7.1", "", "<3.8"), (ALL, "3.2.0 3.8.0 3.9.0", ">=3.3.1,<3.8"),
    ],
)  # fmt: skip
def test_the_range_goes_no_further_than_the_releases_that_were_tried(tmp_path, tried, missing, range_) -> None:
    toolchains = [f"triton=={version}" for version in tried.split()]
    made = bisect_retire.bisect(planted(tmp_path, "==3.6.0"), toolchains, Probe(ALL, missing=missing), every=True)
    assert made.range == range_


def test_candidates() -> None:
    assert bisect_retire.candidates("triton", reversed(lab.toolchains())) == list(RELEASES)
    assert bisect_retire.candidates("triton", lab.toolchains(), ("triton==3.4.0", "3.6.0")) == [
        f"triton=={v}" for v in ("3.4.0", "3.5.1", "3.6.0")
    ]
    with pytest.raises(ArgumentError, match=r"must be one of triton==3\.2\.0"):
        bisect_retire.candidates("triton", lab.toolchains(), ("triton==3.4.1", "triton==3.6.0"))
    with pytest.raises(ArgumentError, match="older version first"):
        bisect_retire.candidates("triton", lab.toolchains(), ("triton==3.6.0", "triton==3.4.0"))


def test_the_command_line(portattn, tmp_path, monkeypatch) -> None:
    planted(tmp_path, ">=3.5,<3.6")
    known = Registry.read(find_backends(), tmp_path)
    monkeypatch.setattr(Registry, "load", lambda: known)
    probe = Probe("3.5.1 3.6.0")
    monkeypatch.setattr(probing, "off", lambda quirk, toolchain, target, registry: probe(quirk, toolchain))
    called = portattn("quirks", "bisect", "rocm-0901-planted")
    assert called.status == 1, "the entry's range is another one"
    assert 'when.toolchain: { triton = ">=3.5.1,<3.7" }' in called.out
    assert 'the entry has: { triton = ">=3.5,<3.6" }' in called.out
    assert "probing triton==3.5.1" in called.err
    probe.words = {"triton==3.5.1": "bad"}
    agreed = portattn("quirks", "bisect", "rocm-0901-planted", "--all", "--json", exits=0)
    assert agreed.json["agrees"] is True
    assert len(agreed.json["bisected"]["tested"]) == len(RELEASES)
    assert portattn("quirks", "bisect", "rocm-0901-planted", "--between", "triton==3.2.0", "triton==3.3.1").status == 1
    unknown = portattn("quirks", "bisect", "nobody", "--json")
    assert (unknown.status, unknown.json["error"]["argument"]) == (2, "ID")


def test_missing_environments_are_made_when_asked_for(portattn, tmp_path, monkeypatch) -> None:
    planted(tmp_path, "==3.5.1")
    known = Registry.read(find_backends(), tmp_path)
    monkeypatch.setattr(Registry, "load", lambda: known)
    made: list[str] = []
    monkeypatch.setattr(lab, "find", lambda toolchain: None)
    monkeypatch.setattr(lab, "create", lambda toolchain, say: made.append(toolchain))
    monkeypatch.setattr(probing, "off", lambda quirk, toolchain, target, registry: Probe("3.5.1")(quirk, toolchain))
    line = ("quirks", "bisect", "rocm-0901-planted", "--between", "triton==3.4.0", "triton==3.5.1")
    assert (portattn(*line).status, made) == (0, [])
    assert portattn(*line, "--create").status == 0
    assert "triton==3.5.1" in made
