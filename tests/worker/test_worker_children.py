"""Workers: nothing is left of a child that is closed or killed, and no forked process takes another's."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support import fake_python
from worker_children import SECONDS, folder_of, gone, process_of

from portattn.worker.client import Reply, Worker


def test_closing_ends_the_process(tmp_path: Path) -> None:
    script, _ = fake_python(tmp_path, "ok")
    worker = Worker(python=str(script))
    worker.close()  # never started
    assert worker.request("compile", SECONDS).outcome == "ok"
    process = process_of(worker)
    worker.close()
    assert gone(process)


def test_closing_from_another_thread_is_a_crash_to_the_request(tmp_path: Path) -> None:
    script, requests = fake_python(tmp_path, "hang")
    worker = Worker(python=str(script))
    found: list[Reply] = []
    asking = threading.Thread(target=lambda: found.append(worker.request("compile", SECONDS)))
    asking.start()
    deadline = time.monotonic() + SECONDS
    while not requests.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.close()
    asking.join(30)
    assert [(reply.outcome, reply.kind) for reply in found] == [("crash", "SIGKILL")]


def test_nothing_is_left_of_a_child_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nmktemp -d > "$0.part"\nmv "$0.part" "$0.made"\nexec sleep 60\n')
    script.chmod(0o755)
    note = tmp_path / "python.made"
    with Worker(python=str(script)) as worker:
        asking = threading.Thread(target=worker.request, args=("compile", SECONDS))
        asking.start()
        deadline = time.monotonic() + SECONDS
        while not note.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        made = Path(note.read_text().strip())
        assert made.is_dir()
        assert made.is_relative_to(tmp_path)
    asking.join(30)
    assert {path.name for path in tmp_path.iterdir()} == {"python", "python.made"}


def test_a_child_whose_parent_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """By a real child, which sees that nobody can ask any more."""
    code = (
        "import os, signal, sys, tempfile\n"
        "from portattn.worker.client import Worker\n"
        "worker = Worker()\n"
        "print(worker.request('none', 60.0).kind, os.listdir(tempfile.gettempdir()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert told.stdout.startswith("ProtocolError ['portattn-worker-"), told
    deadline = time.monotonic() + SECONDS
    while any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(tmp_path.iterdir())


def test_a_child_that_nobody_waits_for_leaves_nothing(tmp_path: Path) -> None:
    """Its parent is killed while it compiles: it has nobody to tell, and ends."""
    left, folder = tmp_path / "left", tmp_path / "modules"
    left.mkdir()
    folder.mkdir()
    begun = tmp_path / "begun"
    (folder / "naps.py").write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(2)\n")
    code = (
        "from portattn.worker.client import Worker\n"
        f"worker = Worker(environment={{'PYTHONPATH': {str(folder)!r}}})\n"
        "signature = dict(module='naps', function='f', types={}, constants={}, divisible=[], small=[], options={})\n"
        "worker.request('compile', 60.0, signature=signature, target=['cuda', 80, 32])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(left)})
    deadline = time.monotonic() + SECONDS
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.name.startswith("portattn-worker-") for path in left.iterdir()] == [True]
    parent.kill()
    parent.wait()
    while any(left.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(left.iterdir())


def test_a_child_whose_folder_was_tidied_away_is_started_again(tmp_path: Path) -> None:
    script, requests = fake_python(tmp_path, "ok")
    with Worker(python=str(script)) as worker:
        assert worker.request("compile", SECONDS).outcome == "ok"
        before = process_of(worker)
        shutil.rmtree(folder_of(worker))
        assert worker.request("compile", SECONDS).outcome == "ok"
        assert process_of(worker) != before
        assert gone(before)
        assert folder_of(worker).is_dir()
    assert len(requests.read_text().splitlines()) == 2


def test_a_forked_process_that_can_start_none_harms_nobody(tmp_path: Path) -> None:
    script, _ = fake_python(tmp_path, "ok")
    with Worker(python=str(script)) as worker:
        assert worker.request("compile", SECONDS).outcome == "ok"
        process, folder = process_of(worker), folder_of(worker)

        def asks() -> None:
            worker.python = str(tmp_path / "gone")
            assert worker.request("compile", SECONDS).stage == "start"
            worker.close()

        forked = multiprocessing.get_context("fork").Process(target=asks, daemon=True)
        forked.start()
        forked.join(60)
        forked.kill()
        assert forked.exitcode == 0
        assert not gone(process)
        assert folder.is_dir()


def test_a_forked_process_has_a_child_of_its_own(tmp_path: Path) -> None:
    script, _ = fake_python(tmp_path, "ok")
    with Worker(python=str(script)) as worker:
        assert worker.request("compile", SECONDS).outcome == "ok"
        process = process_of(worker)

        def asks(told: Connection) -> None:
            worker.close()  # not ours
            reply = worker.request("compile", SECONDS)
            told.send((reply.outcome, process_of(worker)))
            worker.close()

        ours, theirs = multiprocessing.Pipe(duplex=False)
        # As if another thread were in the middle of a request while this process is forked.
        forked = multiprocessing.get_context("fork").Process(target=asks, args=(theirs,), daemon=True)
        with worker._lock, worker._state:
            forked.start()
        outcome, pid = ours.recv() if ours.poll(60) else ("nothing", 0)
        forked.join(60)
        forked.kill()
        assert (outcome, forked.exitcode) == ("ok", 0)
        assert pid not in (0, process)
        assert not gone(process)
        assert worker.request("compile", SECONDS).outcome == "ok"
        assert process_of(worker) == process
