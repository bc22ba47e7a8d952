"""The C functions of native.c: compiled once a machine, as Triton compiles its own launchers, and loaded when needed.

The library is kept in portattn's cache folder, by its source's content and Python's ABI. Where none can be made (no C
compiler, no Python.h, a folder that takes no files), calls are launched from Python, and `portattn doctor` says why.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

import platformdirs

SOURCE = Path(__file__).with_name("native.c")
NAME = "portattn_native"  # what native.c initialises
SECONDS = 60.0  # limit of the compiler: it takes less than one
_lock = threading.Lock()
_loaded: dict[Path, tuple[Any, str]] = {}


def load(cache_dir: str = "") -> tuple[Any, str]:
    """The module, with its types Launches and Hit, and ""; or None, and why there is none. Looked for once a process.

    cache_dir  portattn's cache folder; empty for the platform's
    """
    place = path(cache_dir)
    found = _loaded.get(place)
    if found is None:
        with _lock:
            found = _loaded.get(place)
            if found is None:
                found = _loaded[place] = _make(place)
    return found


def path(cache_dir: str) -> Path:
    """Where the library is, or would be."""
    folder = cache_dir or platformdirs.user_cache_dir("portattn", appauthor=False)
    abi = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return Path(folder) / "native" / f"{_digest()}{abi}"


@functools.lru_cache(maxsize=1)
def _digest() -> str:
    """Of what decides the library's code."""
    parts = (SOURCE.read_bytes(), repr((sys.version_info, sysconfig.get_platform(), os.environ.get("CC"))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _make(place: Path) -> tuple[Any, str]:
    """The module at a place, compiled where it is not there or does not load; or why there is none."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "this Python has no global lock, which the C functions rely on"
    try:
        if place.exists():
            try:
                return _import(place), ""
            except ImportError:
                pass  # another machine's, or half a disk's: made anew
        _compile(place)
        return _import(place), ""
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        lines = [line for line in said.splitlines() if "error" in line] or said.splitlines() or [type(error).__name__]
        return None, lines[0].strip()[:300]


def _import(place: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(place))
    spec = importlib.util.spec_from_file_location(NAME, place, loader=loader)
    if spec is None:
        raise ImportError(f"{place} is no extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(place: Path) -> None:
    """Compile beside the place and rename over it: another process sees all of the library, or none."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=place.parent, suffix=".part")
    os.close(handle)
    command = [*_compiler(), "-O2", "-shared", "-fPIC", f"-I{sysconfig.get_config_var('INCLUDEPY')}"]
    try:
        subprocess.run([*command, str(SOURCE), "-o", part], check=True, capture_output=True, text=True, timeout=SECONDS)
        os.replace(part, place)
    finally:
        Path(part).unlink(missing_ok=True)


def _compiler() -> list[str]:
    """The C compiler that Triton takes: CC, gcc or clang."""
    named = os.environ.get("CC")
    found = shlex.split(named) if named else [p for p in map(shutil.which, ("gcc", "clang", "cc")) if p][:1]
    if not found:
        raise FileNotFoundError("no C compiler: none of gcc, clang, cc is on the path, and CC is not set")
    return found
