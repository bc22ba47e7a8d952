"""Causes of a failed compile: the dead process and its signal. compile/failures.py decides how long it counts."""

from __future__ import annotations

import re
import signal

from portattn.worker.client import Reply

# Ends that say nothing about a compiler in an arm of a probe, only about that moment.
TRANSIENT_STAGES = ("start", "import", "protocol")
TRANSIENT_KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "MemoryError", "ImportError", "ModuleNotFoundError", "ProtocolError")
# By which a program ends itself. What somebody sends, and the system's limits (SIGXFSZ, SIGXCPU), are not among them.
OWN_SIGNALS = ("SIGABRT", "SIGSEGV", "SIGILL", "SIGFPE", "SIGTRAP", "SIGBUS")

# The wording of worker/ascend.py, of subprocess.CalledProcessError, and of Triton for ptxas.
_DEATH = re.compile(
    r"\bdied (?:of signal |with <Signals\.(?P<name>SIG\w+): )(?P<number>\d+)|`\w+` raised (?P<raised>SIG\w+)"
    r"|`\w+` failed with error code -(?P<code>\d+)"
)


def death(reply: Reply) -> str:
    """The signal that a compiler, or a program that it calls, died of; empty where none did."""
    if reply.outcome == "crash":
        return reply.kind if reply.kind.startswith("SIG") else ""
    found = _DEATH.search(reply.message) if reply.outcome == "error" else None
    if found is None:
        return ""
    number = int(found["number"] or found["code"] or 0)
    return found["raised"] or found["name"] or next((s.name for s in signal.Signals if s == number), f"signal {number}")


def is_crash(reply: Reply) -> bool:
    """Whether it died of a signal by which programs end themselves, so that it is worth asking once more."""
    return death(reply) in OWN_SIGNALS
