"""Read a backend's arches, tuning and evidence; quirks are read by quirk_files."""

from __future__ import annotations

import datetime
import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from portattn.errors import DataError
from portattn.planning.kernel_specs import of_gradients
from portattn.schema import compilers, conditions, lowering, toml_reader
from portattn.schema.lowering import BackendOptions
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import OPS
from portattn.schema.target import Arch
from portattn.schema.toolchain import parse_range
from portattn.schema.tuning import Tuning, read_tuning

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_AT_LEAST_ONE = ("cores", "max_programs")
_NOT_NEGATIVE = (
    "core_threads", "core_registers", "register_unit", "reserved_memory", "warp_size", "registers", "scratchpad_bytes",
    "cache_share",
)  # fmt: skip
_NONE = "none"  # the scratchpad_kind of a chip without one


def arch_problem(arch: Arch, stated: str) -> tuple[str, str] | None:
    """Return (key, fault) that the types do not catch, or None; no key for the name. `stated`: the file's `name`."""
    return _name(arch, stated) or _sizes(arch) or _compilers(arch) or _families(arch)


def _name(arch: Arch, stated: str) -> tuple[str, str] | None:
    if not _NAME.fullmatch(arch.name):
        return "", f"{arch.name!r} cannot be an arch's name: it has letters, digits, - and _ only"
    if stated and stated != arch.name:
        return "name", f"{stated!r} is not the arch's name, {arch.name!r}, which is its file's or table's"
    if arch.compiler_target is None:
        return None
    theirs = arch.compiler_target[1]
    fits = (
        re.search(rf"(?<!\d){theirs}(?!\d)", arch.name) is not None
        if isinstance(theirs, int)
        else _plain(theirs).startswith(_plain(arch.name))
    )
    return None if fits else ("compiler_target", f"{theirs!r} is not the compiler's name of {arch.name}")


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).lower()


def _sizes(arch: Arch) -> tuple[str, str] | None:
    for names, least in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0)):
        for key in names:
            if getattr(arch, key) < least:
                return key, f"{getattr(arch, key)} must be at least {least}"
    if (arch.scratchpad_bytes == 0) != (arch.scratchpad_kind == _NONE):
        return "scratchpad_bytes", f"{arch.scratchpad_bytes} bytes of scratchpad_kind {arch.scratchpad_kind!r}"
    if arch.compiler_target is not None and arch.compiler_target[2] != arch.warp_size:
        return "compiler_target", f"{arch.compiler_target[2]} lanes of a warp, and warp_size is {arch.warp_size}"
    return None


def _compilers(arch: Arch) -> tuple[str, str] | None:
    for name, text in arch.toolchain.items():
        if not compilers.is_compiler(name):
            return "toolchain", compilers.unknown(name)
        try:
            parse_range(text)
        except ValueError as error:
            return "toolchain", str(error)
    return None


def _families(arch: Arch) -> tuple[str, str] | None:
    if arch.name in arch.families:
        return "families", f"{arch.name!r} is the arch itself"
    for key in ("families", "devices", "sources"):
        if not all(text.strip() for text in getattr(arch, key)):
            return key, "one of them is empty"
    if not arch.title.strip():
        return "title", "it is empty"
    return None


# A backend's arches: a folder with a file each, and (easier for a small package) one file with a table each.
ARCH_FOLDER, ARCH_TABLES = "arches", "arches.toml"
_NUMBERS = re.compile(r"(\d+)")


def has_arches(folder: Path) -> bool:
    """Return whether a folder holds a backend's arches."""
    return (folder / ARCH_FOLDER).is_dir() or (folder / ARCH_TABLES).is_file()


def load_arches(folder: Path) -> dict[str, Arch]:
    """Return a backend's arches by name, from arches/<name>.toml and the tables of arches.toml, numbers by value.

    Raises DataError (file, line, key), also on an arch that is there twice or a file that would not be read, and
    FileNotFoundError where there are neither files nor tables."""
    arches: dict[str, Arch] = {}
    for path, name, table, text, keys in _tables(folder):
        if name in arches:
            raise DataError(path, None, f"arch {name!r} is already in {ARCH_TABLES}")
        found = toml_reader.convert(table, Arch, path, text, *keys)
        arch = msgspec.structs.replace(found, name=name)
        if problem := arch_problem(arch, found.name):
            key, said = problem
            where = toml_reader.line_of(text, *keys, *([key] if key else []))
            raise DataError(path, where, f"key {key!r}: {said}" if key else said)
        arches[name] = arch
    for name, arch in arches.items():
        for device in arch.devices:
            other = next((n for n, a in arches.items() if n != name and a.is_device(device)), None)
            if other is not None:
                raise DataError(_file_of(folder, name), None, f"device {device!r} of {name} is one of {other}'s, too")
        if arch.tuning and arch.tuning not in arches:
            raise DataError(_file_of(folder, name), None, f"{name} shares the tuning of {arch.tuning!r}, no arch here")
    return dict(sorted(arches.items(), key=lambda item: _by_number(item[0])))


def _file_of(folder: Path, name: str) -> Path:
    own = folder / ARCH_FOLDER / f"{name}.toml"
    return own if own.is_file() else folder / ARCH_TABLES


