"""Types of options and arguments whose values the shell completes. They check nothing: the commands do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from portattn.errors import PortattnError
from portattn.schema.problem_limits import DTYPES, OPS

Values = Iterable[tuple[str, str]]  # value and its meaning
ALIGNMENTS = ("bottom_right", "top_left", "none")  # of a causal mask


class CompletionType(click.ParamType):
    """Text whose values the shell knows.

    values  what there is, asked for when the shell asks
    signs   characters one of which comes before each value (`+id`)
    listed  whether several values may stand in one text, with commas
    """

    def __init__(
        self, name: str, values: Callable[[], Values], *, signs: str = "", listed: bool = False, missing: bool = False
    ) -> None:
        self.name, self._values, self._signs, self._listed, self._missing = name, values, signs, listed, missing

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str | None:
        return f"It is one of {', '.join(value for value, _ in self._values())}" if self._missing else None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",") if self._listed else ("", "", incomplete)
        signs, begun = [""], last
        if self._signs:
            signs, begun = [sign for sign in self._signs if last[:1] in ("", sign)], last[1:]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                known = [(value, text) for value, text in self._values() if value.lower().startswith(begun.lower())]
        except (PortattnError, OSError):  # a broken data file is the command's to tell, not the prompt's
            return []
        return [
            CompletionItem(f"{before}{comma}{sign}{value}", help=text or None)
            for sign in signs
            for value, text in known
        ]


def _words(*words: str) -> Callable[[], Values]:
    return lambda: [(word, "") for word in words]


def _targets() -> Values:
    """Each backend:arch, with its chips, then the families, with their arches."""
    from portattn.planning.registry import Registry
    from portattn.planning.target_names import families

    known = Registry.load().arches
    arches = [
        (f"{backend}:{name}", arch.title + ("; not supported" if arch.refused else ""))
        for backend, own in known.items()
        for name, arch in own.items()
    ]
    return [*arches, *((family, ", ".join(map(":".join, found))) for family, found in families(known).items())]


def _backends() -> Values:
    from portattn.planning.registry import Registry

    return [(name, "") for name in Registry.load().backends]


def _quirks() -> Values:
    from portattn.planning.registry import Registry

    return [(quirk.id, quirk.title) for quirk in Registry.load().quirks.values()]


def _symptoms() -> Values:
    from typing import get_args

    from portattn.schema.quirk import Symptom

    return [(word, "") for word in get_args(Symptom)]


def _paths() -> Values:
    from portattn.planning.paths import GROUPS
    from portattn.planning.registry import Registry

    found = dict.fromkeys(GROUPS, "")
    for name, backend in Registry.load().backends.items():
        own = [*(variant.name for variant in backend.variants), *(vendor.name for vendor in backend.vendor)]
        found |= {path: name for path in (*own, backend.core_path) if path}
    return found.items()


def _toolchains() -> Values:
    from portattn.schema.toolchain import installed_beside, installed_toolchain
    from portattn.tools.lab import toolchains

    here = [str(one) for one in (installed_toolchain(), *installed_beside())]
    return [(name, "installed" if name in here else "") for name in dict.fromkeys((*toolchains(), *here))]


def _fail_on() -> Values:
    from portattn.tools.matrix.verdict import FAIL_ON

    return [(word, "") for word in FAIL_ON]


OP = CompletionType("op", _words(*OPS), missing=True)
DTYPE = CompletionType("dtype", _words(*DTYPES))
CAUSAL = CompletionType("causal", _words(*ALIGNMENTS))
TARGET = CompletionType("target", _targets)
TARGETS = CompletionType("targets", _targets, listed=True)
BACKEND = CompletionType("backend", _backends)
PATH = CompletionType("path", _paths)
QUIRK = CompletionType("quirk", _quirks)
OVERRIDES = CompletionType("overrides", _quirks, signs="+-", listed=True)
SYMPTOM = CompletionType("symptom", _symptoms)
KIND = CompletionType("kind", _words("workaround", "limit"))
TOOLCHAIN = CompletionType("toolchain", _toolchains)
FAIL_ON = CompletionType("words", _fail_on, listed=True)
