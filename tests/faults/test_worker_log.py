"""What children write to their error stream: its beginning and end are kept, no more, and nothing on disk."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from workerfaults import SECONDS, planted, until

from portattn.worker.client import Worker
from portattn.worker.transport import LOG_HEAD, LOG_TAIL, StderrLog

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


@pytest.mark.parametrize(
    "end", ["os.abort()", "answer(ok=False, stage='ttgir', kind='Error')"], ids=["dies", "answers"]
)
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


def test_a_log_without_end_does_not_outlast_the_limit(tmp_path: Path) -> None:
    begun = time.monotonic()
    with Worker(python=planted(tmp_path, "say(stage='ttgir')\nwhile True: os.write(2, b'x' * 65536)")) as worker:
        reply = worker.request("compile", 2.0)
    assert (reply.outcome, reply.kind, reply.stage) == ("hang", "timeout", "ttgir")
    assert len(reply.log) < LOG_HEAD + LOG_TAIL + 100
    assert time.monotonic() - begun < 20


def test_each_request_has_its_own_part_of_the_log(tmp_path: Path) -> None:
    """Also of what is printed after an answer: it belongs to no other request."""
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
    text = written.decode()
    left_out = size - LOG_HEAD - LOG_TAIL
    whole = f"{text[:LOG_HEAD]}\n… {left_out} bytes …\n{text[-LOG_TAIL:]}" if left_out > 0 else text
    assert log.text() == whole
