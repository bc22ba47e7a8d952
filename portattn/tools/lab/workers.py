"""A worker under a toolchain's Python."""

from __future__ import annotations

import os
import sys
from typing import Any

from portattn.schema.toolchain import is_installed
from portattn.tools.lab import folders
from portattn.worker.client import Worker


def worker(toolchain: str | None = None, **options: Any) -> Worker:
    """A child process that compiles with a toolchain: the installed one for None or its own name, or else the lab's.

    `options` go to Worker. Raises LabError where the lab has no such environment, ArgumentError on a bad name.
    """
    own: dict[str, str | None] = options.pop("environment", None) or {}
    if toolchain is None or is_installed(toolchain):
        # The very Triton that this process would import, however it came to be on the path.
        path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return Worker(environment={**path, **own}, **options)
    return Worker(python=folders.need(toolchain).python, environment={**isolation_variables(), **own}, **options)


def isolation_variables() -> dict[str, str | None]:
    """Variables that a lab's Python must not have: they bring this process's packages or another ptxas into it."""
    return dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"))
