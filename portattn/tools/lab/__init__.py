"""The toolchain lab: isolated environments in which the kernels are compiled by other versions of Triton."""

from portattn.tools.lab.creating import create, worker
from portattn.tools.lab.folders import (
    Environment,
    LabError,
    ToolchainState,
    canonical,
    distributions,
    environments,
    find,
    need,
    remove,
    states,
    toolchains,
)

__all__ = [
    "Environment", "LabError", "ToolchainState", "canonical", "create", "distributions", "environments", "find", "need",
    "remove", "states", "toolchains", "worker",
]  # fmt: skip
