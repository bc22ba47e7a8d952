"""Every error that portattn raises on purpose, all derived from PortattnError, and its warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, Protocol


class RejectionLike(Protocol):
    """A path that was not taken, as PathUnavailable's text needs it: `portattn.schema.plan.Rejection`."""

    @property
    def path(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def hint(self) -> str: ...


class PortattnError(Exception):
    """Base class: `except portattn.PortattnError` catches portattn's own refusals, and nothing else.

    Examples:
        >>> import portattn
        >>> try:
        ...     portattn.target("cuda:sm_1")
        ... except portattn.PortattnError as error:
        ...     print(type(error).__name__)
        ArgumentError
    """


class ArgumentError(PortattnError, ValueError):
    """A call's argument is out of its limits. The text names the operation, the argument, the value and the limit.

    Attributes:
        op, argument, value, limit: the same as attributes

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 2, 5, 16)
        >>> portattn.attention(q, q, q, layout="sbhd")
        Traceback (most recent call last):
        portattn.errors.ArgumentError: attention: layout is 'sbhd', but must be one of bhsd, bshd
    """

    def __init__(self, op: str, argument: str, value: object, limit: str) -> None:
        self.op, self.argument, self.value, self.limit = op, argument, value, limit
        # Of an option of the command line None is no value that somebody has given.
        shown = "" if value is None and argument.startswith("--") else f" is {value!r}, but"
        self.args = (f"{op}: {argument}{shown} {limit}",)  # dynamo does not trace super().__init__ here

    def __reduce__(self) -> tuple[Any, ...]:  # as in all that are made of other things than their text: pools pickle
        return type(self), (self.op, self.argument, self.value, self.limit)


class UnknownArgument(ArgumentError, TypeError):
    """A call names an argument that its operation does not have. The text gives portattn's name for it.

    A TypeError too, like Python's own error for an unknown keyword.

    Attributes:
        op, argument: the operation, and the first argument that it does not have

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 2, 5, 16)
        >>> portattn.attention(q, q, q, sm_scale=0.25)
        Traceback (most recent call last):
        portattn.errors.UnknownArgument: attention has no argument 'sm_scale': from FlashInfer: sm_scale -> scale (...)
    """

    def __init__(self, op: str, argument: str, hint: str) -> None:
        self.op, self.argument, self.value, self.limit = op, argument, None, hint
        PortattnError.__init__(self, f"{op} has no argument {argument!r}{hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.op, self.argument, self.limit)


class SettingError(PortattnError, ValueError):
    """An environment variable or a setting is unknown or holds a value outside its vocabulary.

    Examples:
        >>> import portattn
        >>> with portattn.settings(fallback="never"):
        ...     pass
        Traceback (most recent call last):
        portattn.errors.SettingError: setting fallback is 'never', but must be one of warn, error, silent
    """


class DataError(PortattnError, ValueError):
    """A data file (quirk, arch, tuning, results) breaks its schema. The text starts with file:line.

    Attributes:
        path, line, problem: the same as attributes; line is None where it is not known

    Examples:
        >>> import portattn
        >>> print(portattn.DataError("quirks/cuda/cuda-0001.toml", 3, "misses `when`"))
        quirks/cuda/cuda-0001.toml:3: misses `when`
    """

    def __init__(self, path: object, line: int | None, problem: str) -> None:
        self.path, self.line, self.problem = str(path), line, problem
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.line, self.problem)


class QuirkConflict(PortattnError):
    """Two active quirks set one choice differently, so no plan can be made.

    Attributes:
        choice, quirks: the choice, and the ids of both quirks

    Examples:
        >>> import portattn
        >>> error = portattn.QuirkConflict("lowering load", ("cuda-0001", "pointer"), ("cuda-0002", "descriptor"))
        >>> error.quirks
        ('cuda-0001', 'cuda-0002')
    """

    def __init__(self, choice: str, first: tuple[str, object], second: tuple[str, object]) -> None:
        self.choice, self.quirks, self._settings = choice, (first[0], second[0]), (first, second)
        super().__init__(
            f"quirks {first[0]} and {second[0]} both apply and set {choice} differently: "
            f"{first[1]!r} and {second[1]!r}. Narrow one of them, or switch one off with PORTATTN_QUIRKS=-<id>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.choice, *self._settings)


class TracingError(PortattnError, RuntimeError):
    """A trace or a transform asks an operator for something that it cannot do.

    Examples are forward-mode derivatives, second derivatives, and the run of a handle inside a trace.

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 2, 5, 16)
        >>> torch.func.jvp(lambda q: portattn.attention(q, q, q), (q,), (q,))
        Traceback (most recent call last):
        portattn.errors.TracingError: attention: forward-mode derivatives ...
    """


class PathUnavailable(PortattnError):
    """No path is left for this call: the path that it names cannot run it, or falling back is forbidden.

    Attributes:
        rejected: a Rejection for each path: path, reason, hint

    Examples:
        >>> import torch, portattn
        >>> q = torch.randn(1, 2, 5, 16)
        >>> try:
        ...     portattn.attention(q, q, q, backend="triton")
        ... except portattn.PathUnavailable as error:
        ...     print(error.rejected[0].path)
        triton
    """

    def __init__(self, message: str, rejected: Sequence[RejectionLike] = ()) -> None:
        self.rejected = tuple(rejected)
        lines = [f"  {r.path}: {r.reason}" + (f" (hint: {r.hint})" if r.hint else "") for r in self.rejected]
        super().__init__("\n".join([message, *lines]))


class CompileWarning(UserWarning):
    """A call compiled a kernel after warm-up, or a spec could not be warmed up. Given once for each kernel."""


class TracingWarning(UserWarning):
    """A compiled function fills a cache in a way that torch is known to get wrong. Given at each trace of it."""


class FallbackWarning(UserWarning):
    """A call asked for the best path and got another one. Given once per (op, requested, taken, reason)."""


class PluginWarning(UserWarning):
    """An installed backend package is broken, and portattn plans without it. Given once for each package.

    Where warnings are errors (`-W error`), one call raises it for all broken packages together, before anything runs;
    the next call runs."""


_BETWEEN = frozenset({"portattn", "contextlib", "functools"})  # packages whose frames may lie between call and warning


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line of the call stack that is outside of portattn."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
