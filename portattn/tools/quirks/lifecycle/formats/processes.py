"""Processes: those that do not end, and those that die."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats.row import Recogniser

HANGS = (
    Recogniser(
        name="time-out",
        family="process",
        pattern=(
            r"(?P<cause>(?:no answer in|did not end in) [\d.]+ s|timed out after [\d.]+ seconds"
            r"|Timeout >[\d.]+s|exit (?:status|code) 124\b|DUE TO TIME LIMIT)"
        ),
        symptom="hang",
        source="portattn's worker, Python's subprocess, pytest-timeout, GNU timeout, Slurm",
    ),
)  # fmt: skip
DEATHS = (
    Recogniser(
        name="segmentation-fault",
        family="process",
        pattern=(
            r"(?P<cause>SIGSEGV|[Ss]egmentation fault|exit ?(?:status|code)\s*[:=]?\s*(?:139|-11)\b"
            r"|died of signal 11|Caught signal 11)"
        ),
        symptom="compiler-crash",
        signature=r"SIGSEGV|[Ss]egmentation fault|exit ?(status|code)\s*[:=]?\s*(139|-11)|signal 11",
        passes_on=True,
        source="shells, Python's subprocess and faulthandler, torchrun (NVIDIA/Megatron-LM#1880), portattn's worker",
    ),
    Recogniser(
        name="abort",
        family="process",
        pattern=(
            r"(?P<cause>SIGABRT|^Aborted\b|\bAborted +\(core dumped\)|IOT instruction|Fatal Python error: Aborted"
            r"|exit ?(?:status|code)\s*[:=]?\s*(?:134|-6)\b|died of signal 6)"
        ),
        symptom="compiler-crash",
        signature=r"SIGABRT|Aborted|IOT instruction|exit ?(status|code)\s*[:=]?\s*(134|-6)|signal 6",
        passes_on=True,
        source="shells (triton-lang/triton#4883), Python's subprocess and faulthandler, portattn's worker",
    ),
)  # fmt: skip
