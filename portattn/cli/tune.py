"""`portattn tune`: search launch and lowering choices for a set of problems, and write them as tuning data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portattn.cli import INTERRUPTED, RED
from portattn.cli.matrix_compare import command_line
from portattn.cli.output import ProgressCounter, emit_json, json_option, table, target_option, toolchain_option
from portattn.errors import ArgumentError
from portattn.schema.tuning import TIMED_SPILLS
from portattn.tools import param_types
from portattn.tools.param_types import FLAG, SECONDS, options

if TYPE_CHECKING:
    from portattn.schema.target import Target
    from portattn.schema.tuning import Tuning
    from portattn.tools.tune.classes import Class
    from portattn.tools.tune.records import Outcome, Record
    from portattn.tools.tune.tunable import Only, Tunable


def dry_run_rows(
    chosen: list[Class], tools: dict[str, Tunable], where: Target, most: int, only: Only, as_json: bool
) -> None:
    from portattn.tools.tune.search import proposals

    rows: list[dict[str, Any]] = []
    for ground in proposals(chosen, tools, where, most, only):
        one = ground.of
        refused = [record for record in ground.dropped if record.verdict == "refused"]
        row: dict[str, Any] = {
            "class": one.name, "problems": [load.name for load in one.workloads], "incumbent": one.incumbent,
        }  # fmt: skip
        row |= {"candidates": len(ground.entrants), "twins": sum(no.verdict == "twin" for no in ground.dropped)}
        rows.append(row | {"refused": len(refused), "reasons": sorted({record.reason for record in refused})})
    if as_json:
        emit_json({"target": where.name, "toolchain": str(where.toolchain), "classes": rows})
        return
    columns = ("candidates", "twins", "refused", "today", "class", "problems")
    words = [row | {"today": row["incumbent"] or "nothing", "problems": "; ".join(row["problems"])} for row in rows]
    table(columns, [tuple(str(row[name]) for name in columns) for row in words])
    _legend(chosen)


def _legend(classes: list[Class]) -> None:
    from portattn.tools import display_text

    for line in display_text.of_kernels(one.kernel for one in classes):
        click.echo(line)


class SearchProgress(ProgressCounter):
    """Progress on standard error; a line a finished step if it is no terminal."""

    def __init__(self) -> None:
        super().__init__(0, 0, "tune")

    def begin(self, what: str, steps: int) -> None:
        if self._bar is not None:
            self._bar.reset(self._task, total=steps, description=what)
        elif steps:
            click.echo(f"{what}: {steps}", err=True)

    def note(self, record: Record) -> None:
        from portattn.tools.tune.log import row, sentence
        from portattn.tools.tune.records import QUIET, CandidateRecord, CodeRecord, Outcome

        if isinstance(record, CodeRecord | Outcome) and self._bar is not None:
            self._bar.advance(self._task)
        if isinstance(record, Outcome):
            self._say(f"{record.name}: {sentence(record)}")
        elif isinstance(record, CandidateRecord) and record.verdict not in QUIET:
            self._say("  ".join(part for part in row(record) if part))

    def _say(self, line: str) -> None:
        from rich.text import Text

        self._bar.console.print(Text(line)) if self._bar is not None else click.echo(line, err=True)


def tell(
    chosen: list[Class], records: list[Record], outcomes: dict[str, Outcome], path: Path, log_path: Path,
    written: list[str], ended: str, as_json: bool,
) -> None:  # fmt: skip
    from portattn.tools.tune.log import sentence
    from portattn.tools.tune.run import red

    bad = red(records, outcomes)
    if as_json:
        emit_json({
            "origin": records[0], "classes": [outcomes[one.name] for one in chosen if one.name in outcomes],
            "red": bad, "written": written, "out": str(path) if path.exists() else None, "log": str(log_path),
            "table": str(log_path.with_suffix(".txt")), "ended": ended,
        })  # fmt: skip
    else:
        for one in chosen:
            if one.name in outcomes:
                click.echo(f"{one.name}\n  {sentence(outcomes[one.name])}")
                for result in outcomes[one.name].results:
                    if result.times:
                        was = f", was {result.incumbent:.1f}" if result.incumbent else ""
                        click.echo(f"  {result.times.median:8.1f} µs{was}  {result.problem}")
        for line in bad:
            click.secho(line, fg="red")
        _legend([one for one in chosen if one.name in outcomes])
        entries = "1 entry" if len(written) == 1 else f"{len(written)} entries"
        click.echo(f"{entries} written: {path}" if written else "nothing new to write")
        click.echo(f"log: {log_path}, {log_path.with_suffix('.txt')}")
    if ended:
        without = "" if ended == "interrupted" else " without it"
        click.echo(f"{ended}; the same command with --resume goes on{without}", err=True)
        raise click.exceptions.Exit(INTERRUPTED if ended == "interrupted" else RED)
    if bad:
        raise click.exceptions.Exit(RED)


DEFAULT_OUT = Path(".tune")


@click.command(context_settings={"show_default": True})
@target_option("What to tune for. [default: this machine's device]")
@toolchain_option("Compile with this one of the lab. [default: the installed]")
@options(
    ("--set sets", {"multiple": True, "metavar": "NAME"}, "Set of `portattn bench`, or all; can be repeated."),
    ("--only", {"metavar": "TEXT"}, "Only cases of the sets whose name holds this text."),
    ("--problem problems", {"multiple": True, "metavar": "TEXT"},
     "A problem, as 'attention q=4,16,4096,128 kv=4,16,4096,128 dtype=bf16 causal'; can be repeated."),
    ("--op ops", {"multiple": True, "type": param_types.OP, "metavar": "NAME"},
     "Only problems of this op; can be repeated."),
    ("--kernel kernels", {"multiple": True, "metavar": "NAME"}, "Only this kernel or variant; can be repeated."),
    ("--budget", {"type": SECONDS, "metavar": "SECONDS"}, "For all of it."),
    ("--candidates", {"type": click.IntRange(0), "default": 0}, "Of a class, nearest to today's choice; 0: all."),
    ("--setting settings", {"multiple": True, "metavar": "NAME=VALUE"},
     "Only candidates with this setting, such as pipeline=rotated; can be repeated, also for more values of one."),
    ("--spills", {"type": click.IntRange(0), "metavar": "BYTES"},
     f"That a candidate may have. [default: 0; where time will tell {TIMED_SPILLS}, or today's choice's if more]"),
    ("--rounds", {"type": click.IntRange(1, 100), "default": 6}, "Rounds in which finalists take turns."),
    ("--jobs", {"type": click.IntRange(1, 256), "default": 2}, "Compiles at a time."),
    ("--seconds", {"type": SECONDS, "default": 120.0}, "Limit of each compile."),
    ("--by-bound", FLAG, "Time nothing, and take what has the least lower bound on its time."),
    ("--compile-only", FLAG, "Time nothing, on a machine that has the chip too."),
    ("--out", {"type": click.Path(path_type=Path), "default": DEFAULT_OUT},
     "A tuning file to merge into, or a folder for ARCH.toml and the log."),
    ("--log log_path", {"type": click.Path(path_type=Path, dir_okay=False)}, "JSON lines; a .txt beside it."),
    ("--resume", FLAG, "Go on with the log's run: what it finished is kept."),
    ("--commit", {"default": "", "metavar": "TEXT"}, "The commit that is tuned, where git cannot tell."),
    ("--dry-run", FLAG, "Say what would be searched; compile and write nothing."),
)  # fmt: skip
@json_option
def tune(
    target: str | None, toolchain: str | None, sets: tuple[str, ...], only: str | None, problems: tuple[str, ...],
    ops: tuple[str, ...], kernels: tuple[str, ...], budget: float | None, candidates: int, settings: tuple[str, ...],
    spills: int | None, rounds: int, jobs: int, seconds: float, by_bound: bool, compile_only: bool, out: Path,
    log_path: Path | None, resume: bool, commit: str, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Search tiles, warps, stages, loads, pipelines and splits for the problems, and write what is best as data.

    Candidates are compiled in child processes, and those that do not fit, spill or over-subscribe a core are out. Where
    the target is this machine's device the rest are checked against float64, and only then timed, in turns with today's
    choice; elsewhere the choice is one that compiles without spills, and is marked as not measured. With --by-bound it
    is one whose lower bound on its time is 5 % below today's, and is marked so. Nothing is ever searched at run time:
    put the written file in the place of backends/BACKEND/tuning/ARCH.toml.

    Exit status 1: a candidate was wrong or broke (none such is ever chosen), or a class of problems has no choice at
    all. Ctrl-C keeps what is finished; --resume goes on."""
    from portattn.tools.problem_options import target_from

    where = target_from(target, toolchain)
    if by_bound:
        from portattn.testing.bound import rates_of

        rates_of(where)  # raises NoBound
    fixed = _settings(settings)
    found, tools = _tunables(where, kernels)
    cases = _cases(sets, only, problems, ops)
    backend, name = where.backend, where.arch.tuning or where.arch.name
    path = out if out.suffix == ".toml" else out / f"{name}.toml"
    log_path = log_path or path.with_suffix(".jsonl")
    base_path = log_path.with_suffix(".base.toml")
    base = _base(base_path if resume and base_path.exists() else path, backend, name)
    from portattn.tools.tune.classes import classes, workload

    chosen = classes(found, [workload(case) for case in cases], _tuning(base, path, backend), where)
    if not chosen:
        limit = "must serve an op of the problems, and not leave all of them to the core"
        raise ArgumentError("tune", "--kernel", ", ".join(kernels), limit)
    if dry_run:
        dry_run_rows(chosen, tools, where, candidates, fixed, as_json)
        return

    from portattn.files import write_whole
    from portattn.tools.tune.log import History, TuneLog
    from portattn.tools.tune.race import DeviceSampleClock
    from portattn.tools.tune.records import TuningFile, origin
    from portattn.tools.tune.run import TuneOptions, Tuner
    from portattn.tools.tune.search import TuningDeviceLost

    device = None if compile_only or by_bound else _device(where)
    as_today = spills is None and device is not None
    if spills is None:
        spills = TIMED_SPILLS if device is not None else 0
    made = origin(where, device is not None, chosen, command_line("tune"), spills, commit, fixed, by_bound)
    options = TuneOptions(
        budget=budget, jobs=jobs, seconds=seconds, spills=spills, spills_as_today=as_today, candidates=candidates,
        rounds=rounds, only=fixed, by_bound=by_bound,
    )  # fmt: skip
    with TuneLog(log_path) as log:
        records: list[Record] = log.resume(made) if resume else [made]
        if not resume:
            kept = log.begin(made)
            if kept:
                click.echo(f"the log that was there is now {kept}", err=True)
            base_path.unlink(missing_ok=True)
            if base is not None:  # the text of which the classes were made; by then the file itself has new entries
                write_whole(base_path, base.encode())
        history = History(records)
        file = TuningFile(path, base, made, backend)
        written = [one.name for one in chosen if one.name in history.done and file.put(one, history.done[one.name])]
        ended = ""
        with SearchProgress() as progress:

            def note(record: Record) -> None:
                log.append(record)
                records.append(record)
                progress.note(record)

            def done(one: Class, outcome: Outcome) -> None:
                if file.put(one, outcome):
                    written.append(one.name)
                log.show(records)

            clock = DeviceSampleClock(device.type) if device is not None else None
            tuner = Tuner(where, found, options, note, history, device, clock, progress.begin)
            try:
                tuner.run(chosen, done)
            except KeyboardInterrupt:
                from portattn.tools.tune.records import Interruption

                note(Interruption())
                ended = "interrupted"
            except TuningDeviceLost as lost:
                ended = str(lost)
        log.show(records)
    tell(chosen, records, history.done, path, log_path, written, ended, as_json)


