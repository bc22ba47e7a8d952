"""The Python that an environment is made with: this one where the toolchain has a build for it, or else one on PATH."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import msgspec
from packaging.specifiers import SpecifierSet

ON_PATH = ("python3.11", "python3.10", "python3.12", "python3.13", "python3.14", "python3")
ASK_SECONDS = 30.0

_ASK = """
import json, os, platform, sys, venv
base = getattr(sys, "_base_executable", None) or sys.executable
print(json.dumps([os.path.realpath(base), platform.python_version(), platform.python_implementation()]))
"""


class Python(msgspec.Struct, frozen=True):
    """An interpreter: where it really lies (outside any virtual environment), and its version."""

    path: str
    version: str


def ask(path: str) -> Python | None:
    """What an interpreter is; None for a program that is no CPython, or one without venv."""
    try:
        done = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        base, version, implementation = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Python(base, version) if implementation == "CPython" else None


def candidates(supported: SpecifierSet) -> Iterator[Python]:
    """This interpreter and those on PATH whose version is in a range (Recipe.python), each minor version once."""
    seen = set()
    for name in (sys.executable, *ON_PATH):
        path = name if name == sys.executable else shutil.which(name)
        found = ask(path) if path else None
        if found is None:
            continue
        minor = found.version.rpartition(".")[0]
        if minor not in seen and supported.contains(found.version, prereleases=True):
            seen.add(minor)
            yield found
