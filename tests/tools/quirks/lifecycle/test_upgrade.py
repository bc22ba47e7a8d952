"""Upgrading: which entries fall away, stay or newly apply between two compilers, and which plans change."""

from __future__ import annotations

import pytest
import quirk_files

from portattn.errors import ArgumentError
from portattn.planning.registry import Registry
from portattn.tools.matrix.problems import quick
from portattn.tools.quirks.lifecycle import upgrade
from portattn.tools.upgrade.plans import NO_PLAN

OPEN = 'last_seen = "triton==3.6.0"\nreview_by = 2027-06-01'
BLOCK = """
[[verified]]
toolchain = "triton==3.9.0"
target = "{target}"
level = "compiles"
off = "{off}"
on = "pass"
date = 2026-11-20
"""


SLOW = "planted"  # the title of the planted entries


def when(range_: str) -> str:
    return f'toolchain = {{ triton = "{range_}" }}\n'


@pytest.fixture
def known(tmp_path) -> Registry:
    plant = lambda *given, **named: quirk_files.plant(tmp_path, *given, **named)  # noqa: E731
    plant("rocm-0901-fixed", "launch = { num_stages = 1 }", when=when("<3.7"))
    path = plant(
        "rocm-0902-stays", "launch = { num_warps = 2 }", when='arch = ["gfx942"]\n' + when(">=3.4"), evidence=OPEN
    )
    path.write_text(path.read_text() + BLOCK.format(target="rocm:gfx942", off="fail:signature"))
    plant("rocm-0903-new", "launch = { block_n = 16 }", when='arch = ["gfx942"]\n' + when(">=3.9,<3.10"))
    plant("rocm-0904-slow", 'path = "vendor"', symptom="slow", when=when(">=3.4"), evidence=OPEN)
    plant("cuda-0901-lost", 'path = "vendor"', when='arch = ["sm_90"]\nfeatures = ["paged"]\n' + when(">=3.8,<3.10"))
    return quirk_files.registry(tmp_path)


def test_entries(known) -> None:
    made = upgrade.upgrade("triton==3.6.0", "triton==3.9.0", known, ("rocm:gfx942", "rocm:gfx950"))
    found = {(entry.id, entry.change): entry for entry in made.entries}
    assert {key: entry.targets for key, entry in found.items()} == {
        ("rocm-0901-fixed", "falls away"): ("rocm:gfx942", "rocm:gfx950"),
        ("rocm-0902-stays", "stays"): ("rocm:gfx942",),
        ("rocm-0903-new", "newly applies"): ("rocm:gfx942",),
        # A slow one fails open on a compiler newer than any that it was seen on.
        ("rocm-0904-slow", "falls away"): ("rocm:gfx942", "rocm:gfx950"),
    }
    stays = found["rocm-0902-stays", "stays"]
    assert stays.verified == ("rocm:gfx942: fail:signature",)
    assert not stays.unverified
    assert stays.unprobed == ()
    assert stays.note == "last seen on triton==3.6.0; applies to be safe"
    assert found["rocm-0904-slow", "falls away"].note == "last seen on triton==3.6.0; is left out"
    assert found["rocm-0903-new", "newly applies"].unverified
    assert found["rocm-0903-new", "newly applies"].unprobed == ("rocm:gfx942",)
    assert found["rocm-0904-slow", "falls away"].unprobed == (), "it does not apply any more"


def test_a_probe_of_one_target_says_nothing_of_another(tmp_path, portattn, monkeypatch) -> None:
    path = quirk_files.plant(
        tmp_path, "rocm-0905-half", "launch = { num_warps = 2 }", when=when(">=3.4"), evidence=OPEN
    )
    path.write_text(path.read_text() + BLOCK.format(target="rocm:gfx942", off="fail:signature"))
    known = quirk_files.registry(tmp_path)
    [half] = upgrade.upgrade("triton==3.6.0", "triton==3.9.0", known, ("rocm:gfx942", "rocm:gfx950")).entries
    assert (half.verified, half.unprobed) == (("rocm:gfx942: fail:signature",), ("rocm:gfx950",))
    monkeypatch.setattr(Registry, "load", lambda: known)
    line = ("ci", "--from", "triton==3.6.0", "--to", "triton==3.9.0", "--fail-on", "unprobed", "--targets")
    told = portattn(*line, "gfx942,gfx950", "--json")
    assert told.status == 1
    assert [(one["kinds"], one["targets"]) for one in told.json["losses"]] == [(["unprobed"], ["rocm:gfx950"])]
    assert "--target rocm:gfx950 --toolchain triton==3.9.0" in told.json["losses"][0]["todo"]
    assert portattn(*line, "gfx942").status == 0
    shown = portattn(*line, "gfx942,gfx950").out
    assert "probed there: rocm:gfx942: fail:signature (not on rocm:gfx950)" in " ".join(shown.split())
    assert shown.count('"fail:signature" is how the bug shows itself') == 1


