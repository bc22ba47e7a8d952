"""Children that send what is no answer, too much, too little or too late: each is a Reply, within the time limit."""

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support import problem
from workerfaults import SECONDS, noted, planted, runs, scenario, streams_fail, until

from portattn.compile import ensure_compiled
from portattn.compile.record_store import CompileStore, store
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.testing import canary
from portattn.worker.child import LINE_LIMIT, LOG_HEAD, LOG_TAIL, RUNS, Child
from portattn.worker.client import SERVE, Reply, Worker

LIMIT = 2.0  # seconds given to a child that never answers
LATE = 20.0  # seconds by which it must be over even so, on a loaded machine


def asked(folder: Path, body: str, seconds: float = SECONDS, **fields: object) -> Reply:
    with Worker(python=planted(folder, body)) as worker:
        return worker.request("compile", seconds, **fields)


NO_MESSAGES = {
    "invalid UTF-8": r"raw(b'{\"id\": 1, \"stage\": \"\xff\xfe\"}\n')", "nested": "raw(b'[' * 200_000 + b'\\n')",
    "nested in facts": 'raw(b\'{"id": 1, "version": 2, "ok": true, "facts": \' + b\'{"a":\' * 200_000 + b\'\\n\')',
    "a long number": 'raw(b\'{"id": 1, "version": 2, "ok": true, "facts": {"a": \' + b\'9\' * 9_000 + b\'}}\\n\')',
    "no JSON": "raw(b'Segmentation fault?\\n')", "an empty line": "raw(b'\\n')", "NUL": "raw(b'\\0\\n')",
    "a list": "raw(b'[1]\\n')", "stage of no text": "say(stage=3)",
    "stage without an id": 'raw(b\'{"stage": "ttgir"}\\n\')',
    "stage of another request": "number += 1; say(stage='ttgir')",
    "answer without an id": 'raw(b\'{"ok": true, "version": 2}\\n\')',
    "answer to another request": "number -= 1; answer()", "an id of another type": "number = str(number); answer()",
    "no version": "say(ok=True)", "ok of no truth value": "answer(ok='yes')",
    "facts that are none": "answer(facts=[1])", "a fact that is none": "answer(facts={'registers': None})",
    "a fact of parts": "answer(facts={'registers': [1, 2]})", "a kind of no text": "answer(ok=False, kind=3)",
}  # fmt: skip


@pytest.mark.parametrize("body", NO_MESSAGES.values(), ids=list(NO_MESSAGES))
def test_what_is_no_answer_is_a_protocol_error(tmp_path: Path, body: str) -> None:
    """And says nothing about the compiler; the child is not spoken to again."""
    with Worker(python=planted(tmp_path, f"note(os.getpid())\n{body}\ntime.sleep(600)")) as worker:
        reply = worker.request("compile", SECONDS)
        assert (reply.outcome, reply.kind, reply.unavailable) == ("error", "ProtocolError", True)
        assert reply.message.startswith("the worker answered ")
        assert len(reply.message) < 2_000
        assert not runs(int(noted(tmp_path)))


def test_a_second_answer_to_one_request_is_not_taken_for_the_next(tmp_path: Path) -> None:
    with Worker(python=planted(tmp_path, "answer(facts={'asked': number})\nanswer(facts={'asked': number})")) as worker:
        assert worker.request("compile", SECONDS).facts == {"asked": 1}
        second = worker.request("compile", SECONDS)
        assert (second.kind, second.message) == ("ProtocolError",
            "the worker answered request 1 where it was asked request 2")  # fmt: skip
        assert worker.request("compile", SECONDS).facts == {"asked": 3}


def test_texts_that_no_file_takes_are_mended(tmp_path: Path) -> None:
    """Half a surrogate pair can be written in JSON, and nowhere else."""
    half = "'\\ud800'"
    body = f"answer(ok=False, kind='E', message='a' + {half} + 'b', log={half}, stage={half}, facts={{{half}: {half}}})"
    reply = asked(tmp_path, body)
    assert (reply.outcome, reply.message, reply.stage, reply.facts) == ("error", "a?b", "?", {"?": "?"})
    reply.log.encode()


def test_a_line_without_an_end_fills_no_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        reply = asked(tmp_path, "while True: raw(b'x' * 65536)")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (reply.outcome, reply.kind, reply.unavailable) == ("error", "ProtocolError", True)
    assert reply.message == f"the worker answered a line of more than {LINE_LIMIT} bytes"
    assert peak < 3 * LINE_LIMIT


def test_a_long_answer_arrives_whole(tmp_path: Path) -> None:
    text = "v_mfma\n" * 500_000
    reply = asked(tmp_path, "answer(facts={'amdgcn': json.loads(line)['text'], 'sent': len(line)})", text=text)
    assert reply.outcome == "ok", reply
    assert reply.facts["amdgcn"] == text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, 35, 40, 63], ids=int)
