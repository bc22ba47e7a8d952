"""The child process: answers requests, both as JSON lines. Standard library and Triton only (Python 3.9 or newer).

Started by file path, so a Python without portattn (a toolchain's own environment) can run it. Protocol version 2, one
request at a time; each message has its request's id:

  request   {"version": 2, "id": 7, "task": "compile", "signature": {…}, "target": ["cuda", 90, 32], "env": {…}, …}
            {"version": 2, "id": 8, "task": "hello"}   answered with the versions of Python and of the compiler
            {"version": 2, "id": 9, "task": "probe", "program": "…/cuda_0007.py", "arm": "off", …}
            {"version": 2, "id": 10, "task": "package.module:function", …}   calls it with (request, enter); it
            returns the answer's fields beside "ok"
  progress  {"id": 7, "stage": "ttgir"}                before each compiler stage, so that a crash has a stage
  answer    {"id": 7, "version": 2, "ok": true, "facts": {…}, "toolchain": "3.6.0"}
            {"id": 7, "version": 2, "ok": false, "stage": "ttgir", "kind": "RuntimeError", "message": "…", "log": "…"}
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import shutil
import sys
import traceback
import types
from typing import Any, TextIO

PROTOCOL = 2
PROTOCOL_STAGE, IMPORT_STAGE = "protocol", "import"  # as worker/child.py, which is not importable here
TASK = re.compile(r"\w+(\.\w+)+:\w+")  # a function of portattn, or of a package that brings a backend


FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the parent's portattn


class _Own:
    """Finds the parent's portattn beside this file, whatever is installed or on PYTHONPATH."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "portattn":
            return None
        file = os.path.join(FOLDER, "__init__.py")
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[FOLDER])


def import_package() -> None:
    _leave_own_folder()
    sys.meta_path.insert(0, _Own())


def import_without_package() -> None:
    """Make kernels and worker modules importable without running any package's __init__ and its dependencies."""
    folder = FOLDER
    _leave_own_folder()
    _package("portattn", folder)
    # In the source tree backends/ lies beside portattn/; where portattn is installed, in it.
    backends = os.path.join(folder, "backends")
    if not os.path.isdir(backends):
        backends = os.path.join(os.path.dirname(folder), "backends")
    _package("portattn.backends", backends)
    for name in os.listdir(backends) if os.path.isdir(backends) else ():
        if os.path.isdir(os.path.join(backends, name)) and name.isidentifier():
            _package("portattn.backends." + name, os.path.join(backends, name))


def _leave_own_folder() -> None:
    """Take this script's folder from sys.path: its modules must not shadow others."""
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.join(FOLDER, "worker")]


def _package(name: str, folder: str) -> None:
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package


def answer(request: dict[str, Any], say: Any) -> dict[str, Any]:
    """Run one request; `say` sends a progress line."""
    if request.get("version") != PROTOCOL:
        return _failure(
            PROTOCOL_STAGE, "ProtocolError", f"protocol {request.get('version')!r}, this worker speaks {PROTOCOL}"
        )
    stage = {"now": IMPORT_STAGE}

    def enter(name: str) -> None:
        stage["now"] = name
        say({"stage": name})

    before = dict(os.environ)
    try:
        os.environ.update(request.get("env", {}))
        if request["task"] == "hello":
            from portattn.worker import compilers

            return {
                "ok": True,
                "facts": compilers.versions(request.get("packages", ())),
                "toolchain": compilers.triton.__version__,
            }
        if request["task"] == "compile":
            from portattn.worker import compilers

            return {"ok": True, **compilers.compile_signature(request, enter)}
        if request["task"] == "probe":
            from portattn.worker import probe_harness

            return {"ok": True, **probe_harness.answer(request, enter)}
        if TASK.fullmatch(str(request["task"])):
            return {"ok": True, **pkgutil.resolve_name(request["task"])(request, enter)}
        return _failure(PROTOCOL_STAGE, "ProtocolError", f"unknown task {request['task']!r}")
    except (Exception, SystemExit) as error:  # noqa: BLE001
        # Whatever a compiler raises is this request's result; the parent classifies it.
        cause = _innermost(error)
        return _failure(stage["now"], type(cause).__name__, str(cause), traceback.format_exc())
    finally:
        os.environ.clear()
        os.environ.update(before)


def _innermost(error: BaseException) -> BaseException:
    """Return the original error: Triton's interpreter wraps it once per function, as the last one's repr."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _failure(stage: str, kind: str, message: str, log: str = "") -> dict[str, Any]:
    # A message begins with the exit, and ends with the most telling output; a traceback begins with the first cause.
    return {
        "ok": False, "stage": stage, "kind": kind, "message": _shortened(message, 2000, 6000),
        "log": _shortened(log, 8000, 8000),
    }  # fmt: skip


def _shortened(text: str, head: int, tail: int) -> str:
    return text if len(text) <= head + tail else text[:head] + "\n...\n" + text[-tail:]


def serve(requests: TextIO, answers: TextIO) -> None:
    for line in requests:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        number = request.get("id") if isinstance(request, dict) else None

        def say(message: dict[str, Any], number: Any = number) -> None:
            text = json.dumps({"id": number, **message})  # whole, or not at all
            answers.write(text + "\n")
            answers.flush()

        if isinstance(request, dict):
            found = answer(request, say)
        else:
            found = _failure(PROTOCOL_STAGE, "ProtocolError", f"{line[:200]!r} is no request")
        try:
            say({**found, "version": PROTOCOL})
        except (TypeError, ValueError, RecursionError) as error:
            failed = _failure(PROTOCOL_STAGE, "ProtocolError", f"the answer cannot be sent: {error}")
            say({**failed, "version": PROTOCOL})


def prepare() -> None:
    """Import the compiler before the first request. A failure here recurs, and is reported, in a request."""
    try:
        from portattn.worker import compilers

        compilers.read_own_files()
    except (Exception, SystemExit):  # noqa: BLE001
        traceback.print_exc()  # into the log of the first request


def main() -> None:
    # Compilers print to the standard streams, and programs that they call read them: requests and answers get
    # descriptors of their own, what is printed goes to stderr, and there is nothing to read.
    answers, requests = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    try:
        if "--ahead" in sys.argv:
            prepare()
        serve(requests, answers)
    finally:  # no more requests, or no reader of answers
        for argument in sys.argv[1:]:
            if argument.startswith("--folder="):
                shutil.rmtree(argument.partition("=")[2], ignore_errors=True)


if __name__ == "__main__":
    if "--whole" in sys.argv:
        import_package()
    else:
        import_without_package()
    main()
