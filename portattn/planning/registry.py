"""Registry: all data that a plan reads (arches, tuning, quirks), loaded once and never changed."""

from __future__ import annotations

import functools
import importlib.metadata as metadata
from collections.abc import Mapping
from pathlib import Path

import msgspec

from portattn.errors import ArgumentError, DataError, PortattnError
from portattn.planning.backend import ENTRY_POINT_GROUP, Backend
from portattn.schema import toml_reader
from portattn.schema.quirk import Quirk, load_quirk
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain, installed
from portattn.schema.tuning import Tuning, load_tuning


class Registry(msgspec.Struct, frozen=True, kw_only=True):
    """Backends with their arches and tuning, and the quirks by id: those that live, and the tombstones of others."""

    backends: dict[str, Backend]
    arches: dict[str, dict[str, Arch]]
    tunings: dict[str, dict[str, Tuning]]
    quirks: dict[str, Quirk]
    retired: dict[str, Quirk] = {}

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def load() -> Registry:
        """The registry that comes with portattn and with installed backend packages.

        Raises DataError on a broken data file and PortattnError on a backend package that cannot be loaded.
        """
        return Registry.read(find_backends())

    @staticmethod
    def read(backends: Mapping[str, Backend], quirk_folder: Path | None = None) -> Registry:
        """Read arches and tuning of the given backends, and quirks from their folders or from the one given."""
        folder = quirk_folder or shipped_quirks()
        folders = [folder / name for name in backends] + [folder / "any"]
        if quirk_folder is None:
            folders += [own for b in backends.values() if (own := b.quirk_folder())]
        known = load_quirks(folders, tuple(backends))
        return Registry(
            backends=dict(backends),
            arches={name: load_arches(b.folder / "arches.toml") for name, b in backends.items()},
            tunings={name: _load_tunings(b.folder / "tuning", name) for name, b in backends.items()},
            quirks={name: quirk for name, quirk in known.items() if quirk.retired is None},
            retired={name: quirk for name, quirk in known.items() if quirk.retired is not None},
        )

    def arch(self, name: str) -> Arch:
        """The arch of a target's name, as Plan.target has it."""
        backend, _, arch = name.partition(":")
        return self.arches[backend][arch]

    def target(self, text: str, toolchain: str | Toolchain | None = None) -> Target:
        """The target that `backend:arch` names; see Target.parse."""
        backend, _, arch = text.partition(":")
        if backend not in self.backends:
            raise ArgumentError("target", "backend", backend, f"must be one of {', '.join(self.backends)}")
        arches = self.arches[backend]
        if arch not in arches:
            raise ArgumentError("target", "arch", arch, f"{backend} knows {', '.join(arches)}")
        if isinstance(toolchain, str):
            try:
                toolchain = Toolchain.parse(toolchain)
            except ValueError as error:
                raise ArgumentError("target", "toolchain", toolchain, str(error).partition(": ")[2]) from None
        found = installed() if toolchain is None else toolchain
        found = found.with_components(self.backends[backend].components(arches[arch], found))
        return Target(backend=backend, arch=arches[arch], toolchain=found)

    def targets(self, toolchain: str | Toolchain | None = None) -> list[Target]:
        """Every arch of every backend that kernels are planned for."""
        return [
            self.target(f"{backend}:{name}", toolchain)
            for backend, arches in self.arches.items()
            for name, arch in arches.items()
            if not arch.refused and self.backends[backend].core_path == "triton"
        ]

    def tuning(self, target: Target) -> Tuning | None:
        return self.tunings[target.backend].get(target.arch.tuning or target.arch.name)


def shipped_quirks() -> Path:
    import portattn.quirks

    return Path(portattn.quirks.__path__[0])


def find_backends() -> dict[str, Backend]:
    """portattn's own backends, then those of installed packages, by name."""
    from portattn.backends import BUILTIN

    found: dict[str, Backend] = {b.name: b for b in BUILTIN}
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            backend = point.load()
        except Exception as error:
            # A broken plug-in must not be silently missing from every plan: say which one and stop.
            raise PortattnError(
                f"backend package {point.value!r} ({ENTRY_POINT_GROUP}) fails to load: {error}"
            ) from error
        backend = backend() if isinstance(backend, type) else backend
        if backend.name in found:
            raise PortattnError(f"backend package {point.value!r} registers {backend.name!r}, which exists already")
        found[backend.name] = backend
    return found


def load_arches(path: Path) -> dict[str, Arch]:
    """Read an arches.toml: one table per arch. Raises DataError (file, line, key)."""
    data, text = toml_reader.read(path)
    arches = {}
    for name, table in data.items():
        if not isinstance(table, dict):
            raise DataError(path, toml_reader.line_of(text, name), f"key {name!r}: every arch is a table")
        arches[name] = msgspec.structs.replace(toml_reader.convert(table, Arch, path, text, name), name=name)
    return arches


def _load_tunings(folder: Path, backend: str) -> dict[str, Tuning]:
    return {path.stem: load_tuning(path, backend) for path in sorted(folder.glob("*.toml"))}


def load_quirks(folders: list[Path], backends: tuple[str, ...]) -> dict[str, Quirk]:
    """Read every quirk file of the folders, tombstones too.

    Raises DataError on a broken file, an unknown backend, an id used twice.
    """
    quirks: dict[str, Quirk] = {}
    for folder in folders:
        for nested in folder.glob("*/*.toml"):
            raise DataError(nested, None, f"quirk files lie in {folder} itself: this one would never be read")
        for path in sorted(folder.glob("*.toml")):
            quirk = load_quirk(path, backends)
            if quirk.id in quirks:
                raise DataError(path, None, f"id {quirk.id!r} is already taken by {quirks[quirk.id].file}")
            quirks[quirk.id] = quirk
    return quirks
