"""Environments of vLLM, SGLang, diffusers and torch_npu, in which tests/engines/<name> run against the real engine.

    python scripts/engine_env.py make vllm==0.33.0 [--seconds 600]
    python scripts/engine_env.py test vllm-0.33.0 [pytest arguments]
    python scripts/engine_env.py list [--newest]

An environment in ${ENGINES_HOME:-~/.cache/portattn/engines} has exact versions,
tests/engines/requirements/<name>-<version>.txt, without their dependencies: CUDA's libraries have several GB. torch is
its CPU build (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu). Tests take portattn from this checkout.

Exit status: 0 done; 1 bad arguments, or what `test` found; 3 the environment cannot be made here; 130 interrupted.
`test` gives pytest's own status, and 3 where there is no environment.
"""

import argparse
import hashlib
import json
import os
import re
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from portattn.files import write_whole
from portattn.schema import toml_reader
from portattn.tools.lab.creating import CommandError, quiet, run_command
from portattn.tools.lab.folders import MAKING, LabError, discard, interpreter, lock, sweep

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "engines" / "requirements"
MARKER = "engine.json"  # written last: a folder without it is no environment
SIZE = 3000  # megabytes while an environment is made, where its list says nothing else
BAD, CANNOT, INTERRUPTED = 1, 3, 130
SECONDS = 600.0  # for one environment, its downloads included
TRY_SECONDS = 300.0  # to import an engine for the first time
_EXACT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[a-z0-9,-]+\])?==([A-Za-z0-9][A-Za-z0-9.+!_-]*)")
_SETTING = re.compile(r"#: (size|try|env) (.+)")


class Refused(Exception):
    """An argument is wrong."""


@dataclass
class Recipe:
    """One list of packages with its requirements, from the lines `#: size …`, `#: try …` and `#: env …`."""

    name: str
    version: str
    packages: list[str] = field(default_factory=list)
    size: int = SIZE  # megabytes on the disk while it is made
    trial: str = ""  # the Python statement that must work in a finished environment; by default the engine's import
    variables: dict[str, str] = field(default_factory=dict)  # of every process in it
    digest: str = ""

    @property
    def folder(self) -> Path:
        return root() / f"{self.name}-{self.version}"

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables of a process in the environment."""
        outside = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        return {name: value for name, value in os.environ.items() if name not in outside} | self.variables | more

    @property
    def state(self) -> str:
        if not self.folder.exists():
            return "absent"
        try:
            marker = json.loads((self.folder / MARKER).read_text())
        except (OSError, ValueError) as error:
            return f"broken: {MARKER}: {error}"
        return "made" if marker.get("list") == self.digest else "outdated: its list has changed"


def root() -> Path:
    given = os.environ.get("ENGINES_HOME", "")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "portattn" / "engines"


def known() -> list[str]:
    """Return NAME-VERSION of each list, in the order of names, then of versions."""

    def key(text: str) -> tuple[str, list[int]]:
        name, _, version = text.rpartition("-")
        return name, [int(part) for part in re.findall(r"\d+", version)]

    return sorted((path.stem for path in LISTS.glob("*-*.txt")), key=key)


def recipe(text: str) -> Recipe:
    """Return the recipe of NAME==VERSION or NAME-VERSION. Raises Refused if unknown, or if a line is not exact."""
    name, separator, version = text.partition("==")
    if not separator:
        name, _, version = text.rpartition("-")
    path = LISTS / f"{name}-{version}.txt"
    if not name or not version or os.sep in text or not path.is_file():
        raise Refused(f"{text}: there is no list of its packages in {LISTS}; those there are: {', '.join(known())}")
    content = path.read_text()
    made = Recipe(name, version, digest=hashlib.sha256(content.encode()).hexdigest(), trial=f"import {name}")
    for number, line in enumerate(map(str.strip, content.splitlines()), 1):
        setting = _SETTING.fullmatch(line)
        limit = ""
        if setting and setting[1] == "size":
            limit = "" if setting[2].isdecimal() else f"size must be a number of megabytes, not {setting[2]!r}"
            made.size = int(setting[2]) if not limit else 0
        elif setting and setting[1] == "try":
            made.trial = setting[2]
        elif setting:
            variable, equals, value = setting[2].partition("=")
            made.variables[variable] = value
            limit = "" if equals else "must be `#: env NAME=VALUE`"
        elif line.startswith("#:"):
            limit = "must be `#: size MB`, `#: try STATEMENT` or `#: env NAME=VALUE`"
        elif line and not line.startswith("#"):
            limit = "" if _EXACT.fullmatch(line) else f"must be NAME==VERSION, an exact one, not {line!r}"
            made.packages.append(line)
        if limit:
            raise Refused(f"{path}:{number}: {limit}")
    names = {re.split(r"\[|==", package)[0].lower() for package in made.packages}
    missing = sorted({name.lower(), "torch", "pytest", "msgspec", "numpy"} - names)
    if missing:
        raise Refused(f"{path}: lacks {', '.join(missing)}")
    return made


# ------------------------------------------------------------------------------------------------ making


def make(one: Recipe, seconds: float) -> bool:
    """Make an environment unless it is there; return whether it was made now. LabError leaves nothing behind."""
    deadline = time.monotonic() + seconds
    with lock(one.folder, seconds, setting="ENGINES_HOME"):
        if one.state == "made":
            return False
        sweep(one.folder)
        free = shutil.disk_usage(root()).free // 1_000_000
        if free < one.size:
            needs = f"needs {one.size} MB while it is made, and {root()} has {free} MB left"
            raise LabError(f"{one.folder.name}: {needs}; ENGINES_HOME names another folder")
        try:
            _build(one, deadline)
        except CommandError as error:
            late = f"not made within {seconds:.0f} s (--seconds allows more); " if error.late else ""
            raise LabError(f"{one.folder.name}: {late}{error}") from None
        except OSError as error:
            raise LabError(f"{one.folder.name}: {error.filename or root()}: {error.strerror or error}") from None
    return True


def _build(one: Recipe, deadline: float) -> None:
    making = root() / f"{MAKING}{one.folder.name}-{secrets.token_hex(4)}"
    temporary = making / "tmp"  # pip's, on the same disk, and gone with the rest
    python = str(interpreter(making))
    pip = [sys.executable, "-m", "pip", "--python", python, "--no-input", "install", "--no-deps", "--only-binary"]
    options = [":all:", "--progress-bar", "off", "--no-warn-script-location", "--no-compile", *one.packages]
    elsewhere = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_QUIET", "PIP_CONSTRAINT")
    variables = {"TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    of_pip = {name: value for name, value in one.environment(**variables).items() if name not in elsewhere}
    try:
        temporary.mkdir(parents=True)
        tell(f"{one.folder.name}: {len(one.packages)} packages, into {one.folder}")
        run_command([sys.executable, "-I", "-m", "venv", "--without-pip", str(making)], quiet, of_pip, until=deadline)
        run_command([*pip, *options], tell, of_pip, until=deadline)
        tell(f"{one.folder.name}: trying it: {one.trial}")
        trial_ends = min(deadline, time.monotonic() + TRY_SECONDS)
        run_command([python, "-c", one.trial], quiet, one.environment(), temporary, trial_ends)
        shutil.rmtree(temporary)
        for script in (making / "bin").iterdir():  # they hold the name under which they were installed
            if not script.name.startswith("python"):
                script.unlink()
        marker = {"engine": one.name, "version": one.version, "list": one.digest, "made": time.strftime("%Y-%m-%d")}
        write_whole(making / MARKER, f"{json.dumps(marker, indent=1)}\n".encode())
        if one.folder.exists():
            discard(one.folder)
        making.rename(one.folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ using


def test(one: Recipe, arguments: list[str]) -> int:
    """Run tests/engines/<name> in the environment; return pytest's exit status."""
    if one.state != "made":
        again = f"`python scripts/engine_env.py make {one.name}=={one.version}` makes it"
        raise LabError(f"{one.folder.name}: its environment is {one.state}; {again}")
    named = any(argument.split("::")[0].startswith("tests") for argument in arguments)
    tests = [] if named else [f"tests/engines/{one.name}"]
    with tempfile.TemporaryDirectory(prefix="portattn-engine-") as temporary:
        _distribution(Path(temporary))
        places = os.pathsep.join([temporary, str(ROOT)])
        told = {"PORTATTN_ENGINE": one.name, "PORTATTN_ENGINE_VERSION": one.version, "PYTHONPATH": places}
        command = [str(interpreter(one.folder)), "-m", "pytest", "-p", "no:cacheprovider", *arguments, *tests]
        return subprocess.run(command, cwd=ROOT, env=one.environment(**told), check=False).returncode


