"""What a log carries of the program that failed: IR, PTX, Python source, a worker's request, or files that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from portattn.files import read_limited

LARGEST = 4 * 2**20  # bytes of a file that is saved beside a draft
# A module that MLIR printed: aliases, the module, and what a reproducer says about its passes.
_MODULE = re.compile(
    r"(?:^#\w+ = [^\n]*\n)*^module(?: attributes| @\w+)?[^\n]*\{\n(?:.*\n)*?^\}[^\n]*\n?"
    r"(?:\n?\{-#\n(?:.*\n)*?#-\}\n?)?",
    re.MULTILINE,
)
_PTX = re.compile(r"^\.version [\d.]+\n\.target \w+\n(?:.*\n)*?(?=^=====|^Traceback|^\S*ptxas\S* |\Z)", re.MULTILINE)
_SOURCE = re.compile(
    r"CompilationError: at \d+:\d+:\n(?P<source>(?:@[^\n]*\n)*def [^\n]*\n(?:[^\n]*\n)*?)[ ]*\^\n", re.MULTILINE
)
_NAMED = re.compile(r"(?<![\w/])(/[\w./+-]+\.(?:ttir|ttgir|mlir|ttadapter|ptx))\b")
_CUT = re.compile(r"^… \d+ bytes …$", re.MULTILINE)  # what a worker leaves out of a long log (worker/client.py)
# Dialects that show how far a module was lowered.
_GPU = re.compile(r"\bttg\.|\btriton_gpu\.|#blocked")


class Excerpt(msgspec.Struct, frozen=True, kw_only=True):
    """A text to save beside a draft.

    kind     ttir, ttgir, ptx, or source (what a CompilationError shows of a function: not a whole program)
    suffix   of the file to save it in
    passes   what a reproducer says of the passes that failed; empty without one
    """

    kind: str
    suffix: str
    text: str
    origin: str
    passes: str = ""

    @property
    def compiles(self) -> bool:
        """Whether it is a whole program, which a compiler takes."""
        return self.kind != "source"


def excerpts(log: str) -> list[Excerpt]:
    """Whole programs first: modules and PTX in the text, files that it names and that are here, parts of sources."""
    whole = [match.group() for match in _MODULE.finditer(log) if not _CUT.search(match.group())]
    found = [_module(text, "in the log") for text in whole]
    programs = [match.group() for match in _PTX.finditer(log) if not _CUT.search(match.group())]
    found += [Excerpt(kind="ptx", suffix=".ptx", text=text, origin="in the log") for text in programs]
    for name in dict.fromkeys(_NAMED.findall(log)):
        text = _read(Path(name))
        if text and name.endswith(".ptx"):
            found.append(Excerpt(kind="ptx", suffix=".ptx", text=text, origin=name))
        elif text and (match := _MODULE.search(text)):
            found.append(_module(match.group(), name))
    sources = [m["source"] for m in _SOURCE.finditer(log)]
    found += [Excerpt(kind="source", suffix=".txt", text=s, origin="in the log") for s in dict.fromkeys(sources)]
    return found


def _module(text: str, origin: str) -> Excerpt:
    passes = re.search(r"pipeline: \"(.*)\"", text)
    kind = "ttgir" if _GPU.search(text) else "ttir"
    # A pass prints the module as it was before it: with this suffix Triton runs the passes that make TTGIR on it.
    return Excerpt(kind=kind, suffix=".ttir", text=text, origin=origin, passes=passes[1] if passes else "")


def _read(path: Path) -> str:
    """Return a file that a log names; empty if it is not here any more, is no regular file, or is too large to keep."""
    try:
        return read_limited(path, LARGEST).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def request_in(log: str) -> dict[str, Any] | None:
    """The request to a worker that a log quotes, as the command of an incident does; None without one."""
    for match in re.finditer(r"\{\"version\": \d+, \"task\": \"compile\"", log):
        try:
            found, _ = json.JSONDecoder().raw_decode(log, match.start())
        except ValueError:
            continue  # cut short, or quoted in a way that changed it
        if not isinstance(found, dict) or "target" not in found:
            continue
        if isinstance(found.get("signature"), dict) and isinstance(found.get("env", {}), dict):
            return found
    return None
