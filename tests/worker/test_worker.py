"""Workers: what is said between them and a child, how it is started, and every way in which it can end."""

import importlib.metadata as metadata
import io
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from places import ROOT
from support import fake_python
from worker_children import SECONDS, folder_of, gone, process_of, running

from portattn.worker import serve
from portattn.worker.child import PROTOCOL
from portattn.worker.client import SERVE, Worker
from portattn.worker.client import cause as cause_of


def test_a_wrong_protocol_version_is_refused() -> None:
    """By the very process that is spoken to, without Triton."""
    lines = [{"version": 1, "id": 4, "task": "compile"}, {"task": "compile"}, {"version": 2, "id": 6, "task": "bake"}]
    foreign = (
        "os:getcwd", "portattn:plan", "portattn.worker.serve", "portattn.worker.serve:sys.exit", ["portattn.a:b"],
    )  # fmt: skip
    lines += [{"version": 2, "id": 7, "task": task} for task in foreign]
    done = subprocess.run(
        [sys.executable, str(SERVE)], input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(a["ok"], a["kind"]) for a in answers] == [(False, "ProtocolError")] * len(lines)
    assert "protocol 1, this worker speaks 2" in answers[0]["message"]
    assert [(a["version"], a["id"]) for a in answers] == [(2, 4), (2, None), (2, 6), *[(2, 7)] * len(foreign)]
    assert "'bake'" in answers[2]["message"]


def test_environment_is_restored_after_a_failure() -> None:
    answers = io.StringIO()
    request = {"version": PROTOCOL, "id": 1, "task": "compile", "env": {"PLANTED": "1"}, "signature": {}, "target": []}
    serve.serve(io.StringIO(json.dumps(request) + "\n"), answers)
    assert json.loads(answers.getvalue().splitlines()[-1])["ok"] is False
    assert "PLANTED" not in os.environ


