"""This machine: the targets that its devices are."""

from __future__ import annotations

from portattn.api.dispatch import detect_target
from portattn.planning.registry import Registry
from portattn.schema.target import Target


def devices() -> list[Target]:
    """One target for each backend that has a device here (its current one), and the CPU last.

    Raises ArgumentError when a backend detects an arch that its arches.toml does not have.
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
