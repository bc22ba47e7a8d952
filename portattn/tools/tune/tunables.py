"""What can be tuned for a target."""

from __future__ import annotations

from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.ops import PUBLIC
from portattn.schema.target import Target
from portattn.tools.tune.core import CoreTunable
from portattn.tools.tune.tunable import Tunable


def tunables(target: Target, registry: Registry | None = None) -> list[Tunable]:
    """Everything that can be tuned for a target: the core kernels, then its variants that say how (Variant.tunable).

    The gradients' kernels are not searched: a candidate's numbers are checked as those of a forward pass.
    """
    backend = (registry or Registry.load()).backends[target.backend]
    found: list[Tunable] = (
        [CoreTunable(kernel) for op, kernel in CORES.items() if op in PUBLIC] if backend.core_path else []
    )
    for variant in backend.variants:
        make = getattr(variant, "tunable", None)
        if make is not None and target.arch.name in variant.arches:
            found.append(make())
    return found
