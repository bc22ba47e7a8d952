"""Variables of a compile in this process: processes forked or started by other threads meanwhile do not have them."""

import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from workerfaults import SECONDS, planted, runs, until

from portattn.worker.client import Worker, compile_environment, outside

SET, NEW = "TRITON_PLANTED_SET", "TRITON_PLANTED_NEW"  # one that there was, and one that there was not
QUIRK = {SET: "quirk", NEW: "quirk"}


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv(SET, "own")
    monkeypatch.delenv(NEW, raising=False)


def seen():
    return os.environ.get(SET), os.environ.get(NEW)


@contextmanager
def compiling_elsewhere(*environments):
    """Another thread compiles, with these variables one within the other."""
    begun, over = threading.Event(), threading.Event()

    def compiles(left):
        if not left:
            begun.set()
            assert over.wait(SECONDS)
            return
        with compile_environment(left[0]):
            compiles(left[1:])

    thread = threading.Thread(target=compiles, args=(environments,))
    thread.start()
    assert begun.wait(SECONDS)
    try:
        yield
    finally:
        over.set()
        thread.join(SECONDS)


def in_a_fork(work):
    """What the function returns in a process that is forked now; it must not hang there."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    forked = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(work()), daemon=True)
    forked.start()
    try:
        assert ours.poll(SECONDS), "the forked process hangs"
        return ours.recv()
    finally:
        forked.kill()
        forked.join(SECONDS)


def looks():
    """What a forked process sees, what a program that it starts sees, and that it can compile itself."""
    program = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, text=True, check=True).stdout
    before = seen()
    with compile_environment({NEW: "its own"}):
        inside = seen()
    return [before, program.strip(), inside, seen()]


UNHARMED = [("own", None), "own None", ("own", "its own"), ("own", None)]
SHOWS = f"import os; print(os.environ.get({SET!r}), os.environ.get({NEW!r}))"
ANSWERS = f"answer(facts={{'seen': repr((os.environ.get({SET!r}), os.environ.get({NEW!r})))}})"


def test_a_process_forked_while_another_thread_compiles_has_no_quirks_variables():
    with compiling_elsewhere(QUIRK):
        assert (seen(), in_a_fork(looks)) == (("quirk", "quirk"), UNHARMED)
        assert seen() == ("quirk", "quirk")  # the compile goes on here
    assert (seen(), looks()) == (("own", None), UNHARMED)
    assert in_a_fork(looks) == UNHARMED  # where nothing compiles
    with compiling_elsewhere(QUIRK, {SET: "inner"}):
        assert (seen(), in_a_fork(looks)) == (("inner", "quirk"), UNHARMED)
        assert (outside().get(SET), outside().get(NEW)) == ("own", None)


def test_a_fork_of_the_compiling_thread_goes_on_compiling():
    """A compiler that forks has its variables there as well; they end where its compile ends."""
    with compile_environment(QUIRK):
        assert in_a_fork(lambda: (seen(), outside().get(SET), outside().get(NEW))) == (("quirk", "quirk"), "own", None)
        process = os.fork()
        if process == 0:  # leaves the block in the forked process, which ends with what it sees then
            status = 1
            try:
                with compile_environment({NEW: "inner"}):
                    pass
                status = 0 if seen() == ("quirk", "quirk") else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert seen() == ("own", None)


@pytest.mark.parametrize(("compiling", "given", "told"), [
    (compiling_elsewhere, {}, "('own', None)"), (compile_environment, {}, "('own', None)"),
    (compiling_elsewhere, {SET: None, NEW: "given"}, "(None, 'given')"),
])  # fmt: skip
def test_a_worker_started_while_a_thread_compiles_has_its_own_variables_alone(tmp_path, compiling, given, told):
    with compiling(QUIRK), Worker(python=planted(tmp_path, ANSWERS), environment=given) as worker:
        assert worker.request("hello", SECONDS).facts == {"seen": told}


def test_programs_can_be_started_without_the_variables():
    with compiling_elsewhere(QUIRK):
        told = subprocess.run([sys.executable, "-c", SHOWS], env=outside(), capture_output=True, text=True, check=True)
    assert told.stdout == "own None\n"


def test_an_interrupted_compile_leaves_nothing_behind():
    class Interrupt(BaseException):
        pass

    with pytest.raises(Interrupt), compile_environment(QUIRK):
        raise Interrupt
    assert (seen(), outside().get(NEW)) == (("own", None), None)


ORPHAN = """
import os, signal, sys, threading, time
from portattn.worker.client import Worker
worker = Worker(python={python!r})
threading.Thread(target=worker.request, args=("hello", 60), daemon=True).start()
while not os.path.exists({notes!r}):
    time.sleep(0.01)
forked = os.fork()
if forked == 0:
    time.sleep(600)
print(worker._child.process.pid, forked, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_ends_with_its_parent_though_a_forked_process_lives(tmp_path):
    """The forked process has copies of the child's streams, which a thread was using: it must close them."""
    python = planted(tmp_path, "note(number)\ntime.sleep(1)\nanswer()")
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN.format(python=python, notes=str(tmp_path / "notes"))],
        env=os.environ | {"TMPDIR": str(tmp_path)},  # the planted child removes no folder
        stdout=subprocess.PIPE,
        text=True,
    )
    child, forked = map(int, parent.stdout.readline().split())
    try:
        parent.wait(SECONDS)
        assert runs(forked)
        until(lambda: not runs(child), 20)
    finally:
        os.kill(forked, 9)
        parent.stdout.close()


def test_a_fork_in_mid_request_harms_neither(tmp_path):
    """The request is answered here, and the forked process asks a child of its own."""
    python = planted(tmp_path, "note(number)\nsay(stage='ttgir')\ntime.sleep(2)\nanswer(facts={'asked': number})")
    found = []
    with Worker(python=python) as worker:
        asking = threading.Thread(target=lambda: found.append(worker.request("compile", SECONDS)))
        asking.start()
        until((tmp_path / "notes").exists)

        def asks():
            reply = worker.request("compile", SECONDS)
            worker.close()
            return reply.outcome, int(reply.facts["asked"])

        assert in_a_fork(asks) == ("ok", 2)
        asking.join(SECONDS)
    assert [(reply.outcome, reply.stage, reply.facts) for reply in found] == [("ok", "ttgir", {"asked": 1})]
