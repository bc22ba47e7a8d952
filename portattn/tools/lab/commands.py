"""Running programs whose output is told line by line, and ending them when the maker is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LAST_LINES = 12  # of a failed program's output that its error keeps

Say = Callable[[str], None]


class CommandError(Exception):
    """A program could not be started or ended badly; `lines` are the last ones that it printed."""

    def __init__(self, program: str, why: str, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n  ".join([f"{program}: {why}", *self.lines]))


class Commands:
    """Runs programs; `stop` ends those under way, from any thread, and refuses further ones."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._state = threading.Lock()
        self._stopped = False

    def run(
        self, command: Sequence[str], say: Say, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> list[str]:
        """Run a program to its end, telling each line that it prints; all lines. Raises CommandError.

        `environment` replaces this process's own. An interrupt of this call ends the program and its children.
        """
        program = os.path.basename(command[0])
        lines: list[str] = []
        with self._state:
            if self._stopped:
                raise CommandError(program, "not started: interrupted", ())
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    errors="replace", env=environment, cwd=folder, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise CommandError(program, f"cannot be started: {error.strerror}", ()) from None
            self._running.add(process)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.strip():
                    say(line.strip())
            status = process.wait()
        except BaseException:
            _kill(process)
            raise
        finally:
            with self._state:
                self._running.discard(process)
            if process.stdout is not None:
                process.stdout.close()
        if status:
            why = f"died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            raise CommandError(program, why, deque((line for line in lines if line.strip()), LAST_LINES))
        return lines

    def stop(self) -> None:
        """End every program under way; those asked for later are not started."""
        with self._state:
            self._stopped = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def quiet(_: str) -> None:
    """A `say` that tells nobody."""
