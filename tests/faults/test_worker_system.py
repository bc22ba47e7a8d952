"""What the system does not give: a Python, descriptors, processes, folders, room. Each is a Reply that says so."""

import errno
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import problem
from workerfaults import SECONDS, planted, scenario, streams_fail, until

from portattn import ArgumentError
from portattn.compile.ensure_compiled import new_worker, reproducer
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.worker import child as children
from portattn.worker import serve
from portattn.worker.child import LOG_HEAD, LOG_TAIL, StderrLog
from portattn.worker.client import Reply, Worker


def is_unavailable(reply: Reply, kind: str, text: str) -> bool:
    found = (reply.outcome, reply.stage, reply.unavailable, reply.kind)
    assert found == ("crash", "start", True, kind), reply
    assert text in reply.message
    return "cannot be started" in reply.message


@pytest.mark.parametrize("executable", ["None", "''"])
def test_a_python_that_does_not_know_where_it_is(executable: str) -> None:
    """As where an application embeds Python: set before anything is imported, and not looked at before it is used."""
    told = scenario(
        f"import sys\nsys.executable = {executable}\n" "from portattn.compile.ensure_compiled import new_worker\n"
        "from portattn.worker.client import Worker\n" "for worker in (Worker(), new_worker()):\n"
        "    reply = worker.request('hello', 60)\n"
        "    print(reply.outcome, reply.stage, reply.unavailable, reply.message, sep='|')\n")  # fmt: skip
    line = "crash|start|True|a worker cannot be started: sys.executable is empty, and Worker was given no `python`"
    assert told.splitlines() == [line, line]


def test_a_reproducer_needs_no_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incidents hold one: it must not be what fails where a compile has."""
    monkeypatch.setattr(sys, "executable", None)
    target, p = parse_target("cuda:sm_90", "triton==3.6.0"), problem(dtype="fp16", head_dim=64)
    made = plan(p, target, settings=Settings(backend="triton"))
    launches, _, _ = kernel_calls(made, meta_call(p), 1)
    assert " | python3 " in reproducer(launches[0], made, target)


def test_the_python_is_looked_up_when_a_worker_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", planted(tmp_path, "answer()"))
    with Worker() as worker:
        assert worker.request("compile", SECONDS).outcome == "ok"
    assert new_worker().python == sys.executable


def test_no_descriptors_are_left(tmp_path: Path) -> None:
    """The request is answered, nothing is kept open or on disk, and the next one finds descriptors again."""
    python = planted(tmp_path, "answer()")
    told = scenario(
        "import os, resource\n" "from portattn.worker.client import Worker\n" f"worker = Worker(python={python!r})\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n" "import tempfile; folder = tempfile.gettempdir()\n"
        "opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]\n" "for free in range(8):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1] + 1 + free, hard))\n"
        "    reply = worker.request('hello', 60)\n" "    if reply.outcome == 'ok':\n" "        worker.close()\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "    print(reply.outcome, reply.unavailable, reply.kind, reply.message.rpartition(': ')[2],\n"
        "          sum(name.startswith('portattn-worker-') for name in os.listdir(folder)), sep='|')\n"
        "print(worker.request('hello', 60).outcome)\n", {"TMPDIR": str(tmp_path)})  # fmt: skip
    *limited, last = told.splitlines()
    assert limited[:4] == ["crash|True|OSError|Too many open files|0"] * 4
    assert set(limited) <= {"crash|True|OSError|Too many open files|0", "ok|False|||0"}
    assert last == "ok"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_no_process_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptors, worker = len(os.listdir("/proc/self/fd")), Worker()
    with monkeypatch.context() as patch:
        patch.setattr(children.subprocess, "Popen", Mock(side_effect=OSError(number, os.strerror(number))))
        reply = worker.request("hello", SECONDS)
    assert is_unavailable(reply, type(OSError(number, "")).__name__, os.strerror(number))
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(python=planted(tmp_path, "answer()")) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(children.subprocess, "Popen", Mock(side_effect=MemoryError))
            assert is_unavailable(worker.request("hello", SECONDS), "MemoryError", "MemoryError")
        assert worker.request("hello", SECONDS).outcome == "ok"
        process = worker._child.process
        with monkeypatch.context() as patch:
            patch.setattr(worker._child.pipes, "move", Mock(side_effect=MemoryError))
            reply = worker.request("hello", SECONDS)
        assert (reply.outcome, reply.kind, reply.unavailable) == ("crash", "MemoryError", True)
        assert process.returncode is not None


def test_the_streams_fail_in_mid_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the compiler had begun, this is not its failure."""
    with Worker(python=planted(tmp_path, "say(stage='ttgir')\ntime.sleep(600)")) as worker:
        streams_fail(monkeypatch, worker)
        reply = worker.request("hello", SECONDS)
    assert (reply.outcome, reply.stage, reply.kind, reply.unavailable) == ("crash", "ttgir", "OSError", True)
    assert "Input/output error" in reply.message