def _tables(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any], str, tuple[str, ...]]]:
    """Yield (file, name, values, the file's text, keys that lead to the values) of every arch."""
    files = _files(folder / ARCH_FOLDER)
    tables = folder / ARCH_TABLES
    if tables.exists() or not files:
        data, text = toml_reader.read(tables)
        for name, table in data.items():
            if not isinstance(table, dict):
                raise DataError(tables, toml_reader.line_of(text, name), f"key {name!r}: every arch is a table")
            yield tables, name, table, text, (name,)
    for path in files:
        data, text = toml_reader.read(path)
        yield path, path.stem, data, text, ()


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    parts = (part for part in _NUMBERS.split(name) if part)
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _files(folder: Path) -> list[Path]:
    """Return the files of arches in a folder; raise DataError on any other file that is not hidden: it may be one."""
    lying = [] if not folder.is_dir() else sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in lying:
        if path.suffix != ".toml" or not path.is_file():
            limit = "it would not be read: a folder of arches has files called <arch>.toml alone"
            raise DataError(path, None, limit)
    return lying


def load_tuning(path: Path, backend: str) -> Tuning:
    """Read one tuning file of a backend; raise DataError (file, line, key)."""
    return read_tuning(path, backend, backend_options(), of_gradients)


class VerifiedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evidence that comes with a backend: on these arches and this toolchain the tests passed on the chip."""

    arch: tuple[str, ...]
    toolchain: str
    level: Literal["runs", "measured"]
    date: datetime.date
    what: str
    untested_ops: tuple[str, ...] = ()  # newer than that run, or not reached by it
    untested: tuple[str, ...] = ()  # conditions (schema/conditions.py) of untested problems
    untested_gradients: tuple[str, ...] = ()  # the same of problems of gradients alone
    untested_queries: tuple[str, ...] = ()  # formats of queries (Problem.q_format)

    def __post_init__(self) -> None:
        conditions.names((*self.untested, *self.untested_gradients))
        if unknown := sorted(set(self.untested_queries) - conditions.WORDS["kv_format"]):
            raise ValueError(f"untested_queries {unknown} must be among {', '.join(conditions.WORDS['kv_format'])}")
        if unknown := sorted(set(self.untested_ops) - set(OPS)):
            raise ValueError(f"untested_ops {unknown} must be among {', '.join(OPS)}")

    def covers(self, problem: Problem) -> bool:
        features = problem.features()
        new = problem.op in self.untested_ops or problem.q_format in self.untested_queries
        untested = (*self.untested, *self.untested_gradients) if problem.backward else self.untested
        return not (new or any(conditions.texts_hold((text,), features) for text in untested))


class _Verified(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seen: tuple[VerifiedRun, ...]


def load_verified(folder: Path) -> tuple[VerifiedRun, ...]:
    """Read a backend folder's verified.toml, if it has one; raise DataError (file, line, key)."""
    path = folder / "verified.toml"
    if not path.exists():
        return ()
    data, text = toml_reader.read(path)
    return toml_reader.convert(data, _Verified, path, text).seen


def load_tunings(folder: Path, backend: str) -> dict[str, Tuning]:
    """Read every tuning file of a backend's folder, by arch; raise DataError (file, line, key)."""
    return {path.stem: load_tuning(path, backend) for path in toml_reader.files(folder)}


# Launch options that only some backends' compilers know, as the backends declare them.
_OWN = "portattn.backends"  # by name, as the registry has it: a plan needs their data, and no chip's code


KINDS = (bool, int, str)  # types that an option's values may have

_brought: list[BackendOptions] = [{}]  # replaced whole: other threads may be planning


@functools.lru_cache(maxsize=1)
def own_options() -> BackendOptions:
    """Return Backend.options of portattn's own backends, by backend."""
    return {backend.name: backend.options for backend in importlib.import_module(_OWN).BUILTIN}


def bring_options(found: BackendOptions) -> None:
    """Set the options that backends of other packages declare (planning/plugins.py)."""
    _brought[0] = dict(found)


def backend_options() -> BackendOptions:
    """Return Backend.options by backend: portattn's own, and packages' once the registry has looked for them."""
    return {**own_options(), **_brought[0]}


def declared_wrongly(given: Any, earlier: BackendOptions) -> str:
    """Return the fault of a backend's options, or an empty string: an option has one type in all backends' files."""
    if not isinstance(given, Mapping):
        return f"is {given!r}, but must map names to types"
    for name, kind in given.items():
        if not isinstance(name, str) or not name.isidentifier() or kind not in KINDS:
            return f"has {name!r}: {kind!r}, but must map names to bool, int or str"
        if name in lowering.LAUNCH_FIELDS or name in lowering.CHOICES:
            return f"has {name!r}, which every launch has"
        for other, options in earlier.items():
            if options.get(name, kind) is not kind:
                return f"has {name!r} of type {kind.__name__}, and {other} has it of type {options[name].__name__}"
    return ""


def options() -> dict[str, type]:
    return {name: kind for own in backend_options().values() for name, kind in own.items()}


def check_option(name: str, backend: str | None) -> None:
    """Raise ValueError if the backend (None: every backend) does not know the compiler option `name`."""
    lowering.check_option(name, backend, backend_options())


def check_launch_values(values: dict[str, Any], backend: str | None, rows: bool = False) -> None:
    """Raise ValueError on an unknown name, another backend's option or a bad value; `rows`: of kernels of gradients."""
    lowering.check_launch_values(values, backend, backend_options(), rows)
