"""Many processes on one folder, and processes that are killed while they write."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from store_children import FORK, SECONDS, forked
from test_store_corruption import KEYS, record

from portattn.compile.store import CompileStore

READERS_SECONDS = 4.0


def _write_forever(folder: Path) -> None:
    kept = CompileStore(folder)
    for turn in range(10**9):
        kept.put(record(KEYS[turn % 3], reason=f"{turn} " * 4_000))


def _read(folder: Path, key: str) -> bool:
    """Whether there is a record; what is there is one that was put."""
    found = CompileStore(folder).get(key)
    if found is None:
        return False
    assert found.key == key
    assert len(set(found.reason.split())) == 1
    return True


def test_writers_that_are_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    end, kills, seen = time.monotonic() + READERS_SECONDS, 0, 0
    while time.monotonic() < end or kills < 10:
        writer = FORK.Process(target=_write_forever, args=(tmp_path,))
        writer.start()
        dies = time.monotonic() + chance.uniform(0.01, 0.15)
        while time.monotonic() < dies:
            seen += sum(_read(tmp_path, key) for key in KEYS)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(SECONDS)
        kills += 1
        seen += sum(_read(tmp_path, key) for key in KEYS)
    assert seen
    # The key is not locked for those who come after.
    with CompileStore(tmp_path).lock(KEYS[0], SECONDS):
        CompileStore(tmp_path).put(record(KEYS[0]))
    assert CompileStore(tmp_path).get(KEYS[0]) == record(KEYS[0])


def _hold(folder: Path, ready: object) -> None:
    with CompileStore(folder).lock(KEYS[0], SECONDS):
        ready.set()  # type: ignore[attr-defined]
        time.sleep(SECONDS)


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    ready = FORK.Event()
    holder = FORK.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(SECONDS)
    holder.kill()
    holder.join(SECONDS)
    begun = time.monotonic()
    with CompileStore(tmp_path).lock(KEYS[0], SECONDS):
        assert time.monotonic() - begun < SECONDS / 2, "it was waited for to the end"


def _work(folder: Path, number: int, turns: int) -> int:
    kept, chance = CompileStore(folder), random.Random(number)
    for turn in range(turns):
        key = chance.choice(KEYS)
        with kept.lock(key, SECONDS):
            kept.put(record(key, reason=f"{number}-{turn} " * 300))
        assert _read(folder, key)
    return turns


def test_sixteen_processes_on_one_folder(tmp_path: Path) -> None:
    """All of them write and read; a 17th, which only reads, never sees half a record."""
    with FORK.Pool(16) as pool:
        under_way = pool.starmap_async(_work, [(tmp_path, number, 12) for number in range(16)])
        read = 0
        while not under_way.ready():
            read += sum(_read(tmp_path, key) for key in KEYS)
        assert under_way.get(SECONDS) == [12] * 16
    assert read
    assert all(_read(tmp_path, key) for key in KEYS)
    left = [path.name for path in (tmp_path / "records").iterdir()]
    assert sorted(left) == sorted(f"{key}.json" for key in KEYS)


def _locks_again(folder: Path) -> bool:
    with CompileStore(folder).lock(KEYS[1], SECONDS):
        return CompileStore(folder).get(KEYS[1]) is None


def test_a_process_that_is_forked_under_a_lock_takes_its_own(tmp_path: Path) -> None:
    with CompileStore(tmp_path).lock(KEYS[0], SECONDS):
        assert forked(_locks_again, tmp_path)
