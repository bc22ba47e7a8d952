"""Upgrading: which entries fall away, stay or newly apply between two compilers, and which plans change."""

import pytest
import quirk_files

from portattn.planning.registry import Registry
from portattn.tools.compare import registry_changes as compare
from portattn.tools.compare.registry_changes import NO_PLAN

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


def when(range_: str) -> str:
    return f'toolchain = {{ triton = "{range_}" }}\n'


@pytest.fixture
def known(tmp_path) -> Registry:
    plant = lambda *given, **named: quirk_files.plant(tmp_path, *given, **named)  # noqa: E731
    plant("rocm-0901-fixed", "launch = { num_stages = 1 }", when=when("<3.7"))
    plant("cuda-0901-lost", 'path = "vendor"', when='arch = ["sm_90"]\nfeatures = ["paged"]\n' + when(">=3.8,<3.10"))
    return quirk_files.registry(tmp_path)


def test_a_plan_that_leaves_the_core_kernel_is_lost(known, portattn, monkeypatch) -> None:
    made = compare.upgrade("triton==3.6.0", "triton==3.9.0", known, ("cuda:sm_90", "cuda:sm_80"))
    lost = [one for one in made.moved if one.lost]
    assert made.lost
    assert {one.targets for one in lost} == {("cuda:sm_90",)}
    assert all("page" in one.problem or "MLA" in one.problem for one in lost)
    assert all(one.before == "triton" and one.after in ("sdpa", "reference") for one in lost)
    monkeypatch.setattr(Registry, "load", lambda: known)
    line = ("quirks", "upgrade", "--from", "triton==3.6.0", "--to", "triton==3.9.0", "--target")
    assert [portattn(*line, chip).status for chip in ("cuda:sm_90", "cuda:sm_80", "rocm:gfx950")] == [1, 0, 0]
    strict = portattn(*line, "rocm:gfx950", "--strict", "--json", exits=1)
    assert "rocm-0901-fixed" in strict.json["unverified"]
    assert "rocm-0901-fixed" in strict.json["less_sure"], "its work-around is dropped without a probe"


STRICT = ("quirks", "upgrade", "--target", "rocm:gfx942", "--strict", "--json")


def test_strict_is_green_where_nothing_is_less_sure(portattn) -> None:
    """Entries that no probe has looked at stay as unsure as they were."""
    called = portattn(*STRICT, "--from", "triton==3.6.0", "--to", "triton==3.6.0")
    assert called.json["unverified"]
    assert (called.json["less_sure"], called.status) == ([], 0)


@pytest.mark.parametrize(
    ("probed", "range_", "red"),
    [
        ((), ">=3.4", False),  # stays, unprobed with both
        (("triton==3.6.0",), ">=3.4", True),  # stays: looked at with the old one alone
        (("triton==3.6.0", "triton==3.9.0"), ">=3.4", False), (("triton==3.9.0",), ">=3.4", False),
        ((), ">=3.8,<3.10", True),  # newly applies
        (("triton==3.9.0",), ">=3.8,<3.10", False),
        ((), "<3.8", True),  # falls away
        (("triton==3.6.0",), "<3.8", True), (("triton==3.9.0",), "<3.8", False),
    ],
)  # fmt: skip
def test_strict_is_red_for_an_entry_that_is_less_sure(tmp_path, portattn, monkeypatch, probed, range_, red) -> None:
    path = quirk_files.plant(tmp_path, "rocm-0906-one", "launch = { num_warps = 2 }", when=when(range_), evidence=OPEN)
    for toolchain in probed:
        text = BLOCK.format(target="rocm:gfx942", off="fail:signature").replace("triton==3.9.0", toolchain)
        path.write_text(path.read_text() + text)
    known = quirk_files.registry(tmp_path)
    monkeypatch.setattr(Registry, "load", lambda: known)
    called = portattn(*STRICT, "--from", "triton==3.6.0", "--to", "triton==3.9.0")
    assert (called.json["less_sure"], called.status) == (["rocm-0906-one"] * red, int(red))


def test_two_entries_that_contradict_each_other_on_the_new_one_leave_no_plan(tmp_path) -> None:
    quirk_files.plant(tmp_path, "cuda-0901-two", "launch = { num_stages = 2 }", when=when(">=3.9,<3.10"))
    quirk_files.plant(tmp_path, "cuda-0902-one", "launch = { num_stages = 1 }", when=when(">=3.9,<3.10"))
    known = quirk_files.registry(tmp_path)
    made = compare.upgrade("triton==3.6.0", "triton==3.9.0", known, ("cuda:sm_90",))
    assert {one.after for one in made.moved} == {NO_PLAN}
    assert made.lost
    assert any("cuda-0901-two and cuda-0902-one" in line for line in made.moved[0].differs)
    assert not compare.upgrade("triton==3.9.0", "triton==3.6.0", known, ("cuda:sm_90",)).lost


def test_the_shipped_registry(portattn) -> None:
    called = portattn("quirks", "upgrade", "--from", "triton==3.8.0", "--to", "triton==3.9.0", "--json")
    found = {entry["id"]: entry for entry in called.json["upgrade"]["entries"] if entry["change"] == "newly applies"}
    assert "any-0001-no-block-pointers" in found
    text = portattn("quirks", "upgrade", "--from", "triton==3.8.0", "--to", "triton==3.9.0", "--target", "cuda:sm_90")
    assert "spills were not looked at" in text.out
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
