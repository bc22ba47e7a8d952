"""How a request to a worker ended, as its caller sees it."""

from __future__ import annotations

import signal
from typing import Literal

import msgspec

Outcome = Literal["ok", "error", "crash", "hang"]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended.

    outcome      ok; error: the compiler raised; crash: the process died; hang: the time limit passed
    stage        the compiler stage it was in
    kind         exception type, or the signal's name
    toolchain    version of the Triton that the child really used; empty where it does not say
    unavailable  nothing was learnt about what was asked, whatever the outcome: the child could not be started or ended
                 before it began, was closed, did not speak the protocol, or the system failed the parent (no process,
                 no descriptor, no memory). `message` says which. Not set where a compiler may have been the cause,
                 as where a child is killed by somebody: worker/exit_status.py judges those by their kind
    """

    outcome: Outcome
    facts: dict[str, int | str | float] = {}
    stage: str = ""
    kind: str = ""
    message: str = ""
    log: str = ""
    toolchain: str = ""
    unavailable: bool = False


def ended_by(status: int) -> str:
    """The name of how a process ended, from its return code: SIGABRT, SIGRTMIN+6, `exit status 3`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # only the first and the last of the real-time signals have names
        return f"SIGRTMIN+{-status - signal.SIGRTMIN}" if -status > signal.SIGRTMIN else f"SIG{-status}"


def cause(log: str) -> str:
    """The line of a crash log that names the cause: an assertion, an MLIR or LLVM error, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for mark in ("Assertion", "LLVM ERROR", "error:", "UNREACHABLE", "what():"):
        for line in lines:
            if mark in line:
                return line[:500]
    return lines[-1][:500] if lines else ""
