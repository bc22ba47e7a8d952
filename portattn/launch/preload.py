"""Loading compiled kernels with little waiting for C compilers.

Triton, before 3.7, has a C compiler make a launcher for each CUDA kernel as it is loaded, and one library for its
driver; `native` makes another. Each takes 0.3 to 0.5 s. Cached launches never call them: where native.c is
there to launch by, they are made when something else does. The libraries are made while a child compiles the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from portattn.launch import cudadriver, native
from portattn.worker.triton_digest import digest

_lock = threading.RLock()


class _Launcher:
    """Triton's launcher of one kernel, made when it is first called or asked for a name of its own."""

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
        if name.startswith("_"):  # what copying and inspecting ask of anything
            raise AttributeError(name)
        return getattr(self._launcher(), name)


def load(compiled: Any, cache_dir: str) -> None:
    """Load a compiled kernel on the current device, if it is not loaded: later it can be launched inside the capture of
    a CUDA graph. Raises what compiler and driver raise.

    cache_dir  portattn's cache folder; empty for the platform's
    """
    if compiled.metadata.target.backend != cudadriver.KIND or native.load(cache_dir)[0] is None:
        compiled._init_handles()  # Triton's launcher is needed, and what cannot be made shall fail here
        return
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
def meanwhile(backend: str, cache_dir: str, kernels: Sequence[tuple[str, str]] = ()) -> Iterator[None]:
    """Beside the block, in a thread, make ready what loading and launching will need; wait for it at the end, unless
    the block is interrupted.

    backend    of the target: only CUDA kernels are launched by native.c
    cache_dir  portattn's cache folder; empty for the platform's
    kernels    what is being compiled: modules that are imported already, and functions of theirs
    """
    ready: list[Callable[[], object]] = [_triton_driver, _triton_key]
    ready += [functools.partial(_kernel_key, *names) for names in kernels]
    if backend == cudadriver.KIND:
        ready.insert(0, functools.partial(native.load, cache_dir))
    thread = threading.Thread(target=_make, args=(ready,), name="portattn-ready", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread to be had: all is made where it is needed
        thread.start()
    try:
        yield
    except Exception:
        _wait(thread)
        raise
    _wait(thread)


def _wait(thread: threading.Thread) -> None:
    if thread.ident is not None:
        thread.join()


def _make(ready: list[Callable[[], object]]) -> None:
    for make in ready:
        with contextlib.suppress(Exception):  # who needs it asks again, and is told
            make()


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that held it is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _triton_driver() -> None:
    from triton.runtime import driver

    with _lock:  # several kernels may be compiled ahead at once: one of them makes it
        _ = driver.active.utils


def _triton_key() -> None:
    find = digest()
    if find is not None:
        find()


def _kernel_key(module: str, function: str) -> None:
    """The digest of a kernel's source and of all that it calls, by which Triton looks it up; it keeps it as well.

    Only where Triton has a lock for it (3.5 and later): another thread might compile the same kernel.
    """
    kernel: Any = getattr(sys.modules.get(module), function, None)
    if hasattr(kernel, "_hash_lock"):
        _ = kernel.cache_key
