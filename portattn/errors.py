"""Every error that portattn raises on purpose. All derive from PortattnError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Rejected(Protocol):
    """What the text of PathUnavailable says of a path that was not taken: `portattn.schema.plan.Rejection`."""

    @property
    def path(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def hint(self) -> str: ...


class PortattnError(Exception):
    """Base class: `except portattn.PortattnError` catches what portattn itself refuses, and nothing else."""


class ArgumentError(PortattnError, ValueError):
    """A call's argument is out of its limits. The text names the operation, the argument, the value and the limit."""

    def __init__(self, op: str, argument: str, value: object, limit: str) -> None:
        self.op, self.argument, self.value, self.limit = op, argument, value, limit
        super().__init__(f"{op}: {argument} is {value!r}, but {limit}")

    def __reduce__(self) -> tuple[Any, ...]:  # as in all that are made of other things than their text: pools pickle
        return type(self), (self.op, self.argument, self.value, self.limit)


class UnknownArgument(ArgumentError, TypeError):
    """A call names an argument that its operation does not have. The text says what the argument is called here.

    A TypeError too, as Python's own error for an unknown keyword is.
    """

    def __init__(self, op: str, argument: str, hint: str) -> None:
        self.op, self.argument, self.value, self.limit = op, argument, None, hint
        PortattnError.__init__(self, f"{op} has no argument {argument!r}{hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.op, self.argument, self.limit)


class SettingError(PortattnError, ValueError):
    """An environment variable or a setting is unknown or holds a value outside its vocabulary."""


class DataError(PortattnError, ValueError):
    """A data file (quirk, arch, tuning, results) breaks its schema. The text starts with file:line."""

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        self.path, self.line, self.problem = str(path), line, problem
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.line, self.problem)


class QuirkConflict(PortattnError):
    """Two active quirks set one choice differently, so no plan can be made."""

    def __init__(self, choice: str, first: tuple[str, object], second: tuple[str, object]) -> None:
        self.choice, self.quirks, self._settings = choice, (first[0], second[0]), (first, second)
        super().__init__(
            f"quirks {first[0]} and {second[0]} both apply and set {choice} differently: "
            f"{first[1]!r} and {second[1]!r}. Narrow one of them, or switch one off with PORTATTN_QUIRKS=-<id>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.choice, *self._settings)


class TracingError(PortattnError, RuntimeError):
    """A call is recorded by a tracer, or transformed by torch.func: neither would see what is written to its output."""


class PathUnavailable(PortattnError):
    """No path is left for this call: one was named that cannot run it, or falling back is forbidden."""

    def __init__(self, message: str, rejected: Sequence[Rejected] = ()) -> None:
        self.rejected = tuple(rejected)
        lines = [f"  {r.path}: {r.reason}" + (f" (hint: {r.hint})" if r.hint else "") for r in self.rejected]
        super().__init__("\n".join([message, *lines]))


class CompileWarning(UserWarning):
    """A call compiled a kernel after warm-up, or a spec could not be warmed up. Given once for each kernel."""


class FallbackWarning(UserWarning):
    """A call asked for the best path and got another one. Given once per (op, requested, taken, reason)."""


class PluginWarning(UserWarning):
    """An installed backend package is broken, and portattn plans without it. Given once for each package.

    Where warnings are errors (`-W error`), one call raises it, for all broken packages together, before anything of the
    call runs; the same call made again runs.
    """