def test_a_child_that_a_signal_ends_in_mid_answer(tmp_path: Path, number: int) -> None:
    names = {35: "SIGRTMIN+1", 40: "SIGRTMIN+6", 63: "SIGRTMIN+29"}
    kind = names.get(number) or signal.Signals(number).name
    reply = asked(tmp_path, f"say(stage='ptx')\nraw(b'{{\"id\": 1, \"ok\"')\nos.kill(os.getpid(), {int(number)})")
    assert (reply.outcome, reply.stage, reply.kind, reply.unavailable) == ("crash", "ptx", kind, False)


def test_an_answer_that_came_before_the_end_counts(tmp_path: Path) -> None:
    with Worker(python=planted(tmp_path, "answer(facts={'asked': number})\nos._exit(3)")) as worker:
        assert worker.request("compile", SECONDS).facts == {"asked": 1}
        child = worker._child
        until(lambda: child is None or child.ended())
        assert worker.request("compile", SECONDS).facts == {"asked": 2}


HANGS = {
    "stopped before": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stopped mid-answer": "raw(b'{\"id\": 1, \"ok\": tr'); os.kill(os.getpid(), signal.SIGSTOP)",
    "stages without end": "while True: say(stage='ptx')", "a log without end": "while True: os.write(2, b'x' * 65536)",
}  # fmt: skip


@pytest.mark.parametrize("body", HANGS.values(), ids=list(HANGS))
def test_what_never_answers_is_a_hang_and_does_not_outlast_the_limit(tmp_path: Path, body: str) -> None:
    begun = time.monotonic()
    reply = asked(tmp_path, f"note(os.getpid())\nsay(stage='ptx')\n{body}", LIMIT)
    assert (reply.outcome, reply.stage, reply.kind, reply.unavailable) == ("hang", "ptx", "timeout", False)
    assert len(reply.log) < LOG_HEAD + LOG_TAIL + 100
    assert not runs(int(noted(tmp_path)))
    assert time.monotonic() - begun < LATE


def test_a_child_that_does_not_read_its_request_is_a_hang(tmp_path: Path) -> None:
    """A request of megabytes does not fit into what the system holds between two processes."""
    begun = time.monotonic()
    with Worker(python=planted(tmp_path, "", before="time.sleep(600)")) as worker:
        reply = worker.request("compile", LIMIT, text="x" * 5_000_000)
    assert (reply.outcome, reply.stage, reply.unavailable) == ("hang", "start", True)
    assert time.monotonic() - begun < LATE


def test_a_child_that_closes_its_ears_is_heard(tmp_path: Path) -> None:
    """It answers before it has read all: nothing of the rest may reach the next request."""
    first = "number = 1 + os.path.exists(NOTES)\nanswer(facts={'asked': number})\nos.close(0)\ntime.sleep(600)"
    with Worker(python=planted(tmp_path, "", before=first)) as worker:
        assert worker.request("compile", SECONDS, text="x" * 5_000_000).facts == {"asked": 1}
        (tmp_path / "notes").touch()
        assert worker.request("compile", SECONDS).facts == {"asked": 2}


HOLDS = """\
program = subprocess.Popen(["sleep", "600"], start_new_session={own}, stdout=1)
note(program.pid)
say(stage="ptx")
{end}
"""


@pytest.mark.parametrize(("own", "end", "kind"), [
    (False, "os.abort()", "SIGABRT"), (False, "time.sleep(600)", "timeout"), (True, "os.abort()", "SIGABRT"),
], ids=["its group", "its group, of one that hangs", "a session of its own"])  # fmt: skip
def test_a_child_whose_program_holds_its_streams(tmp_path: Path, own: bool, end: str, kind: str) -> None:
    """Nobody waits for the end of streams that another process keeps open; ptxas, a linker end with the compiler."""
    begun = time.monotonic()
    reply = asked(tmp_path, HOLDS.format(own=own, end=end), LIMIT if kind == "timeout" else SECONDS)
    program = int(noted(tmp_path))
    try:
        assert (reply.outcome, reply.stage, reply.kind) == ("hang" if kind == "timeout" else "crash", "ptx", kind)
        assert time.monotonic() - begun < LATE
        if not own:
            until(lambda: not runs(program), 10)
    finally:
        if own:
            os.kill(program, signal.SIGKILL)


def test_what_ends_before_a_stage_is_unavailable(tmp_path: Path) -> None:
    """The compiler was not reached; where it was, the reply is about it."""
    assert asked(tmp_path, "os._exit(3)").unavailable
    assert asked(tmp_path, "time.sleep(600)", LIMIT).unavailable
    assert not asked(tmp_path, "say(stage='ttgir')\nos._exit(3)").unavailable
    assert not asked(tmp_path, "answer(ok=False, stage='ttgir', kind='RuntimeError')").unavailable
    for stage in ("import", "protocol"):
        assert asked(tmp_path, f"answer(ok=False, stage={stage!r}, kind='ImportError')").unavailable


