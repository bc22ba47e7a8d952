"""Which environments the lab has. Each is one folder with a marker file, which is written when all else is there."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import filelock
import msgspec

from portattn.config import current
from portattn.errors import ArgumentError, PortattnError, SettingError
from portattn.files import UntrustedPath, cache_folder, check_owner, check_tree, trusted_folder
from portattn.schema import compilers
from portattn.schema.compilers import TRITON, Compiler, Recipe
from portattn.schema.toolchain import Toolchain

SCHEMA = 1  # of the marker; raised when a reader of the version before would misread it
MARKER = "environment.json"
MAKING, REMOVING = ".making-", ".removing-"  # folders that are no environments, or not any more


def recipes() -> dict[str, Compiler]:
    """The compilers that the lab can install, by name: those that have a recipe."""
    return {name: one for name, one in compilers.all_compilers().items() if one.lab is not None}


def distributions() -> tuple[str, ...]:
    """Names of the compilers that the lab can install."""
    return tuple(recipes())


def toolchains() -> tuple[str, ...]:
    """The toolchains that `portattn lab list` names, whether or not they are made."""
    return tuple(f"{name}=={version}" for name, one in recipes().items() if one.lab for version in one.lab.releases)


def recipe(toolchain: str) -> Recipe:
    """Return the recipe of a canonical toolchain. Raises LabError if no installed package brings the compiler."""
    own = recipes().get(toolchain.partition("==")[0])
    if own is None or own.lab is None:
        raise LabError(f"{toolchain}: no package that is installed says how its environment is made")
    return own.lab


def programs(toolchain: str) -> ModuleType | None:
    """Import the module of an environment's programs beside Python (Recipe.programs); most have none: None.

    Raises LabError if it cannot be imported.
    """
    name = recipe(toolchain).programs
    try:
        return importlib.import_module(name) if name else None
    except Exception as error:  # noqa: BLE001 - another package's
        raise LabError(f"{toolchain}: its module of programs, {name}: {type(error).__name__}: {error}") from None


class LabError(PortattnError):
    """An environment is missing, broken, in use, or cannot be made. The text says which one and what helps."""


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment's description of itself, environment.json.

    python    version of its Python, such as 3.11.7
    bytes     its size on the disk when it was made
    versions  of its packages, ptxas and the fetched MLIR tools
    """

    schema: int = SCHEMA
    toolchain: str
    python: str
    created: datetime.date
    bytes: int
    versions: dict[str, str] = {}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """One toolchain's environment, whole.

    python          path of its interpreter
    bytes           its size on the disk
    tools           programs beside Python that its recipe names, by name, as far as it has them: for triton-ascend
                    `mlir-opt`, `mlir-translate`, `llc` (all of LLVM 19) and `cc`
    python_version  such as 3.11.7
    versions        of its packages and programs
    """

    toolchain: str
    folder: Path
    python: str
    created: datetime.date
    bytes: int
    tools: dict[str, str] = {}
    python_version: str = ""
    versions: dict[str, str] = {}


