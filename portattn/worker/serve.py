"""The child process: reads requests as JSON lines, answers with JSON lines. Standard library and Triton only.

Started by file path, so that it also runs under a Python in which portattn is not installed (a toolchain's own
environment). Protocol version 1, one request at a time:

  request   {"version": 1, "task": "compile", "signature": {…}, "target": ["cuda", 90, 32], "env": {…}, "facts": "full"}
            {"version": 1, "task": "hello"}          answered with the versions of Python and of the compiler
            {"version": 1, "task": "probe", "program": "…/cuda_0007.py", "arm": "off", "name": "cuda:sm_100", …}
  progress  {"stage": "ttgir"}                       before each compiler stage, so that a crash has a stage
  answer    {"ok": true, "facts": {…}, "toolchain": "3.6.0"}
            {"ok": false, "stage": "ttgir", "kind": "RuntimeError", "message": "…", "log": "…"}

Every answer also says the child's "version": the parent refuses those of another protocol.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import types
from typing import Any, TextIO

PROTOCOL = 1


def import_without_package() -> None:
    """Make kernels (the backends' own too) and worker modules importable without running any package's __init__, which
    would need portattn's dependencies."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # A script's own folder heads sys.path; its modules must not shadow others.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.join(folder, "worker")]
    _package("portattn", folder)
    # In the source tree backends/ lies beside portattn/; where portattn is installed, in it.
    backends = os.path.join(folder, "backends")
    if not os.path.isdir(backends):
        backends = os.path.join(os.path.dirname(folder), "backends")
    _package("portattn.backends", backends)
    for name in os.listdir(backends) if os.path.isdir(backends) else ():
        if os.path.isdir(os.path.join(backends, name)) and name.isidentifier():
            _package("portattn.backends." + name, os.path.join(backends, name))


def _package(name: str, folder: str) -> None:
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package


def answer(request: dict[str, Any], say: Any) -> dict[str, Any]:
    """Carry out one request; `say` sends a progress line."""
    if request.get("version") != PROTOCOL:
        return _failure(
            "protocol", "ProtocolError", f"protocol {request.get('version')!r}, this worker speaks {PROTOCOL}"
        )
    stage = {"now": "import"}

    def enter(name: str) -> None:
        stage["now"] = name
        say({"stage": name})

    before = dict(os.environ)
    os.environ.update(request.get("env", {}))
    try:
        if request["task"] == "hello":
            from portattn.worker import compilers

            return {"ok": True, "facts": compilers.versions(), "toolchain": compilers.triton.__version__}
        if request["task"] == "compile":
            from portattn.worker import compilers

            return {"ok": True, **compilers.compile_signature(request, enter)}
        if request["task"] == "probe":
            from portattn.worker import probe

            return {"ok": True, **probe.answer(request, enter)}
        if request["task"] == "interpret":
            from portattn.worker import interpret

            return {"ok": True, **interpret.compare(request, enter)}
        if request["task"] == "execute":
            from portattn.linalg import execute

            return {"ok": True, **execute.compare(request, enter)}
        if request["task"] == "emulate":
            from portattn.emulate import execute as emulated

            return {"ok": True, **emulated.compare(request, enter)}
        if request["task"] == "older":
            from portattn.older import execute as older

            return {"ok": True, **older.compare(request, enter)}
        return _failure("protocol", "ProtocolError", f"unknown task {request['task']!r}")
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # Whatever a compiler raises is this request's result; the parent classifies it.
        return _failure(stage["now"], type(error).__name__, str(error), traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(before)


def _failure(stage: str, kind: str, message: str, log: str = "") -> dict[str, Any]:
    if len(message) > 8000:  # how it ended stands first, what it printed last says most
        message = message[:2000] + "\n...\n" + message[-6000:]
    return {"ok": False, "stage": stage, "kind": kind, "message": message, "log": log[-16000:]}


def serve(requests: TextIO, answers: TextIO) -> None:
    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for line in requests:
        say(answer(json.loads(line), say) | {"version": PROTOCOL})


def main() -> None:
    # Compilers print to the standard streams: answers get a descriptor of their own, and the rest goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    finally:  # nobody asks any more, or nobody is there to be answered
        for argument in sys.argv[1:]:
            if argument.startswith("--folder="):
                shutil.rmtree(argument.partition("=")[2], ignore_errors=True)


if __name__ == "__main__":
    if "--installed" not in sys.argv:
        import_without_package()
    main()
