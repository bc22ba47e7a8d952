"""What an environment of an engine is made of: its list of packages, where it lies, and whether it is there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "engines" / "requirements"
MARKER = "engine.json"  # written last: a folder without it is no environment
SIZE = 3000  # megabytes while an environment is made, where its list says nothing else
_EXACT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[a-z0-9,-]+\])?==([A-Za-z0-9][A-Za-z0-9.+!_-]*)")
_SETTING = re.compile(r"#: (size|try|env) (.+)")


class Refused(Exception):
    """What was asked for is wrong."""


class CannotBeMade(Exception):
    """The environment cannot be made on this machine, or not in the time given. The text says why."""


@dataclass
class Recipe:
    """One list: what is installed, and from its lines `#: size …`, `#: try …` and `#: env …` what it needs.

    size       megabytes on the disk while it is made
    trial      the Python statement that must work in a finished environment; by default the engine's import
    variables  of every process in it
    """

    name: str
    version: str
    path: Path
    packages: list[str] = field(default_factory=list)
    size: int = SIZE
    trial: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    digest: str = ""

    @property
    def folder(self) -> Path:
        return root() / f"{self.name}-{self.version}"


def root() -> Path:
    """The folder of all environments."""
    given = os.environ.get("ENGINES_HOME", "")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "portattn" / "engines"


def known() -> list[str]:
    """NAME-VERSION of each list, in the order of names, then of versions."""

    def key(text: str) -> tuple[str, list[int]]:
        name, _, version = text.rpartition("-")
        return name, [int(part) for part in re.findall(r"\d+", version)]

    return sorted((path.stem for path in LISTS.glob("*-*.txt")), key=key)


def recipe(text: str) -> Recipe:
    """The recipe of NAME==VERSION or NAME-VERSION. Raises Refused: unknown, or a line of its list is not exact."""
    name, separator, version = text.partition("==")
    if not separator:
        name, _, version = text.rpartition("-")
    path = LISTS / f"{name}-{version}.txt"
    if not name or not version or os.sep in text or not path.is_file():
        raise Refused(f"{text}: there is no list of its packages in {LISTS}; those there are: {', '.join(known())}")
    content = path.read_text()
    made = Recipe(name, version, path, digest=hashlib.sha256(content.encode()).hexdigest())
    for number, line in enumerate(content.splitlines(), 1):
        _line(made, line.strip(), f"{path}:{number}")
    names = {re.split(r"\[|==", package)[0].lower() for package in made.packages}
    missing = sorted({name.lower(), "torch", "pytest", "msgspec", "numpy"} - names)
    if missing:
        raise Refused(f"{path}: lacks {', '.join(missing)}")
    made.trial = made.trial or f"import {name}"
    return made


def _line(made: Recipe, line: str, place: str) -> None:
    setting = _SETTING.fullmatch(line)
    if setting:
        key, value = setting.groups()
        if key == "size":
            if not value.isdecimal():
                raise Refused(f"{place}: size must be a number of megabytes, not {value!r}")
            made.size = int(value)
        elif key == "try":
            made.trial = value
        else:
            variable, equals, content = value.partition("=")
            if not equals:
                raise Refused(f"{place}: must be `#: env NAME=VALUE`")
            made.variables[variable] = content
    elif line.startswith("#:"):
        raise Refused(f"{place}: must be `#: size MB`, `#: try STATEMENT` or `#: env NAME=VALUE`")
    elif line and not line.startswith("#"):
        if not _EXACT.fullmatch(line):
            raise Refused(f"{place}: must be NAME==VERSION, an exact one, not {line!r}")
        made.packages.append(line)


def state(one: Recipe) -> str:
    """`made`, `absent`, or what is wrong with the environment."""
    if not one.folder.exists():
        return "absent"
    try:
        marker = json.loads((one.folder / MARKER).read_text())
    except FileNotFoundError:
        return f"broken: no {MARKER}"
    except (OSError, ValueError) as error:
        return f"broken: {MARKER}: {error}"
    if not os.access(python_of(one.folder), os.X_OK):
        return "broken: its Python is gone"
    return "made" if marker.get("list") == one.digest else "outdated: its list has changed"


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"
