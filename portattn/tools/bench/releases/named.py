"""Which releases of Triton are timed, and where each one's package is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from packaging.version import Version

from portattn.errors import ArgumentError
from portattn.schema.compilers import TRITON
from portattn.schema.toolchain import Toolchain, installed_toolchain
from portattn.tools import lab

OPTION = "--release"


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A release of Triton.

    version  such as 3.8.0
    folder   of which `triton/` is a part; empty for the installed one
    """

    version: str
    folder: str = ""

    @property
    def toolchain(self) -> str:
        return f"{TRITON}=={self.version}"

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment of its processes: its folder first, and then what this process imports from."""
        return {"PYTHONPATH": os.pathsep.join(path for path in (self.folder, *sys.path) if path)}


def releases(texts: Iterable[str]) -> list[Release]:
    """The releases of texts such as `3.8.0`, which is installed or in the lab, and `3.8.0=FOLDER`.

    Raises ArgumentError on a text that is neither, a version that is given twice, or a folder without Triton.
    """
    found: dict[Version, Release] = {}  # 99 is 99.0.0, though nobody knows how it is written
    for text in texts:
        release = _release(text)
        named = found.setdefault(Version(release.version), release)
        if named is not release:
            raise ArgumentError("bench", OPTION, text, f"must name each release once, and {named.version} was named")
    return list(found.values())


def _release(text: str) -> Release:
    stated, equals, folder = text.strip().removeprefix(f"{TRITON}==").partition("=")
    try:
        version = Toolchain.parse(f"{TRITON}=={stated}").version  # 3.8 and v3.8.0 are 3.8.0: it names a folder
    except ValueError:
        raise ArgumentError("bench", OPTION, text, "must be VERSION or VERSION=FOLDER, such as 3.8.0") from None
    if not equals:
        return Release(version=version, folder=_place(version, text))
    place = Path(folder).absolute()
    if not (place / TRITON / "__init__.py").is_file():
        raise ArgumentError("bench", OPTION, text, f"must name a folder with {TRITON}/__init__.py in it")
    return Release(version=version, folder=str(place))


def _place(version: str, text: str) -> str:
    """The lab's folder of a release; empty where it is the installed one."""
    own = installed_toolchain()
    if own.distribution == TRITON and own.within(TRITON, f"=={version}"):
        return ""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = lab.find(f"{TRITON}=={version}")
    if made is None or not made.python_version.startswith(f"{python}."):
        wrong = f"its lab environment has Python {made.python_version}" if made else "the lab has none"
        helps = "" if made else f"`portattn lab create {TRITON}=={version}` makes one, or "
        limit = f"is not the installed release ({own}), and {wrong}: {helps}give its folder, {version}=FOLDER"
        raise ArgumentError("bench", OPTION, text, f"{limit} (scripts/pack_triton.py makes one for Python {python})")
    return str(made.folder / "lib" / f"python{python}" / "site-packages")
