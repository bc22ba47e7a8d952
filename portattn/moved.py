"""Where modules went that the documentation of an earlier portattn named: importing one says its new name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# The old name, below portattn, and the new one. A name that is not here is looked for by what it starts with.
MOVED = {
    "backends.base": "portattn.planning.backend",
    "bench": "portattn.tools.bench",
    "call": "portattn.schema.call",
    "catalogue": "portattn.tools.quirks.pages",
    "emulate": "portattn.backends.rocm.emulator",
    "lab": "portattn.tools.lab",
    "linalg": "portattn.backends.ascend.linalg",
    "matrix": "portattn.tools.matrix",
    "older": "portattn.backends.cuda.ptx_compat",
    "ops": "portattn.api.ops",
    "planner": "portattn.planning.planner",
    "problem": "portattn.schema.problem",
    "quirk": "portattn.schema.quirk",
    "registry": "portattn.planning.registry",
    "toolchain": "portattn.schema.toolchain",
    "tune": "portattn.tools.tune",
    "verdict": "portattn.schema.compile_record",
    "verify": "portattn.tools.verify",
}


class _Moved:
    """The last finder: asked for what no other has found.

    `importlib.util.find_spec` gives a spec for an old name, whose `origin` is the new one: whoever only asks whether
    there is such a module is not met by an exception. Importing it raises ModuleNotFoundError with the new name.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        if package != "portattn" or old not in MOVED:
            return None
        return ModuleSpec(name, self, origin=MOVED[old])  # type: ignore[arg-type]  # what a loader must have, it has

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # No `name`: `from portattn import lab` would take it for a missing attribute, and say nothing.
        raise ModuleNotFoundError(f"{spec.name} is now {spec.origin}")

    def exec_module(self, module: ModuleType) -> None:
        """Never reached: there is no module."""


def install() -> None:
    """Have imports of old names answered."""
    sys.meta_path.append(_Moved())
