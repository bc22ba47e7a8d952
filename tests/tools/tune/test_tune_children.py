"""Work in child processes: errors, hanging children, children that die, and time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from portattn.tools.tune.run import in_children


def raises(item: int) -> int:
    raise ValueError(f"item {item}")


def test_what_a_child_raises_is_raised_here():
    with pytest.raises(ValueError, match="item 3"):
        in_children([3], raises, 1, lambda item, found: None)


def waits(item: Path) -> None:
    item.write_text(str(os.getpid()))
    threading.Event().wait(60)


def test_children_that_hang_are_killed(tmp_path):
    marks = [tmp_path / "1", tmp_path / "2"]
    assert not in_children(marks, waits, 2, lambda item, found: None, lambda: all(m.exists() for m in marks))
    for mark in marks:
        with pytest.raises(ProcessLookupError):  # no such process any more
            os.kill(int(mark.read_text() or 0), 0)


def stop(item: int) -> None:
    os._exit(1)


def test_a_child_that_dies_is_said():
    assert not in_children([1], stop, 1, lambda item, found: None)
