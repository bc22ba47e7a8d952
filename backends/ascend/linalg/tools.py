"""The programs that turn linalg into code: mlir-opt, mlir-translate and llc of LLVM 19, and a C compiler."""

from __future__ import annotations

from portattn.errors import PortattnError
from portattn.tools.lab import mlir
from portattn.tools.lab.folders import folder_of

TOOLCHAIN = "triton-ascend==3.2.0"  # whose lab environment may have MLIR's programs beside it
PROGRAMS = (*mlir.LLVM, "cc")


class LinalgError(PortattnError):
    """A lowered kernel cannot be executed: a program is missing, or refuses it. The text says which and why."""


def tools() -> dict[str, str]:
    """Paths of the programs by name, as far as there are any."""
    return mlir.tools(folder_of(TOOLCHAIN))


def missing() -> str:
    """Why nothing lowered can be executed here; empty when it can."""
    have = tools()
    lacking = [name for name in PROGRAMS if name not in have]
    return f"no {', '.join(lacking)} here: {mlir.NEEDED}" if lacking else ""


def need() -> dict[str, str]:
    """All programs. Raises LinalgError where one is missing."""
    why = missing()
    if why:
        raise LinalgError(why)
    return tools()
