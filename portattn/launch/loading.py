"""What loads compiled kernels with little waiting for C compilers.

Triton, before 3.7, has a C compiler make a launcher for each kernel as it is loaded, and one library for its driver;
`native` makes another. A compile takes 0.3 to 0.5 s. Kept launches never call Triton's launchers, so they are made when
something does; the two libraries are made while a child process compiles the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from portattn.launch import native

_lock = threading.RLock()


class _Launcher:
    """Triton's launcher of one kernel, made when it is first asked for anything."""

    __slots__ = ("_lock", "_made", "_make")

    def __init__(self, make: Callable[..., Any], source: Any, metadata: Any) -> None:
        self._make = functools.partial(make, source, metadata)
        self._lock, self._made = threading.Lock(), None

    def _launcher(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
        return self._made

    def __call__(self, *arguments: Any) -> Any:
        return self._launcher()(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher(), name)


def load(compiled: Any) -> None:
    """Load a compiled kernel on the current device, if it is not loaded: later it can be launched inside the capture of
    a CUDA graph. Its launcher of Triton's is made when it is first needed.
    """
    from triton.runtime import driver

    with _lock:
        active = driver.active
        make = active.launcher_cls
        active.launcher_cls = functools.partial(_Launcher, make)
        try:
            compiled._init_handles()
        finally:
            active.launcher_cls = make


@contextlib.contextmanager
def meanwhile(cache_dir: str) -> Iterator[None]:
    """Beside the block, in a thread, make ready what loading and launching will need; wait for it at the end.

    cache_dir  portattn's cache folder; empty for the platform's
    """
    thread = threading.Thread(target=_make_ready, args=(cache_dir,), name="portattn-ready", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _make_ready(cache_dir: str) -> None:
    for make in (functools.partial(native.load, cache_dir), _triton_driver, _triton_key):
        with contextlib.suppress(Exception):  # who needs it asks again, and is told
            make()


def _triton_driver() -> None:
    from triton.runtime import driver

    _ = driver.active.utils


def _triton_key() -> None:
    """The digest of Triton's own files, which is part of every key in its cache; it keeps it for the process."""
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # 3.5 and later; before
        find = getattr(importlib.import_module(place), "triton_key", None)
        if find is not None:
            find()
            return
