"""Installed distributions, read one at a time, and the digest of Triton's files.

importlib.metadata's own functions over all distributions (entry_points, packages_distributions) raise at the first
broken one. Standard library only: a child process imports it without portattn.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

POINTS = "entry_points.txt"
_LISTS = ("RECORD", "installed-files.txt", "SOURCES.txt")  # as importlib.metadata looks for files


class Unreadable(NamedTuple):
    """A distribution whose entry points cannot be read."""

    name: str  # its own, else its folder's
    shown: str  # with its version
    file: str
    problem: str


def entry_points(group: str) -> tuple[list[Any], list[Unreadable]]:
    """Return a group's entry points, and the unreadable distributions that may have some.

    Of distributions of one name the first on sys.path counts, as in importlib.metadata."""
    points, broken, seen = [], [], set()
    for dist in metadata.distributions():
        folder = str(getattr(dist, "_path", ""))
        key = _key(dist, folder)
        if key in seen:
            continue
        seen.add(key)
        problem = ""
        try:
            points += [point for point in dist.entry_points if point.group == group]
            if not dist.read_text(POINTS):
                problem = _missing(dist, folder)
        except Exception as error:  # noqa: BLE001 - whatever its parser raises: UnicodeDecodeError, TypeError, OSError
            problem = f"{type(error).__name__}: {error}"
        if problem:
            name, version = _stated(dist)
            shown = f"{name} {version}" if name and version else name or os.path.basename(folder) or repr(dist)
            broken.append(Unreadable(name or key, shown, os.path.join(folder, POINTS), problem))
    return points, broken


def claiming(package: str) -> list[tuple[str, Any]]:
    """Return (name, distribution) of each readable distribution whose files include this importable package."""
    found = []
    for dist in metadata.distributions():
        try:
            declared = (dist.read_text("top_level.txt") or "").split()
            if package not in declared if declared else not _lists(dist, f"{package}/"):
                continue
        except (OSError, ValueError):  # ValueError: not UTF-8
            continue
        name, version = _stated(dist)
        if name and version:
            found.append((name, dist))
    return found


def version(name: str) -> str | None:
    """Return a distribution's version; None if it is not installed or states no readable one."""
    try:
        stated: str | None = metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, OSError, ValueError, TypeError):
        return None
    return stated or None


def _missing(dist: Any, folder: str) -> str:
    """Return why an unread file should exist: it is on disk (folder, dangling link, no permission) or listed."""
    path = os.path.join(folder, POINTS)
    if folder and os.path.lexists(path):
        try:
            with open(path, encoding="utf-8") as file:
                file.read()
        except OSError as error:
            return f"{type(error).__name__}: {error.strerror}"
        return ""  # empty
    return "it is missing, and the distribution's RECORD lists it" if _lists(dist, f"/{POINTS},") else ""


def _lists(dist: Any, text: str) -> bool:
    for name in _LISTS:
        files = dist.read_text(name)
        if files is not None:
            return text in files
    return False


def _key(dist: Any, folder: str) -> str:
    stem, ending = os.path.splitext(os.path.basename(folder))
    name = stem.partition("-")[0] if ending in (".dist-info", ".egg-info") else _stated(dist)[0] or folder
    return re.sub(r"[-_.]+", "-", name).lower()


def _stated(dist: Any) -> tuple[str, str]:
    try:
        about = dist.metadata
        return str(about["Name"] or ""), str(about["Version"] or "")
    except (KeyError, OSError, ValueError, TypeError, AttributeError):
        return "", ""


def digest() -> Callable[[], object] | None:
    """Return Triton's function that computes and keeps it; None if this Triton has none."""
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # 3.5 and later; before
        found: Callable[[], object] | None = getattr(importlib.import_module(place), "triton_key", None)
        if found is not None:
            return found
    return None
