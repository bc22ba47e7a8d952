"""The C functions of native.c: compiled once a machine, as Triton compiles its own launchers, and loaded when needed.

The library is kept in portattn's cache folder, by its source's content and Python's ABI. It runs in this process: it is
loaded from there only if nobody else can have written it and it is whole (launch/verified_dlopen.py), and kept there
only once a child process has imported it. Where none can be made (no C compiler, no Python.h, a folder that takes no
files), calls are launched from Python, and `portattn doctor` says why.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

from portattn.files import Untrusted, cache_folder, locked, read_limited, sweep, trusted_folder, workshop
from portattn.launch import c_compiler, verified_dlopen
from portattn.launch.c_compiler import BuildFailed

SOURCE = Path(__file__).with_name("native.c")
NAME = "portattn_native"  # what native.c initialises
SECONDS = 60.0  # limit of the compiler: it takes less than one
TRIAL_SECONDS = 20.0  # limit of the child that imports what was compiled: it takes a twentieth of one
# Prints its last argument once the library's types are there. A crash leaves no core file.
_TRIAL = """
import importlib.machinery, importlib.util, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
name, path, word = sys.argv[1:]
loader = importlib.machinery.ExtensionFileLoader(name, path)
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
loader.exec_module(module)
module.Launches, module.Sized, module.Kind, module.Finder
print(word)
"""
_lock = threading.Lock()
_loaded: dict[Path, tuple[Any, str]] = {}


def load(cache_dir: str = "") -> tuple[Any, str]:
    """The module, with its types Launches, Sized, Kind and Finder, and ""; or None, and why there is none. It is looked
    for once.

    cache_dir  portattn's cache folder; empty for the platform's

    Whatever the compiler, the folder or the library is, nothing but an interrupt comes out of it.
    """
    try:
        place = path(cache_dir)
    except OSError as error:
        return None, f"native.c cannot be read: {error}"
    found = _loaded.get(place)
    if found is None:
        with _lock:
            found = _loaded.get(place)
            if found is None:
                found = _loaded[place] = _make(place)
    return found


def path(cache_dir: str) -> Path:
    """Where the library is, or would be."""
    abi = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return cache_folder(cache_dir) / "native" / f"{_digest(os.environ.get('CC'))}{abi}"


@functools.lru_cache(maxsize=8)
def _digest(compiler: str | None) -> str:
    """Of what decides the library's code."""
    parts = (SOURCE.read_bytes(), repr((sys.version_info, sysconfig.get_platform(), compiler)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _make(place: Path) -> tuple[Any, str]:
    """The module at a place, compiled where it is not there or must not be loaded; or why there is none."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "this Python has no global lock, which the C functions rely on"
    try:
        return _load_or_compile(place), ""
    except Exception as error:  # noqa: BLE001 - the reason is handed on; a library may raise anything as it is imported
        lines = str(error).splitlines() or [type(error).__name__]
        return None, lines[0].strip()[:300]


def _load_or_compile(place: Path) -> Any:
    found = _cached(place)
    if found is not None:
        return found
    with trusted_folder(place.parent, make=True):  # the lock's file, too, is put where nobody else can put one
        sweep(place.parent)
        with locked(place.with_name(f".{place.name}.lock"), SECONDS + TRIAL_SECONDS):
            # Another process may have made it while this one waited.
            found = _cached(place)
            if found is None:
                _compile(place)
                found = _import(place)
    return found


def _cached(place: Path) -> Any:
    """The module at a place; None where there is none, or none that may be loaded: then it is made anew."""
    try:
        return _import(place)
    except (OSError, ImportError, Untrusted):  # ImportError: another machine's
        return None


def _import(place: Path) -> Any:
    """Import the library at a place, once it is checked. Raises Untrusted, OSError, and what importing raises."""
    handle = verified_dlopen.opened(place)
    # By the descriptor that was checked. It stays open: its number is part of the name that the loader knows it by.
    path = f"/proc/self/fd/{handle}"
    try:
        return _module(path if os.path.exists(path) else str(place))
    except BaseException:
        os.close(handle)
        raise


def _module(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(place: Path) -> None:
    """Compile, import in a child, and only then keep: another process sees all of the library, or none.

    Raises BuildFailed, Untrusted, OSError.
    """
    options = ["-O2", "-shared", "-fPIC", f"-I{sysconfig.get_config_var('INCLUDEPY')}"]
    with workshop(place.parent) as folder:
        made = folder / f"{NAME}.so"
        command = [*c_compiler.compiler(), *options, str(SOURCE), "-o", str(made)]
        c_compiler.run(command, "native.c was not compiled", SECONDS, folder)
        if not made.is_file():
            raise BuildFailed(f"native.c was not compiled: {command[0]!r} ended well and made no library")
        _try(made, folder)
        verified_dlopen.keep(place, read_limited(made, verified_dlopen.MOST))


def _try(made: Path, folder: Path) -> None:
    """Import a library in a child process, which it may crash. Raises BuildFailed when it does, or does not import."""
    if not sys.executable:
        raise BuildFailed(
            "native.c is not used: it would be tried in a child first, and sys.executable names no Python"
        )
    word = os.urandom(8).hex()
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, NAME, str(made), word]
    if word not in c_compiler.run(command, "the compiled native.c does not import", TRIAL_SECONDS, folder):
        raise BuildFailed(f"native.c is not used: {sys.executable} is no Python that could try it")


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that held it is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