@pytest.mark.parametrize("place", ["missing", "a file"])
def test_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "a file").touch()
    kind, text = (("FileNotFoundError", "No such file") if place == "missing" else ("NotADirectoryError",
        "Not a directory"))  # fmt: skip
    worker = Worker(python=planted(tmp_path, "answer()"))
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / place))
        assert is_unavailable(worker.request("hello", SECONDS), kind, text)
    with worker:
        assert worker.request("hello", SECONDS).outcome == "ok"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_temporary_folder_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError(number, os.strerror(number))))
    reply = Worker(python=planted(tmp_path, "answer()")).request("hello", SECONDS)
    assert is_unavailable(reply, "OSError", os.strerror(number))


@pytest.mark.parametrize(
    ("looked", "said"),
    [
        ("tempfile.gettempdir()", "crash SIGABRT False Assertion `room` failed.\n"),
        ("", "crash FileNotFoundError True No usable temporary directory found\n"),
    ],
    ids=["later", "from the beginning"],
)
def test_nothing_is_written_where_the_disk_is_full(tmp_path: Path, looked: str, said: str) -> None:
    """Not a byte may be written to a file: the log of a crash is there even so. Python's tempfile tries its folders
    once, by writing a file."""
    python = planted(tmp_path, "say(stage='ttgir')\nos.write(2, b'Assertion `room` failed.\\n')\nos.abort()")
    told = scenario("import resource, tempfile\n" "from portattn.worker.client import Worker\n" f"{looked}\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        f"reply = Worker(python={python!r}).request('compile', 60)\n"
        "message = reply.message.rpartition('started: ')[2].partition(' in [')[0]\n"
        "print(reply.outcome, reply.kind, reply.unavailable, message)\n")  # fmt: skip
    assert told == said


def test_many_failures_keep_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    python = planted(tmp_path, "if number % 3 == 0: os.abort()\nelif number % 3 == 1: raw(b'nonsense\\n')\nanswer()")
    with Worker(python=python) as worker:
        worker.request("hello", SECONDS)
        before = len(os.listdir("/proc/self/fd"))
        kinds = [worker.request("hello", SECONDS).kind for _ in range(12)]
    assert kinds == ["", "SIGABRT", "ProtocolError"] * 4
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not list(folder.iterdir())


@pytest.mark.parametrize("handling", ["SIGPIPE, signal.SIG_DFL", "SIGCHLD, signal.SIG_IGN"])
def test_an_application_with_signals_of_its_own(tmp_path: Path, handling: str) -> None:
    """A child that is gone must not take its parent along (SIGPIPE), nor be waited for in vain where the system
    reaps it (SIGCHLD)."""
    dies = planted(tmp_path, "", before="os.close(0)\nos._exit(3)", name="dies")
    answers = planted(tmp_path, "answer()", name="answers")
    told = scenario(
        "import signal\n" "from portattn.worker.client import Worker\n" f"signal.signal(signal.{handling})\n"
        f"print(Worker(python={dies!r}).request('compile', 60, text='x' * 5_000_000).outcome)\n"
        f"with Worker(python={answers!r}) as worker:\n" "    print(worker.request('compile', 60).outcome)\n"
    )  # fmt: skip
    assert told.splitlines() == ["crash", "ok"]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
