"""This machine: the targets that its devices are."""

from __future__ import annotations

import functools
from typing import Any

from portattn.planning import plugins
from portattn.planning.backend import Backend
from portattn.planning.registry import Registry, own_backends
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain, installed_for


@functools.lru_cache(maxsize=64)
def detect_target(device_type: str, index: int | None) -> tuple[Target, str]:
    """The target that a torch device is, and why it is only the CPU's reference when no backend knows the device.

    A device of a known backend whose arch is not known is a target that refuses kernels: the vendor's library runs it.
    """
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
    """A target for a device that the backend has, and of whose arch it knows nothing: no kernel is planned for it."""
    arch = Arch(
        name=name, title=name, cores=1, scratchpad_bytes=0, scratchpad_kind="none", max_programs=1, sources=(),
        refused=f"backend {backend.name} finds {seen}; add it: docs/backends.md",
    )  # fmt: skip
    return Target(backend=backend.name, arch=arch, toolchain=toolchain)


def devices() -> list[Target]:
    """One target for each backend that has a device here (its current one), and the CPU last.

    Raises ArgumentError when a backend detects an arch that it has no file for.
    """
    found = []
    for kind in dict.fromkeys(b.device_type for b in Registry.load().backends.values()):
        target, unknown = detect_target(kind, None)
        if not unknown:
            found.append(target)
    return sorted(found, key=lambda t: t.backend == "cpu")


def this_target() -> Target:
    """The first accelerator that is here, or else the CPU."""
    return devices()[0]
