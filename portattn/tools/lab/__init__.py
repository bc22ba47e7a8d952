"""The toolchain lab: isolated environments in which the kernels are compiled by other versions of Triton.

folders.py       which environments there are, whole or broken; taking one away
creating.py      making one: whole or not at all, one maker at a time
commands.py      running pip and apt, and ending them when the maker is interrupted
mlir.py          the MLIR 19 tools that execute triton-ascend's linalg on a CPU
workers.py       a child process under an environment's Python
"""

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
from portattn.tools.lab.workers import worker

__all__ = [
    "Environment",
    "LabError",
    "ToolchainState",
    "canonical",
    "create",
    "distributions",
    "environments",
    "find",
    "need",
    "remove",
    "states",
    "toolchains",
    "worker",
]
