"""The range that a verdict asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_probe import BOOM, child, plant

from portattn.schema.toolchain import parse_range
from portattn.tools.quirks import probe
from portattn.tools.quirks.probe import ranges


@pytest.mark.parametrize(
    ("old", "version", "affected", "new"),
    [
        (">=3.4", "3.9.0", ["3.6.0", "3.8.0"], ">=3.4,<3.9.0"),
        (">=3.4,<3.9", "3.7.1", ["3.5.1"], ">=3.4,<3.7.1"),
        (">=3.4", "3.4.0", ["3.6.0", "3.5.1"], ">=3.5.1"),
        (">=3.4,<3.9", "3.6.0", ["3.5.1", "3.7.1"], ">=3.4,<3.9,!=3.6.0"),
        (">=3.4,<3.9", "3.6.0", [], ">=3.4,<3.6.0"),
        ("<3.9", "3.8.0", ["3.2.0"], "<3.8.0"),
        ("==3.7.*", "3.7.1", ["3.7.0"], ">=3.7,<3.7.1"),
    ],
)
def test_narrowed(old: str, version: str, affected: list[str], new: str) -> None:
    assert ranges.narrow_range(old, version, affected) == new
    assert not parse_range(new).contains(version)
    assert all(parse_range(new).contains(v) for v in affected)


@pytest.mark.parametrize(
    ("range_", "last", "advice"),
    [
        ("==3.6.0", "3.9.0", "nobody has seen it in ==3.6.0: retire rocm-0901-planted, or mend its probe"),
        (">=3.6", "3.9.0", "nobody has seen it in >=3.6: retire rocm-0901-planted, or mend its probe"),
        (">=3.6.0,<3.7", "3.4.0", "nobody has seen it in >=3.6.0,<3.7: retire rocm-0901-planted, or mend its probe"),
        ("==3.6.0", "3.6.0", "triton==3.6.0 does not have it any more: retire rocm-0901-planted, or mend its probe"),
    ],
)
def test_a_range_of_which_nothing_is_left_is_advised_to_nobody(
    tmp_path: Path, range_: str, last: str, advice: str
) -> None:
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
def test_satisfiable(text: str, some: bool) -> None:
    assert ranges.satisfiable(text) is some


@pytest.mark.parametrize(
    ("old", "version", "new"),
    [
        (">=3.5.1,<3.7", "3.7.1", ">=3.5.1,<=3.7.1"),
        (">=3.5.1,<3.7", "3.4.0", ">=3.4.0,<3.7"),
        ("==3.7.1", "3.8.0", ">=3.7.1,<=3.8.0"),
        ("==3.7.1", "3.6.0", ">=3.6.0,<=3.7.1"),
        (">=3.4,!=3.6.0", "3.6.0", ">=3.4"),
        ("<3.4", "3.4.0", "<=3.4.0"),
    ],
)
def test_extended(old: str, version: str, new: str) -> None:
    assert ranges.extend_range(old, version) == new
    assert parse_range(new).contains(version)


def test_diff_is_of_the_files_line(tmp_path: Path) -> None:
    quirk = plant(tmp_path, range_=">=3.4,<3.9")
    with child(tmp_path) as worker:
        stale = probe.run(quirk, "triton==3.6.0", worker=worker)
    line = next(n for n, text in enumerate(Path(quirk.file).read_text().splitlines(), 1) if "toolchain" in text)
    assert stale.diff.splitlines() == [
        f"--- {quirk.file}:{line}",
        '-toolchain = { triton = ">=3.4,<3.9" }',
        '+toolchain = { triton = ">=3.4,<3.6.0" }',
    ]
    quirk = plant(tmp_path, range_=">=3.7")
    with child(tmp_path, off=BOOM) as worker:
        narrow = probe.run(quirk, "triton==3.6.0", worker=worker)
    assert narrow.diff.endswith('+toolchain = { triton = ">=3.6.0" }')


def test_no_diff_where_the_range_is_right(tmp_path: Path) -> None:
    with child(tmp_path, off=BOOM) as worker:
        assert probe.run(plant(tmp_path), "triton==3.6.0", worker=worker).diff == ""
