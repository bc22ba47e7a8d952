"""Finder for a source tree, in which backends/ and quirks/ lie beside portattn/ but are imported as parts of it.

The tree's root on `__path__` would also give `portattn.portattn`: a second copy, whose errors no caller catches.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PARTS = ("backends", "quirks")


class _Beside:
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
    """Add the finder if the package lies in a source tree; raise ImportError if it is in an archive.

    It comes before all other finders: an editable install's finder has the folders of the tree that it was made from.
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
    """Return whether the package's folder belongs to a source tree, not to an installed portattn."""
    root = os.path.dirname(package)
    return not os.path.isdir(os.path.join(package, PARTS[0])) and os.path.isdir(os.path.join(root, PARTS[0]))


def install_extra(extra: str, package: str = "") -> str:
    """Return the command that installs an extra: of the checkout, or, for an installed portattn, its requirements.

    An index need not have portattn, nor the same release of it."""
    if is_tree(package or os.path.dirname(os.path.abspath(__file__))):
        return f"pip install -e '.[{extra}]' in the checkout"
    return "pip install " + " ".join(f"'{one}'" for one in _requirements(extra))


def _requirements(extra: str) -> list[str]:
    from packaging.requirements import Requirement

    found = []
    for one in map(Requirement, importlib.metadata.requires("portattn") or ()):
        if one.marker is None or not one.marker.evaluate({"extra": extra}) or one.marker.evaluate({"extra": ""}):
            continue
        parts = [_requirements(name) for name in sorted(one.extras)] if one.name == "portattn" else [[_bare(one)]]
        found += [name for part in parts for name in part]
    return found


def _bare(requirement: Any) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


GIT_SECONDS = 20.0


def source_commit(folder: Path) -> tuple[str, bool]:
    """The commit of the source tree that a package's folder lies in, and whether the tree has changes that are not in
    it: new files count, as a new quirk is one. ("", False) for an installed portattn, and where git cannot tell."""
    if not is_tree(str(folder)):
        return "", False
    parts = [name for name in (folder.name, *PARTS) if (folder.parent / name).exists()]
    try:
        commit = _git(folder.parent, "rev-parse", "HEAD")
        return commit, bool(_git(folder.parent, "status", "--porcelain", "--", *parts))
    except (OSError, subprocess.SubprocessError):
        return "", False


def source_commit_text(folder: Path) -> str:
    """The same in one text: the commit, "+changes" behind it where the tree has some; empty where git cannot tell."""
    commit, changed = source_commit(folder)
    return commit + ("+changes" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
    )  # fmt: skip
    return done.stdout.strip()
