"""Retiring: a tombstone that the loader knows, comments kept, ids never free again, and no living bug buried."""

import contextlib
import datetime
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from quirk_files import plant

from portattn.errors import ArgumentError, DataError
from portattn.planning import quirk_files
from portattn.planning.registry import Registry, find_backends
from portattn.tools.quirks import bisect_retire, drafts
from portattn.tools.quirks.probe_results import edit

TODAY = datetime.date(2026, 11, 30)
BLOCK = """
[[verified]]
toolchain = "{toolchain}"
target = "rocm:gfx942"
level = "compiles"
off = "{off}"
on = "{on}"
date = {date}
"""


def planted(tmp_path: Path, name: str = "rocm-0901-planted", blocks: str = "", range_: str = "<3.3") -> Registry:
    path = plant(tmp_path, name, 'path = "vendor"', when=f'toolchain = {{ triton = "{range_}" }}  # seen so')
    path.write_text("# why this is here\n" + path.read_text() + blocks)
    return Registry.read(find_backends(), tmp_path)


def block(toolchain: str, off: str, on: str = "pass", date: str = "2026-11-20") -> str:
    return BLOCK.format(toolchain=toolchain, off=off, on=on, date=date)


def test_a_tombstone(tmp_path) -> None:
    planted(tmp_path, "rocm-0902-next")
    known = planted(tmp_path)
    made = bisect_retire.retire(
        "rocm-0901-planted", known, " fixed upstream ", fixed_in="triton==3.3.1", replaced_by="rocm-0902-next",
        today=TODAY,
    )  # fmt: skip
    text = Path(made.file).read_text()
    assert text.startswith("# why this is here\n")
    assert "# seen so" in text
    now = Registry.read(find_backends(), tmp_path)
    assert set(now.quirks) == {"rocm-0902-next"}
    tombstone = now.retired["rocm-0901-planted"].retired
    assert (tombstone.date, tombstone.reason) == (TODAY, "fixed upstream")
    assert (tombstone.fixed_in, tombstone.replaced_by) == ("triton==3.3.1", "rocm-0902-next")
    assert drafts.next_number("rocm", tmp_path / "out", now) == 903
    with pytest.raises(ArgumentError, match="was retired on 2026-11-30: fixed upstream"):
        bisect_retire.retire("rocm-0901-planted", now, "again")
    made = bisect_retire.retire("rocm-0902-next", now, "was no bug", today=TODAY)
    text = Path(made.file).read_text()
    assert ("fixed_in" in text, "replaced_by" in text) == (False, False), "what is empty is left out"
    supported = bisect_retire.retire("rocm-0903-x", planted(tmp_path, "rocm-0903-x", range_=">=3.5,<3.7"), "gone")
    assert supported.still_in_range == ("triton==3.5.1", "triton==3.6.0")