def saying(folder: Path, line: str) -> str:
    """A program in the place of a Python that answers every request with one line."""
    script = folder / "worker"
    script.write_text(f"#!{sys.executable}\nimport sys\nfor request in sys.stdin:\n    print({line!r}, flush=True)\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("ok", [True, False])
def test_a_worker_of_another_protocol_is_refused(tmp_path: Path, ok: bool) -> None:
    """With one message that names both versions, whatever it answers."""
    told = {"ok": ok, "version": 1, "facts": {}, "stage": "protocol", "kind": "ProtocolError", "message": "", "log": ""}
    with Worker(python=saying(tmp_path, json.dumps(told))) as worker:
        reply = worker.request("hello", SECONDS)
        assert not running(worker)  # not spoken to again
    assert (reply.outcome, reply.kind) == ("error", "ProtocolError")
    assert reply.message == (
        "the worker speaks protocol 1, and this portattn speaks 2: they are of different releases, "
        "install one of them anew"
    )


@pytest.mark.compiles
def test_hello_says_the_versions() -> None:
    with Worker() as worker:
        reply = worker.request("hello", SECONDS)
    assert reply.outcome == "ok", reply
    assert reply.facts["python"] == platform.python_version()
    assert reply.facts["triton"] == metadata.version("triton")


@pytest.mark.compiles
def test_a_child_is_started_ahead_of_its_first_request() -> None:
    """It imports its compiler meanwhile, and is the one that is asked; to start it again does nothing."""
    with Worker(ahead=True) as worker:
        worker.start()
        started = worker._child.process.pid
        worker.start()
        reply = worker.request("hello", SECONDS)
        assert worker._child.process.pid == started
    assert reply.outcome == "ok", reply


TELLS = """\
def where(request, enter):
    import portattn.backends, portattn.errors, portattn.quirks
    parts = (portattn, portattn.errors, portattn.backends, portattn.quirks)
    return {"facts": {part.__name__: part.__file__ for part in parts}}
"""


@pytest.mark.parametrize("runs", ["kernels", "interpreter"])
def test_a_child_imports_its_parents_portattn_whatever_else_is_found_first(tmp_path, monkeypatch, runs):
    (tmp_path / "portattn").mkdir()
    (tmp_path / "portattn" / "__init__.py").write_text("raise SystemExit('another portattn')\n")
    (tmp_path / "tells").mkdir()
    (tmp_path / "tells" / "where.py").write_text(TELLS)
    monkeypatch.chdir(tmp_path)
    with Worker(environment={"PYTHONPATH": str(tmp_path)}, runs=runs) as worker:
        reply = worker.request("tells.where:where", SECONDS)
    assert reply.outcome == "ok", reply
    parts = ("portattn/__init__.py", "portattn/errors.py", "backends/__init__.py", "quirks/__init__.py")
    assert list(reply.facts.values()) == [str(ROOT / part) for part in parts]


def test_what_fails_ahead_is_told_at_the_first_request(tmp_path: Path) -> None:
    """A Python that is gone, a child that ends at once, and a compiler that does not import."""
    with Worker(python=str(tmp_path / "gone"), ahead=True) as worker:
        worker.start()
        reply = worker.request("hello", SECONDS)
    assert (reply.outcome, reply.stage) == ("crash", "start")
    assert reply.message == f"{tmp_path / 'gone'} cannot be started: No such file or directory"
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise SystemExit('no such compiler')\n")
    with Worker(environment={"PYTHONPATH": str(tmp_path)}, ahead=True) as worker:
        worker.start()
        reply = worker.request("hello", SECONDS)
    assert (reply.outcome, reply.stage, reply.kind) == ("error", "import", "SystemExit")
    assert reply.unavailable


def test_nobody_waits_for_a_request_to_start_a_child() -> None:
    worker = Worker()
    with worker._lock:  # as while another thread asks
        worker.start()
    assert worker._child is None
    worker.close()


def test_variables_are_set_and_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_ONE", "outer")
    monkeypatch.setenv("TRITON_TWO", "outer")
    script = tmp_path / "worker"
    script.write_text(
        '#!/bin/sh\necho "${TRITON_ONE-unset} ${TRITON_TWO-unset} ${TRITON_INTERPRET-unset}" >&2\nexit 2\n'
    )
    script.chmod(0o755)
    with Worker(python=str(script), environment={"TRITON_ONE": None, "TRITON_TWO": "inner"}) as worker:
        reply = worker.request("hello", SECONDS)
    assert (reply.outcome, reply.stage, reply.kind) == ("crash", "start", "exit status 2")
    assert reply.message == "unset inner unset"


def test_the_toolchain_that_the_child_used_is_kept(tmp_path: Path) -> None:
    script, _ = fake_python(tmp_path, "ok")
    with Worker(python=str(script)) as worker:
        assert worker.request("compile", SECONDS).toolchain == ""
    text = script.read_text().replace('"ok": True,', '"ok": True, "toolchain": "3.1.0+planted",')
    script.write_text(text)
    with Worker(python=str(script)) as worker:
        assert worker.request("compile", SECONDS).toolchain == "3.1.0+planted"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("x\npython: a.cpp:1: Assertion `b' failed.\nAborted", "python: a.cpp:1: Assertion `b' failed."),
        ("loc: error: no\nStack dump", "loc: error: no"),
    ],
)
def test_the_line_of_a_log_that_names_the_cause(log: str, cause: str) -> None:
    assert cause_of(log) == cause


def test_what_the_interpreter_wrapped_is_told_as_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each function on the way: the repr of a repr of a repr, where the backslashes hide the words."""

    class InterpreterError(Exception):
        pass

    def task(request: dict[str, object], enter: object) -> dict[str, object]:
        try:
            try:
                raise NotImplementedError("Block pointers have been removed")
            except NotImplementedError as error:
                raise InterpreterError(repr(error)) from error
        except InterpreterError as error:
            raise InterpreterError(repr(error)) from error

    monkeypatch.setattr("portattn.testing.verdict.compare", task)
    said = serve.answer({"version": PROTOCOL, "task": "portattn.testing.verdict:compare"}, lambda line: None)
    assert (said["kind"], said["message"]) == ("NotImplementedError", "Block pointers have been removed")
    assert "InterpreterError" in said["log"]


def test_closing_ends_the_process(tmp_path: Path) -> None:
    script, _ = fake_python(tmp_path, "ok")
    worker = Worker(python=str(script))
    worker.close()  # never started
    assert worker.request("compile", SECONDS).outcome == "ok"
    process = process_of(worker)
    worker.close()
    assert gone(process)


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
    code = (
        "import os, signal, sys, tempfile\n" "from portattn.worker.client import Worker\n" "worker = Worker()\n"
        "print(worker.request('none', 60.0).kind, os.listdir(tempfile.gettempdir()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )  # fmt: skip
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