def _distribution(folder: Path) -> None:
    """Describe the checkout as an installed distribution, with entry points, in a folder for PYTHONPATH."""
    entry_points = toml_reader.read(ROOT / "pyproject.toml")[0]["project"].get("entry-points", {})
    version = runpy.run_path(str(ROOT / "portattn" / "version.py"))["__version__"]
    described = folder / f"portattn-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: portattn\nVersion: {version}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""])
        for group, entries in entry_points.items()
    ]
    (described / "entry_points.txt").write_text("\n".join(groups))


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="engine_env.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    make_ = commands.add_parser("make", help="make an environment; one that is there stays")
    make_.add_argument("engine", metavar="NAME==VERSION")
    make_.add_argument("--seconds", type=float, default=SECONDS, help="for all of it (%(default).0f)")
    test_ = commands.add_parser("test", help="run the engine's tests in its environment")
    test_.add_argument("engine", metavar="NAME-VERSION")
    test_.add_argument("arguments", nargs=argparse.REMAINDER, metavar="PYTEST ARGUMENTS")
    list_ = commands.add_parser("list", help="the environments that can be made, and which are")
    list_.add_argument("--newest", action="store_true", help="only NAME==VERSION of the newest of each engine")
    return made


def main(arguments: list[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = parser().parse_args(arguments)
    try:
        if given.command == "list":
            tell_list(given.newest)
            return 0
        one = recipe(given.engine)
        if given.command == "test":
            return test(one, given.arguments)
        if given.seconds <= 0:
            raise Refused(f"--seconds must be greater than 0, not {given.seconds}")
        print(f"{one.folder.name}: {'made' if make(one, given.seconds) else 'there already'}: {one.folder}")
    except (Refused, LabError) as error:
        tell(f"engine_env.py: {error}")
        return BAD if isinstance(error, Refused) else CANNOT
    except KeyboardInterrupt:
        tell(f"engine_env.py: {given.command} was interrupted")
        return INTERRUPTED
    return 0


def tell_list(newest: bool) -> None:
    if newest:
        found = {name.rpartition("-")[0]: name.rpartition("-")[2] for name in known()}  # the last of each stays
        print("\n".join(f"{engine}=={version}" for engine, version in found.items()))
        return
    print("\n".join([*(f"{name:24} {recipe(name).state}" for name in known()), f"in {root()}"]))


if __name__ == "__main__":
    sys.exit(main())
