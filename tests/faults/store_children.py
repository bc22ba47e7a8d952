"""Work in a forked child: under limits, as another user, or to be killed."""

import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

FORK = multiprocessing.get_context("fork")
NOBODY = 65534
SECONDS = 120.0  # a guard against hangs


def _answer(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pipe.send((True, work(*arguments)))
    except BaseException:  # noqa: BLE001 - the parent raises it
        pipe.send((False, traceback.format_exc()))
    pipe.close()


def forked(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a child process. Fails the test when it raises, dies or does not end."""
    here, there = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_answer, args=(there, work, arguments))
    child.start()
    there.close()
    try:
        assert here.poll(SECONDS), f"no answer in {SECONDS} s"
        try:
            well, result = here.recv()
        except EOFError:
            child.join(SECONDS)
            raise AssertionError(f"the child died: exit code {child.exitcode}") from None
    finally:
        if child.is_alive() and not here.poll(0):
            child.join(5)
        if child.is_alive():
            child.kill()
        child.join()
    assert well, result
    return result


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def no_file_over(size: int) -> None:
    """Writing more than so many bytes into a file fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