def test_plans(known) -> None:
    made = upgrade.upgrade("triton==3.6.0", "triton==3.9.0", known, ("rocm:gfx942", "rocm:gfx950"))
    assert made.plans == 2 * len(quick())
    moved = {(one.problem, one.targets): one for one in made.moved}
    one = next(m for (_, targets), m in moved.items() if targets == ("rocm:gfx942", "rocm:gfx950"))
    assert (one.before, one.after) == ("sdpa", "triton"), "the slow entry falls away"
    assert one.differs == ("path: sdpa -> triton", "kernel: none -> dense_forward", f"why: {SLOW} -> None")
    assert not one.lost
    again = upgrade.upgrade("triton==3.9.0", "triton==3.9.0", known, ("rocm:gfx942",))
    assert again.moved == ()
    assert {entry.change for entry in again.entries} == {"stays"}


def test_a_plan_that_leaves_the_core_kernel_is_lost(known, portattn, monkeypatch) -> None:
    made = upgrade.upgrade("triton==3.6.0", "triton==3.9.0", known, ("cuda:sm_90", "cuda:sm_80"))
    lost = [one for one in made.moved if one.lost]
    assert made.lost
    assert {one.targets for one in lost} == {("cuda:sm_90",)}
    assert all("page" in one.problem or "MLA" in one.problem for one in lost)
    assert all(one.before == "triton" and one.after in ("sdpa", "reference") for one in lost)
    monkeypatch.setattr(Registry, "load", lambda: known)
    line = ("quirks", "upgrade", "--from", "triton==3.6.0", "--to", "triton==3.9.0", "--target")
    assert portattn(*line, "cuda:sm_90").status == 1
    assert portattn(*line, "cuda:sm_80").status == 0
    assert portattn(*line, "rocm:gfx950").status == 0
    strict = portattn(*line, "rocm:gfx950", "--strict", "--json")
    assert strict.status == 1
    assert "rocm-0901-fixed" in strict.json["unverified"]
    assert "rocm-0901-fixed" in strict.json["less_sure"], "its work-around is dropped, and nobody has looked"


STRICT = ("quirks", "upgrade", "--target", "rocm:gfx942", "--strict", "--json")


def test_strict_is_green_where_nothing_is_less_sure(portattn) -> None:
    """Entries that no probe has looked at stay as unsure as they were."""
    called = portattn(*STRICT, "--from", "triton==3.6.0", "--to", "triton==3.6.0")
    assert called.json["unverified"]
    assert (called.json["less_sure"], called.status) == ([], 0)


@pytest.mark.parametrize(
    ("probed", "range_", "red"),
    [
        ((), ">=3.4", False),  # stays, and nobody has looked with either
        (("triton==3.6.0",), ">=3.4", True),  # stays: looked at with the old one alone
        (("triton==3.6.0", "triton==3.9.0"), ">=3.4", False),
        (("triton==3.9.0",), ">=3.4", False),
        ((), ">=3.8,<3.10", True),  # newly applies
        (("triton==3.9.0",), ">=3.8,<3.10", False),
        ((), "<3.8", True),  # falls away
        (("triton==3.6.0",), "<3.8", True),
        (("triton==3.9.0",), "<3.8", False),
    ],
)
def test_strict_is_red_for_an_entry_that_is_less_sure(tmp_path, portattn, monkeypatch, probed, range_, red) -> None:
    path = quirk_files.plant(tmp_path, "rocm-0906-one", "launch = { num_warps = 2 }", when=when(range_), evidence=OPEN)
    for toolchain in probed:
        text = BLOCK.format(target="rocm:gfx942", off="fail:signature").replace("triton==3.9.0", toolchain)
        path.write_text(path.read_text() + text)
    known = quirk_files.registry(tmp_path)
    monkeypatch.setattr(Registry, "load", lambda: known)
    called = portattn(*STRICT, "--from", "triton==3.6.0", "--to", "triton==3.9.0")
    assert called.json["less_sure"] == ["rocm-0906-one"] * red
    assert called.status == int(red)


