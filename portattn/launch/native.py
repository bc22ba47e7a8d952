"""The C functions of native.c: compiled once a machine, as Triton compiles its launchers, and loaded when needed.

This process loads the library only if nobody else can have written it and its digest is right; the cache folder keeps
it only after a child process has imported it. Without one, calls launch from Python; `portattn doctor` says why.

`reader` has native.c read a tensor's sizes, strides and address through libtorch's C functions (`aoti_torch_get_…`). In
Python each of the three makes objects: 0.15 to 0.25 µs. The functions take an `at::Tensor`, whose offset in a Python
tensor is undocumented: it is searched and checked once a process, with Python as fall-back. They complain on stderr
about nested and sparse tensors, so native.c checks the first word of the implementation.
"""

from __future__ import annotations

import contextlib
import ctypes
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

import torch

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
    """A compiler or trial run failed; the text is a one-line reason."""


def compiler() -> list[str]:
    """Return the C compiler that Triton takes: CC with its options, else gcc or clang. Raise BuildError without one."""
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
    """Run a program to its end and return its output; raise BuildError, which begins with `what`, on failure.

    Output goes to a file in `folder`: a process left running would keep a pipe open. An interrupt ends the program."""
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
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it said nothing")


_MARK = b"\nportattn sealed "
MOST = 64 << 20  # bytes of a library


def seal(code: bytes) -> bytes:
    return code + _MARK + hashlib.sha256(code).digest()


def keep(place: Path, code: bytes) -> None:
    """Write a library, whole or not at all, in a folder that is made safe. Raise UntrustedPath or OSError."""
    with trusted_folder(place.parent, make=True):
        # Not synced: a file torn by a power failure fails its digest and is made anew.
        write_whole(place, seal(code), durable=False, mode=0o644)


def open_library(place: Path) -> int:
    """Return a descriptor of a checked library. Raise UntrustedPath, FileNotFoundError or OSError."""
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
TRIAL_SECONDS = 20.0  # limit of the trial import: it takes a twentieth of one
# Prints its last argument once the library's types are there. A crash leaves no core file.
_TRIAL = """
import importlib.machinery, importlib.util, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
name, path, word = sys.argv[1:]
loader = importlib.machinery.ExtensionFileLoader(name, path)
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
loader.exec_module(module)
module.Launches, module.Sized, module.Kind, module.Finder, module.Backward
print(word)
"""
_lock = threading.Lock()
_loaded: dict[Path, tuple[Any, str]] = {}


def load(cache_dir: str = "") -> tuple[Any, str]:
    """Return (module, "") or (None, reason), looked for once; nothing but an interrupt is raised."""
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
    abi = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return cache_folder(cache_dir) / "native" / f"{_digest(os.environ.get('CC'))}{abi}"


