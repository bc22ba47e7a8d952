"""Types of options and arguments: ranges of numbers, and values that the shell completes and the commands check."""

import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from portattn.errors import ArgumentError, PortattnError
from portattn.schema.problem_limits import DTYPES, OPS
from portattn.schema.quirk import Symptom

F = TypeVar("F", bound=Callable[..., Any])
Values = Iterable[tuple[str, str]]  # value and its meaning
FLAG: dict[str, Any] = {"is_flag": True}
PATH: dict[str, Any] = {"type": click.Path(path_type=Path)}
FILE: dict[str, Any] = {"type": click.Path(path_type=Path, dir_okay=False), "metavar": "FILE"}
ALIGNMENTS = ("bottom_right", "top_left", "none")  # of a causal mask


def options(*rows: tuple[str, dict[str, Any], str]) -> Callable[[F], F]:
    """Add an option for each row: its names with blanks between, click's keywords, and its help."""

    def add(function: F) -> F:
        for names, kind, text in reversed(rows):
            function = click.option(*names.split(), help=text, **kind)(function)
        return function

    return add


class CompletionType(click.ParamType):
    """Text whose values the shell knows; one of `signs` precedes a value (`+id`); `listed`: commas join several."""

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
        return [CompletionItem(f"{before}{comma}{sign}{value}", help=text or None)
                for sign in signs for value, text in known]  # fmt: skip


def check_known(command: str, option: str, values: Iterable[str | None], known: Iterable[str]) -> None:
    """Raise ArgumentError for the first value that is not known; None is no value."""
    every = tuple(known)
    for value in values:
        if value is not None and value not in every:
            raise ArgumentError(command, option, value, f"must be one of {', '.join(every)}")


def words(found: Callable[[], Iterable[str]]) -> Callable[[], Values]:
    return lambda: [(word, "") for word in found()]


def _targets() -> Values:
    from portattn.planning.registry import Registry
    from portattn.planning.target_names import families

    known = Registry.load().arches
    arches = [(f"{backend}:{name}", arch.title + "; not supported" * bool(arch.refused))
              for backend, own in known.items() for name, arch in own.items()]  # fmt: skip
    return [*arches, *((family, ", ".join(map(":".join, found))) for family, found in families(known).items())]


def _backends() -> Iterable[str]:
    from portattn.planning.registry import Registry

    return Registry.load().backends


def _quirks() -> Values:
    from portattn.planning.registry import Registry

    return [(quirk.id, quirk.title) for quirk in Registry.load().quirks.values()]


def _paths() -> Values:
    from portattn.planning.planner import GROUPS
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


OP = CompletionType("op", words(lambda: OPS), missing=True)
DTYPE = CompletionType("dtype", words(lambda: DTYPES))
CAUSAL = CompletionType("causal", words(lambda: ALIGNMENTS))
TARGET = CompletionType("target", _targets)
TARGETS = CompletionType("targets", _targets, listed=True)
BACKEND = CompletionType("backend", words(_backends))
PLANNED_PATH = CompletionType("path", _paths)
QUIRK = CompletionType("quirk", _quirks)
OVERRIDES = CompletionType("overrides", _quirks, signs="+-", listed=True)
SYMPTOM = CompletionType("symptom", words(lambda: get_args(Symptom)))
KIND = CompletionType("kind", words(lambda: ("workaround", "limit")))
TOOLCHAIN = CompletionType("toolchain", _toolchains)


class FiniteRange(click.FloatRange):
    """A range of floats without NaN, which no limit of click.FloatRange can refuse, and infinity; JSON has neither."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found:g} is not in the range {self._describe_range()}: it must be finite.", param, ctx)
        return found


LONGEST = 1e6  # seconds. Source: poll(2) takes its time as an int of milliseconds, 2**31 - 1 of them at most
SECONDS = FiniteRange(min=0, min_open=True, max=LONGEST)  # a time limit, or a time for all of it
