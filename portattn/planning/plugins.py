"""Backends of installed packages. One that is broken is left out, whole, and keeps nobody else from planning.

Whole, because a quirk that cannot be read guards against wrong results: without it no kernel may run there.
"""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import DataError, PluginWarning, PortattnError
from portattn.planning.backend import ENTRY_POINT_GROUP, Backend, Variant, VendorPath
from portattn.planning.data_files import load_arches, load_tuning
from portattn.planning.quirk_checks import ANY
from portattn.planning.quirk_files import check_file
from portattn.schema.problem import DEMANDS, OPS

_NAME = re.compile(r"[\w-]+")
_warned: set[str] = set()


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a package. `file` and `line` are empty or None where they are not known."""

    text: str
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.text}" if where else self.text


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A backend package that is left out.

    name          the backend's name; the entry point's, where the backend has none that can be used
    package       its distribution and version, as far as they are known, and its entry point, for people
    faults        what is wrong with it, at least one thing
    device_type   torch's device type of its tensors; empty where it did not come to say
    """

    name: str
    package: str
    faults: tuple[Fault, ...]
    device_type: str = ""

    def told(self) -> str:
        """What is wrong, and what it means: goes on after "but", as an ArgumentError's limit does."""
        return (
            f"backend package {self.package} is broken: {'; '.join(map(str, self.faults))}. "
            "portattn plans as if it were not installed"
        )


class _Loaded(msgspec.Struct, kw_only=True):
    package: str
    backend: Backend


def find(own: Mapping[str, Backend], own_quirks: Collection[str]) -> tuple[dict[str, Backend], tuple[Broken, ...]]:
    """Backends of installed packages by name, and those that are left out.

    own         portattn's own backends, whose names are taken
    own_quirks  ids of portattn's own quirks, which are taken too

    An Exception, or SystemExit, is taken for a package's fault: an interrupt goes through.
    """
    broken: list[Broken] = []
    loaded: dict[str, _Loaded] = {}
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        package = _package(point)
        try:
            value = point.load()
            backend = value() if isinstance(value, type) else value
            _check_backend(backend, (*own, *loaded))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever another package does, it stops no plan
            broken.append(Broken(name=point.name, package=package, faults=(_fault(error),)))
        else:
            loaded[backend.name] = _Loaded(package=package, backend=backend)
    # A quirk may name a backend that another package brings, broken or not.
    names = (*own, *loaded, *(b.name for b in broken))
    usable: dict[str, Backend] = {}
    taken = set(own_quirks)
    for name, one in loaded.items():
        found: set[str] = set()
        faults = tuple(_data_faults(one.backend, names, taken, found))
        if faults:
            kind = one.backend.device_type
            broken.append(Broken(name=name, package=one.package, faults=faults, device_type=kind))
        else:
            usable[name] = one.backend
            taken |= found
    return usable, tuple(broken)


def warn(broken: Collection[Broken]) -> None:
    """Warn about each package that is left out, once in this process."""
    for one in broken:
        if one.package not in _warned:
            _warned.add(one.package)
            warnings.warn(f"{one.told()}; `portattn doctor` shows it too", PluginWarning, stacklevel=3)


def _package(point: Any) -> str:
    """`portattn-acme 0.1 (acme = portattn_acme:AcmeBackend)`, as far as the distribution's metadata has it."""
    shown = f"{point.name} = {point.value}"
    try:
        name, version = point.dist.metadata["Name"], point.dist.version
    except Exception:  # noqa: BLE001 - broken metadata, and it is only for people
        return shown
    return f"{name} {version} ({shown})" if name and version else shown


def _check_backend(backend: Any, taken: Collection[str]) -> None:
    """Raise on what is no backend, or has not what others than its own plans read of it."""
    if not isinstance(backend, Backend):
        raise PortattnError(f"it registers {backend!r}, which is no portattn.planning.backend.Backend")
    for attribute, kind in (("name", str), ("device_type", str), ("folder", Path)):
        if not isinstance(getattr(backend, attribute, None), kind):
            raise PortattnError(f"{type(backend).__name__}.{attribute} must be a {kind.__name__}")
    if not _NAME.fullmatch(backend.name) or backend.name == ANY:
        raise PortattnError(f"{backend.name!r} cannot be a backend's name")
    if backend.name in taken:
        raise PortattnError(f"it registers {backend.name!r}, which exists already")
    given: tuple[tuple[type[VendorPath] | type[Variant], tuple[Any, ...]], ...]
    given = ((VendorPath, backend.vendor), (Variant, backend.variants))
    for wanted, paths in given:
        for path in paths:
            if not isinstance(path, wanted):
                raise PortattnError(f"it has {path!r} among its paths, which is no {wanted.__name__}")
            _check_path(path)


def _check_path(path: VendorPath | Variant) -> None:
    """Raise on declarations that would deny everything, or nothing, by mistake."""
    name = type(path).__name__
    if not isinstance(getattr(path, "name", None), str):
        raise PortattnError(f"{name}.name must be a str")
    if not isinstance(path.ops, tuple) or not path.ops or not set(path.ops) <= set(OPS):
        raise PortattnError(f"{name}.ops is {path.ops!r}, but must be a tuple of ops, one at least: {', '.join(OPS)}")
    if not isinstance(path.takes, (frozenset, set)) or not path.takes <= DEMANDS:
        unknown = sorted(path.takes - DEMANDS) if isinstance(path.takes, (frozenset, set)) else path.takes
        raise PortattnError(f"{name}.takes has {unknown!r}, but must be a set of {', '.join(sorted(DEMANDS))}")


def _data_faults(backend: Backend, names: tuple[str, ...], taken: Collection[str], found: set[str]) -> Iterator[Fault]:
    """Everything that is wrong with a backend's files. Ids of its quirks are added to `found`."""
    yield from _caught(functools.partial(load_arches, backend.folder))
    for path in sorted((backend.folder / "tuning").glob("*.toml")):
        yield from _caught(functools.partial(load_tuning, path, backend.name))
    try:
        folder = _quirk_folder(backend)
    except Exception as error:  # noqa: BLE001 - as in `find`
        yield _fault(error)
        return
    if folder is None:
        return
    for nested in sorted(folder.glob("*/*.toml")):
        yield Fault(text=f"quirk files lie in {folder} itself: this one would never be read", file=str(nested))
    for path in sorted(folder.glob("*.toml")):
        yield from _quirk_faults(path, names)
        if path.stem in taken:  # a quirk's id is its file's name
            yield Fault(text=f"id {path.stem!r} is already taken", file=str(path))
        found.add(path.stem)


def _quirk_faults(path: Path, names: tuple[str, ...]) -> list[Fault]:
    try:
        return [_fault(error) for error in check_file(path, names)[1]]
    except Exception as error:  # noqa: BLE001 - as in `find`: a file that may not be read, say
        return [_fault(error)]


def _quirk_folder(backend: Backend) -> Path | None:
    folder = backend.quirk_folder()
    if folder is not None and not folder.is_dir():
        raise DataError(folder, None, "the folder of its quirk files does not exist")
    return folder


def _caught(read: Callable[[], object]) -> Iterator[Fault]:
    try:
        read()
    except Exception as error:  # noqa: BLE001 - as in `find`
        yield _fault(error)


def _fault(error: BaseException) -> Fault:
    if isinstance(error, DataError):
        return Fault(text=error.problem, file=error.path, line=error.line)
    if isinstance(error, OSError) and error.filename:
        return Fault(text=f"{type(error).__name__}: {error.strerror}", file=str(error.filename))
    return Fault(text=_text(error))


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, PortattnError) else f"{type(error).__name__}: {error}"
