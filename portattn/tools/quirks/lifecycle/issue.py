"""The text of a report for the compiler's own tracker: what was run on what, what happened, and the log."""

from __future__ import annotations

import re
from pathlib import Path

from portattn.planning.registry import Registry
from portattn.tools.quirks.lifecycle.failure_report import Facts
from portattn.tools.quirks.lifecycle.programs import form_of
from portattn.tools.quirks.trackers import tracker_of

BEFORE, AFTER = 12, 28  # lines of the log round the cause
_EXPECTED = {
    "compile-error": "The kernel compiles.",
    "compiler-crash": "The kernel compiles; if it cannot, the compiler raises an error and the process lives on.",
    "hang": "The compiler ends.",
    "wrong-result": "The numbers agree with a float64 reference.",
    "slow": "Code as fast as that of the neighbouring versions.",
    "resource-limit": "The kernel fits the chip, or the compiler says how much room there is.",
}


def issue(facts: Facts, title: str, program: str, saved: str, reproduced: str) -> str:
    """Markdown. program, saved: names of the files beside it; reproduced: what running the program here gave."""
    failure = facts.failure
    compiler = facts.compiler.partition("==")[0]
    rows = [
        ("compiler", facts.compiler or "FILL IN: version of the compiler"),
        ("chip", ", ".join(facts.arches) or facts.chip or "FILL IN: chip"),
        *sorted(facts.components.items()),
        ("kernel", facts.function or "FILL IN"),
        ("stage", failure.stage),
    ]
    files = [f"`{name}`" for name in (program, saved) if name]
    parts = [
        f"# {title}",
        f"Tracker: {tracker_of(compiler)}" if tracker_of(compiler) else "Tracker: FILL IN",
        "## Environment",
        "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]),
        "## What happens",
        f"{_cap(failure.symptom)} at stage `{failure.stage}`:",
        _fenced(failure.cause),
        "## To reproduce",
        _how(facts, files),
        _fenced(f"python {program} off"),
        f"{reproduced}." if reproduced else "Not run yet on the machine that wrote this report.",
        *_without_portattn(facts, saved),
        "## Expected",
        _EXPECTED[failure.symptom],
        "## Log",
        _fenced(excerpt(facts.log, facts.at)),
    ]
    if facts.command:
        parts += ["## The request as it was sent to the compiler's process", _fenced(facts.command)]
    return private("\n\n".join(parts) + "\n")


def _how(facts: Facts, files: list[str]) -> str:
    """What the attached files are good for."""
    named = " and ".join(files)
    if form_of(facts) == "missing":
        return f"FILL IN: {named}, attached, lacks the kernel: the log holds no program."
    if facts.failure.symptom == "wrong-result" or facts.failure.stage == "launch":
        return f"{named}, attached, on the chip itself."
    return f"{named}, attached; no accelerator is needed."


def _without_portattn(facts: Facts, saved: str) -> list[str]:
    """How to compile the module alone, where the program has the kernels of portattn for its source."""
    if form_of(facts) != "specialisation" or not saved.endswith(".ttir") or facts.signature is None or not facts.arches:
        return []
    where = Registry.load()
    backend = where.backends[facts.backend]
    target = backend.triton_target(where.arches[facts.backend][facts.arches[0]])
    arguments = f"target=GPUTarget{target!r}, options={facts.signature['options']!r}"
    lines = ["from triton.backends.compiler import GPUTarget", "import triton", ""]
    return [
        "Or without portattn, from the module as it was before the stage that fails:",
        _fenced("\n".join([*lines, f'triton.compile("{saved}", {arguments})'])),
    ]


def excerpt(log: str, line: int) -> str:
    """The lines of a log round one of them, and its last ones."""
    lines = log.rstrip("\n").splitlines()
    first, last = max(line - 1 - BEFORE, 0), min(line + AFTER, len(lines))
    tail = max(last, len(lines) - 4)
    cut = [f"… {tail - last} lines …"] if tail > last else []
    return "\n".join([*(["…"] if first else []), *lines[first:last], *cut, *lines[tail:]])


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(found) for found in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * max(longest + 1, 3)
    return f"{fence}\n{text}\n{fence}"


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def private(text: str) -> str:
    """Without the name of the user's own folder: a report and what goes with it are public."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
