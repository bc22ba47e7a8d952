"""A griffe extension for the API reference (mkdocs.yml): docstrings come from the modules, not from their stubs."""

from pathlib import Path
from typing import Any

import griffe


class ModulesBeforeStubs(griffe.Extension):
    """Empties each stub: its overloads would replace names that griffe has not resolved yet, docstrings too."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        if isinstance(mod.filepath, Path) and mod.filepath.suffix == ".pyi":
            mod.members.clear()
            mod.imports.clear()
            mod.exports = None
