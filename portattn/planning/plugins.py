"""Backends of installed packages. A broken one is left out whole, and stops no other from planning.

Whole, because a quirk that cannot be read guards against wrong results: without it no kernel may run there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import DataError, PluginWarning, PortattnError, warn_caller
from portattn.planning import data_files
from portattn.planning.backend import ENTRY_POINT_GROUP, INTERFACES, Backend, Variant, VendorPath
from portattn.planning.data_files import load_arches, load_tuning, load_verified
from portattn.planning.quirk_files import ANY, check_file
from portattn.schema import compilers, quirk, toml_reader
from portattn.schema.compilers import Compiler
from portattn.schema.problem import DEMANDS
from portattn.schema.problem_limits import OPS
from portattn.worker import installed_packages
from portattn.worker.installed_packages import Unreadable

_NAME = re.compile(r"[\w-]+")
_warned: set[str] = set()
_disabled: dict[str, Broken] = {}  # by the backend's name


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of a package. `file` and `line` are empty or None if unknown."""

    text: str
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.text}" if where else self.text


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A backend package that is left out."""

    name: str  # the backend's, or the entry point's if the backend's cannot be used
    package: str  # distribution and version, as far as they are known, and entry point, for people
    faults: tuple[Fault, ...]
    device_type: str = ""  # torch's, if the package came to say it
    means: str = "portattn plans as if it were not installed"  # consequence for the user
    quirks: tuple[str, ...] = ()  # ids, as far as they are known
    kind: str = "backend package"  # or "distribution": with unreadable entry points it need be no backend package

    def has_quirk(self, name: str) -> bool:
        """Return whether an id, whole or up to its number, is the package's, or begins with its backend's name."""
        return bool(quirk.matching(name, self.quirks)) or name.startswith(f"{self.name}-")

    def told(self) -> str:
        """Return the faults and their consequence, to follow "but", as an ArgumentError's limit does."""
        return f"{self.kind} {self.package} is broken: {'; '.join(map(str, self.faults))}. {self.means}"


class _Loaded(msgspec.Struct, kw_only=True):
    package: str
    backend: Backend
    brings: dict[str, Compiler] = {}  # compilers of its folder
    faults: tuple[Fault, ...] = ()  # of these compilers


def find(own: Mapping[str, Backend], own_quirks: Collection[str]) -> tuple[dict[str, Backend], tuple[Broken, ...]]:
    """Return installed packages' backends by name, and the broken ones; set the compilers that packages bring.

    Names in `own` and ids in `own_quirks` are taken. An Exception or SystemExit is a package's fault; an interrupt
    passes."""
    with compilers.loading():
        usable, broken, brought = _find(own, own_quirks)
    names = {name for one in usable.values() for name in brought[one.name]}
    left_out = [name for brings in brought.values() for name in brings if name not in names]
    found = {name: brings[name] for brings in brought.values() for name in brings if name in names}
    compilers.bring(found, left_out, [one.told() for one in broken])
    data_files.bring_options({name: one.options for name, one in usable.items()})
    return usable, broken


def _find(
    own: Mapping[str, Backend], own_quirks: Collection[str]
) -> tuple[dict[str, Backend], tuple[Broken, ...], dict[str, dict[str, Compiler]]]:
    """Like `find`, with the compilers that each backend brings, broken ones too."""
    broken: list[Broken] = []
    loaded: dict[str, _Loaded] = {}
    points, unreadable = _points()
    for dist in unreadable:
        fault = Fault(text=f"its entry points cannot be read: {dist.problem}", file=dist.file)
        means = "portattn plans without the backends that it may have"
        broken.append(Broken(name=dist.name, package=dist.shown, faults=(fault,), means=means, kind="distribution"))
    for point in points:
        package = _package(point)
        try:
            value = point.load()
            backend = value() if isinstance(value, type) else value
            _check_backend(backend, (*own, *loaded))
            _check_options(backend, loaded)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever another package does, it stops no plan
            broken.append(Broken(name=point.name, package=package, faults=(_fault(error),)))
        else:
            earlier = [compilers.own(), *(one.brings for one in loaded.values())]
            brings, faults = _brought(backend, package, {k: v for some in earlier for k, v in some.items()})
            loaded[backend.name] = _Loaded(package=package, backend=backend, brings=brings, faults=faults)
    # Files of one package may name the compilers of another.
    compilers.bring({name: one for each in loaded.values() for name, one in each.brings.items()})
    data_files.bring_options({name: one.backend.options for name, one in loaded.items()})
    # A quirk may name a backend that another package brings, broken or not.
    names = (*own, *loaded, *(b.name for b in broken))
    usable: dict[str, Backend] = {}
    taken = set(own_quirks)
    for name, one in loaded.items():
        found: set[str] = set()
        faults = (*one.faults, *_data_faults(one.backend, names, taken, found))
        if faults:
            kind = one.backend.device_type
            quirks = tuple(sorted(found))
            broken.append(Broken(name=name, package=one.package, faults=faults, device_type=kind, quirks=quirks))
        else:
            usable[name] = one.backend
            taken |= found
    return usable, tuple(broken), {name: one.brings for name, one in loaded.items()}


