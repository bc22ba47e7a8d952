"""[[verified]] tables: written by the tool, into the quirk's own file, and nothing else of it is touched."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from planted_probe import BOOM, OTHER, child, plant

from portattn.errors import DataError
from portattn.planning.quirk_files import load_quirk
from portattn.schema.quirk import Quirk
from portattn.tools.quirks import probe
from portattn.tools.quirks.probe.record import record


def result(folder: Path, quirk: Quirk, toolchain: str, **arms: str) -> probe.ProbeResult:
    with child(folder, **arms) as worker:
        return probe.run(quirk, toolchain, worker=worker)


def test_writes_one_table_for_each_toolchain(tmp_path: Path) -> None:
    quirk = plant(tmp_path)
    before = Path(quirk.file).read_text()
    found = [result(tmp_path, quirk, f"triton==3.{minor}.0", off=BOOM) for minor in (4, 6)]
    assert record(quirk, found) == 2
    after = Path(quirk.file).read_text()
    assert after.startswith(before), "comments and layout of what was there are kept"
    read = load_quirk(Path(quirk.file)).verified
    assert [(v.toolchain, v.target, v.level, v.off, v.on) for v in read] == [
        (f"triton==3.{minor}.0", "rocm:gfx942", "compiles", "fail:signature", "pass") for minor in (4, 6)
    ]
    assert read[0].date == datetime.date.today()
    assert read[0].saw == "RuntimeError: boom went the pass"


def test_probed_again_replaces(tmp_path: Path) -> None:
    quirk = plant(tmp_path)
    record(
        quirk, [result(tmp_path, quirk, "triton==3.4.0", off=BOOM), result(tmp_path, quirk, "triton==3.6.0", off=BOOM)]
    )
    text = Path(quirk.file).read_text().replace("[[verified]]", "# by hand\n[[verified]]", 1)
    Path(quirk.file).write_text(text)
    record(quirk, [result(tmp_path, quirk, "triton==3.4.0", off="pass")])
    read = load_quirk(Path(quirk.file)).verified
    assert [(v.toolchain, v.off, v.on, bool(v.saw)) for v in read] == [
        ("triton==3.4.0", "pass", "not run", False),
        ("triton==3.6.0", "fail:signature", "pass", True),
    ]
    assert "# by hand" in Path(quirk.file).read_text()


def test_what_saw_nothing_is_not_recorded(tmp_path: Path) -> None:
    quirk = plant(tmp_path, range_=">=3.7")
    before = Path(quirk.file).read_text()
    said_nothing = [
        result(tmp_path, quirk, "triton==3.6.0", control=OTHER),
        result(tmp_path, quirk, "triton==3.6.0", off=OTHER),
        probe.run(quirk, "triton==3.5.0"),
    ]
    assert [r.verdict for r in said_nothing] == ["broken", "inconclusive", "unverified"]
    assert record(quirk, said_nothing) == 0
    assert Path(quirk.file).read_text() == before


def test_never_half_written(tmp_path: Path) -> None:
    quirk = plant(tmp_path)
    found = result(tmp_path, quirk, "triton==3.6.0", off=BOOM)
    path = Path(quirk.file)
    broken = path.read_text().replace('symptom = "compile-error"', 'symptom = "no such"')
    path.write_text(broken)
    with pytest.raises(DataError, match="nothing was written"):
        record(quirk, [found])
    assert path.read_text() == broken
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.write_text(broken.replace(quirk.id, "rocm-0902-other"))
    with pytest.raises(DataError, match="is 'rocm-0902-other' now"):
        record(quirk, [found])
