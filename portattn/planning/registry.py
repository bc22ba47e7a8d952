"""Registry: all data that a plan reads (arches, tuning, quirks), loaded once and never changed; and the targets of this
machine's devices."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import ArgumentError
from portattn.planning import plugins, target_names
from portattn.planning.backend import Backend
from portattn.planning.data_files import load_arches as load_arches
from portattn.planning.data_files import load_tunings
from portattn.planning.plugins import Broken
from portattn.planning.quirk_files import load_quirks
from portattn.schema import quirk as schema_quirk
from portattn.schema import toml_reader
from portattn.schema.quirk import Quirk, parse_overrides
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain, installed_for
from portattn.schema.tuning import Tuning

BUILTIN = "portattn.backends"  # by name, like other packages': a plan needs their data, and no chip's code


class Registry(msgspec.Struct, frozen=True, kw_only=True):
    """Backends with their arches and tuning, and the quirks by id: living ones, and tombstones of retired ones.

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
        """Return the names of all backends' kernels with schedules of their own (`gluon_forward`)."""
        return [variant.name for backend in self.backends.values() for variant in backend.variants]

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def load() -> Registry:
        """Return the registry of portattn and backend packages; warn once of broken ones, which are left out.

        Raises DataError on a broken data file of portattn's own."""
        backends, broken = look_around()
        registry = Registry.read(backends, broken=broken)
        plugins.warn(broken)
        return registry

    @staticmethod
    def read(
        backends: Mapping[str, Backend], quirk_folder: Path | None = None, broken: tuple[Broken, ...] = ()
    ) -> Registry:
        """Read the backends' arches and tuning, and quirks from `quirk_folder` or their own folders.

        Raises DataError on any broken file. Quirks may name the backends that are left out as broken."""
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
        """Return the setting `quirks` as ids forced on and off; raise SettingError on an unknown id.

        A left-out package's quirk only gives a warning: its override must not stop a call once the package breaks."""
        if self.broken and text:
            text = plugins.without_left_out(text, self.quirks, self.broken)
        return parse_overrides(text, self.quirks)

    def quirk(self, text: str, op: str = "quirk", argument: str = "id") -> Quirk:
        """Return an id's quirk, by the whole id or its number; raise ArgumentError if unknown, ambiguous or retired."""
        found = schema_quirk.matching(text, self.quirks)
        if len(found) == 1:
            return self.quirks[found[0]]
        buried = schema_quirk.matching(text, self.retired)
        if found:
            limit = f"several begin so: {schema_quirk.several(found)}"
        elif buried and (tombstone := self.retired[buried[0]].retired):
            limit = f"it was retired on {tombstone.date}: {tombstone.reason}"
        else:
            close = schema_quirk.did_you_mean(text, self.quirks)
            limit = f"no quirk has this id{close or '; `portattn quirks list` names all'}"
        raise ArgumentError(op, argument, text, limit)

    def unknown(self, backend: str) -> str:
        """Return why there is no backend of this name, as an ArgumentError's limit."""
        left_out = [b.told() for b in self.broken if b.name == backend]
        return left_out[0] if left_out else f"must be one of {', '.join(self.backends)}"

    def arch(self, name: str) -> Arch:
        backend, _, arch = name.partition(":")
        return self.arches[backend][arch]

    def target(self, name: str, toolchain: str | Toolchain | None = None) -> Target:
        """Return the target of `backend:arch`, an arch alone or a chip's name; see parse_target."""
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
        """Return BACKEND:ARCH of each arch of a family (`rdna3`, `rocm:rdna3`); empty for other texts."""
        return [":".join(pair) for pair in target_names.members(text, self.arches)]

    def targets(self, toolchain: str | Toolchain | None = None) -> list[Target]:
        """Return every arch of every backend that kernels are planned for."""
        return [
            self.target(f"{backend}:{name}", toolchain)
            for backend, arches in self.arches.items()
            for name, arch in arches.items()
            if not arch.refused and self.backends[backend].core_path == "triton"
        ]

    def tuning(self, target: Target) -> Tuning | None:
        return self.tunings[target.backend].get(target.arch.tuning or target.arch.name)


