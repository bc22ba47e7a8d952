"""A program or a kernel's module, imported from its file. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType


def load(path: str) -> ModuleType:
    """Import a program from its file. Its folder is importable, for `from harness import …`."""
    folder, name = os.path.dirname(os.path.abspath(path)), os.path.splitext(os.path.basename(path))[0]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python program")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton reads a kernel's source through its module
    spec.loader.exec_module(module)
    return module
