"""What a signal handler raises while a child compiles: the child ends, and its answer is nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest
from workerfaults import SECONDS, planted, runs, scenario, until

from portattn.worker.child import Child
from portattn.worker.client import Worker

# The first child compiles well, but takes its time; the second one's compiler aborts. Both start a program.
SLOW_THEN_ABORTS = """\
if not os.path.exists(NOTES):
    say(stage="ttgir")
    note(f"{os.getpid()} {subprocess.Popen(['sleep', '600']).pid}")
    time.sleep(1)
    answer()
    continue
say(stage="ttgir")
os.abort()
"""
INTERRUPTED = """
import os, signal, sys, threading, time
sys.path.append({here!r})
from workerfaults import runs, until
from portattn.worker.client import Worker

class Alarm(Exception):
    pass

def alarm(number, frame):
    raise Alarm

signal.signal(signal.SIGALRM, alarm)

def interrupt():
    while not os.path.exists({notes!r}):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.{name})

threading.Thread(target=interrupt).start()
with Worker(python={python!r}) as worker:
    try:
        print(worker.request("compile", {seconds}))
    except (KeyboardInterrupt, Alarm) as error:
        print(type(error).__name__)
    child, started = (int(number) for number in open({notes!r}).read().split())
    print(runs(child))
    until(lambda: not runs(started), 10)  # killed with it, and nothing that this process can wait for
    time.sleep(1.5)  # the first answer would have come
    reply = worker.request("compile", {seconds})
    print(reply.outcome, reply.kind)
"""


@pytest.mark.parametrize(("name", "raised"), [("SIGINT", "KeyboardInterrupt"), ("SIGALRM", "Alarm")])
def test_an_interrupted_request_is_not_answered_to_the_next_one(tmp_path: Path, name: str, raised: str) -> None:
    """By a real signal. The child is gone before the exception is seen, and what it started is killed with it."""
    python = planted(tmp_path, SLOW_THEN_ABORTS)
    told = scenario(
        INTERRUPTED.format(
            here=str(Path(__file__).parent), notes=str(tmp_path / "notes"), name=name, python=python, seconds=SECONDS
        )
    )
    assert told.splitlines() == [raised, "False", "crash SIGABRT"]


def test_an_interrupt_while_the_child_is_ended_leaves_no_answer_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice Ctrl-C: the child could not be killed then, so it is killed before the next request."""
    python = planted(tmp_path, "answer(facts={'line': json.loads(line)['what']})")
    raised = []

    def interrupted(*_: object) -> None:
        raised.append(1)
        raise KeyboardInterrupt

    with Worker(python=python) as worker:
        assert worker.request("compile", SECONDS, what="zero").facts == {"line": "zero"}
        assert worker._child is not None
        first = worker._child.process.pid
        with monkeypatch.context() as patch:
            patch.setattr(Child, "ended", interrupted)  # looked at once the request is on its way
            patch.setattr(Child, "usable", True)
            patch.setattr(Child, "end", interrupted)
            with pytest.raises(KeyboardInterrupt):
                worker.request("compile", SECONDS, what="one")
        assert len(raised) == 2
        assert runs(first)
        reply = worker.request("compile", SECONDS, what="two")
        assert (reply.outcome, reply.facts) == ("ok", {"line": "two"})
        assert not runs(first)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, GeneratorExit])
def test_whatever_is_raised_in_a_request_ends_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with Worker(python=planted(tmp_path, "answer()")) as worker:
        assert worker.request("compile", SECONDS).outcome == "ok"
        child = worker._child
        assert child is not None

        def raises(seconds: float) -> bool:
            raise error

        monkeypatch.setattr(child.pipes, "move", raises)
        with pytest.raises(error):
            worker.request("compile", SECONDS)
        assert child.process.returncode is not None
        assert not Path(child.folder).exists()
        assert worker.request("compile", SECONDS).outcome == "ok"


def test_a_signal_whose_handler_returns_changes_nothing(tmp_path: Path) -> None:
    python = planted(tmp_path, "say(stage='ttgir')\ntime.sleep(1)\nanswer()")
    told = scenario(
        "import signal\n"
        "from portattn.worker.client import Worker\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
        f"print(Worker(python={python!r}).request('compile', {SECONDS}).outcome)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    assert told == "ok\n"


def test_a_crash_ends_the_programs_of_the_compiler(tmp_path: Path) -> None:
    """What it had started is in its process group, and nobody else would end it."""
    body = "note(subprocess.Popen(['sleep', '600']).pid)\nsay(stage='ttgir')\nos.abort()"
    with Worker(python=planted(tmp_path, body)) as worker:
        reply = worker.request("compile", SECONDS)
    assert (reply.outcome, reply.kind) == ("crash", "SIGABRT")
    until(lambda: not runs(int((tmp_path / "notes").read_text())), 10)