def parse_target(name: str, toolchain: str | Toolchain | None = None) -> Target:
    """Return the target of a name: a machine to plan for, which need not be here.

    Args:
        name: `rocm:gfx942`; an arch that only one backend has may stand alone (`gfx942`), and so may a chip, by its
            name (`mi300x`) or as its driver prints it (`AMD Instinct MI300X`)
        toolchain: `triton==3.6.0`, with components `triton==3.6.0,ptxas==13.3.33`, `none`, or a Toolchain; None for
            this machine's

    Returns:
        The Target: backend, arch and toolchain.

    An arch that is known and not supported gives a target, too: `target.arch.refused` is the reason, and plans for it
    take the vendor's library or the reference.

    Raises:
        ArgumentError: The backend, arch or chip is unknown (the error has the nearest names), or the toolchain is
            malformed.

    Examples:
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
    return {backend.name: backend for backend in importlib.import_module(BUILTIN).BUILTIN}


def find_backends() -> dict[str, Backend]:
    """Return portattn's own backends, then installed packages' that are not broken, by name."""
    return look_around()[0]


def look_around() -> tuple[dict[str, Backend], tuple[Broken, ...]]:
    """Return the backends of find_backends, and the installed packages that are left out."""
    own = own_backends()
    usable, broken = plugins.find(own, {path.stem for path in toml_reader.files(shipped_quirks(), "*/*.toml")})
    return own | usable, broken


@functools.lru_cache(maxsize=64)
def detect_target(device_type: str, index: int | None) -> tuple[Target, str]:
    """Return a torch device's target, and why it is only the CPU's reference if no backend knows the device.

    A known backend's device of an unknown arch is a target that refuses kernels: the vendor's library runs it."""
    registry = Registry.load()
    candidates = [b for b in registry.backends.values() if b.device_type == device_type]
    if device_type == "meta" and not candidates:
        return registry.target("cpu:generic"), ""  # shapes without data: the reference computes them
    for backend in candidates:
        arch = _asked(backend, "detect", index)
        if arch is None:
            continue
        toolchain = installed_for(backend.compilers).with_components(_asked(backend, "machine_components") or {})
        if arch in registry.arches[backend.name]:
            return registry.target(f"{backend.name}:{arch}", toolchain), ""
        return _unknown_arch(backend, arch, f"arch {arch}, which is none of its arches", toolchain), ""
    # Several backends can share a device type: the one that can say something about the device has it.
    owner = next((b for b in candidates if _asked(b, "describe", index)), None)
    candidates = [b for b in candidates if b.name not in {one.name for one in plugins.disabled_backends()}]
    if owner is None and index is not None and len(candidates) == 1:
        owner = candidates[0]  # a tensor's device: it is there
    if owner is not None:
        seen = _asked(owner, "describe", index) or f"device {device_type}:{index or 0}"
        if trouble := _asked(owner, "trouble", index):
            seen += f" ({trouble})"
        toolchain = installed_for(owner.compilers).with_components(_asked(owner, "machine_components") or {})
        return _unknown_arch(owner, "unknown", f"{seen}, which is none of its arches", toolchain), ""
    target = registry.target("cpu:generic")
    known = ", ".join(sorted({b.device_type for b in registry.backends.values()}))
    seen = f"no backend knows device {device_type}:{index or 0}; device types of backends: {known}"
    # One that failed before it said its device type may be the one that is missing here.
    perhaps = [b.told() for b in (*registry.broken, *plugins.disabled_backends()) if b.device_type in ("", device_type)]
    return target, ". ".join([seen, *perhaps])


def _asked(backend: Backend, question: str, *given: int | None) -> Any:
    return plugins.ask_backend(backend, question, own_backends(), *given)


def _unknown_arch(backend: Backend, name: str, seen: str, toolchain: Toolchain) -> Target:
    """Return a target for a backend's device of unknown arch: no kernel is planned for it."""
    arch = Arch(
        name=name, title=name, cores=1, scratchpad_bytes=0, scratchpad_kind="none", max_programs=1, sources=(),
        refused=f"backend {backend.name} finds {seen}; add it: docs/backends.md",
    )  # fmt: skip
    return Target(backend=backend.name, arch=arch, toolchain=toolchain)


def devices() -> list[Target]:
    """Return a target for each backend with a device here (its current one), the CPU last."""
    found = []
    for kind in dict.fromkeys(b.device_type for b in Registry.load().backends.values()):
        target, unknown = detect_target(kind, None)
        if not unknown:
            found.append(target)
    return sorted(found, key=lambda t: t.backend == "cpu")


def this_target() -> Target:
    """Return the first accelerator that is here, or else the CPU."""
    return devices()[0]