def test_two_entries_that_contradict_each_other_on_the_new_one_leave_no_plan(tmp_path) -> None:
    quirk_files.plant(tmp_path, "cuda-0901-two", "launch = { num_stages = 2 }", when=when(">=3.9,<3.10"))
    quirk_files.plant(tmp_path, "cuda-0902-one", "launch = { num_stages = 1 }", when=when(">=3.9,<3.10"))
    known = quirk_files.registry(tmp_path)
    made = upgrade.upgrade("triton==3.6.0", "triton==3.9.0", known, ("cuda:sm_90",))
    assert {one.after for one in made.moved} == {NO_PLAN}
    assert made.lost
    assert any("cuda-0901-two and cuda-0902-one" in line for line in made.moved[0].differs)
    back = upgrade.upgrade("triton==3.9.0", "triton==3.6.0", known, ("cuda:sm_90",))
    assert not back.lost


def test_same_changes_are_one_line(known) -> None:
    made = upgrade.upgrade("triton==3.6.0", "triton==3.7.1", known)
    together = [one for one in made.moved if set(one.targets) >= {"rocm:gfx942", "rocm:gfx950"}]
    assert together, "rocm-0901 falls away on every AMD chip alike"


@pytest.mark.parametrize(
    ("before", "after", "targets", "argument"),
    [
        ("triton", "triton==3.9.0", (), "--from"),
        ("triton==3.6.0", "none", (), "--to"),
        ("triton==3.6.0", "triton-ascend==3.2.0", (), "--to"),
        ("triton==3.6.0", "triton==3.9.0", ("cuda:sm_1",), "arch"),
    ],
)
def test_bad_input(registry, before, after, targets, argument) -> None:
    with pytest.raises(ArgumentError) as refused:
        upgrade.upgrade(before, after, registry, targets)
    assert refused.value.argument == argument


def test_the_shipped_registry(portattn) -> None:
    called = portattn("quirks", "upgrade", "--from", "triton==3.8.0", "--to", "triton==3.9.0", "--json")
    found = {entry["id"]: entry for entry in called.json["upgrade"]["entries"] if entry["change"] == "newly applies"}
    assert "any-0001-no-block-pointers" in found
    text = portattn("quirks", "upgrade", "--from", "triton==3.8.0", "--to", "triton==3.9.0", "--target", "cuda:sm_90")
    assert "newly applies" in text.out
    assert text.out.count('"fail:signature" is how the bug shows itself') == 1, "or it reads as a failure of the tool"
    assert text.out.index("is how the bug shows itself") < text.out.index("probed there: cuda:sm_90: fail:signature")
    assert "any-0001-no-block-pointers" in text.out


@pytest.mark.parametrize("release", ["3.99", "3.10.0", "4.0.0"])
def test_a_release_that_nobody_knows_is_said_and_compared_all_the_same(portattn, release) -> None:
    line = ("quirks", "upgrade", "--target", "rocm:gfx950")
    to = portattn(*line, "--from", "triton==3.9.0", "--to", f"triton=={release}", "--json")
    said = f"portattn: triton=={release} is no known release of triton; the nearest: "
    assert to.err.startswith(said), "as `plan` and `matrix run` say it"
    assert to.json["from"] == {"toolchain": "triton==3.9.0", "known": True}
    assert to.json["to"] == {"toolchain": f"triton=={release}", "known": False}
    back = portattn(*line, "--from", f"triton=={release}", "--to", "triton==3.9.0", "--json")
    assert back.err.startswith(said)
    assert (back.json["from"]["known"], back.json["to"]["known"]) == (False, True)


def test_known_releases_are_not_remarked_upon(portattn) -> None:
    called = portattn("quirks", "upgrade", "--from", "triton==3.8", "--to", "triton==3.9.0", "--target", "rocm:gfx950")
    assert "no known release" not in called.err


def test_outcomes_are_explained_where_there_is_one_to_explain(tmp_path, portattn, monkeypatch) -> None:
    path = quirk_files.plant(tmp_path, "rocm-0907-fixed", "launch = { num_warps = 2 }", when=when("<3.8"))
    path.write_text(path.read_text() + BLOCK.format(target="rocm:gfx942", off="pass"))
    known = quirk_files.registry(tmp_path)
    monkeypatch.setattr(Registry, "load", lambda: known)
    line = ("--from", "triton==3.6.0", "--to", "triton==3.9.0")
    for text in (
        portattn("quirks", "upgrade", *line, "--target", "rocm:gfx942").out,
        portattn("ci", *line, "--targets", "gfx942").out,
    ):
        assert "probed there: rocm:gfx942: pass" in " ".join(text.split())
        assert "shows itself" not in text
