"""Environments of vLLM, SGLang, diffusers and torch_npu, in which tests/engines/<name> run against the real engine.

    python scripts/engine_env.py make vllm==0.33.0 [--seconds 600] [--json]
    python scripts/engine_env.py test vllm-0.33.0 [pytest arguments]
    python scripts/engine_env.py list [--json | --newest]
    python scripts/engine_env.py remove vllm-0.33.0

An environment is made from a list of exact versions, tests/engines/requirements/<name>-<version>.txt, installed without
its dependencies: an engine's own would bring CUDA's libraries, several GB of them. torch is its CPU build, so the index
that pip knows must have it (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu). portattn is not installed: tests
take it from this checkout, entry points included, so one environment serves every checkout. Environments lie in
${ENGINES_HOME:-~/.cache/portattn/engines}.

Exit status: 0 done; 1 bad arguments, or what `test` found; 3 the environment cannot be made here; 130 interrupted.
`test` gives pytest's own status, and 3 where there is no environment.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import filelock
from engine_recipes import MARKER, ROOT, CannotBeMade, Recipe, Refused, known, python_of, recipe, root, state

MAKING, REMOVING = ".making-", ".removing-"
BAD, CANNOT, INTERRUPTED = 1, 3, 130
SECONDS = 600.0  # for one environment, its downloads included
TRY_SECONDS = 300.0  # to import an engine for the first time
_LEFT = {  # of a command that was interrupted
    "make": "; nothing is left of it",
    "remove": "; the same again removes what is left",
    "test": "; the environment stays as it was",
}
LAST_LINES = 12  # of pip's output that an error keeps
TOLD_SECONDS = 5.0  # between two lines of progress where nobody sits at a terminal


# ------------------------------------------------------------------------------------------------ making


def make(one: Recipe, seconds: float) -> bool:
    """Make an environment, unless it is there; whether it was made now. Raises CannotBeMade; nothing is left then."""
    deadline = time.monotonic() + seconds
    try:
        root().mkdir(parents=True, exist_ok=True)
        with _lock(one, seconds):
            found = state(one)
            if found == "made":
                return False
            if found != "absent":
                tell(f"{one.folder.name}: {found}: made again")
            _sweep(one)
            _room(one)
            _build(one, deadline, seconds)
    except OSError as error:
        raise CannotBeMade(f"{one.folder.name}: {_why(error)}") from None
    return True


def _why(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full(shutil.disk_usage(root()).free)
    return f"{error.filename or root()}: {error.strerror or error}"


def _full(free: int) -> str:
    return f"the disk is full: {root()} has {free // 1_000_000} MB left; ENGINES_HOME names another folder"


def _room(one: Recipe) -> None:
    free = shutil.disk_usage(root()).free
    if free < one.size * 1_000_000:
        needs = f"needs {one.size} MB while it is made, and {root()} has {free // 1_000_000} MB left"
        raise CannotBeMade(f"{one.folder.name}: {needs}; ENGINES_HOME names another folder")


@contextlib.contextmanager
def _lock(one: Recipe, seconds: float) -> Iterator[None]:
    """One maker at a time. The kernel gives the lock back when its holder dies."""
    lock = filelock.FileLock(root() / f".{one.folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        tell(f"{one.folder.name}: another process makes or removes it; waiting")
        try:
            lock.acquire(timeout=seconds)
        except filelock.Timeout:
            raise CannotBeMade(f"{one.folder.name}: another process held it for {seconds:.0f} s") from None
    try:
        yield
    finally:
        lock.release()


def _sweep(one: Recipe) -> None:
    """Remove what makers and removers of this environment left when they were killed. Needs the lock."""
    for left in (*root().glob(f"{MAKING}{one.folder.name}-*"), *root().glob(f"{REMOVING}{one.folder.name}-*")):
        shutil.rmtree(left, ignore_errors=True)


def _build(one: Recipe, deadline: float, seconds: float) -> None:
    making = root() / f"{MAKING}{one.folder.name}-{secrets.token_hex(4)}"
    temporary = making / "tmp"  # pip's, on the same disk, and gone with the rest
    try:
        temporary.mkdir(parents=True)
        tell(f"{one.folder.name}: {len(one.packages)} packages, into {one.folder}")
        _run([sys.executable, "-I", "-m", "venv", "--without-pip", str(making)], one, deadline, seconds, {})
        pip = [sys.executable, "-m", "pip", "--python", str(python_of(making)), "--no-input", "install", "--no-deps"]
        options = ["--only-binary", ":all:", "--progress-bar", "off", "--no-warn-script-location", "--no-compile"]
        elsewhere = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_QUIET", "PIP_CONSTRAINT")
        variables = dict.fromkeys((*elsewhere, "PYTHONPATH", "PYTHONHOME"), "")
        variables |= {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        _run([*pip, *options, *one.packages], one, deadline, seconds, variables, _Progress(one))
        tell(f"{one.folder.name}: trying it: {one.trial}")
        trial = [str(python_of(making)), "-c", one.trial]
        _run(trial, one, min(deadline, time.monotonic() + TRY_SECONDS), seconds, _own(one), folder=temporary)
        shutil.rmtree(temporary)
        for script in (making / "bin").iterdir():  # they hold the name under which they were installed
            if not script.name.startswith("python"):
                script.unlink()
        marker = {"engine": one.name, "version": one.version, "list": one.digest, "made": time.strftime("%Y-%m-%d")}
        _synced(making / MARKER, json.dumps(marker, indent=1) + "\n")
        if one.folder.exists():
            _discard(one)
        making.rename(one.folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _own(one: Recipe) -> dict[str, str]:
    """Variables of a process in the environment; an empty one is taken away."""
    return {"PYTHONPATH": "", "PYTHONHOME": "", "VIRTUAL_ENV": "", **one.variables}


class _Progress:
    """Says which of the packages pip has come to: at a terminal on one line, else every few seconds."""

    def __init__(self, one: Recipe) -> None:
        self._name, self._all = one.folder.name, len(one.packages)
        self._count, self._told, self._begun = 0, 0.0, time.monotonic()

    def __call__(self, line: str) -> None:
        if line.startswith("Collecting ") or line.startswith("Requirement already"):
            self._count += 1
            self._tell(f"{self._count} of {self._all}: {line.split()[1]}")
        elif line.lstrip().startswith("Downloading") and "MB" in line:
            self._tell(line.strip(), always=True)
        elif line.startswith("Installing collected"):
            self._tell("unpacking", always=True)

    def _tell(self, text: str, always: bool = False) -> None:
        now = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r\033[K{self._name}: {text[:70]}", end="" if not always else "\n", file=sys.stderr, flush=True)
        elif always or now - self._told > TOLD_SECONDS:
            self._told = now
            tell(f"{self._name}: {now - self._begun:.0f} s: {text}")


def _run(
    command: list[str], one: Recipe, deadline: float, seconds: float, variables: dict[str, str],
    each: _Progress | None = None, folder: Path | None = None,
) -> None:  # fmt: skip
    """Run a program until the deadline. Raises CannotBeMade with the last lines that it printed."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value or name not in variables}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=environment, cwd=folder, start_new_session=True,
    )  # fmt: skip
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(process)

    timer = threading.Timer(min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX), end)
    timer.start()
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                lines.append(line.rstrip())
                if each:
                    each(line)
        status = process.wait()
    except BaseException:
        _kill(process)
        raise
    finally:
        timer.cancel()
    if late.is_set():
        last = f"; last: {lines[-1].strip()}" if lines else ""
        raise CannotBeMade(f"{one.folder.name}: not made within {seconds:.0f} s (--seconds allows more){last}")
    if status:
        text = "\n".join(lines)
        if "No space left on device" in text or "Errno 28" in text:
            raise CannotBeMade(f"{one.folder.name}: {_full(shutil.disk_usage(root()).free)}")
        shown = [line for line in lines if not line.startswith("WARNING")][-LAST_LINES:]
        what = "pip" if "pip" in command else command[-1] if "-c" in command else "venv"
        raise CannotBeMade("\n  ".join([f"{one.folder.name}: {what}: exit status {status}", *shown]))


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _discard(one: Recipe) -> None:
    """Take an environment away: out of its name first, so that nobody finds half of it."""
    aside = one.folder.with_name(f"{REMOVING}{one.folder.name}-{secrets.token_hex(4)}")
    one.folder.rename(aside)
    shutil.rmtree(aside)