@functools.lru_cache(maxsize=8)
def _digest(compiler: str | None) -> str:
    parts = (SOURCE.read_bytes(), repr((sys.version_info, sysconfig.get_platform(), compiler)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _make(place: Path) -> tuple[Any, str]:
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
    with trusted_folder(place.parent, make=True):  # the lock's file is in a folder that only this user can write
        sweep(place.parent)
        with hold_lock(place.with_name(f".{place.name}.lock"), SECONDS + TRIAL_SECONDS):
            # Another process may have made it while this one waited.
            found = _cached(place)
            if found is None:
                _compile(place)
                found = _import(place)
    return found


def _cached(place: Path) -> Any:
    try:
        return _import(place)
    except (OSError, ImportError, UntrustedPath):  # ImportError: another machine's
        return None


def _import(place: Path) -> Any:
    """Import a library after checking it. Raise UntrustedPath, OSError, or the import's error."""
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
    """Compile, import in a child, and only then store: another process sees all of the library, or no file."""
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
    """Import a library in a child process, which it may crash. Raise BuildError if that fails."""
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


_WORD = ctypes.sizeof(ctypes.c_void_p)
_FUNCTIONS = ("dim", "sizes", "strides", "data_ptr", "dtype", "device_type", "device_index")
# (type, offset, class, and addresses of the functions): the `reader` of native.c's Kind.
Reader = tuple[type, int, int, int, int, int, int, int, int, int]


@functools.lru_cache(maxsize=1)
def reader() -> Reader | None:
    """Return native.c's reader of torch.Tensor and torch.nn.Parameter; None if it must not be used.

    It is (torch.Tensor, bytes from an object's address to its at::Tensor, first word of a plain tensor's
    implementation, addresses of the seven functions)."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), mode=_LOADED)
        functions = [getattr(library, f"aoti_torch_get_{name}") for name in _FUNCTIONS]
        with torch.device("cpu"):  # not the caller's default device: the answer is the process's
            tensors = _samples()
        offsets = {_offset(tensor) for tensor in tensors}
        if len(offsets) != 1 or None in offsets:
            return None
        offset: int = offsets.pop()  # type: ignore[assignment]
        classes = {_word(tensor._cdata) for tensor in tensors}
        if len(classes) != 1 or not all(_read(functions[:4], tensor, offset) == _said(tensor) for tensor in tensors):
            return None
        read = {(tensor.dtype, *_numbers(functions[4:], tensor, offset)) for tensor in tensors}
        if not len(read) == len({one[0] for one in read}) == len({one[1] for one in read}):
            return None
    except (OSError, AttributeError, RuntimeError, TypeError):
        return None
    places = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return (torch.Tensor, offset, classes.pop(), *places)  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def dtype_codes(*dtypes: torch.dtype) -> tuple[int, ...]:
    """Return the C functions' numbers of dtypes; 0 without a reader."""
    found = reader()
    if found is None:
        return (0,) * len(dtypes)
    ask = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(place) for place in found[7:]]
    with torch.device("cpu"):
        return tuple(_numbers(ask, torch.empty(0, dtype=dtype), found[1])[0] for dtype in dtypes)


_LOADED = getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", 0)  # torch has loaded it


def _samples() -> Sequence[torch.Tensor]:
    """Return plain tensors of every kind that a call may bring: of few and many axes, views, parameters, results."""
    x = torch.zeros(2, 3, 4, 5)
    asking = torch.zeros(2, 6, requires_grad=True)
    return [
        x, torch.zeros(()), torch.zeros(0, 3), torch.zeros(1, 2, 1, 2, 1, 2, 3), x.transpose(1, 2)[1:, :, 1:],
        torch.zeros(1, 3).expand(4, 3), torch.nn.Parameter(torch.zeros(3)), asking, asking * 2.0,
        torch.zeros(8, dtype=torch.bfloat16)[3:],
    ]  # fmt: skip


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _offset(tensor: torch.Tensor) -> int | None:
    """Return the offset in a tensor's object of the pointer that torch reports."""
    size = type(tensor).__basicsize__
    places = range(object.__basicsize__, size - _WORD + 1, _WORD)
    return next((place for place in places if _word(id(tensor) + place) == tensor._cdata), None)


def _said(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.data_ptr()


def _read(functions: Sequence[Any], tensor: torch.Tensor, offset: int) -> tuple[Any, ...]:
    dim, sizes, strides, address = functions
    place = ctypes.c_void_p(id(tensor) + offset)
    count, found = ctypes.c_int64(), [ctypes.c_void_p() for _ in range(3)]
    errors = [dim(place, ctypes.byref(count))]
    errors += [ask(place, ctypes.byref(to)) for ask, to in zip((sizes, strides, address), found, strict=True)]
    if any(errors) or count.value != tensor.ndim:
        raise RuntimeError("torch does not say a tensor's sizes")
    axes = ctypes.c_int64 * count.value
    listed = [tuple(axes.from_address(one.value)) if one.value else () for one in found[:2]]
    return listed[0], listed[1], found[2].value or 0


def _numbers(functions: Sequence[Any], tensor: torch.Tensor, offset: int) -> tuple[int, ...]:
    place, found = ctypes.c_void_p(id(tensor) + offset), [ctypes.c_int32() for _ in functions]
    if any(ask(place, ctypes.byref(to)) for ask, to in zip(functions, found, strict=True)):
        raise RuntimeError("torch does not say a tensor's dtype or device")
    return tuple(one.value for one in found)