def test_serve_answers_every_line(tmp_path: Path) -> None:
    """A line that is no request gets an answer, with the id where there is one, and the child lives on."""
    lines = ["no JSON", "[" * 200_000, "[1]", "null", '{"id": 5}', '{"id": 6, "version": 2, "task": "bake", "env": 3}']
    done = subprocess.run([sys.executable, str(SERVE)], input="\n".join(lines) + "\n", capture_output=True, text=True,
        timeout=SECONDS, check=True)  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(a["id"], a["ok"], a["version"]) for a in answers] == [(None, False, 2), (None, False, 2), (None, False, 2),
        (None, False, 2), (5, False, 2), (6, False, 2)]  # fmt: skip


READS_AND_PRINTS = """\
import subprocess, sys
print('{"id": 1, "version": 2, "ok": true, "facts": {"planted": 1}}', flush=True)
subprocess.run(["sh", "-c", "echo '{}'; cat"], check=True)
raise RuntimeError("read " + repr(sys.stdin.read()))
"""


@pytest.mark.compiles
def test_what_a_compiler_prints_and_reads_is_not_the_workers(tmp_path: Path) -> None:
    """Nor what programs that it calls do: they find nothing to read, and print into the log."""
    (tmp_path / "reads.py").write_text(READS_AND_PRINTS)
    nothing: dict[str, object] = {"types": {}, "constants": {}, "divisible": [], "small": [], "options": {}}
    signature = {"module": "reads", "function": "f", **nothing}
    with Worker(environment={"PYTHONPATH": str(tmp_path)}) as worker:
        for _ in range(2):
            reply = worker.request("compile", SECONDS, signature=signature, target=["cuda", 80, 32])
            assert (reply.outcome, reply.kind, reply.message) == ("error", "RuntimeError", "read ''")
            assert '"planted"' in reply.log
            (tmp_path / "reads.py").touch()


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
    told = scenario(INTERRUPTED.format(here=str(Path(__file__).parent), notes=str(tmp_path / "notes"), name=name,
        python=python, seconds=SECONDS))  # fmt: skip
    assert told.splitlines() == [raised, "False", "crash SIGABRT"]


def test_an_interrupt_while_the_child_is_ended_leaves_no_answer_behind(tmp_path, monkeypatch):
    """Twice Ctrl-C: the child could not be killed then, so it is killed before the next request."""
    python = planted(tmp_path, "answer(facts={'line': json.loads(line)['what']})")
    raised = []

    def interrupted(*_: object) -> None:
        raised.append(1)
        raise KeyboardInterrupt

    with Worker(python=python) as worker:
        assert worker.request("compile", SECONDS, what="zero").facts == {"line": "zero"}
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
def test_whatever_is_raised_in_a_request_ends_the_child(tmp_path, monkeypatch, error):
    with Worker(python=planted(tmp_path, "answer()")) as worker:
        assert worker.request("compile", SECONDS).outcome == "ok"
        child = worker._child
        monkeypatch.setattr(child.pipes, "move", Mock(side_effect=error))
        with pytest.raises(error):
            worker.request("compile", SECONDS)
        assert child.process.returncode is not None
        assert not Path(child.folder).exists()
        assert worker.request("compile", SECONDS).outcome == "ok"


def test_a_signal_whose_handler_returns_changes_nothing(tmp_path: Path) -> None:
    python = planted(tmp_path, "say(stage='ttgir')\ntime.sleep(1)\nanswer()")
    told = scenario("import signal\n" "from portattn.worker.client import Worker\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n" "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\n"
        f"print(Worker(python={python!r}).request('compile', {SECONDS}).outcome)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n")  # fmt: skip
    assert told == "ok\n"


def test_a_failure_of_the_system_is_not_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call falls back, with the reason; the next process asks again."""
    settings = Settings(cache_dir=str(tmp_path / "records"), backend="triton")
    target, p = parse_target("cuda:sm_90", "triton==3.6.0"), problem(dtype="fp16", head_dim=64)
    made = plan(p, target, settings=settings)
    launches, _, _ = kernel_calls(made, meta_call(p), 1)
    with Worker(python=planted(tmp_path, "say(stage='ttgir')\ntime.sleep(600)")) as worker:
        streams_fail(monkeypatch, worker)
        monkeypatch.setattr(ensure_compiled, "_worker", worker)
        failed = ensure_compiled.ensure(made, launches, torch.empty(1), target, settings)
    assert not failed.passed
    assert "Input/output error" in failed.reason
    key = ensure_compiled.code_key(made, launches)
    assert (store(settings).get(key), CompileStore(Path(settings.cache_dir)).get(key)) == (failed, None)


def test_a_failure_of_the_system_says_nothing_about_a_canary() -> None:
    where, p = parse_target("cuda:sm_90", "triton==3.6.0"), problem(dtype="fp16")
    seen = {"outcome": "crash", "stage": RUNS, "kind": "SIGSEGV", "message": "Segmentation fault"}
    assert canary.judge_reply(Reply(**seen), where, p)[0] == "compiler-crash"
    assert canary.judge_reply(Reply(**seen, unavailable=True), where, p) == ("", "crash: SIGSEGV: Segmentation fault")
