"""Loads compiled kernels with little waiting for C compilers.

Before 3.7 Triton has a C compiler make a launcher per CUDA kernel and a library for its driver, 0.3 to 0.5 s each.
Launches by native.c never call them: they are made on demand, and native.c itself while a child compiles the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from portattn.config import available_cores
from portattn.launch import cudadriver, native
from portattn.worker.installed_packages import digest

_lock = threading.RLock()
FEW_CORES = 4


class _Launcher:
    """Triton's launcher of one kernel, made at its first call or attribute access."""

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
        if name.startswith("_"):  # asked by copy and inspect of any object
            raise AttributeError(name)
        return getattr(self._launcher(), name)


def load(compiled: Any, cache_dir: str) -> None:
    """Load a compiled kernel on the current device, so that it can later be launched in the capture of a CUDA graph."""
    if compiled.metadata.target.backend != cudadriver.KIND or native.load(cache_dir)[0] is None:
        compiled._init_handles()  # Triton's launcher is needed: its failure belongs here
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
    """Prepare loading and launching `kernels` (module, function) in threads beside the block, and wait at its end."""
    ready: list[list[Callable[[], object]]] = [[_triton_driver, _triton_key]]
    ready[0] += [functools.partial(_kernel_key, *names) for names in kernels]
    if backend == cudadriver.KIND:
        ready.insert(0, [functools.partial(native.load, cache_dir)])
    if available_cores() < FEW_CORES:  # a core stays free for the child process
        ready = [[make for chain in ready for make in chain]]
    threads = [threading.Thread(target=_make, args=(one,), name="portattn-ready", daemon=True) for one in ready]
    with contextlib.suppress(RuntimeError):  # no thread available: all is made on demand
        for thread in threads:
            thread.start()
    try:
        yield
    except Exception:
        _wait(threads)
        raise
    _wait(threads)


def _wait(threads: list[threading.Thread]) -> None:
    for thread in threads:
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
    """Import a kernel, and have Triton compute and keep its cache key, if it has a lock for it (3.5 and later)."""
    kernel: Any = getattr(importlib.import_module(module), function, None)
    if hasattr(kernel, "_hash_lock"):
        _ = kernel.cache_key
