"""Make an environment: build it under another name beside its place, try it, and rename it when it is whole."""

import contextlib
import contextvars
import datetime
import fnmatch
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from packaging.specifiers import SpecifierSet

from portattn.errors import ArgumentError
from portattn.files import write_whole
from portattn.schema import compilers
from portattn.schema.toolchain import Toolchain, is_installed
from portattn.tools.lab import folders
from portattn.tools.lab.folders import Environment, LabError, Marker, ToolchainState
from portattn.worker.client import Worker

LAST_LINES = 12  # of a failed program's output that its error keeps

Say = Callable[[str], None]
Job = TypeVar("Job")
Found = TypeVar("Found")


class CommandError(Exception):
    """A program could not be started, ended badly or was `late`; `lines` are the last ones that it printed."""

    def __init__(self, program: str, why: str, lines: Iterable[str] = (), late: bool = False) -> None:
        self.why, self.lines, self.late = why, list(lines), late
        super().__init__("\n  ".join([f"{program}: {why}", *self.lines]))


def run_command(
    command: Sequence[str], say: Say, environment: Mapping[str, str] | None = None, folder: Path | None = None,
    until: float = math.inf,
) -> list[str]:  # fmt: skip
    """Run a program, telling each line; return all. It ends at an interrupt, or `until`. Raises CommandError."""
    program, lines = os.path.basename(command[0]), list[str]()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment, cwd=folder, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CommandError(program, f"cannot be started: {error.strerror}") from None
    timer = threading.Timer(min(max(until - time.monotonic(), 0.0), threading.TIMEOUT_MAX), _kill, [process])
    timer.daemon = True
    if math.isfinite(until):
        timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.strip():
                say(line.strip())
        status = process.wait()
    except BaseException:
        _kill(process)
        raise
    finally:
        timer.cancel()
        if process.stdout is not None:
            process.stdout.close()
    if status:
        why = f"died of {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        last = deque((line for line in lines if line.strip()), LAST_LINES)
        raise CommandError(program, why, last, late=time.monotonic() >= until)
    return lines


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def quiet(_: str) -> None:
    """Ignore a line: a `say` without output."""


def worker(toolchain: str | None = None, **options: Any) -> Worker:
    """Return a child that compiles with a toolchain, the installed one for None. Raises LabError or ArgumentError."""
    own: dict[str, str | None] = options.pop("environment", None) or {}
    if toolchain is None or is_installed(toolchain):
        # The very Triton that this process would import, however it came to be on the path.
        path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return Worker(environment={**path, **own}, **options)
    return Worker(python=folders.need(toolchain).python, environment={**isolation_variables(), **own}, **options)


def isolation_variables() -> dict[str, str | None]:
    """Return the variables to unset for a lab's Python: they bring this process's packages or another ptxas into it."""
    return dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"))


OpenWorker = Callable[[Hashable, Callable[[], Any]], Any]  # starts and returns an object with a method `close`