class ToolchainState(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of one toolchain: an environment, a broken one and why, or neither."""

    toolchain: str
    environment: Environment | None = None
    broken: str = ""


def root() -> Path:
    """The folder of all environments, under the cache folder that PORTATTN_CACHE_DIR names or the user's own.

    Raises SettingError where the named one is no folder, and cannot be one: no path below it could be read or made.
    """
    given = current().cache_dir
    if given and (blocking := _no_folder(Path(given))):
        limit = f"must be a folder, or a path where one can be made: {blocking} is no folder"
        raise SettingError(f"PORTATTN_CACHE_DIR (setting cache_dir) is {given!r}, but {limit}")
    return cache_folder(given) / "lab"


def _no_folder(path: Path) -> Path | None:
    """What of a path exists and is no folder, itself or one above it; None where nothing is in the way."""
    there = next((part for part in (path, *path.parents) if os.path.lexists(part)), path)
    return there if os.path.lexists(there) and not there.is_dir() else None


def canonical(toolchain: str) -> str:
    """A toolchain's name as the lab writes it: NAME==VERSION without components.

    Raises ArgumentError on anything else, and on a compiler that cannot be installed by name.
    """
    try:
        parsed = Toolchain.parse(toolchain)
    except ValueError as error:
        raise ArgumentError("lab", "toolchain", toolchain, str(error).partition(": ")[2]) from None
    if parsed.distribution not in distributions():
        limit = f"must be one of {', '.join(distributions())}, which can be installed by name"
        raise ArgumentError("lab", "toolchain", toolchain, limit)
    return f"{parsed.distribution}=={parsed.version}"


def folder_of(toolchain: str) -> Path:
    """Where the environment of a canonical toolchain lies."""
    return root() / toolchain.replace("==", "-")


def state(toolchain: str) -> ToolchainState:
    """Return a canonical toolchain's state. Reads the owners of all files and starts nothing.

    An environment that another user owns or can change counts as broken: its Python must not run.
    """
    folder = folder_of(toolchain)
    if not folder.exists():
        return ToolchainState(toolchain=toolchain)
    try:
        check_owner(os.stat(folder.parent), str(folder.parent), "folder", private_group=True)
        check_tree(folder)  # all of it is code, for a process that may be root's
        marker = msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except UntrustedPath as error:
        return ToolchainState(toolchain=toolchain, broken=f"not to be run: {error}")
    except FileNotFoundError:
        return ToolchainState(toolchain=toolchain, broken=f"{MARKER} is missing")
    except OSError as error:
        return ToolchainState(toolchain=toolchain, broken=f"{MARKER} cannot be read: {error.strerror}")
    except msgspec.DecodeError as error:
        return ToolchainState(toolchain=toolchain, broken=f"{MARKER} cannot be understood: {error}")
    wrong = _wrong(folder, marker, toolchain)
    if wrong:
        return ToolchainState(toolchain=toolchain, broken=wrong)
    try:
        beside = programs(toolchain)
    except LabError as error:  # its package's: the other environments are listed all the same
        return ToolchainState(toolchain=toolchain, broken=str(error))
    made = Environment(
        toolchain=toolchain,
        folder=folder,
        python=str(interpreter(folder)),
        created=marker.created,
        bytes=marker.bytes,
        tools=beside.tools(folder) if beside is not None else {},
        python_version=marker.python,
        versions=marker.versions,
    )
    return ToolchainState(toolchain=toolchain, environment=made)


def _wrong(folder: Path, marker: Marker, toolchain: str) -> str:
    """Return the difference of an environment from its marker; empty if it is whole."""
    if marker.schema != SCHEMA:
        return f"{MARKER} is of schema version {marker.schema}; this portattn reads version {SCHEMA}"
    if marker.toolchain != toolchain:
        return f"{MARKER} says {marker.toolchain}"
    if not os.access(interpreter(folder), os.X_OK):
        return f"its Python {marker.python} is gone: {os.path.realpath(interpreter(folder))}"
    minor = ".".join(marker.python.split(".")[:2])
    packages = folder / "lib" / f"python{minor}" / "site-packages"
    for package in dict.fromkeys((TRITON, recipes()[toolchain.partition("==")[0]].package)):
        if not (packages / package / "__init__.py").is_file():
            return f"the {package} package is not in it"
    return ""


def interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def find(toolchain: str) -> Environment | None:
    """Return a toolchain's environment; None if it is absent or broken. Raises ArgumentError on a bad name."""
    return state(canonical(toolchain)).environment


def need(toolchain: str) -> Environment:
    """Return a toolchain's environment. Raises LabError with a hint if it is missing, ArgumentError on a bad name."""
    name = canonical(toolchain)
    found = state(name)
    if found.environment is None:
        what = f"broken: {found.broken}" if found.broken else "not there"
        raise LabError(f"{name}: its lab environment is {what}; `portattn lab create {name}` makes it")
    return found.environment


def states() -> list[ToolchainState]:
    """Every toolchain of `toolchains`, made or not, then every other one that has a folder in the lab."""
    others, listed, installable = [], toolchains(), distributions()
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(root().iterdir()):
            name, dash, version = entry.name.rpartition("-")
            if entry.is_dir() and dash and name in installable and f"{name}=={version}" not in listed:
                others.append(f"{name}=={version}")
    return [state(toolchain) for toolchain in (*listed, *others)]


def environments() -> list[Environment]:
    """Every environment that is there and whole."""
    return [found.environment for found in states() if found.environment is not None]


def remove(toolchain: str) -> int:
    """Take an environment away, a broken one and what interrupted makers left of it too; the bytes given back.

    Raises LabError when there is none, when somebody makes it at this moment, or when the disk refuses.
    """
    name = canonical(toolchain)
    folder = folder_of(name)
    with lock(name, seconds=0):
        freed = sweep(name)
        if not folder.exists():
            if freed:
                return freed
            raise LabError(f"{name}: there is no lab environment to remove in {root()}")
        return freed + discard(folder)


def discard(folder: Path) -> int:
    """Take a folder away, first out of its name, so that nobody finds half of it; the bytes given back."""
    aside = folder.with_name(f"{REMOVING}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        folder.rename(aside)
        freed = size(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise LabError(f"{folder}: cannot be removed: {error.strerror}: {error.filename}") from None
    return freed


def sweep(name: str) -> int:
    """Take away what killed makers and removers of one toolchain left; its lock must be held. The bytes given back."""
    freed = 0
    for kind in (MAKING, REMOVING):
        for left in root().glob(f"{kind}{folder_of(name).name}-*"):
            freed += size(left)
            shutil.rmtree(left, ignore_errors=True)
    return freed


@contextlib.contextmanager
def lock(name: str, seconds: float) -> Iterator[None]:
    """Hold a toolchain's lock among processes and threads. Raises LabError after `seconds`, or where none can be."""
    held = filelock.FileLock(root() / f"{folder_of(name).name}.lock", thread_local=False)
    try:
        with trusted_folder(root().resolve(), make=True):
            held.acquire(timeout=seconds)
    except UntrustedPath as error:
        raise LabError(f"{error}; PORTATTN_CACHE_DIR names another folder") from None
    except filelock.Timeout:
        raise LabError(f"{name}: another process is making or removing it now") from None
    except OSError as error:
        raise LabError(
            f"{root()}: cannot be written ({error.strerror}); PORTATTN_CACHE_DIR names another folder"
        ) from None
    try:
        yield
    finally:
        held.release()


def size(folder: Path) -> int:
    """Bytes of the files below a folder, links not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
