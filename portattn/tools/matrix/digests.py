"""Digests of what cells depend on: kernels, the code that plans, compiles and judges, and each backend's data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

import portattn
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.tools.matrix.identity import digest

SOURCES = (".py", ".c", ".toml")
DATA = ("arches", "tuning", "arches.toml")  # of a backend's folder: these have digests of their own
# Packages of portattn that no cell's result depends on; of the tools, cells are made by these alone.
APART = ("cli", "integrations", "kernels", "tools", "backends", "quirks")
TOOLS = ("matrix", "lab")
# What of a quirk nothing but people and the audit reads.
UNREAD = ("probe", "needs", "stand_in", "source", "review_by")


def digests(registry: Registry) -> dict[str, str]:
    """The digests of this portattn and of a registry, as `Identity.digests` has them."""
    found = {"kernels": kernel_source_digest(), "code": _code(), "quirks/any": _quirks(registry, None)}
    for name, backend in registry.backends.items():
        found |= {
            f"quirks/{name}": _quirks(registry, name),
            f"arches/{name}": digest(registry.arches[name]),
            f"tuning/{name}": digest(registry.tunings[name]),
            f"backends/{name}": _files(backend.folder, _sources(backend.folder)),
        }
    return found


def _code() -> str:
    """Digest of portattn's own code, as far as a cell's result depends on it."""
    return _files(Path(portattn.__file__).parent, _counted())


def _counted() -> list[Path]:
    """The files of portattn's own code that are counted, but the kernels, which have a digest of their own."""
    root = Path(portattn.__file__).parent
    folders = [path for path in root.iterdir() if path.is_dir() and path.name not in APART]
    folders += [root / "tools" / name for name in TOOLS]
    shared = [*root.glob("*.py"), *(root / "tools").glob("*.py")]
    return [*shared, *(path for folder in folders for path in _sources(folder))]


def _sources(folder: Path) -> Iterable[Path]:
    found = (path for path in folder.rglob("*") if path.suffix in SOURCES)
    return (path for path in found if path.relative_to(folder).parts[0] not in DATA)


def _files(root: Path, paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()[:16]


def _quirks(registry: Registry, backend: str | None) -> str:
    """Digest of what plans, footnotes and checks read of a backend's quirks; of those of every backend where None."""
    return digest([_read(quirk) for _, quirk in sorted(registry.quirks.items()) if quirk.when.backend == backend])


def _read(quirk: Quirk) -> object:
    seen = msgspec.to_builtins(quirk)
    for name in ("verified", "retired", "file"):
        del seen[name]
    for name in UNREAD:
        del seen["evidence"][name]
    return seen