NOT_CARRIED = {
    "an object": (object(), "a object"), "bytes": (b"x", "a bytes"), "a set": ({1}, "a set"),
    "keys": ({(1, 2): 3}, "a dict"), "a circle": (CIRCLE, "a list"), "nested": (nested(100_000), "a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_a_field_that_json_cannot_carry_is_the_callers_error(tmp_path: Path, name: str) -> None:
    value, shown = NOT_CARRIED[name]
    with Worker(python=planted(tmp_path, "answer()")) as worker:
        assert worker.request("compile", SECONDS).outcome == "ok"
        child = worker._child
        with pytest.raises(ArgumentError,
                match=rf"Worker\.request: planted is {shown}, but must be what JSON can carry"):  # fmt: skip
            worker.request("compile", SECONDS, fine=1, planted=value)
        assert worker.request("compile", SECONDS).outcome == "ok"
        assert worker._child is child


def test_arguments_that_no_request_has(tmp_path: Path) -> None:
    worker = Worker(python=planted(tmp_path, "answer()"))
    with pytest.raises(ArgumentError, match="fields is 'version', but version, id, task are the protocol's own"):
        worker.request("compile", SECONDS, version=1)
    for seconds in (float("nan"), -1.0):
        with pytest.raises(ArgumentError, match=r"seconds is (nan|-1\.0), but must be 0 or more"):
            worker.request("compile", seconds)
    with pytest.raises(ArgumentError, match=r"python is 'a.*', but must be the path of a file"):
        Worker(python="a\0b")
    for name in ("", "A=B", "A\0", "\ud800"):
        with pytest.raises(ArgumentError, match="a variable's name is not empty and without = and NUL"):
            Worker(environment={name: "1"})
    with pytest.raises(ArgumentError, match=r"environment\['A'\] is '1.*', but must be a text without NUL"):
        Worker(environment={"A": "1\0"})


def test_a_worker_that_is_closed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request under way is no crash of a compiler; its thread alone closes the streams."""
    with Worker(python=planted(tmp_path, "say(stage='ttgir')\ntime.sleep(600)")) as worker:
        started = worker._started

        def closes() -> Any:
            child = started()
            move = child.pipes.move
            monkeypatch.setattr(child.pipes, "move", lambda seconds: (worker.close(), move(seconds))[1])
            return child

        monkeypatch.setattr(worker, "_started", closes)
        reply = worker.request("compile", SECONDS)
    assert (reply.outcome, reply.kind, reply.unavailable) == ("crash", "SIGKILL", True)
    assert reply.message == "the worker was closed while it was asked"


def test_a_python_of_another_kind_is_unavailable(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("no program at all")
    assert is_unavailable(Worker(python=str(script)).request("hello", SECONDS), "PermissionError", "Permission denied")
    script.chmod(0o755)
    assert is_unavailable(Worker(python=str(script)).request("hello", SECONDS), "OSError", "Exec format error")


TIMES, PART = 300, 149_797 * len("module ")  # 315 megabytes
FIRST, LAST = "error: the first line\n", "\nthe last line\n"
FLOOD = f"""\
os.write(2, {FIRST.encode()!r})
for _ in range({TIMES}): os.write(2, b"module " * {PART // len("module ")})
os.write(2, {LAST.encode()!r})
"""


def size_of(folder: Path) -> int:
    """Bytes of the files under a folder that another process may be tidying."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


@pytest.mark.parametrize("end", ["os.abort()", "answer(ok=False, stage='ttgir', kind='Error')"],
    ids=["dies", "answers"])  # fmt: skip
def test_a_log_of_hundreds_of_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], size_of(folder))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with Worker(python=planted(tmp_path, f"say(stage='ttgir')\n{FLOOD}\n{end}")) as worker:
            reply = worker.request("compile", SECONDS)
            assert size_of(folder) == 0
    finally:
        over.set()
        looking.join()
    assert reply.stage == "ttgir"
    assert reply.outcome in ("crash", "error")
    assert reply.log.startswith(FIRST)
    assert reply.log.rstrip().endswith("the last line")
    assert len(reply.log) < LOG_HEAD + LOG_TAIL + 100
    left_out = len(FIRST) + TIMES * PART + len(LAST) - LOG_HEAD - LOG_TAIL
    assert f"\n… {left_out} bytes …\n" in reply.log
    assert most[0] < 2**20


def test_each_request_has_its_own_part_of_the_log(tmp_path: Path) -> None:
    body = (
        "os.write(2, b'before %d\\n' % number)\nanswer(ok=False, kind='Error')\nos.write(2, b'after %d\\n' % number)\n"
    )
    with Worker(python=planted(tmp_path, body + "note(number)")) as worker:
        assert worker.request("compile", SECONDS).log.splitlines()[0] == "before 1"
        until((tmp_path / "notes").exists)
        assert "before 2" in (log := worker.request("compile", SECONDS).log)
        assert "1" not in log


def test_a_program_that_prints_for_ever_stops_no_request(tmp_path: Path) -> None:
    """It has outlived the request that started it, and keeps the error stream full."""
    body = "if number == 1: subprocess.Popen(['yes'], stdout=2)\nanswer(facts={'asked': number})"
    with Worker(python=planted(tmp_path, body)) as worker:
        for number in (1, 2, 3):
            assert worker.request("compile", SECONDS).facts == {"asked": number}


@pytest.mark.parametrize("size", [0, 1, LOG_HEAD, LOG_HEAD + LOG_TAIL, LOG_HEAD + LOG_TAIL + 1, 200_000])
@pytest.mark.parametrize("part", [1, 1000, 65_536])
def test_the_log_keeps_its_beginning_and_its_end(size: int, part: int) -> None:
    if size // part > 30_000:
        part = 7
    written = bytes(ord("a") + i % 26 for i in range(size))
    log = StderrLog()
    for at in range(0, size, part):
        log.add(written[at : at + part])
    text, left_out = written.decode(), size - LOG_HEAD - LOG_TAIL
    whole = f"{text[:LOG_HEAD]}\n… {left_out} bytes …\n{text[-LOG_TAIL:]}" if left_out > 0 else text
    assert log.text() == whole


def test_a_long_traceback_keeps_its_first_cause() -> None:
    """A kernel's errors are chained through each function that calls the next, the first cause first."""
    answer = serve._failure("parse", "CompilationError", "x" * 9000, FIRST + "y" * 30_000 + LAST)
    assert len(answer["message"]) < 8100
    assert answer["log"].startswith(FIRST)
    assert answer["log"].endswith(LAST)
    assert len(answer["log"]) < 16_100
