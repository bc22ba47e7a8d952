"""Registry: all data that a plan reads (arches, tuning, quirks), loaded once and never changed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from portattn.errors import ArgumentError
from portattn.planning import plugins, target_names
from portattn.planning.backend import Backend
from portattn.planning.data_files import load_arches as load_arches
from portattn.planning.data_files import load_tunings
from portattn.planning.plugins import Broken
from portattn.planning.quirk_files import load_quirks
from portattn.schema import quirk_names, toml_reader
from portattn.schema.quirk import Quirk, parse_overrides
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain, installed_for
from portattn.schema.tuning import Tuning

BUILTIN = "portattn.backends"  # by name, like other packages': a plan needs their data, and no chip's code


class Registry(msgspec.Struct, frozen=True, kw_only=True):
    """Backends with their arches and tuning, and the quirks by id: those that live, and the tombstones of others.

    backends  by name
    arches    of each backend, by name
    tunings   of each backend, by arch
    quirks    by id
    retired   tombstones, by id
    broken    installed backend packages that are left out: plans are made as if they were not installed

    >>> import portattn
    >>> portattn.Registry.load().arches["cuda"]["sm_90"].cores
    132
    """

    backends: dict[str, Backend]
    arches: dict[str, dict[str, Arch]]
    tunings: dict[str, dict[str, Tuning]]
    quirks: dict[str, Quirk]
    retired: dict[str, Quirk] = {}
    broken: tuple[Broken, ...] = ()

    def variant_names(self) -> list[str]:
        """Kernels with a schedule of their own, of all backends (`gluon_forward`)."""
        return [variant.name for backend in self.backends.values() for variant in backend.variants]

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def load() -> Registry:
        """The registry that comes with portattn and with installed backend packages.

        A backend package that is broken is left out, with a PluginWarning once in a process. Raises DataError on a
        broken data file of portattn's own.
        """
        backends, broken = look_around()
        registry = Registry.read(backends, broken=broken)
        plugins.warn(broken)
        return registry

    @staticmethod
    def read(
        backends: Mapping[str, Backend], quirk_folder: Path | None = None, broken: tuple[Broken, ...] = ()
    ) -> Registry:
        """Read arches and tuning of the given backends, and quirks from their folders or from the one given.

        Strict: raises DataError on any broken file. Quirks may name the backends that are left out as broken.
        """
        folder = quirk_folder or shipped_quirks()
        folders = [folder / name for name in backends] + [folder / "any"]
        if quirk_folder is None:
            folders += [own for b in backends.values() if (own := b.quirk_folder())]
        known = load_quirks(folders, (*backends, *(b.name for b in broken)))
        return Registry(
            backends=dict(backends),
            arches={name: load_arches(b.folder) for name, b in backends.items()},
            tunings={name: load_tunings(b.folder / "tuning", name) for name, b in backends.items()},
            quirks={name: quirk for name, quirk in known.items() if quirk.retired is None},
            retired={name: quirk for name, quirk in known.items() if quirk.retired is not None},
            broken=broken,
        )

    def overrides(self, text: str) -> tuple[frozenset[str], frozenset[str]]:
        """The setting `quirks` as ids forced on and off. Raises SettingError on an id that does not exist.

        To switch off a quirk of a package that is left out is a warning: whoever needed that is not to be stopped once
        the package breaks.
        """
        if self.broken and text:
            text = plugins.without_left_out(text, self.quirks, self.broken)
        return parse_overrides(text, self.quirks)

    def quirk(self, text: str, op: str = "quirk", argument: str = "id") -> Quirk:
        """The living entry that an id, whole or up to its number, names.

        op, argument  what an error names

        Raises ArgumentError on an id of none or of several, with the nearest ids, and of a retired one.
        """
        found = quirk_names.matching(text, self.quirks)
        if len(found) == 1:
            return self.quirks[found[0]]
        buried = quirk_names.matching(text, self.retired)
        if found:
            limit = f"several begin so: {quirk_names.several(found)}"
        elif buried and (tombstone := self.retired[buried[0]].retired):
            limit = f"it was retired on {tombstone.date}: {tombstone.reason}"
        else:
            close = quirk_names.did_you_mean(text, self.quirks)
            limit = f"no quirk has this id{close or '; `portattn quirks list` names all'}"
        raise ArgumentError(op, argument, text, limit)

    def unknown(self, backend: str) -> str:
        """Why there is no backend of this name: a limit, as of an ArgumentError."""
        left_out = [b.told() for b in self.broken if b.name == backend]
        return left_out[0] if left_out else f"must be one of {', '.join(self.backends)}"

    def arch(self, name: str) -> Arch:
        """The arch of a target's name, as Plan.target has it."""
        backend, _, arch = name.partition(":")
        return self.arches[backend][arch]

    def target(self, name: str, toolchain: str | Toolchain | None = None) -> Target:
        """The target that `backend:arch`, an arch alone or a chip's name means; see parse_target."""
        named = name.partition(":")[0]
        if named not in self.backends and any(b.name == named for b in self.broken):
            raise ArgumentError("target", "backend", named, self.unknown(named))
        words = {known: b.device_words for known, b in self.backends.items()}
        backend, arch = target_names.resolve(name, self.arches, words)
        arches = self.arches[backend]
        if isinstance(toolchain, str):
            try:
                toolchain = Toolchain.parse(toolchain)
            except ValueError as error:
                raise ArgumentError("target", "toolchain", toolchain, str(error).partition(": ")[2]) from None
        found = installed_for(self.backends[backend].compilers) if toolchain is None else toolchain
        found = found.with_components(self.backends[backend].components(arches[arch], found))
        return Target(backend=backend, arch=arches[arch], toolchain=found)

    def family(self, text: str) -> list[str]:
        """BACKEND:ARCH of each arch of a family, as `rdna3` or `rocm:rdna3`; none where a text names no family."""
        return [":".join(pair) for pair in target_names.members(text, self.arches)]

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


