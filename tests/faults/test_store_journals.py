"""Files that a run goes on with: a line that was changed is never gone on with, and is named."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from portattn.errors import DataError
from portattn.tools import run_log
from portattn.tools.run_log import RunLog


class Line(msgspec.Struct, frozen=True):
    name: str
    figures: tuple[float, ...] = ()


LINES = [Line(name=f"case {n} – π", figures=(1.5 * n, 0.25)) for n in range(5)]


def decoded(data: bytes, resumed: bool = True) -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for _, line in run_log.lines(Path("x.jsonl"), data, resumed)]


def test_lines_come_back_as_they_were_and_are_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.touch()
    with RunLog(path, tmp_path / ".lock", op="bench", option="--out", shown=tmp_path) as file:
        for line in LINES:
            file.append(line)
    data = path.read_bytes()
    assert data == b"".join(map(run_log.encode_record, LINES))
    assert decoded(data) == LINES
    assert decoded(data[:-1]) == LINES[:-1], "a line without an end is left out"
    assert [msgspec.json.decode(line, type=Line) for line in data.splitlines()] == LINES, "other readers see no more"
    assert set(msgspec.json.decode(data.splitlines()[0])) == {"name", "figures", "sum"}


def test_a_changed_line_is_found(tmp_path: Path) -> None:
    chance, data = random.Random(5), b"".join(map(run_log.encode_record, LINES))
    found = 0
    for _ in range(2_000):
        at, kind = chance.randrange(len(data)), chance.randrange(3)
        bit = bytes([data[at] ^ 1 << chance.randrange(8)])
        changed = data[:at] + (bit + data[at + 1 :], data[at + 1 :], chance.randbytes(3) + data[at:])[kind]
        try:
            lines = decoded(changed)
        except DataError:
            found += 1
            continue
        # The last line's end is gone, or a byte was inserted after it: what is left was written.
        assert lines == LINES[: len(lines)]
        assert len(lines) >= 4
    assert found > 1_900


def test_lines_of_an_older_release_are_shown_and_not_gone_on_with() -> None:
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in LINES)
    assert decoded(data, resumed=False) == LINES
    with pytest.raises(DataError, match="an older portattn wrote it"):
        decoded(data)
