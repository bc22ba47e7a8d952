"""The lab's environments: each is one folder with a marker file, which is written last."""

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
    return {name: one for name, one in compilers.all_compilers().items() if one.lab is not None}


def distributions() -> tuple[str, ...]:
    return tuple(recipes())


def toolchains() -> tuple[str, ...]:
    """Return the toolchains that `portattn lab list` names, made or not."""
    return tuple(f"{name}=={version}" for name, one in recipes().items() if one.lab for version in one.lab.releases)


def recipe(toolchain: str) -> Recipe:
    """Return the recipe of a canonical toolchain. Raises LabError if no installed package brings the compiler."""
    own = recipes().get(toolchain.partition("==")[0])
    if own is None or own.lab is None:
        raise LabError(f"{toolchain}: no package that is installed says how its environment is made")
    return own.lab


def programs(toolchain: str) -> ModuleType | None:
    """Import an environment's programs beside Python (Recipe.programs); None without. Raises LabError if that fails."""
    name = recipe(toolchain).programs
    try:
        return importlib.import_module(name) if name else None
    except Exception as error:  # noqa: BLE001 - another package's
        raise LabError(f"{toolchain}: its module of programs, {name}: {type(error).__name__}: {error}") from None


class LabError(PortattnError):
    """An environment is missing, broken, in use, or cannot be made; the text names it and the remedy."""


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment's description of itself, environment.json."""

    schema: int = SCHEMA
    toolchain: str
    python: str  # version of its Python, such as 3.11.7
    created: datetime.date
    bytes: int  # its size on the disk when it was made
    versions: dict[str, str] = {}  # of its packages, ptxas and the fetched MLIR tools


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """One toolchain's environment, whole."""

    toolchain: str
    folder: Path
    python: str  # path of its interpreter
    created: datetime.date
    bytes: int  # its size on the disk
    # available programs of its recipe beside Python, by name: for triton-ascend `mlir-opt`, `mlir-translate`, `llc`
    # (all of LLVM 19) and `cc`
    tools: dict[str, str] = {}
    python_version: str = ""  # such as 3.11.7
    versions: dict[str, str] = {}  # of its packages and programs


class ToolchainState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one toolchain: an environment, a broken one and why, or neither."""

    toolchain: str
    environment: Environment | None = None
    broken: str = ""


def root() -> Path:
    """Return the folder of all environments, in the cache folder. Raises SettingError on a bad PORTATTN_CACHE_DIR."""
    given = current().cache_dir
    path = Path(given)
    there = next((part for part in (path, *path.parents) if os.path.lexists(part)), path)
    if given and os.path.lexists(there) and not there.is_dir():
        limit = f"must be a folder, or a path where one can be made: {there} is no folder"
        raise SettingError(f"PORTATTN_CACHE_DIR (setting cache_dir) is {given!r}, but {limit}")
    return cache_folder(given) / "lab"


def canonical(toolchain: str) -> str:
    """Return a toolchain's name as the lab writes it, NAME==VERSION. Raises ArgumentError if it cannot be installed."""
    try:
        parsed = Toolchain.parse(toolchain)
    except ValueError as error:
        raise ArgumentError("lab", "toolchain", toolchain, str(error).partition(": ")[2]) from None
    if parsed.distribution not in distributions():
        limit = f"must be one of {', '.join(distributions())}, which can be installed by name"
        raise ArgumentError("lab", "toolchain", toolchain, limit)
    return f"{parsed.distribution}=={parsed.version}"


def folder_of(toolchain: str) -> Path:
    return root() / toolchain.replace("==", "-")


def state(toolchain: str) -> ToolchainState:
    """Return a toolchain's state; broken if another user can change it, as its Python must not run. Starts nothing."""
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
    if wrong := _wrong(folder, marker, toolchain):
        return ToolchainState(toolchain=toolchain, broken=wrong)
    try:
        beside = programs(toolchain)
    except LabError as error:  # its package's: the other environments are listed all the same
        return ToolchainState(toolchain=toolchain, broken=str(error))
    made = Environment(
        toolchain=toolchain, folder=folder, python=str(interpreter(folder)), created=marker.created, bytes=marker.bytes,
        tools=beside.tools(folder) if beside is not None else {}, python_version=marker.python,
        versions=marker.versions,
    )  # fmt: skip
    return ToolchainState(toolchain=toolchain, environment=made)


def _wrong(folder: Path, marker: Marker, toolchain: str) -> str:
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
    """Return the state of every toolchain of `toolchains`, then of every other one with a folder in the lab."""
    others, listed, installable = [], toolchains(), distributions()
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(root().iterdir()):
            name, dash, version = entry.name.rpartition("-")
            if entry.is_dir() and dash and name in installable and f"{name}=={version}" not in listed:
                others.append(f"{name}=={version}")
    return [state(toolchain) for toolchain in (*listed, *others)]


def environments() -> list[Environment]:
    return [found.environment for found in states() if found.environment is not None]


def remove(toolchain: str) -> int:
    """Remove an environment, also a broken one, and leftovers; return the freed bytes. Raises LabError."""
    name = canonical(toolchain)
    folder = folder_of(name)
    with lock(folder, 0, name):
        freed = sweep(folder)
        if not folder.exists():
            if freed:
                return freed
            raise LabError(f"{name}: there is no lab environment to remove in {root()}")
        return freed + discard(folder)


def discard(folder: Path) -> int:
    """Remove a folder, renamed first so that no reader finds half of it; return the freed bytes."""
    aside = folder.with_name(f"{REMOVING}{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        folder.rename(aside)
        freed = size(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise LabError(f"{folder}: cannot be removed: {error.strerror}: {error.filename}") from None
    return freed


def sweep(folder: Path) -> int:
    """Remove leftovers of killed makers and removers of an environment, under its lock; return the freed bytes."""
    freed = 0
    for kind in (MAKING, REMOVING):
        for left in folder.parent.glob(f"{kind}{folder.name}-*"):
            freed += size(left)
            shutil.rmtree(left, ignore_errors=True)
    return freed


@contextlib.contextmanager
def lock(folder: Path, seconds: float, name: str = "", setting: str = "PORTATTN_CACHE_DIR") -> Iterator[None]:
    """Hold an environment's lock among processes and threads. Raises LabError if it is not free within `seconds`."""
    root, name = folder.parent, name or folder.name
    held = filelock.FileLock(root / f"{folder.name}.lock", thread_local=False)
    try:
        with trusted_folder(root.resolve(), make=True):
            held.acquire(timeout=seconds)
    except UntrustedPath as error:
        raise LabError(f"{error}; {setting} names another folder") from None
    except filelock.Timeout:
        raise LabError(f"{name}: another process is making or removing it now") from None
    except OSError as error:
        raise LabError(f"{root}: cannot be written ({error.strerror}); {setting} names another folder") from None
    try:
        yield
    finally:
        held.release()


def size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
