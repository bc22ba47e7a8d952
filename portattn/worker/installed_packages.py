"""Installed distributions, read one at a time: one whose metadata cannot be read keeps nobody from the others'.

importlib.metadata's own functions over all distributions (entry_points, packages_distributions) raise at the first
one that is broken. Standard library only: children read it too, where portattn is not installed.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
from typing import Any, NamedTuple

POINTS = "entry_points.txt"
_LISTS = ("RECORD", "installed-files.txt", "SOURCES.txt")  # as importlib.metadata looks for files


class Unreadable(NamedTuple):
    """A distribution whose entry points cannot be read.

    name     its own, or its folder's where it states none
    shown    with its version, for people
    file     that could not be read
    problem  what is wrong with it
    """

    name: str
    shown: str
    file: str
    problem: str


def entry_points(group: str) -> tuple[list[Any], list[Unreadable]]:
    """The entry points of a group, and the distributions that may have some and cannot be asked.

    As importlib.metadata has it, of distributions of one name the first on sys.path counts.
    """
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
    """(name, distribution) of each that has this importable package among its files, and can be read."""
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
    """The version of a distribution; None where it is not installed, or states none that can be read."""
    try:
        stated: str | None = metadata.version(name)
    except (metadata.PackageNotFoundError, KeyError, OSError, ValueError, TypeError):
        return None
    return stated or None


def _missing(dist: Any, folder: str) -> str:
    """Why a file that is not read should be: it lies there (a folder, a link to nowhere, no permission), or it is
    listed among the distribution's files."""
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
    """Whether the distribution's list of files has this text at a path's place."""
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
    """Name and version that a distribution states; empty where they cannot be read."""
    try:
        about = dist.metadata
        return str(about["Name"] or ""), str(about["Version"] or "")
    except (KeyError, OSError, ValueError, TypeError, AttributeError):
        return "", ""
