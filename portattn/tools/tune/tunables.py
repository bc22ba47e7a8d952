"""The tunable kernels of a target."""

from __future__ import annotations

from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema.ops import WRITERS
from portattn.schema.target import Target
from portattn.tools.tune.core import core_tunable
from portattn.tools.tune.tunable import Tunable


def tunables(target: Target, registry: Registry | None = None) -> list[Tunable]:
    """Everything that can be tuned for a target: the core kernels, then the backend's tunables.

    Among gradients' kernels only the core's can be tuned; a cache writer's tiles follow from its sizes.
    """
    backend = (registry or Registry.load()).backends[target.backend]
    kernels = [kernel for kernel in CORES.values() if kernel.op not in WRITERS] if backend.core_path else []
    found: list[Tunable] = [core_tunable(kernel) for kernel in kernels]
    return [*found, *backend.tunables(target.arch.name)]