# ------------------------------------------------------------------------------------------------ using


def test(one: Recipe, arguments: list[str]) -> int:
    """Run tests/engines/<name> in the environment; pytest's exit status."""
    found = state(one)
    if found != "made":
        again = f"`python scripts/engine_env.py make {one.name}=={one.version}` makes it"
        raise CannotBeMade(f"{one.folder.name}: its environment is {found}; {again}")
    tests = f"tests/engines/{one.name}"
    named = any(argument.split("::")[0].startswith("tests") for argument in arguments)
    with tempfile.TemporaryDirectory(prefix="portattn-engine-") as temporary:
        described = _distribution(Path(temporary))
        environment = {**os.environ, **_own(one), "PYTHONPATH": os.pathsep.join([str(described), str(ROOT)])}
        environment = {name: value for name, value in environment.items() if value}
        environment |= {"PORTATTN_ENGINE": one.name, "PORTATTN_ENGINE_VERSION": one.version}
        command = [str(python_of(one.folder)), "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(
            [*command, *([] if named else [tests])], cwd=ROOT, env=environment, check=False
        ).returncode


def _distribution(folder: Path) -> Path:
    """A folder for PYTHONPATH that describes the checkout as an installed distribution, its entry points too."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = folder / f"portattn-{project['version']}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: portattn\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""])
        for group, entries in project.get("entry-points", {}).items()
    ]
    (described / "entry_points.txt").write_text("\n".join(groups))
    return folder


def remove(one: Recipe) -> None:
    """Remove an environment and what was left of making it. Raises Refused where there is none."""
    if not root().is_dir():
        raise Refused(f"{one.folder.name}: there is no environment in {root()}")
    with _lock(one, seconds=0):
        _sweep(one)
        if not one.folder.exists():
            raise Refused(f"{one.folder.name}: there is no environment in {root()}")
        _discard(one)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    assert __doc__
    made = argparse.ArgumentParser(
        prog="engine_env.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    make_ = commands.add_parser("make", help="make an environment; one that is there stays")
    make_.add_argument("engine", metavar="NAME==VERSION")
    make_.add_argument("--seconds", type=float, default=SECONDS, help="for all of it (%(default).0f)")
    make_.add_argument("--json", action="store_true", help="print the result as JSON")
    test_ = commands.add_parser("test", help="run the engine's tests in its environment")
    test_.add_argument("engine", metavar="NAME-VERSION")
    test_.add_argument("arguments", nargs=argparse.REMAINDER, metavar="PYTEST ARGUMENTS")
    list_ = commands.add_parser("list", help="the environments that can be made, and which are")
    list_.add_argument("--json", action="store_true", help="print the result as JSON")
    list_.add_argument("--newest", action="store_true", help="only NAME==VERSION of the newest of each engine")
    remove_ = commands.add_parser("remove", help="remove an environment")
    remove_.add_argument("engine", metavar="NAME-VERSION")
    return made


def main(arguments: list[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    given = parser().parse_args(arguments)
    one: Recipe | None = None
    try:
        if given.command == "list":
            return _newest() if given.newest else _list(given.json)
        one = recipe(given.engine)
        if given.command == "make":
            if not given.seconds > 0:
                raise Refused(f"--seconds must be greater than 0, not {given.seconds}")
            new = make(one, given.seconds)
            if given.json:
                print(json.dumps({"engine": one.folder.name, "folder": str(one.folder), "new": new}))
            else:
                print(f"{one.folder.name}: {'made' if new else 'there already'}: {one.folder}")
            return 0
        if given.command == "remove":
            remove(one)
            print(f"{one.folder.name}: removed")
            return 0
        return test(one, given.arguments)
    except Refused as error:
        tell(f"engine_env.py: {error}")
        return BAD
    except CannotBeMade as error:
        tell(f"engine_env.py: {error}")
        if given.command == "make" and given.json and one:
            print(json.dumps({"engine": one.folder.name, "error": str(error)}))
        return CANNOT
    except KeyboardInterrupt:
        tell(f"engine_env.py: {given.command} was interrupted{_LEFT.get(given.command, '')}")
        return INTERRUPTED


def _newest() -> int:
    newest = {name.rpartition("-")[0]: name for name in known()}  # sorted by version: the last one stays
    for name in newest.values():
        engine, _, version = name.rpartition("-")
        print(f"{engine}=={version}")
    return 0


def _list(as_json: bool) -> int:
    states = {name: state(recipe(name)) for name in known()}
    if as_json:
        print(json.dumps({"folder": str(root()), "engines": states}, indent=1))
    else:
        for name, found in states.items():
            print(f"{name:24} {found}")
        print(f"in {root()}")
    return 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
