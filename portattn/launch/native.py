"""The C functions of native.c: compiled once a machine, as Triton compiles its own launchers, and loaded when needed.

The library is kept in portattn's cache folder, by its source's content and Python's ABI. It runs in this process: it is
loaded from there only if nobody else can have written it and it is whole (launch/native.py), and kept there
only once a child process has imported it. Where none can be made (no C compiler, no Python.h, a folder that takes no
files), calls are launched from Python, and `portattn doctor` says why.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from portattn.files import (
    UntrustedPath,
    cache_folder,
    check_owner,
    hold_lock,
    read_limited,
    read_open,
    sweep,
    trusted_folder,
    workshop,
    write_whole,
)

_SAID = 64 << 10  # bytes of a program's output that are read
_ROOM = 4096  # bytes of it that the disk has in any case
_LINE = 300  # characters of a reason


class BuildError(Exception):
    """A program did not do what it was for; the text is one line that says why."""


def compiler() -> list[str]:
    """The C compiler that Triton takes: CC, with its options; else gcc or clang. Raises BuildError without one."""
    named = os.environ.get("CC", "")
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"CC is {named!r}, which is no command: {error}") from None
    if words:
        return words
    if named:
        raise BuildError(f"CC is {named!r}, which names no program")
    found = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if found is None:
        raise BuildError("no C compiler: none of gcc, clang, cc is on the path, and CC is not set")
    return [found]


def run(command: Sequence[str], what: str, seconds: float, folder: Path) -> str:
    """Run a program to its end; what it printed. Raises BuildError, which begins with `what`, when it ends badly.

    folder  for its temporary files, and for its output meanwhile: a pipe would be held open by what it leaves running

    Whoever interrupts this process ends the program with all that it started; the interrupt passes through.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as output:
        try:
            if output.write(bytes(_ROOM)) != _ROOM:  # for the program: of a full disk it could not say so there
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            output.seek(0)
        except OSError as error:
            raise BuildError(f"{what}: no file can be written in {folder}: {error.strerror}") from None
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, "TMPDIR": str(folder.absolute())}, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # ValueError: a NUL in a name
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise BuildError(f"{what}: {command[0]!r} cannot be started: {reason}") from None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{what}: {command[0]!r} has not ended after {seconds:g} s") from None
        finally:
            _end(process)
        written = output.tell()  # the program's own place: it shares the file's
        output.seek(0)
        said = (output.read(min(written, _SAID)) or b"").decode(errors="replace")
    if status == 0:
        return said
    how = f"exit status {status}"
    if status < 0:
        names = {one.value: one.name for one in signal.Signals}
        how = f"died of {names.get(-status, f'signal {-status}')}"
    raise BuildError(f"{what}: {how}: {_cause(said)}"[:_LINE])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program, and what it left running in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it said nothing")


_MARK = b"\nportattn sealed "
MOST = 64 << 20  # bytes of a library


def seal(code: bytes) -> bytes:
    """A library's bytes with their digest at the end."""
    return code + _MARK + hashlib.sha256(code).digest()


def keep(place: Path, code: bytes) -> None:
    """Write a library, whole or not at all, in a folder that is made safe. Raises UntrustedPath, OSError."""
    with trusted_folder(place.parent, make=True):
        # Not synced: what a power failure leaves is not whole, and made anew.
        write_whole(place, seal(code), durable=False, mode=0o644)


def open_library(place: Path) -> int:
    """A descriptor of a library that was checked. Raises UntrustedPath, FileNotFoundError, and OSError."""
    with trusted_folder(place.parent) as folder:
        handle = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        check_owner(os.fstat(handle), str(place), "file")
        data = read_open(handle, place, MOST)
        end = len(data) - len(_MARK) - hashlib.sha256().digest_size
        if end < 0 or seal(data[:end]) != data:
            raise UntrustedPath(f"{place} is not whole")
    except BaseException:
        os.close(handle)
        raise
    return handle


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
        with hold_lock(place.with_name(f".{place.name}.lock"), SECONDS + TRIAL_SECONDS):
            # Another process may have made it while this one waited.
            found = _cached(place)
            if found is None:
                _compile(place)
                found = _import(place)
    return found


def _cached(place: Path) -> Any:
    """Return the module at a place; None if it is missing or must not be loaded: then it is built anew."""
    try:
        return _import(place)
    except (OSError, ImportError, UntrustedPath):  # ImportError: another machine's
        return None


def _import(place: Path) -> Any:
    """Import the library at a place, once it is checked. Raises UntrustedPath, OSError, and what importing raises."""
    handle = open_library(place)
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

    Raises BuildError, UntrustedPath, OSError.
    """
    options = ["-O2", "-shared", "-fPIC", f"-I{sysconfig.get_config_var('INCLUDEPY')}"]
    with workshop(place.parent) as folder:
        made = folder / f"{NAME}.so"
        command = [*compiler(), *options, str(SOURCE), "-o", str(made)]
        run(command, "native.c was not compiled", SECONDS, folder)
        if not made.is_file():
            raise BuildError(f"native.c was not compiled: {command[0]!r} ended well and made no library")
        _try(made, folder)
        keep(place, read_limited(made, MOST))


def _try(made: Path, folder: Path) -> None:
    """Import a library in a child process, which it may crash. Raises BuildError when it does, or does not import."""
    if not sys.executable:
        raise BuildError("native.c is not used: it would be tried in a child first, and sys.executable names no Python")
    word = os.urandom(8).hex()
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, NAME, str(made), word]
    if word not in run(command, "the compiled native.c does not import", TRIAL_SECONDS, folder):
        raise BuildError(f"native.c is not used: {sys.executable} is no Python that could try it")


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that held it is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
