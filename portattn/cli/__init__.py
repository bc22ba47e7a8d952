"""The `portattn` command; subcommands are imported when they are called, so that `portattn --help` is quick.

An error is one line on standard error, an exit status, and with --json an object on standard output."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pkgutil
import warnings
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string

from portattn.errors import ArgumentError, PathUnavailable, PortattnError
from portattn.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


RED = 1  # what was checked is red
BAD_INPUT = 2
UNCHECKED = 3  # nothing was checked: neither green nor red
INTERRUPTED = 130  # as shells report a process that Ctrl-C ended
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SHOWN = 3
JSON_KEY = "portattn.json"  # in click's meta: whether --json was given
BREAKS = ":="  # of COMP_WORDBREAKS, those that our values hold


class Bash(BashComplete):
    """Joins words that bash split, and answers with the text behind the last split."""

    _before = 0  # characters of each answer that bash leaves as they stand

    def get_completion_args(self) -> tuple[list[str], str]:
        words, at = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        whole: list[str] = []
        broken = False
        for word in words[: at + 1]:
            is_break = not word.strip(BREAKS)
            if whole and (is_break or broken):
                whole[-1] += word
            else:
                whole.append(word)
            broken = is_break
        typed = whole.pop() if at < len(words) else ""
        value = typed.partition("=")[2] if typed.startswith("-") else typed
        self._before = max(map(value.rfind, BREAKS)) + 1
        return whole[1:], typed

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value[self._before :]}"


COMPLETING = "_PORTATTN_COMPLETE"  # the variable by which a shell asks for completion
EXIT_STATUSES = """\b
Exit status:
  0    fine
  1    what was checked is red: a failed check, a red cell, a path that cannot run
  2    bad input; one line on standard error names the argument, its value and the limit.
       Also what the system refuses: output that cannot be written, a full disk
  3    nothing was checked; standard error says why
  130  interrupted (Ctrl-C); what was finished is kept

Every command takes --json: one JSON document on standard output, errors included."""

# Name -> (module:attribute, one line for --help). Written here, so that help imports no command.
COMMANDS = {
    "doctor": ("portattn.cli.doctor:doctor", "What is installed here, what works, and which quirks apply."),
    "plan": ("portattn.cli.plan:plan", "How a problem would run on any target, and why."),
    "context-parallel": (
        "portattn.cli.plan:context_parallel",
        "What attention over several GPUs costs each of them, and a model of its time.",
    ),
    "quirks": ("portattn.cli.quirks:quirks", "Known compiler bugs and limits: list, why, audit, new, probe, …"),
    "matrix": ("portattn.cli.matrix:matrix", "Ops × targets: plan, compile, check and report every cell."),
    "ci": ("portattn.cli.ci:ci", "What breaks with another compiler, for a library's CI."),
    "lab": ("portattn.cli.lab:lab", "Environments of other compilers: list, create, remove."),
    "verify": ("portattn.cli.verify:verify", "The kernels by every means that is here, and which one differs."),
    "report": ("portattn.cli.verify:report", "What this machine's devices show, as one file to send."),
    "warmup": ("portattn.cli.plan:warmup", "Compile what calls will need, before they are made."),
    "tune": ("portattn.cli.tune:tune", "Search launch choices for a set of problems, and write them as tuning data."),
    "bench": ("portattn.cli.bench:bench", "Time the paths of this machine's device against each other."),
}
# Names of commands that users type by habit, from Python or other tools -> ours.
ELSEWHERE = {"explain": "plan", "why": "quirks why", "audit": "quirks audit", "benchmark": "bench", "info": "doctor"}


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


def _one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None) -> str:
    return f"portattn: {category.__name__}: {message}\n"


class CommandLine(click.Group):
    """The root group: loads subcommands by name, and turns every error into one line and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in ELSEWHERE and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}: it is `portattn {ELSEWHERE[name]}`.")
        if name not in COMMANDS:
            return None
        command: click.Command = pkgutil.resolve_name(COMMANDS[name][0])
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if COMPLETING in os.environ:
            add_completion_class(Bash)
        # In one line: the caller of a command has no place in the code.
        before, warnings.formatwarning = warnings.formatwarning, _one_line
        try:
            return super().main(*args, **kwargs)
        finally:
            warnings.formatwarning = before

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Looked for before anything is parsed, so that errors in the other options come as JSON too.
        ctx.meta[JSON_KEY] = "--json" in args
        with _system_told(ctx):  # --help and --version print here
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            _check_given_once(command, rest, ctx)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _system_told(ctx):
                return super().invoke(ctx)
        except (PortattnError, click.UsageError) as error:
            if isinstance(error, click.exceptions.NoArgsIsHelpError):
                raise
            raise command_line_error(error, ctx) from error
        except KeyboardInterrupt:  # what a command does not tell of itself; click's own status is that of red cells
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


def _check_given_once(command: click.Command, args: list[str], parent: click.Context) -> None:
    """Raise UsageError if an option that takes one value is given twice: click takes the last, and says nothing."""
    ctx = click.Context(command, parent=parent, info_name=command.name, resilient_parsing=True)
    try:
        _, rest, order = command.make_parser(ctx).parse_args(getattr(command, "expand", list)(args))
    except click.UsageError:
        return  # raised again when the command itself parses
    once = [one for one in order if isinstance(one, click.Option) and not (one.multiple or one.is_flag or one.count)]
    for option in once:
        if (times := once.count(option)) > 1:
            raise click.UsageError(f"{option.opts[0]} is given {times} times, and takes one value.", ctx)
    inner = command.get_command(ctx, rest[0]) if isinstance(command, click.Group) and rest else None
    if inner is not None:
        _check_given_once(inner, rest[1:], ctx)


@contextlib.contextmanager
def _system_told(ctx: click.Context) -> Iterator[None]:
    """Turn the system's errors, such as a full disk, into one line; they never mean a red check."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever read the output has enough: click ends quietly
            raise
        raise command_line_error(error, ctx) from error


@click.group(
    name="portattn", cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_STATUSES
)
@click.version_option(__version__, prog_name="portattn")
def main() -> None:
    """Attention written once, run on every accelerator, that can always say which path ran and why."""
