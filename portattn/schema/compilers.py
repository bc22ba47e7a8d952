"""Compilers: the distributions that compile kernels, as backends' compilers.toml files describe them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pkgutil
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from portattn.errors import DataError
from portattn.schema import toml_reader

FILE = "compilers.toml"
OWN = "portattn"  # `brought_by` of portattn's own compilers
TRITON = "triton"  # the folder that Triton or a fork of it installs
# Other parts of a toolchain that compile or run kernels; a condition on the toolchain may name them.
COMPONENTS = ("ptxas", "cuda", "rocm", "cann", "driver", "torch", "torch-npu", "numpy", "python")
_BACKENDS = "portattn.backends"  # for its folder alone: it is not imported
_LOOK = "portattn.planning.registry:look_around"  # by name: it is above this package


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lab's recipe for an environment of a release (`portattn lab create NAME==VERSION`)."""

    releases: tuple[str, ...] = ()  # releases that `portattn lab list` names, oldest first; pip may find others
    python: str = ">=3.10"  # range of CPython versions that the distribution is built for
    # packages to install beside it, as pip takes them -> range of the compiler's versions that need them
    also: Mapping[str, str] = {}
    index: str = ""  # the index that publishes the distribution, if it is not pip's own: information alone
    # Module that fetches further programs, with ALL, NEEDED, NoTools, tools(folder), missing(folder) and fetch(folder,
    # names, say, commands), as backends/ascend/linalg/llvm_tools.py.
    programs: str = ""


class Compiler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    aliases: tuple[str, ...] = ()  # other names of distributions of the same compiler
    # folder that it installs: `triton` for Triton and its forks, of which a Python has one; its own for a compiler
    # added to Triton
    package: str = TRITON
    # regular expression whose first group is the PEP 440 version in the metadata's text; empty: the whole text, as
    # 3.2.0+git1234
    spelling: str = ""
    # Its numbers are unrelated to Triton's: no range of another compiler holds for it. If False, such ranges are
    # unknown to hold.
    apart: bool = False
    tried: str = ""  # range of versions that compiled the kernels; empty: unknown
    released: tuple[str, ...] = ()  # published versions, oldest first; empty: unknown
    stages: tuple[str, ...] = ()  # stages of its compile adapter beside Triton's; a quirk's evidence may name them
    variables: tuple[str, ...] = ()  # environment variables that it reads when it compiles; a quirk may set them
    tracker: str = ""  # link to its bug tracker
    lab: Recipe | None = None  # None: it cannot be installed by name
    name: str = ""  # set by the reader, as the next two: the table's name, the package, the file
    brought_by: str = ""
    file: str = ""

    def version(self, stated: str) -> str:
        match = re.search(self.spelling, stated) if self.spelling else None
        return match.group(1) if match else stated


def read(folder: Path, brought_by: str) -> dict[str, Compiler]:
    """Return the compilers of a backend's folder by name. Raises DataError (file, line, key)."""
    path = folder / FILE
    if not path.exists():
        return {}
    data, text = toml_reader.read(path)
    found = {}
    for name, table in data.items():
        if not isinstance(table, dict):
            raise DataError(path, toml_reader.line_of(text, name), f"key {name!r}: every compiler is a table")
        made = toml_reader.convert(table, Compiler, path, text, name)
        if problem := _problem(name, made):
            key, said = problem
            raise DataError(path, toml_reader.line_of(text, name, *key.split(".")), f"key '{name}.{key}': {said}")
        found[name] = msgspec.structs.replace(made, name=name, brought_by=brought_by, file=str(path))
    return found


def _problem(name: str, made: Compiler) -> tuple[str, str] | None:
    for key in ("name", "brought_by", "file"):
        if getattr(made, key):
            return key, "is not stated: it follows from the file"
    for one in (name, *made.aliases):
        if canonicalize_name(one) != one or one == "none":
            return "aliases", f"{one!r} is no distribution's name, in lower case with dashes"
    if not made.package.isidentifier():
        return "package", f"{made.package!r} is not the name of a folder that can be imported"
    try:
        groups = re.compile(made.spelling).groups
    except re.error as error:
        return "spelling", f"not a regular expression: {error}"
    if made.spelling and not groups:
        return "spelling", f"{made.spelling!r} has no group, which would be the version"
    recipe = made.lab or Recipe()
    ranges = [("tried", made.tried), ("lab.python", recipe.python)]
    for key, text in (*ranges, *(("lab.also", text) for text in recipe.also.values())):
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            return key, f"{text!r} is not a PEP 440 version range"
    for key, versions in (("released", made.released), ("lab.releases", recipe.releases)):
        for text in versions:
            try:
                Version(text)
            except InvalidVersion:
                return key, f"{text!r} is not a PEP 440 version"
    return None