def _brought(
    backend: Backend, package: str, earlier: Mapping[str, Compiler]
) -> tuple[dict[str, Compiler], tuple[Fault, ...]]:
    """Return the compilers that a backend brings and no earlier one does, and their faults."""
    try:
        found = compilers.read(backend.folder, package)
        backend.compile_adapter()
    except Exception as error:  # noqa: BLE001 - as in `find`
        return {}, (_fault(error),)
    found = {name: one for name, one in found.items() if one.file not in {other.file for other in earlier.values()}}
    taken = {name: text for name, one in found.items() if (text := compilers.name_conflict(name, one, earlier))}
    faults = tuple(Fault(text=text, file=found[name].file) for name, text in taken.items())
    return {name: one for name, one in found.items() if name not in taken}, faults


def warn(broken: Collection[Broken]) -> None:
    """Warn once in this process about each package that is left out."""
    _warn_once({one.package: f"{one.told()}; `portattn doctor` shows it too" for one in broken})


def _warn_once(texts: Mapping[str, str]) -> None:
    """Give the warnings of new keys. Under `-W error` raise one that names all, which stops only one call."""
    new = {key: text for key, text in texts.items() if key not in _warned}
    _warned.update(new)
    raised = []
    for text in new.values():
        try:
            warn_caller(text, PluginWarning)
        except PluginWarning as error:
            raised.append(str(error))
    if raised:
        raise PluginWarning("\n".join(raised))


def without_left_out(overrides: str, known: Collection[str], broken: Collection[Broken]) -> str:
    """Return the setting `quirks` without overrides that switch off left-out packages' quirks, and warn of these."""
    kept = []
    for part in overrides.split(","):
        sign, name = part.strip()[:1], part.strip()[1:].strip()
        asked_off = sign == "-" and not quirk.matching(name, known)
        owner = next((one for one in broken if asked_off and one.has_quirk(name)), None)
        if owner is None:
            kept.append(part)
        else:
            text = f"quirk override '-{name}' switches nothing off: {owner.told()}"
            _warn_once({f"{owner.package} {name}": text})
    return ",".join(kept)


def ask_backend(backend: Backend, question: str, own: Collection[str], *given: Any) -> Any:
    """Return a backend's answer about this machine, by its method `question`, or None if it has been disabled.

    A package's backend that raises is disabled in this process: its tensors' calls take the reference, and plans for
    its chips by name go on. Exceptions of portattn's `own` backends go through."""
    if backend.name in _disabled:
        return None
    try:
        return getattr(backend, question)(*given)
    except Exception as error:
        if backend.name in own:
            raise
        _disable(backend, question, error)
        return None


def _disable(backend: Backend, question: str, error: Exception) -> None:
    package = next((_package(point) for point in _points()[0] if _is_of(backend, point)), type(backend).__module__)
    fault = Fault(text=f"{question}() raised {type(error).__name__}: {error}")
    one = Broken(
        name=backend.name, package=package, faults=(fault,), device_type=backend.device_type,
        means="Its devices are not used in this process",
    )  # fmt: skip
    _disabled[backend.name] = one
    warn([one])


def disabled_backends() -> tuple[Broken, ...]:
    """Return the packages' backends that raised when they were asked about this machine."""
    return tuple(_disabled.values())


def _points() -> tuple[list[Any], list[Unreadable]]:
    return installed_packages.entry_points(ENTRY_POINT_GROUP)


