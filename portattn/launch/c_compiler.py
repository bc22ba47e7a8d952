"""Running a C compiler, whatever it is: in a process group of its own, under a time limit, its words read with care."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SAID = 64 << 10  # bytes of a program's output that are read
_ROOM = 4096  # bytes of it that the disk has in any case
_LINE = 300  # characters of a reason


class BuildFailed(Exception):
    """A program did not do what it was for; the text is one line that says why."""


def compiler() -> list[str]:
    """The C compiler that Triton takes: CC, with its options; else gcc or clang. Raises BuildFailed without one."""
    named = os.environ.get("CC", "")
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise BuildFailed(f"CC is {named!r}, which is no command: {error}") from None
    if words:
        return words
    if named:
        raise BuildFailed(f"CC is {named!r}, which names no program")
    found = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if found is None:
        raise BuildFailed("no C compiler: none of gcc, clang, cc is on the path, and CC is not set")
    return [found]


def run(command: Sequence[str], what: str, seconds: float, folder: Path) -> str:
    """Run a program to its end; what it printed. Raises BuildFailed, which begins with `what`, when it ends badly.

    folder  for its temporary files, and for its output meanwhile: a pipe would be held open by what it leaves running

    Whoever interrupts this process ends the program with all that it started; the interrupt passes through.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as output:
        try:
            if output.write(bytes(_ROOM)) != _ROOM:  # for the program: of a full disk it could not say so there
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            output.seek(0)
        except OSError as error:
            raise BuildFailed(f"{what}: no file can be written in {folder}: {error.strerror}") from None
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, "TMPDIR": str(folder.absolute())}, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:  # ValueError: a NUL in a name
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise BuildFailed(f"{what}: {command[0]!r} cannot be started: {reason}") from None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BuildFailed(f"{what}: {command[0]!r} has not ended after {seconds:g} s") from None
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
    raise BuildFailed(f"{what}: {how}: {_cause(said)}"[:_LINE])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program, and what it left running in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it said nothing")
