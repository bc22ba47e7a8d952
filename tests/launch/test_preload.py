"""What is made ready beside a child's compile, and launchers that are made when something needs them."""

from __future__ import annotations

import copy
import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from portattn.launch import native, preload


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
    launcher = preload._Launcher(Made, "source", "metadata")
    assert made == []
    assert launcher(1, 2) == ("source", "metadata", (1, 2))
    assert launcher.launch_cooperative_grid
    assert launcher(3) == ("source", "metadata", (3,))
    assert len(made) == 1


def test_a_launcher_that_cannot_be_made_says_so_each_time() -> None:
    launcher = preload._Launcher(Mock(side_effect=RuntimeError("no C compiler")), "source", "metadata")
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
        with preload.meanwhile("cuda", "here"):
            assert begun.wait(30)
            assert "here" not in seen
            go_on.set()
            raise KeyError

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(preload, "_triton_driver", lambda: seen.append("driver"))
    monkeypatch.setattr(preload, "_triton_key", lambda: seen.append("key"))
    with pytest.raises(KeyError):
        failing()
    assert sorted(seen) == ["driver", "here", "key"]


def test_only_cuda_needs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(native, "load", lambda folder: seen.append(folder))
    monkeypatch.setattr(preload, "_triton_driver", lambda: seen.append("driver"))
    monkeypatch.setattr(preload, "_triton_key", lambda: seen.append("key"))
    with preload.meanwhile("rocm", "here"):
        pass
    assert seen == ["driver", "key"]


def test_the_digest_of_a_kernel_is_made_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton has a lock for it; of a function that is interpreted, and of a module that is not there, none is."""
    asked: list[str] = []

    class Kernel:
        _hash_lock = object()

        @property
        def cache_key(self) -> str:
            asked.append(threading.current_thread().name)
            return "key"

    module = SimpleNamespace(locked=Kernel(), interpreted=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", module)
    monkeypatch.setattr(preload, "_triton_driver", lambda: None)
    monkeypatch.setattr(preload, "_triton_key", lambda: None)
    names = [("kernels_of_a_test", "interpreted"), ("not_imported", "locked"), ("kernels_of_a_test", "locked")]
    with preload.meanwhile("rocm", "here", names):
        pass
    assert asked == ["portattn-ready"]


def test_without_a_thread_all_is_made_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with preload.meanwhile("cuda", ""):
        pass


class Compiled:
    """A kernel of Triton's that makes its launcher as it is loaded."""

    def __init__(self, backend: str = "cuda", inside: Compiled | None = None) -> None:
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend=backend))
        self.run: Any = None
        self.inside = inside

    def _init_handles(self) -> None:
        from triton.runtime import driver

        if self.inside is not None:
            preload.load(self.inside, "")
        self.run = driver.active.launcher_cls("source", "metadata")


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's driver, with a launcher that counts."""
    pytest.importorskip("triton")
    from triton import runtime

    made.clear()
    active = SimpleNamespace(launcher_cls=Made)
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(native, "load", lambda folder: (object(), ""))
    return active


def test_a_kernel_is_loaded_without_its_launcher(active: Any) -> None:
    kernel = Compiled()
    preload.load(kernel, "")
    assert made == []
    assert active.launcher_cls is Made
    assert (kernel.run(1), len(made)) == (("source", "metadata", (1,)), 1)


def test_the_drivers_class_is_put_back_whatever_happens(active: Any) -> None:
    broken = Compiled()
    broken._init_handles = Mock(side_effect=RuntimeError("out of resource"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of resource"):
        preload.load(broken, "")
    assert active.launcher_cls is Made
    outer = Compiled(inside=Compiled())  # a hook of Triton's may load another kernel
    preload.load(outer, "")
    assert active.launcher_cls is Made
    assert outer.run(2) == ("source", "metadata", (2,))


@pytest.mark.parametrize(("backend", "library"), [("hip", object()), ("cuda", None)])
def test_where_tritons_launcher_is_needed_it_is_made_at_once(active, monkeypatch, backend, library):
    """What cannot be made is then a failure of the path, not of a call."""
    monkeypatch.setattr(native, "load", lambda folder: (library, ""))
    preload.load(Compiled(backend), "")
    assert len(made) == 1


def test_looking_at_a_launcher_makes_none(active: Any) -> None:
    launcher = preload._Launcher(Made, "source", "metadata")
    assert not hasattr(launcher, "__wrapped__")
    assert not hasattr(launcher, "_nothing")
    copy.copy(launcher)
    assert made == []


def test_triton_keeps_its_key() -> None:
    """The digest is found where this Triton has it, and computed once."""
    pytest.importorskip("triton")
    preload._triton_key()
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        from triton.compiler.compiler import triton_key
    before = triton_key.cache_info()
    preload._triton_key()
    assert triton_key.cache_info().hits == before.hits + 1
