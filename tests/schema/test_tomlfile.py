"""Data files: every complaint names the file, the line and the key."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest

from portattn import DataError
from portattn.schema.toml_reader import convert, line_of, read

TEXT = """\
title = "x"          # 1
[when]               # 2
arch = ["a"]         # 3
[when.toolchain]     # 4
triton = "<3"        # 5

[[verified]]         # 7
level = "runs"       # 8
[[verified]]         # 9
"level" = "compiles" # 10
"""


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("title",), 1),
        (("when",), 2),
        (("when", "arch"), 3),
        (("when", "toolchain"), 4),
        (("when", "toolchain", "triton"), 5),
        (("when", "toolchain", "ptxas"), 4),  # the innermost that is there
        (("verified", "0", "level"), 8),
        (("verified", "1", "level"), 10),
        (("nothing",), None),
    ],
)
def test_line_of(keys: tuple[str, ...], line: int | None) -> None:
    assert line_of(TEXT, *keys) == line


def test_a_key_is_not_found_by_its_beginning() -> None:
    assert line_of("title_long = 1\ntitle = 2\n", "title") == 2


def write(folder: Path, data: str | bytes) -> Path:
    path = folder / "data.toml"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("data", "line", "part"),
    [
        ("a = 1\nb = = 2\n", 2, "not TOML"),
        ("a = 1\na = 2\n", 2, "not TOML"),
        ("a = [1,\n\n", 2, "not TOML"),
        (b"a = 1\nb = '\xff'\n", 2, "not UTF-8"),
    ],
)
def test_broken_files_are_reported_with_their_line(tmp_path: Path, data: str | bytes, line: int, part: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(DataError) as error:
        read(path)
    assert abs(error.value.line - line) <= 1  # parsers differ about where a statement that never ends goes wrong
    assert str(path) in str(error.value)
    assert part in str(error.value)


def test_reading_gives_data_and_text(tmp_path: Path) -> None:
    data, text = read(write(tmp_path, TEXT))
    assert data["when"]["toolchain"] == {"triton": "<3"}
    assert text == TEXT


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    level: str
    count: int = 0


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    date: datetime.date | None = None
    verified: tuple[Inner, ...] = ()
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("title = 1\n", 1, ["'title'", "str", "int"]),
        ('title = "x"\ntitel = "y"\n', 2, ["'titel'", "unknown key"]),
        ('title = "x"\n[inner]\ncount = 2\n', 2, ["'inner'", "lacks the key", "level"]),
        ('title = "x"\n[[verified]]\nlevel = "a"\n[[verified]]\nlevel = 2\n', 5, ["verified", "level"]),
        ('title = "x"\n[inner]\nlevel = "a"\ncnt = 2\n', 4, ["inner.cnt", "unknown key"]),
        ('title = "x"\ndate = 3\n', 2, ["'date'"]),
    ],
)
def test_departures_from_the_schema(tmp_path: Path, text: str, line: int, parts: list[str]) -> None:
    path = write(tmp_path, text)
    data, text = read(path)
    with pytest.raises(DataError) as error:
        convert(data, Shape, path, text)
    assert error.value.line == line
    assert str(error.value).startswith(f"{path}:{line}: ")
    for part in parts:
        assert part in str(error.value)


def test_a_prefix_names_the_table(tmp_path: Path) -> None:
    path = write(tmp_path, '[one]\nlevel = "a"\n[two]\nlevel = 1\n')
    data, text = read(path)
    assert convert(data["one"], Inner, path, text, "one").level == "a"
    with pytest.raises(DataError, match=r"two\.level") as error:
        convert(data["two"], Inner, path, text, "two")
    assert error.value.line == 4


DAMAGED = {
    "deep": ("x = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    "a long integer": (f"x = {'9' * 5000}", "not TOML"),
}


@pytest.mark.parametrize(("text", "said"), DAMAGED.values(), ids=DAMAGED)
def test_what_python_cannot_take_is_an_error_with_the_file(tmp_path, text, said):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"x\.toml.*{said}"):
        read(path)
