"""The toolchain lab: isolated environments in which the kernels are compiled by other versions of Triton."""

from portattn.tools.lab.creating import create
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
from portattn.tools.lab.run_programs import worker

__all__ = [
    "Environment", "LabError", "ToolchainState", "canonical", "create", "distributions", "environments", "find", "need",
    "remove", "states", "toolchains", "worker",
]  # fmt: skip
