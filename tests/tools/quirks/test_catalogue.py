"""The catalogue of quirks says what the registry says."""

import re
from pathlib import Path

import pytest

from portattn.errors import DataError
from portattn.planning.registry import Registry
from portattn.tools.quirks import pages

QUIRKS = Registry.load().quirks


def test_the_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pages.main()
    assert capsys.readouterr().out == pages.render(QUIRKS.values(), pages.load_left_out())


def test_every_entry_is_on_its_side() -> None:
    text = pages.render(QUIRKS.values(), pages.load_left_out())
    work_arounds, limits = text.split("## Limits")[0], text.split("## Limits")[1].split("## Not in the registry")[0]
    for quirk in QUIRKS.values():
        here, there = (work_arounds, limits) if quirk.kind == "workaround" else (limits, work_arounds)
        assert here.count(f"`{quirk.id}`") == 1
        assert f"`{quirk.id}`" not in there
        assert quirk.title in " ".join(here.split())


def test_an_entry_has_its_fields() -> None:
    text = pages.render(QUIRKS.values(), pages.load_left_out())
    for entry in text.split("## Not in the registry")[0].split("\n### ")[1:]:
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