def parse_target(name: str, toolchain: str | Toolchain | None = None) -> Target:
    """The target of a name: a machine to plan for, which need not be here.

    name       `rocm:gfx942`; an arch that only one backend has may stand alone (`gfx942`), and so may a chip, by its
               name (`mi300x`) or as its driver prints it (`AMD Instinct MI300X`)
    toolchain  `triton==3.6.0`, with components `triton==3.6.0,ptxas==13.3.33`, `none`, or a Toolchain; None for this
               machine's

    Returns the Target: backend, arch and toolchain.

    An arch that is known and not supported gives a target, too: `target.arch.refused` is the reason, and plans for it
    take the vendor's library or the reference.

    Raises ArgumentError naming an unknown backend, arch or chip, with the nearest names, or a malformed toolchain.

    >>> import portattn
    >>> portattn.target("rocm:gfx942", "triton==3.6.0").arch.cores
    304
    >>> print(portattn.target("NVIDIA H100 80GB HBM3", "triton==3.6.0"))
    cuda:sm_90 with triton==3.6.0
    """
    return Registry.load().target(name, toolchain)


def shipped_quirks() -> Path:
    import portattn.quirks

    return Path(portattn.quirks.__path__[0])


def own_backends() -> dict[str, Backend]:
    """The backends that come with portattn, by name."""
    return {backend.name: backend for backend in importlib.import_module(BUILTIN).BUILTIN}


def find_backends() -> dict[str, Backend]:
    """Return portattn's own backends, then installed packages' that are not broken, by name."""
    return look_around()[0]


def look_around() -> tuple[dict[str, Backend], tuple[Broken, ...]]:
    """Backends as of find_backends, and the installed packages that are left out."""
    own = own_backends()
    usable, broken = plugins.find(own, {path.stem for path in toml_reader.files(shipped_quirks(), "*/*.toml")})
    return own | usable, broken
