"""The source tree: backends/ and quirks/ lie beside portattn/, and are imported as parts of it all the same.

A finder of its own, and not the tree's root on portattn's `__path__`: that has portattn/ too, and tests/ and docs/, so
that `import portattn.portattn.errors` would make a second copy, whose errors nobody catches.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PARTS = ("backends", "quirks")


class _Beside:
    """Finds the parts in a source tree."""

    def __init__(self, root: str) -> None:
        self._found = {f"portattn.{part}": os.path.join(root, part) for part in PARTS}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self._found.get(name)
        if folder is None:
            return None
        module = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(name, module, submodule_search_locations=[folder])


def install(package: str) -> None:
    """Have the parts found beside the package's folder, where they do not lie in it: an installed portattn holds them.

    Before every other finder: a Python that is started in a tree's root imports that tree, all of it, whatever is
    installed, and an editable install's finder knows the folders of the tree that it was made from.

    Raises ImportError if the package is not a folder on disk, as in a zip archive.
    """
    if not os.path.isdir(package):
        raise ImportError(
            f"portattn cannot be imported from an archive ({package}): compilers read its kernels from files, "
            "and plans read data files; unpack it, or install it with pip",
            name="portattn",
        )
    if is_tree(package):
        sys.meta_path.insert(0, _Beside(os.path.dirname(package)))


def is_tree(package: str) -> bool:
    """Whether the package's folder is that of a source tree, and not of an installed portattn."""
    root = os.path.dirname(package)
    return not os.path.isdir(os.path.join(package, PARTS[0])) and os.path.isdir(os.path.join(root, PARTS[0]))


def install_extra(extra: str, package: str = "") -> str:
    """The command that installs an extra of this portattn: in a source tree that of the tree, which no index has.

    package  the package's folder; this one's when empty

    >>> from portattn.source_tree import install_extra
    >>> "[triton]'" in install_extra("triton")
    True
    """
    if is_tree(package or os.path.dirname(os.path.abspath(__file__))):
        return f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install 'portattn[{extra}]'"