@functools.lru_cache(maxsize=1)
def own() -> dict[str, Compiler]:
    """Return portattn's own compilers, Triton first. Raises DataError on a broken file."""
    spec = importlib.util.find_spec(_BACKENDS)
    folders = [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]
    found: dict[str, Compiler] = {}
    for file in sorted(path for folder in folders for path in folder.glob(f"*/{FILE}")):
        found |= read(file.parent, OWN)
    return {name: found[name] for name in sorted(found, key=lambda name: (name != TRITON, found[name].lab is None))}


class _Brought:
    """The compilers of installed packages; None until the registry has loaded."""

    def __init__(self) -> None:
        self.compilers: dict[str, Compiler] | None = None
        self.left_out: tuple[str, ...] = ()
        self.broken: tuple[str, ...] = ()
        self.here = threading.local()  # `loading`, in the thread that loads packages


_brought = _Brought()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Keep `all_compilers` from loading packages again while this thread loads them."""
    before = getattr(_brought.here, "loading", False)
    _brought.here.loading = True
    try:
        yield
    finally:
        _brought.here.loading = before


def bring(found: Mapping[str, Compiler], left_out: Collection[str] = (), broken: Collection[str] = ()) -> None:
    """Set the packages' compilers.

    Args:
        left_out: names that broken packages bring; other files may still name them
        broken: errors about those packages, for the error about an unknown compiler
    """
    _brought.left_out, _brought.broken = tuple(left_out), tuple(broken)
    _brought.compilers = dict(found)


def all_compilers() -> dict[str, Compiler]:
    """Return all compilers by name: portattn's own, then the installed packages', which it loads first."""
    if _brought.compilers is None and not getattr(_brought.here, "loading", False):
        pkgutil.resolve_name(_LOOK)()
    return {**own(), **(_brought.compilers or {})}


def names() -> tuple[str, ...]:
    return tuple(all_compilers())


def is_compiler(name: str) -> bool:
    """Return whether a file may name this compiler: it is known, or a package left out as broken brings it."""
    if name in own() or name in COMPONENTS:
        return name in own()  # without loading packages
    return name in all_compilers() or name in _brought.left_out


def find(name: str) -> Compiler | None:
    """Return the compiler of a distribution's name or alias, in any spelling, or None."""
    name = canonicalize_name(name)
    for some in (own, all_compilers):  # a name of portattn's own needs no other package
        for one in some().values():
            if name == one.name or name in one.aliases:
                return one
    return None


def package(name: str) -> str:
    one = find(name)
    return one.package if one else TRITON


def version(name: str, stated: str) -> str:
    one = find(name)
    return one.version(stated) if one else stated


def released_versions(name: str) -> tuple[str, ...]:
    one = find(name)
    return one.released if one else ()


def tried_range(name: str) -> str:
    one = find(name)
    return one.tried if one else ""


def canonical(name: str) -> str:
    """Return the compiler's name for a distribution's name or alias; of an unknown one the normalised name."""
    one = find(name)
    return one.name if one else canonicalize_name(name)


def stages() -> tuple[str, ...]:
    return tuple(stage for one in all_compilers().values() for stage in one.stages)


def variables() -> tuple[str, ...]:
    return tuple(name for one in all_compilers().values() for name in one.variables)


def unknown(name: str) -> str:
    """Return the text of the error about an unknown compiler."""
    listed = ", ".join(names())
    told = f"{name!r} is no known compiler; known: {listed}; a backend package may bring others (docs/backends.md)"
    return ". ".join([told, *_brought.broken])


def name_conflict(name: str, one: Compiler, earlier: Mapping[str, Compiler]) -> str:
    """Return the reason why a package cannot bring a compiler (another brings one of its names), or an empty text."""
    for other in earlier.values():
        both = {name, *one.aliases} & {other.name, *other.aliases}
        if both and other.file != one.file:
            return f"it brings the compiler {min(both)!r}, which {other.brought_by} brings already ({other.file})"
    return ""
