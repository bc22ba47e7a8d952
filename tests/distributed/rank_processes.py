"""Processes that are the ranks of a gloo group, kept for many tests: `Ranks(4).run(function, *arguments)`.

A server imports torch once, and the ranks are its forks: a rank costs no import.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 60  # of a test's function on all ranks: more is a hang
COLLECTIVE = datetime.timedelta(seconds=30)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor", "portattn", "opcalls"])


class RankFailed(AssertionError):
    """A function raised on a rank: its traceback."""


class Ranks:
    """`world_size` processes."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        place = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, world_size, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What function(*arguments) returned on each rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
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
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, place: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=world_size, timeout=COLLECTIVE
    )  # fmt: skip
    while True:
        task = pipe.recv()
        if task is None:
            return
        function, arguments = task
        try:
            answer = (True, function(*arguments))
        except BaseException:  # noqa: BLE001 - told to the test, which raises
            answer = (False, traceback.format_exc())
        pipe.send(answer)


@contextlib.contextmanager
def pools() -> Iterator[Callable[[int], Ranks]]:
    """A function that starts the ranks of a world size when they are first wanted."""
    started: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    try:
        yield of
    finally:
        for ranks in started.values():
            ranks.close()
