"""The programs that turn triton-ascend's linalg into x86 code: MLIR's and LLVM's of version 19, and a C compiler.

Missing Debian packages are unpacked into the lab's environment without being installed, which needs no root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path

from portattn.errors import PortattnError
from portattn.tools.lab.creating import CommandError, Say, quiet, run_command
from portattn.tools.lab.folders import folder_of

LLVM = ("mlir-opt", "mlir-translate", "llc")
ALL = (*LLVM, "cc")
VERSION = "19"
PREFIX = Path(f"/usr/lib/llvm-{VERSION}/bin")
COMPILERS = ("cc", "gcc", "clang")
PACKAGES = (f"mlir-{VERSION}-tools", f"llvm-{VERSION}")
FOLDER = "mlir"  # in an environment
NEEDED = f"to execute lowered code, install {' and '.join(PACKAGES)} (Debian's names) and a C compiler"
_WRAPPER = """\
#!/bin/sh
# The libraries lie beside the program, wherever the environment does.
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/../lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "$here/../libexec/{name}" "$@"
"""
# A line of apt's simulation: `Inst NAME (VERSION SOURCE [ARCH])`, of an upgrade `Inst NAME [OLD] (NEW …)`.
_PLANNED = re.compile(r"^Inst (?P<name>\S+) (?:\[\S+\] )?\((?P<version>\S+)")


class NoTools(Exception):
    """The tools cannot be fetched here; the text says what to install instead."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no MLIR {VERSION} tools: {why}; {NEEDED}")


def tools(folder: Path) -> dict[str, str]:
    """Return the programs found, by name: `mlir-opt`, `mlir-translate`, `llc`, `cc`; the environment's come first."""
    found = {}
    for name in LLVM:
        places = (folder / FOLDER / "bin" / name, shutil.which(f"{name}-{VERSION}") or "", PREFIX / name)
        for place in places:
            if place and os.access(place, os.X_OK):
                found[name] = str(place)
                break
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    return found | ({"cc": compiler} if compiler else {})


def missing(folder: Path) -> list[str]:
    """Return the LLVM programs that are neither in the environment nor on the machine."""
    have = tools(folder)
    return [name for name in LLVM if name not in have]


def fetch(folder: Path, names: list[str], say: Say) -> dict[str, str]:
    """Fetch programs from Debian's packages, whole or not at all; return their versions. Raises NoTools."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NoTools("this machine has no apt")
    work = folder / f".{FOLDER}-{uuid.uuid4().hex[:8]}"
    try:
        (work / "debs").mkdir(parents=True)
        try:
            _download(work / "debs", say)
            say("unpacking")
            for package in sorted((work / "debs").glob("*.deb")):
                run_command(["dpkg-deb", "-x", str(package), str(work / "root")], quiet)
        except CommandError as error:
            raise NoTools(str(error)) from None
        versions = _arrange(work / "root", work / "made", names)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        (work / "made").rename(folder / FOLDER)
        return versions
    except OSError as error:
        raise NoTools(f"{error.filename}: {error.strerror}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(into: Path, say: Say) -> None:
    plan = run_command(["apt-get", "install", "-s", "-qq", "--no-install-recommends", *PACKAGES], quiet)
    wanted = [f"{match['name']}={match['version']}" for match in map(_PLANNED.match, plan) if match]
    if not wanted:
        raise NoTools(f"apt says that {' and '.join(PACKAGES)} are installed, and their programs are not in {PREFIX}")
    say(f"fetching {len(wanted)} Debian packages")
    run_command(["apt-get", "download", "-q", *wanted], say, folder=into)


def _arrange(root: Path, made: Path, names: list[str]) -> dict[str, str]:
    """Take the programs and their libraries out of unpacked packages; try each program and return its version."""
    for place in ("bin", "lib", "libexec"):
        (made / place).mkdir(parents=True)
    for path in root.rglob("*.so*"):
        if path.is_file() and re.search(r"\.so(\.\d+)*$", path.name):  # a link into another package counts there
            target = made / "lib" / path.resolve().name
            if not target.exists():
                shutil.copy2(path, target)
            if path.name != target.name and not (made / "lib" / path.name).exists():
                (made / "lib" / path.name).symlink_to(target.name)
    versions = {}
    for name in names:
        program = root / PREFIX.relative_to("/") / name
        if not program.is_file():
            raise NoTools(f"the packages hold no {name}")
        shutil.copy2(program, made / "libexec" / name)
        wrapper = made / "bin" / name
        wrapper.write_text(_WRAPPER.format(name=name))
        wrapper.chmod(0o755)
        done = subprocess.run([wrapper, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"version (\d+(?:\.\d+)+)", done.stdout)
        if done.returncode or version is None:
            raise NoTools(f"{name} of the packages does not run: {(done.stderr or done.stdout).strip()[-300:]}")
        versions[name] = version.group(1)
    return versions


TOOLCHAIN = "triton-ascend==3.2.0"  # whose lab environment may have MLIR's programs beside it
PROGRAMS = (*LLVM, "cc")


class LinalgError(PortattnError):
    """A lowered kernel cannot be executed: a program is missing, or refuses it."""


def programs() -> dict[str, str]:
    return tools(folder_of(TOOLCHAIN))


def missing_reason() -> str:
    """Return why no lowered code can be executed here; empty if it can."""
    have = programs()
    lacking = [name for name in PROGRAMS if name not in have]
    return f"no {', '.join(lacking)} here: {NEEDED}" if lacking else ""


def need() -> dict[str, str]:
    why = missing_reason()
    if why:
        raise LinalgError(why)
    return programs()
