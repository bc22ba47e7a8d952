"""The commit of the source tree that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from portattn.source_tree import PARTS, is_tree

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
