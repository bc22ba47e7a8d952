"""Processes that are the ranks of a gloo group, kept for many tests: `Pools().of(4).run(function, *arguments)`. They
are forks of one server (rank_server.py), which has imported what they need: a rank costs no import."""

import datetime
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

SECONDS = 120  # of a test's function on all ranks: more is a hang
COLLECTIVE = datetime.timedelta(seconds=60)
SERVER = Path(__file__).with_name("rank_server.py")


class RankFailed(AssertionError):
    """A function raised on a rank: its traceback."""


class Ranks:
    """The ranks of one group, by their pipes."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.world_size, self._pipes = len(pipes), pipes
        self.lost = False  # whether one did not answer: the others may wait for it

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                self.lost = True
                self.close()
                raise RankFailed(f"rank {rank} of {self.world_size} did not answer in {SECONDS} s")
            good, value = pipe.recv()
            found.append(value)
            if not good:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise RankFailed("\n".join(failures))
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


class Pools:
    """Groups of several world sizes, each started when it is first wanted."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "socket")
        self._listener = Listener(address)
        self._server = subprocess.Popen([sys.executable, str(SERVER), address])
        self._pipe = self._listener.accept()
        self._started: dict[int, Ranks] = {}
        self._stores = 0

    def of(self, world_size: int) -> Ranks:
        if world_size not in self._started or self._started[world_size].lost:
            self._stores += 1
            self._pipe.send((world_size, str(Path(self._folder.name) / f"store{self._stores}")))
            pipes = {}
            for _ in range(world_size):
                pipe = self._listener.accept()
                pipes[pipe.recv()] = pipe
            self._started[world_size] = Ranks([pipes[rank] for rank in range(world_size)])
        return self._started[world_size]

    def close(self) -> None:
        for ranks in self._started.values():
            ranks.close()
        self._pipe.close()
        self._listener.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:  # ranks that wait for one another end by the group's time-out
            self._server.kill()
            self._server.wait()
        self._folder.cleanup()
