"""Planted children for workers, and scenarios that need a process of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from portattn.worker.client import Worker

SECONDS = 60.0  # for what should take a moment: a guard against hangs
# What a planted child has beside the standard library: `line` is the request's text, `number` its id.
HEAD = """\
#!{python}
import json, os, resource, signal, subprocess, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
NOTES = {notes!r}
def say(**message):
    raw(json.dumps({{"id": number, **message}}).encode() + b"\\n")
def answer(**message):
    say(**{{"ok": True, "version": 2, **message}})
def raw(data):
    while data:
        data = data[os.write(1, data):]
def note(text):
    with open(NOTES + ".part", "a") as file:
        file.write(str(text) + "\\n")
    os.rename(NOTES + ".part", NOTES)
"""


def planted(folder: Path, body: str, before: str = "", name: str = "planted") -> str:
    """A program for Worker(python=…) that runs `body` for every request, and `before` when it starts. What it gives to
    note() is in the file `notes` of the folder."""
    script = folder / name
    text = HEAD.format(python=sys.executable, notes=str(folder / "notes")) + before + "\n"
    text += "for line in sys.stdin:\n    number = json.loads(line)['id']\n"
    script.write_text(text + "".join(f"    {line}\n" for line in body.splitlines()))
    script.chmod(0o755)
    return str(script)


def noted(folder: Path) -> str:
    until((folder / "notes").exists)
    return (folder / "notes").read_text().strip()


def until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def scenario(code: str, environment: dict[str, str] | None = None) -> str:
    """What a Python of its own prints that runs the code; it must end well."""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **(environment or {})}, capture_output=True,
        text=True, timeout=2 * SECONDS, check=False, preexec_fn=_interruptible)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def streams_fail(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> None:
    """The streams of the worker's child fail once it has announced a stage."""
    started = worker._started

    def starts() -> Any:
        child = started()
        move = child.pipes.move

        def fails(seconds: float) -> bool:
            move(seconds)
            if b"ttgir" in child.pipes._got:
                monkeypatch.setattr(child.pipes, "move", Mock(side_effect=OSError(5, os.strerror(5))))
            return True

        monkeypatch.setattr(child.pipes, "move", fails)
        return child

    monkeypatch.setattr(worker, "_started", starts)