def _settings(given: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ArgumentError("tune", "--setting", text, "must be NAME=VALUE, such as pipeline=rotated")
        found[name] = (*found.get(name, ()), value)
    return found


def _tunables(where: Target, kernels: tuple[str, ...]) -> tuple[list[Tunable], dict[str, Tunable]]:
    from portattn.tools.tune.run import tunables

    known = {one.name: one for one in tunables(where)}
    if where.arch.refused or not known or where.backend == "cpu":
        reason = where.arch.refused or "no kernel is tuned there"
        raise ArgumentError("tune", "--target", where.name, f"must be a chip that kernels are compiled for: {reason}")
    param_types.check_known("tune", "--kernel", kernels, known)
    return [one for name, one in known.items() if not kernels or name in kernels], known


def _cases(sets: tuple[str, ...], only: str | None, problems: tuple[str, ...], ops: tuple[str, ...]) -> list[Any]:
    from portattn.schema.ops import BACKWARD, ROWS
    from portattn.tools.tune.classes import from_sets, parse, tunable_sets

    param_types.check_known("tune", "--op", ops, ROWS)
    if not sets and not problems:
        limit = f"must be given, or --problem; sets: {', '.join([*tunable_sets(), 'all'])}"
        raise ArgumentError("tune", "--set", "nothing", limit)
    found = from_sets(sets, only) + [parse(text) for text in problems]
    left = [case for case in found if not ops or (BACKWARD[case.op] if case.backward else case.op) in ops]
    if not left:
        raise ArgumentError("tune", "--op", ", ".join(ops), "must be the op of a problem that is asked for")
    return left


def _base(path: Path, backend: str, name: str) -> str | None:
    """Return the text to merge into: the existing file, else portattn's own; None without either."""
    from portattn.planning.registry import Registry
    from portattn.tools.tune.records import read_base

    shipped = Registry.load().backends[backend].folder / "tuning" / f"{name}.toml"
    return next((read_base(one) for one in (path, shipped) if one.exists()), None)


def _tuning(base: str | None, path: Path, backend: str) -> Tuning | None:
    import tempfile

    from portattn.planning.data_files import load_tuning

    if base is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(base, encoding="utf-8")
        return load_tuning(copy, backend)


def _device(where: Target) -> Any:
    """Return this machine's device, if it is the target and the compiler is the installed one; else None."""
    from portattn.launch.torch_compat import timed_device
    from portattn.planning.registry import Registry, devices
    from portattn.schema.toolchain import installed_for

    backend, device = Registry.load().backends[where.backend], timed_device()
    if device is None or device.type != backend.device_type:
        return None
    compiled_here = str(where.toolchain) == str(installed_for(backend.compilers))
    return device if compiled_here and any(one.name == where.name for one in devices()) else None
