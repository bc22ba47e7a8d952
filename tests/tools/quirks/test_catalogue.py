"""docs/quirk-catalogue.md says what the registry says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import DOCS

from portattn.errors import DataError
from portattn.planning.registry import Registry
from portattn.tools.quirks import pages

PAGE = DOCS / "quirk-catalogue.md"
QUIRKS = Registry.load().quirks


def test_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    pages.main()
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8"), (
        "run: python -m portattn.tools.quirks.pages > docs/quirk-catalogue.md"
    )


def test_every_entry_is_on_its_side() -> None:
    text = pages.render(QUIRKS.values(), pages.load_left_out())
    work_arounds, limits = text.split("## Limits")[0], text.split("## Limits")[1].split("## Not in the registry")[0]
    for quirk in QUIRKS.values():
        here, there = (work_arounds, limits) if quirk.kind == "workaround" else (limits, work_arounds)
        assert here.count(f"`{quirk.id}`") == 1
        assert f"`{quirk.id}`" not in there
        assert quirk.title in " ".join(here.split())


def test_an_entry_has_its_fields_and_its_lines_are_not_too_long() -> None:
    text = pages.render(QUIRKS.values(), pages.load_left_out())
    for entry in text.split("## Not in the registry")[0].split("\n### ")[1:]:
        fields = re.findall(r"^- ([\w ]+): ", entry, re.MULTILINE)
        assert fields == ["Where", "Toolchains", "Only when", "Effect", "Source", "Review"], entry
    assert [line for line in text.splitlines() if len(line) > 120 and " " in line.strip().removeprefix("- ")] == []


def test_left_out_has_reasons(tmp_path: Path) -> None:
    reports = pages.load_left_out()
    assert all(r.what and r.where and r.source and r.reason for r in reports)
    assert {r.backend for r in reports} == {"any", "cpu", "cuda", "rocm", "ascend"}
    broken = tmp_path / "left.toml"
    broken.write_text('[[report]]\nbackend = "cuda"\nwhat = "x"\n')
    with pytest.raises(DataError, match=r"left.toml:1: key 'report.0': the table lacks the key `where`"):
        pages.load_left_out(broken)
