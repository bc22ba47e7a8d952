"""Compilers: the distributions that kernels are compiled with, as backends bring them (their folders' compilers.toml).

portattn's own are read from the folders of its backends, other packages' when the registry loads: a name that is not
portattn's own makes it load.
"""

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
OWN = "portattn"  # who brings those that come with portattn
TRITON = "triton"  # the folder that compilers which are Triton, or a fork of it, occupy
# What else takes part in compiling or running kernels, and a condition on the toolchain may name.
COMPONENTS = ("ptxas", "cuda", "rocm", "cann", "driver", "torch", "torch-npu", "numpy", "python")
_BACKENDS = "portattn.backends"  # its folder alone: nothing of it is imported
_LOOK = "portattn.planning.registry:look_around"  # by name: it is above this package


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the lab makes an environment of a release (`portattn lab create NAME==VERSION`).

    releases  those that `portattn lab list` names, oldest first; any other that pip finds can be made, too
    python    CPython versions that the distribution is built for, as a range
    also      what is installed beside it, as pip takes it -> the range of the compiler's versions that need it
    index     where the distribution is published, if that is not pip's own index: for people
    programs  module with what more is needed: ALL, NEEDED, NoTools, tools(folder), missing(folder) and
              fetch(folder, names, say, commands), as portattn/tools/lab/mlir.py has them
    """

    releases: tuple[str, ...] = ()
    python: str = ">=3.10"
    also: Mapping[str, str] = {}
    index: str = ""
    programs: str = ""


class Compiler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One distribution that kernels are compiled with.

    aliases   distributions that are the same compiler under other names
    package   the folder that it installs. `triton` for Triton and its forks, of which a Python has one; a compiler that
              is added to Triton has a folder of its own
    spelling  regular expression whose first group is the PEP 440 version in what the metadata states; empty where it is
              one, as 3.2.0+git1234 and 3.1.0.post2 are
    apart     its numbers say nothing of Triton's: no range of another compiler holds for it. Without, such ranges are
              neither known to hold nor not to
    tried     versions that the kernels were compiled with, as a range; empty: not known
    released  versions that are published, oldest first; empty: not known
    stages    stages that its compile adapter announces, beside Triton's: a quirk's evidence may name them
    variables environment variables that it reads as it compiles, and that a quirk may set
    tracker   where it takes reports: a link
    lab       how the lab makes an environment; None where it cannot be installed by name
    name, brought_by, file  set by the reader: the table's name, the package, and the file that says all this
    """

    aliases: tuple[str, ...] = ()
    package: str = TRITON
    spelling: str = ""
    apart: bool = False
    tried: str = ""
    released: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    tracker: str = ""
    lab: Recipe | None = None
    name: str = ""
    brought_by: str = ""
    file: str = ""

    def version(self, stated: str) -> str:
        """The PEP 440 version in what metadata states; the text itself where `spelling` does not match it."""
        match = re.search(self.spelling, stated) if self.spelling else None
        return match.group(1) if match else stated


def read(folder: Path, brought_by: str) -> dict[str, Compiler]:
    """The compilers of a backend's folder by name; none where it has no compilers.toml.

    Raises DataError (file, line, key).
    """
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
    """(key, what is wrong with it) of a table; None where nothing is."""
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
    """The compilers that come with portattn. Raises DataError on a broken file."""
    spec = importlib.util.find_spec(_BACKENDS)
    folders = [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]
    found: dict[str, Compiler] = {}
    for file in sorted(path for folder in folders for path in folder.glob(f"*/{FILE}")):
        found |= read(file.parent, OWN)
    return {name: found[name] for name in sorted(found, key=lambda name: (name != TRITON, found[name].lab is None))}


class _Brought:
    """What packages bring: not known before the registry has looked for them."""

    def __init__(self) -> None:
        self.compilers: dict[str, Compiler] | None = None
        self.left_out: tuple[str, ...] = ()
        self.broken: tuple[str, ...] = ()
        self.here = threading.local()  # `loading` in the thread that looks for packages


_brought = _Brought()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While packages are looked for in this thread, names are those that are known so far: no second search begins."""
    before = getattr(_brought.here, "loading", False)
    _brought.here.loading = True
    try:
        yield
    finally:
        _brought.here.loading = before


def bring(found: Mapping[str, Compiler], left_out: Collection[str] = (), broken: Collection[str] = ()) -> None:
    """Set what packages bring.

    left_out  names that packages bring which are broken: others' files may say them
    broken    what is wrong with those packages, for whoever asks for a name that nobody brings
    """
    _brought.left_out, _brought.broken = tuple(left_out), tuple(broken)
    _brought.compilers = dict(found)


def all_compilers() -> dict[str, Compiler]:
    """Every compiler by name: portattn's own, then those that installed packages bring."""
    if _brought.compilers is None and not getattr(_brought.here, "loading", False):
        pkgutil.resolve_name(_LOOK)()
    return {**own(), **(_brought.compilers or {})}


def names() -> tuple[str, ...]:
    """Names of all known compilers."""
    return tuple(all_compilers())


def is_compiler(name: str) -> bool:
    """Whether a file may name this compiler: it is known, or brought by a package that is left out as broken."""
    if name in own() or name in COMPONENTS:
        return name in own()  # nobody is asked
    return name in all_compilers() or name in _brought.left_out


def find(name: str) -> Compiler | None:
    """The compiler of a distribution's name or alias, however it is spelt; None for one that nobody brings."""
    name = canonicalize_name(name)
    for some in (own, all_compilers):  # a name of portattn's own needs no other package
        for one in some().values():
            if name == one.name or name in one.aliases:
                return one
    return None


def package(name: str) -> str:
    """The folder that a compiler installs: `triton`, unless it is one that is added to Triton."""
    one = find(name)
    return one.package if one else TRITON


def version(name: str, stated: str) -> str:
    """The PEP 440 version in what the metadata of a distribution states."""
    one = find(name)
    return one.version(stated) if one else stated


def released_versions(name: str) -> tuple[str, ...]:
    """Published versions of a compiler, oldest first; none where nobody says."""
    one = find(name)
    return one.released if one else ()


def tried_range(name: str) -> str:
    """The range of a compiler's versions that kernels were compiled with; empty where nobody says."""
    one = find(name)
    return one.tried if one else ""


def canonical(name: str) -> str:
    """The compiler's name of a distribution's name or alias; the name itself, normalised, where nobody brings it."""
    one = find(name)
    return one.name if one else canonicalize_name(name)


def stages() -> tuple[str, ...]:
    """Stages that compilers of packages have beside Triton's."""
    return tuple(stage for one in all_compilers().values() for stage in one.stages)


def variables() -> tuple[str, ...]:
    """Environment variables that compilers of packages read, and that a quirk may set."""
    return tuple(name for one in all_compilers().values() for name in one.variables)


def unknown(name: str) -> str:
    """Return the error about an unknown compiler."""
    listed = ", ".join(names())
    told = f"{name!r} is no known compiler; known: {listed}; a backend package may bring others (docs/backends.md)"
    return ". ".join([told, *_brought.broken])


def name_conflict(name: str, one: Compiler, earlier: Mapping[str, Compiler]) -> str:
    """Why a package cannot bring a compiler: another brings a name of it. Empty where it can."""
    for other in earlier.values():
        both = {name, *one.aliases} & {other.name, *other.aliases}
        if both and other.file != one.file:
            return f"it brings the compiler {min(both)!r}, which {other.brought_by} brings already ({other.file})"
    return ""
