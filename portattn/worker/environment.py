"""Variables that a quirk asks the compiler to see: set in this process for the time of a compile, and for nobody else.

Compilers read them with getenv in C++ too, so they have to be in the process's environment and cannot be handed over.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping


class _Compiles:
    """The compile under way: which thread compiles, and what the variables were that it set (inner compiles last)."""

    def __init__(self) -> None:
        self.turn = threading.RLock()  # held for a whole compile
        self.change = threading.RLock()  # held while os.environ and `before` change; never for long
        self.thread = 0
        self.before: list[dict[str, str | None]] = []


_now = _Compiles()


@contextlib.contextmanager
def compile_environment(env: Mapping[str, str]) -> Iterator[None]:
    """Set the variables for the time of a compile in this thread; other threads' compiles wait.

    A process that another thread forks meanwhile does not have them, nor has a Worker's child, nor what is started with
    `env=outside()`. Any other program that another thread starts meanwhile inherits them, as from any os.environ: it is
    the C library that hands them on, and the compiler must find them there.
    """
    now = _now
    with now.turn:
        before = {name: os.environ.get(name) for name in env}
        try:
            with now.change:
                now.thread = threading.get_ident()
                now.before.append(before)  # first: whoever looks in the middle knows how it was
                os.environ.update(env)
            yield
        finally:
            with now.change:
                if now.before and now.before[-1] is before:  # not where an interrupt came before it was noted
                    _put_back(os.environ, before)
                    now.before.pop()


def outside() -> dict[str, str]:
    """This process's environment without what a compile under way has set, in whichever thread."""
    with _now.change:
        # One by one: other threads may take away variables of their own.
        found = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
        for before in reversed(_now.before):
            _put_back(found, before)
    return found


def _put_back(environment: os._Environ[str] | dict[str, str], before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value


def _forked() -> None:
    """In a process that was just forked: a compile of another thread goes on in the parent alone."""
    global _now
    if _now.before and _now.thread == threading.get_ident():
        _now.change = threading.RLock()  # this very thread compiles, here as well: it puts back what it set
        return
    for before in reversed(_now.before):
        _put_back(os.environ, before)
    _now = _Compiles()


os.register_at_fork(after_in_child=_forked)
