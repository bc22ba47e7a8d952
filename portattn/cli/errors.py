"""Errors on the command line: one line on standard error, an exit status, and with --json an object on stdout."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from typing import IO, Any

import click

from portattn.errors import ArgumentError, PathUnavailable

RED = 1  # what was checked is red
BAD_INPUT = 2
UNCHECKED = 3  # nothing was checked: neither green nor red
INTERRUPTED = 130  # as shells report a process that Ctrl-C ended
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SHOWN = 3
JSON_KEY = "portattn.json"  # in click's meta: whether --json was given


class CommandLineError(click.ClickException):
    """An error in the command line's form: click prints it through `show` and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int, document: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it on the class, and reads it from the instance
        self.document = document

    def show(self, file: IO[Any] | None = None) -> None:
        with contextlib.suppress(OSError):  # where nobody can be told, the exit status still says it
            click.echo(self.message, err=True)
            if self.document is not None:
                click.echo(json.dumps({"error": self.document}, indent=2))


def command_line_error(error: Exception, ctx: click.Context) -> CommandLineError:
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "portattn"
        text, kind = error.format_message(), "UsageError"
        if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option) and error.param.metavar:
            text = f"{text.rstrip('.')}: {error.param.metavar}"
    else:
        text = _of_system(error) if isinstance(error, OSError) else str(error)
        command, kind = "portattn", type(error).__name__
    document: dict[str, Any] = {"kind": kind, "message": text}
    if isinstance(error, ArgumentError):
        document |= {"operation": error.op, "argument": error.argument, "value": str(error.value), "limit": error.limit}
    if isinstance(error, PathUnavailable):
        document["rejected"] = [{"path": r.path, "reason": r.reason, "hint": r.hint} for r in error.rejected]
    status = RED if isinstance(error, PathUnavailable) else BAD_INPUT
    return CommandLineError(f"{command}: {text}", status, document if ctx.meta.get(JSON_KEY) else None)


def require_some(count: int, done: str, reasons: Iterable[str]) -> None:
    """Exit with status 3 if a command has checked nothing, and print the first three different reasons.

    `done` is the past participle of the command's verb: "verified"."""
    if count:
        return
    different = list(dict.fromkeys(filter(None, reasons)))
    more = f"; and {len(different) - _SHOWN} more reasons" if len(different) > _SHOWN else ""
    click.echo(f"portattn: nothing was {done}: {'; '.join(different[:_SHOWN])}{more}", err=True)
    raise click.exceptions.Exit(UNCHECKED)


def _of_system(error: OSError) -> str:
    what = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    if not what and error.errno in _NOT_WRITTEN:
        what = "output cannot be written"
    return ": ".join(part for part in (what, error.strerror or str(error) or type(error).__name__) if part)
