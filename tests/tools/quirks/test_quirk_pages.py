"""scripts/quirk_pages.py: its pages say what the registry says, and enough of it is verified."""

import re
from pathlib import Path

import msgspec
import pytest
from places import ROOT

from portattn.errors import DataError
from portattn.planning.registry import Registry
from portattn.schema.quirk import ProbeRun
from portattn.worker.own_kernels import load

pages = load(str(ROOT / "scripts" / "quirk_pages.py"))
KNOWN = Registry.load()
CATALOGUE = pages.render(KNOWN.quirks.values(), pages.load_left_out())


def test_every_entry_is_on_its_side() -> None:
    work_arounds, limits = (text.split("## Not in the registry")[0] for text in CATALOGUE.split("## Limits"))
    for quirk in KNOWN.quirks.values():
        here, there = (work_arounds, limits) if quirk.kind == "workaround" else (limits, work_arounds)
        assert here.count(f"`{quirk.id}`") == 1
        assert f"`{quirk.id}`" not in there
        assert quirk.title in " ".join(here.split())


def test_an_entry_has_its_fields() -> None:
    for entry in CATALOGUE.split("## Not in the registry")[0].split("\n### ")[1:]:
        fields = re.findall(r"^- ([\w ]+): ", entry, re.MULTILINE)
        assert fields == ["Where", "Toolchains", "Only when", "Effect", "Source", "Review"], entry


def test_left_out_has_reasons(tmp_path: Path) -> None:
    reports = pages.load_left_out()
    assert all(r.what and r.where and r.source and r.reason for r in reports)
    assert {r.backend for r in reports} == {"any", "cpu", "cuda", "rocm", "ascend"}
    broken = tmp_path / "left.toml"
    broken.write_text('[[report]]\nbackend = "cuda"\nwhat = "x"\n')
    with pytest.raises(DataError, match=r"left.toml:1: key 'report.0': the table lacks the key `where`"):
        pages.load_left_out(broken)


def test_enough_is_verified_on_both_sides() -> None:
    """At least twenty entries were seen on an affected and on an unaffected toolchain, and none is red."""
    assert len(KNOWN.quirks) >= 60
    assert len(pages.on_both_sides(KNOWN)) >= 20
    assert "**" not in pages.render_verification(KNOWN)


def test_shows_what_turned_red() -> None:
    quirk = KNOWN.quirks["rocm-0015-kpack"]
    seen = ProbeRun(
        toolchain="triton==3.4.0", target="rocm:gfx950", level="compiles", off="pass", on="not run",
        date=quirk.verified[0].date,
    )  # fmt: skip
    changed = msgspec.structs.replace(quirk, verified=(seen,))
    text = pages.render_verification(msgspec.structs.replace(KNOWN, quirks={quirk.id: changed}))
    assert f"| `{quirk.id}` | workaround | rocm:gfx950 | **stale** {seen.date} |" in text
    bare = msgspec.structs.replace(quirk, verified=())
    assert "none yet" in pages.render_verification(msgspec.structs.replace(KNOWN, quirks={quirk.id: bare}))