@pytest.mark.parametrize(
    ("blocks", "refused"),
    [
        ("", False),
        (block("triton==3.2.0", "fail:signature"), True),
        (block("triton==3.2.0", "pass", "not run"), False),
        (block("triton==3.2.0", "fail:signature", "fail:signature"), False),
        # A caution has no work-around to run.
        (block("triton==3.2.0", "fail:signature", "not run"), True),
        # A newer compiler without the bug does not help those who have the older one, which is supported.
        (block("triton==3.2.0", "fail:signature") + block("triton==3.9.0", "pass", "not run"), True),
        (block("triton==3.2.0", "fail:signature", date="2026-01-01") + block("triton==3.3.1", "pass", "not run"), True),
        (block("triton==3.1.0", "fail:signature") + block("triton==3.2.0", "pass", "not run"), False),
        (block("triton==3.10.0", "fail:signature") + block("triton==3.9.0", "pass", "not run"), True),
    ],
)
def test_a_confirmed_entry_is_not_buried(tmp_path, blocks: str, refused: bool) -> None:
    known = planted(tmp_path, blocks=blocks)
    before = Path(known.quirks["rocm-0901-planted"].file).read_text()
    if not refused:
        bisect_retire.retire("rocm-0901-planted", known, "gone")
        return
    with pytest.raises(ArgumentError, match="must be confirmed no more on a supported compiler"):
        bisect_retire.retire("rocm-0901-planted", known, "gone")
    assert Path(known.quirks["rocm-0901-planted"].file).read_text() == before
    bisect_retire.retire("rocm-0901-planted", known, "gone", force=True)
    assert "rocm-0901-planted" in Registry.read(find_backends(), tmp_path).retired
    assert "[[verified]]" in Path(known.quirks["rocm-0901-planted"].file).read_text()


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"reason": "  "}, "--reason"), ({"quirk_id": "nobody"}, "ID"),
        ({"fixed_in": "3.7.1"}, "--fixed-in"), ({"fixed_in": "gcc==14"}, "--fixed-in"),
        ({"replaced_by": "nobody"}, "--replaced-by"), ({"replaced_by": "rocm-0901-planted"}, "--replaced-by"),
    ],
)  # fmt: skip
def test_bad_input(tmp_path, given: dict[str, str], argument: str) -> None:
    known = planted(tmp_path)
    before = Path(known.quirks["rocm-0901-planted"].file).read_text()
    arguments = {"quirk_id": "rocm-0901-planted", "registry": known, "reason": "x"} | given
    with pytest.raises(ArgumentError) as refused:
        bisect_retire.retire(**arguments)
    assert refused.value.argument == argument
    assert Path(known.quirks["rocm-0901-planted"].file).read_text() == before


def test_an_edit_that_would_break_the_file_is_not_written(tmp_path) -> None:
    path = Path(planted(tmp_path).quirks["rocm-0901-planted"].file)
    before = path.read_text()
    with pytest.raises(DataError, match="nothing was written"):
        edit(path, "rocm-0901-planted", lambda document: document.update(symptom="tired"))
    with pytest.raises(DataError, match="and not 'rocm-0007-other'"):
        edit(path, "rocm-0007-other", lambda document: None)
    assert (path.read_text(), [p.name for p in path.parent.iterdir()]) == (before, [path.name])


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_the_entry_stays_as_it_was(tmp_path) -> None:
    known = planted(tmp_path)
    path = Path(known.quirks["rocm-0901-planted"].file)
    before = path.read_text()
    with full_disk(), pytest.raises(DataError, match=f"{path.name}: cannot be written: File too large"):
        bisect_retire.retire("rocm-0901-planted", known, "gone")
    assert (path.read_text(), [p.name for p in path.parent.iterdir()]) == (before, [path.name])
    assert "rocm-0901-planted" in Registry.read(find_backends(), tmp_path).quirks


def test_nothing_is_in_the_folder_while_the_change_is_checked(tmp_path, monkeypatch) -> None:
    """A trial file there would be read by other processes, and stay where this one is killed."""
    known = planted(tmp_path)
    path = Path(known.quirks["rocm-0901-planted"].file)
    seen: list[str] = []
    real = quirk_files.quirk_problems

    def look(*arguments):
        seen.extend(p.name for p in path.parent.iterdir())
        return real(*arguments)

    monkeypatch.setattr(quirk_files, "quirk_problems", look)
    bisect_retire.retire("rocm-0901-planted", known, "gone")
    assert seen == [path.name]


def test_the_command_line(portattn, tmp_path, monkeypatch) -> None:
    known = planted(tmp_path, range_=">=3.5,<3.7")
    monkeypatch.setattr(Registry, "load", lambda: known)
    words = ("--reason", "fixed", "--fixed-in", "triton==3.7.1")
    called = portattn("quirks", "retire", "rocm-0901-planted", *words, exits=0)
    assert "triton==3.5.1, triton==3.6.0" in called.out
    assert "rocm-0901-planted" in Registry.read(find_backends(), tmp_path).retired
    missing = portattn("quirks", "retire", "nobody", "--reason", "x", "--json")
    assert (missing.status, missing.json["error"]["argument"]) == (2, "ID")