def _is_of(backend: Backend, point: Any) -> bool:
    """Return whether a backend's class is of the entry point's package, without loading the entry point again."""
    return bool(point.value.partition(":")[0].partition(".")[0] == type(backend).__module__.partition(".")[0])


def _package(point: Any) -> str:
    """Return `portattn-acme 0.1 (acme = portattn_acme:AcmeBackend)`, as far as the distribution's metadata has it."""
    shown = f"{point.name} = {point.value}"
    try:
        name, version = point.dist.metadata["Name"], point.dist.version
    except Exception:  # noqa: BLE001 - broken metadata, and it is only for people
        return shown
    return f"{name} {version} ({shown})" if name and version else shown


def _check_backend(backend: Any, taken: Collection[str]) -> None:
    """Raise PortattnError on an object that is no backend, or lacks an attribute that other backends' plans read."""
    if not isinstance(backend, Backend):
        raise PortattnError(f"it registers {backend!r}, which is no portattn.planning.backend.Backend")
    for attribute, kind in (("name", str), ("device_type", str), ("folder", Path)):
        if not isinstance(getattr(backend, attribute, None), kind):
            raise PortattnError(f"{type(backend).__name__}.{attribute} must be a {kind.__name__}")
    if not _NAME.fullmatch(backend.name) or backend.name == ANY:
        raise PortattnError(f"{backend.name!r} cannot be a backend's name")
    if backend.interface not in INTERFACES:
        limit = f"this portattn has {' and '.join(map(str, INTERFACES))}"
        raise PortattnError(f"it is written for interface {backend.interface!r} of backends, and {limit}")
    if backend.name in taken:
        raise PortattnError(f"it registers {backend.name!r}, which exists already")
    given: tuple[tuple[type[VendorPath] | type[Variant], tuple[Any, ...]], ...]
    given = ((VendorPath, backend.vendor), (Variant, backend.variants))
    for wanted, paths in given:
        for path in paths:
            if not isinstance(path, wanted):
                raise PortattnError(f"it has {path!r} among its paths, which is no {wanted.__name__}")
            _check_path(path)


def _check_options(backend: Backend, loaded: Mapping[str, _Loaded]) -> None:
    """Raise PortattnError on launch options that are no names with types, or contradict another backend's types."""
    earlier = {**data_files.own_options(), **{name: one.backend.options for name, one in loaded.items()}}
    if wrong := data_files.declared_wrongly(backend.options, earlier):
        raise PortattnError(f"{type(backend).__name__}.options {wrong}")


def _check_path(path: VendorPath | Variant) -> None:
    """Raise PortattnError on declarations that would deny everything, or nothing, by mistake."""
    name = type(path).__name__
    if not isinstance(getattr(path, "name", None), str):
        raise PortattnError(f"{name}.name must be a str")
    if not isinstance(path.ops, tuple) or not path.ops or not set(path.ops) <= set(OPS):
        raise PortattnError(f"{name}.ops is {path.ops!r}, but must be a tuple of ops, one at least: {', '.join(OPS)}")
    if not isinstance(path.takes, (frozenset, set)) or not path.takes <= DEMANDS:
        unknown = sorted(path.takes - DEMANDS) if isinstance(path.takes, (frozenset, set)) else path.takes
        raise PortattnError(f"{name}.takes has {unknown!r}, but must be a set of {', '.join(sorted(DEMANDS))}")


def _data_faults(backend: Backend, names: tuple[str, ...], taken: Collection[str], found: set[str]) -> Iterator[Fault]:
    """Yield all faults of a backend's files, and add its quirks' ids to `found`."""
    yield from _caught(functools.partial(load_arches, backend.folder))
    for path in toml_reader.files(backend.folder / "tuning"):
        yield from _caught(functools.partial(load_tuning, path, backend.name))
    yield from _caught(functools.partial(load_verified, backend.folder))
    try:
        folder = _quirk_folder(backend)
    except Exception as error:  # noqa: BLE001 - as in `find`
        yield _fault(error)
        return
    if folder is None:
        return
    for nested in toml_reader.files(folder, "*/*.toml"):
        yield Fault(text=f"quirk files lie in {folder} itself: this one would never be read", file=str(nested))
    for path in toml_reader.files(folder):
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
