"""What is made ready beside a child's compile, and launchers that are made when something needs them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from portattn.launch import loading, native


class Made:
    """In the place of Triton's launcher."""

    launch_cooperative_grid = True

    def __init__(self, source: str, metadata: str) -> None:
        self.source, self.metadata = source, metadata
        made.append(self)

    def __call__(self, *arguments: int) -> tuple[str, str, tuple[int, ...]]:
        return self.source, self.metadata, arguments


made: list[Made] = []


def test_a_launcher_is_made_once_and_late() -> None:
    made.clear()
    launcher = loading._Launcher(Made, "source", "metadata")
    assert made == []
    assert launcher(1, 2) == ("source", "metadata", (1, 2))
    assert launcher.launch_cooperative_grid
    assert launcher(3) == ("source", "metadata", (3,))
    assert len(made) == 1


def test_a_launcher_that_cannot_be_made_says_so_each_time() -> None:
    def make(source: str, metadata: str) -> Any:
        raise RuntimeError("no C compiler")

    launcher = loading._Launcher(make, "source", "metadata")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no C compiler"):
            launcher()


def test_what_is_made_beside_is_there_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the block fails; and what cannot be made is left to whoever needs it."""
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def load(folder: str) -> Any:
        begun.set()
        assert go_on.wait(30)
        seen.append(folder)
        raise OSError("no room")

    def failing() -> None:
        with loading.meanwhile("here"):
            assert begun.wait(30)
            assert seen == []
            go_on.set()
            raise KeyError

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(loading, "_triton_driver", lambda: seen.append("driver"))
    monkeypatch.setattr(loading, "_triton_key", lambda: seen.append("key"))
    with pytest.raises(KeyError):
        failing()
    assert seen == ["here", "driver", "key"]


def test_triton_keeps_its_key() -> None:
    """The digest is found where this Triton has it, and computed once."""
    pytest.importorskip("triton")
    loading._triton_key()
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        from triton.compiler.compiler import triton_key
    before = triton_key.cache_info()
    loading._triton_key()
    assert triton_key.cache_info().hits == before.hits + 1