def run_in_threads(
    jobs: Iterable[Job], work: Callable[[Job, OpenWorker], Found], parallel: int, done: Callable[[Job, Found], None],
    out_of_time: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Work on jobs side by side, telling `done` in this thread; no job begins once `out_of_time`.

    `work` gets a function that returns the thread's worker of a key, started by the given function if the thread has
    none. An interrupt or an error kills the workers and drops the other jobs."""
    local, opened, closed = threading.local(), list[Any](), threading.Event()

    def open_worker(key: Hashable, start: Callable[[], Any]) -> Any:
        own: dict[Any, Any] = local.__dict__
        if key not in own:
            if closed.is_set():
                raise CancelledError("the run has ended")
            own[key] = start()
            opened.append(own[key])
        return own[key]

    pool = ThreadPoolExecutor(parallel, thread_name_prefix="portattn")
    try:
        # A few at a time: an interrupt then finds little under way.
        waiting, running = list(jobs)[::-1], dict[Future[Found], Job]()
        while waiting or running:
            if out_of_time():
                waiting.clear()
            while waiting and len(running) < parallel:
                job = waiting.pop()
                # With this thread's settings.
                running[pool.submit(contextvars.copy_context().run, work, job, open_worker)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running.pop(future), future.result())
    finally:
        closed.set()
        for worker in opened:
            worker.close()
        pool.shutdown(cancel_futures=True)
        for worker in opened:  # a thread can have started a child between the two
            worker.close()


ON_PATH = ("python3.11", "python3.10", "python3.12", "python3.13", "python3.14", "python3")
ASK_SECONDS = 30.0

_ASK = """
import json, os, platform, sys, venv
base = getattr(sys, "_base_executable", None) or sys.executable
print(json.dumps([os.path.realpath(base), platform.python_version(), platform.python_implementation()]))
"""


class Python(msgspec.Struct, frozen=True):
    """An interpreter: its real path outside any virtual environment, and its version."""

    path: str
    version: str


def ask(path: str) -> Python | None:
    """Return an interpreter's description; None for a program that is no CPython, or without venv."""
    try:
        done = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        base, version, implementation = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Python(base, version) if implementation == "CPython" else None


def candidates(supported: SpecifierSet) -> Iterator[Python]:
    """Yield this interpreter and others on PATH within a version range (Recipe.python), each minor version once."""
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


# A third of a wheel, which no compile reads: the profiler and its libraries, static libraries, plug-ins.
UNUSED = ("*.a", "backends/nvidia/lib/cupti*/*", "_C/libproton*", "instrumentation/*.so")
WAIT_SECONDS = 3600.0  # for another process that makes the same environment
TRY_SECONDS = 300.0  # to import Triton for the first time, on a loaded machine


def create(toolchain: str, say: Say = quiet, *, python: str | None = None) -> Environment:
    """Make a toolchain's environment by its backend's recipe, and return it; an existing whole environment stays.

    `python`: by default this one, or one on PATH that has a build. `tools` lacks MLIR 19 if Debian's cannot be fetched.
    Raises ArgumentError on a bad name or interpreter, LabError on a failure, which leaves nothing behind."""
    name = folders.canonical(toolchain)
    chosen = _chosen(name, python) if python else None
    with folders.lock(folders.folder_of(name), WAIT_SECONDS, name):
        folders.sweep(folders.folder_of(name))
        found = folders.state(name)
        if found.environment is None:
            _make(found, chosen, say)
        elif chosen and chosen.version != found.environment.python_version:
            have = f"its environment is there, with Python {found.environment.python_version}: remove it first"
            raise ArgumentError("lab create", "--python", python, have)
        _add_programs(name, say)
        return folders.need(name)


def _chosen(name: str, path: str) -> Python:
    found = ask(path)
    distribution, supported = name.partition("==")[0], SpecifierSet(folders.recipe(name).python)
    if found is None:
        raise ArgumentError("lab create", "--python", path, "must be a CPython interpreter with the venv module")
    if not supported.contains(found.version, prereleases=True):
        limit = f"is Python {found.version}; {distribution} needs {supported}"
        raise ArgumentError("lab create", "--python", path, limit)
    return found


def _make(found: ToolchainState, chosen: Python | None, say: Say) -> None:
    name, final = found.toolchain, folders.folder_of(found.toolchain)
    making = final.with_name(f"{folders.MAKING}{final.name}-{uuid.uuid4().hex[:8]}")
    try:
        with_python = _install(name, making, chosen, say)
        say("taking out what no compile reads")
        _trim(making)
        say("trying it")
        versions = _tried(name, making)
        _write_marker(making, name, with_python.version, versions)
        _take_from_others(making)
        if found.broken:
            say(f"replacing the broken one ({found.broken})")
            folders.discard(final)
        making.rename(final)
    except OSError as error:
        raise LabError(f"{name}: cannot be made in {final.parent}: {error.strerror}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _install(name: str, making: Path, chosen: Python | None, say: Say) -> Python:
    distribution, recipe = name.partition("==")[0], folders.recipe(name)
    parsed, supported = Toolchain.parse(name), SpecifierSet(recipe.python)
    also = [package for package, versions in recipe.also.items() if parsed.within(distribution, versions)]
    elsewhere = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PYTHONPATH", "PYTHONHOME")
    of_pip = {k: v for k, v in os.environ.items() if k not in elsewhere} | {"PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    refused: list[str] = []
    tried: list[str] = []
    for python in [chosen] if chosen else candidates(supported):
        say(f"Python {python.version} ({python.path})")
        shutil.rmtree(making, ignore_errors=True)
        making.parent.mkdir(parents=True, exist_ok=True)
        try:
            run_command([python.path, "-I", "-m", "venv", "--without-pip", str(making)], say)
            run_command([*_pip(), *_into(making), name, *also], say, environment=of_pip)
        except CommandError as error:
            if not any("No matching distribution" in line for line in error.lines):
                raise LabError(f"{name}: cannot be installed\n{error}") from None
            tried.append(python.version)
            refused = [line for line in error.lines if "ERROR" in line]
            continue
        return python
    if not tried:
        raise LabError(
            f"{name}: needs CPython {supported}, and neither this Python nor one on PATH "
            f"({', '.join(ON_PATH)}) is; --python names one"
        )
    wheel = f"a wheel {name.replace('-', '_').replace('==', '-')}-*.whl in a folder that PIP_FIND_LINKS names"
    index = f"it is published at {recipe.index}: " if recipe.index else ""
    remedy = f"{index}PIP_EXTRA_INDEX_URL names another index, and {wheel} is taken, too"
    raise LabError("\n  ".join([f"{name}: no build of it for Python {', '.join(tried)}; pip said", *refused, remedy]))


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise LabError(f"there is no pip, neither of {sys.executable} nor on PATH: `python -m ensurepip` adds it")
    return [found]


def _into(folder: Path) -> list[str]:
    return [
        "--python", str(folders.interpreter(folder)), "--no-input", "--disable-pip-version-check", "install",
        "--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--no-warn-script-location",
    ]  # fmt: skip


def packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python3*/site-packages"))


def _trim(making: Path) -> None:
    """Remove files that no compile reads, and the scripts, which hold the building name."""
    triton = packages(making) / "triton"
    for path in sorted(triton.rglob("*")):
        relative = path.relative_to(triton).as_posix()
        if not path.is_dir() and any(fnmatch.fnmatchcase(relative, pattern) for pattern in UNUSED):
            path.unlink()
    for path in (making / "bin").iterdir():
        if not path.name.startswith("python"):
            path.unlink()


def _take_from_others(folder: Path) -> None:
    for place, folders_in, files in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in (*folders_in, *files))):
            mode = os.lstat(path).st_mode
            if mode & 0o022 and not stat.S_ISLNK(mode):
                os.chmod(path, stat.S_IMODE(mode) & ~0o022)


def _tried(name: str, making: Path) -> dict[str, str]:
    distribution, _, version = name.partition("==")
    package = folders.recipes()[distribution].package
    with Worker(python=str(folders.interpreter(making)), environment=isolation_variables()) as worker:
        reply = worker.request("hello", TRY_SECONDS, packages=[package])
    if reply.outcome != "ok":
        raise LabError(
            f"{name}: installed, but it cannot be imported: {reply.kind}: {reply.message}\n{reply.log}".strip()
        )
    versions = {str(key): str(value) for key, value in reply.facts.items() if key not in ("protocol", "python")}
    stated = {compilers.canonical(key): compilers.version(key, value) for key, value in versions.items()}
    if stated.get(distribution) != version:
        raise LabError(f"{name}: installed, but {package}/ in it belongs to {versions or 'no distribution'}")
    return versions


def _write_marker(folder: Path, name: str, python: str, versions: dict[str, str]) -> None:
    for program in packages(folder).glob("triton/backends/nvidia/bin/ptxas*"):
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        if release := re.search(r"\bV(\d+(?:\.\d+)+)", done.stdout):
            versions = versions | {program.name: release.group(1)}
    marker = Marker(
        toolchain=name, python=python, created=datetime.date.today(), bytes=folders.size(folder),
        versions=dict(sorted(versions.items())),
    )  # fmt: skip
    write_whole(folder / folders.MARKER, msgspec.json.format(msgspec.json.encode(marker)))


def _add_programs(name: str, say: Say) -> None:
    """Fetch the recipe's programs that the machine lacks; on failure name the packages to install."""
    folder, beside = folders.folder_of(name), folders.programs(name)
    missing = beside.missing(folder) if beside is not None else []
    if beside is None or not missing:
        return
    try:
        versions = beside.fetch(folder, missing, say)
    except beside.NoTools as error:
        say(str(error))
        return
    if versions:
        marker = msgspec.json.decode((folder / folders.MARKER).read_bytes(), type=Marker)
        _write_marker(folder, name, marker.python, marker.versions | versions)
        _take_from_others(folder)
