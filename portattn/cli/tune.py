"""`portattn tune`: search launch and lowering choices for a set of problems, and write them as tuning data."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portattn.cli.output import json_option
from portattn.errors import ArgumentError
from portattn.schema.tuning import TIMED_SPILLS
from portattn.tools import shell_values
from portattn.tools.number_ranges import SECONDS

if TYPE_CHECKING:
    from portattn.schema.target import Target
    from portattn.schema.tuning import Tuning
    from portattn.tools.tune.classes import Class
    from portattn.tools.tune.records import Outcome, Record
    from portattn.tools.tune.tunable import Tunable

DEFAULT_OUT = Path(".tune")


@click.command(context_settings={"show_default": True})
@click.option(
    "--target",
    type=shell_values.TARGET,
    metavar="BACKEND:ARCH",
    help="What to tune for. [default: this machine's device]",
)
@click.option(
    "--toolchain",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="Compile with this one of the lab. [default: the installed]",
)
@click.option("--set", "sets", multiple=True, metavar="NAME", help="Set of `portattn bench`, or all; can be repeated.")
@click.option("--only", metavar="TEXT", help="Only cases of the sets whose name holds this text.")
@click.option(
    "--problem",
    "problems",
    multiple=True,
    metavar="TEXT",
    help="A problem, as 'attention q=4,16,4096,128 kv=4,16,4096,128 dtype=bf16 causal'; can be repeated.",
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    type=shell_values.OP,
    metavar="NAME",
    help="Only problems of this op; can be repeated.",
)
@click.option(
    "--kernel", "kernels", multiple=True, metavar="NAME", help="Only this kernel or variant; can be repeated."
)
@click.option("--budget", type=SECONDS, metavar="SECONDS", help="For all of it.")
@click.option("--candidates", type=click.IntRange(0), default=0, help="Of a class, nearest to today's choice; 0: all.")
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Only candidates with this setting, such as pipeline=rotated; can be repeated, also for more values of one.",
)
@click.option(
    "--spills",
    type=click.IntRange(0),
    metavar="BYTES",
    help=f"That a candidate may have. [default: 0; where time will tell {TIMED_SPILLS}, or today's choice's if more]",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=6, help="Rounds in which finalists take turns.")
@click.option("--jobs", type=click.IntRange(1, 256), default=2, help="Compiles at a time.")
@click.option("--seconds", type=SECONDS, default=120.0, help="Limit of each compile.")
@click.option("--compile-only", is_flag=True, help="Time nothing, on a machine that has the chip too.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=DEFAULT_OUT,
    help="A tuning file to merge into, or a folder for ARCH.toml and the log.",
)
@click.option(
    "--log", "log_path", type=click.Path(path_type=Path, dir_okay=False), help="JSON lines; a .txt beside it."
)
@click.option("--resume", is_flag=True, help="Go on with the log's run: what it finished is kept.")
@click.option("--commit", default="", metavar="TEXT", help="The commit that is tuned, where git cannot tell.")
@click.option("--dry-run", is_flag=True, help="Say what would be searched; compile and write nothing.")
@json_option
def tune(
    target: str | None,
    toolchain: str | None,
    sets: tuple[str, ...],
    only: str | None,
    problems: tuple[str, ...],
    ops: tuple[str, ...],
    kernels: tuple[str, ...],
    budget: float | None,
    candidates: int,
    settings: tuple[str, ...],
    spills: int | None,
    rounds: int,
    jobs: int,
    seconds: float,
    compile_only: bool,
    out: Path,
    log_path: Path | None,
    resume: bool,
    commit: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Search tiles, warps, stages, loads, pipelines and splits for the problems, and write what is best as data.

    Candidates are compiled in child processes, and those that do not fit, spill or over-subscribe a core are out. Where
    the target is this machine's device the rest are checked against float64, and only then timed, in turns with today's
    choice; elsewhere the choice is one that compiles without spills, and is marked as not measured. Nothing is ever
    searched at run time: put the written file in the place of backends/BACKEND/tuning/ARCH.toml.

    Exit status 1: a candidate was wrong or broke (none such is ever chosen), or a class of problems has no choice at
    all. Ctrl-C keeps what is finished; --resume goes on.
    """
    from portattn.cli.tune_output import SearchProgress, dry_run_rows, tell
    from portattn.tools.problem_text import target_from

    where = target_from(target, toolchain)
    fixed = _settings(settings)
    found, tools = _tunables(where, kernels)
    cases = _cases(sets, only, problems, ops)
    backend, name = where.backend, where.arch.tuning or where.arch.name
    path = out if out.suffix == ".toml" else out / f"{name}.toml"
    log_path = log_path or path.with_suffix(".jsonl")
    base_path = log_path.with_suffix(".base.toml")
    base = _base(base_path if resume and base_path.exists() else path, backend, name)
    from portattn.tools.tune.classes import classes
    from portattn.tools.tune.workloads import workload

    chosen = classes(found, [workload(case) for case in cases], _tuning(base, path, backend), where)
    if not chosen:
        raise ArgumentError(
            "tune",
            "--kernel",
            ", ".join(kernels),
            "must serve an op of the problems, and not leave all of them to the core",
        )
    if dry_run:
        dry_run_rows(chosen, tools, where, candidates, fixed, as_json)
        return

    from portattn.tools.tune.entries import TuningFile
    from portattn.tools.tune.log import History, TuneLog
    from portattn.tools.tune.origin import origin
    from portattn.tools.tune.race import DeviceSampleClock
    from portattn.tools.tune.run import TuneOptions, Tuner
    from portattn.tools.tune.search import TuningDeviceLost

    device = None if compile_only else _device(where)
    ours = Path(sys.argv[0]).name in ("portattn", "__main__.py")  # else another program, which has arguments of its own
    command = shlex.join(["portattn", *sys.argv[1:]]) if ours else "portattn tune"
    as_today = spills is None and device is not None
    if spills is None:
        spills = TIMED_SPILLS if device is not None else 0
    made = origin(where, device is not None, chosen, command, spills, commit, fixed)
    options = TuneOptions(
        budget=budget, jobs=jobs, seconds=seconds, spills=spills, spills_as_today=as_today, candidates=candidates,
        rounds=rounds, only=fixed,
    )  # fmt: skip
    with TuneLog(log_path) as log:
        records: list[Record] = log.resume(made) if resume else [made]
        if not resume:
            kept = log.begin(made)
            if kept:
                click.echo(f"the log that was there is now {kept}", err=True)
            _keep_base(base_path, base)
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

            tuner = Tuner(
                where,
                found,
                options,
                note,
                history,
                device,
                DeviceSampleClock() if device is not None else None,
                progress.begin,
            )
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
    """The values that each named setting may have."""
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ArgumentError("tune", "--setting", text, "must be NAME=VALUE, such as pipeline=rotated")
        found[name] = (*found.get(name, ()), value)
    return found


def _tunables(where: Target, kernels: tuple[str, ...]) -> tuple[list[Tunable], dict[str, Tunable]]:
    from portattn.tools.tune.tunables import tunables

    known = {one.name: one for one in tunables(where)}
    if where.arch.refused or not known or where.backend == "cpu":
        reason = where.arch.refused or "no kernel is tuned there"
        raise ArgumentError("tune", "--target", where.name, f"must be a chip that kernels are compiled for: {reason}")
    for name in kernels:
        if name not in known:
            raise ArgumentError("tune", "--kernel", name, f"must be one of {', '.join(known)}")
    return [one for name, one in known.items() if not kernels or name in kernels], known


def _cases(sets: tuple[str, ...], only: str | None, problems: tuple[str, ...], ops: tuple[str, ...]) -> list[Any]:
    """The cases that are asked for."""
    from portattn.schema.ops import BACKWARD, ROWS
    from portattn.tools.tune.workloads import from_sets, parse, tunable_sets

    for op in ops:
        if op not in ROWS:
            raise ArgumentError("tune", "--op", op, f"must be one of {', '.join(ROWS)}")
    if not sets and not problems:
        limit = f"must be given, or --problem; sets: {', '.join([*tunable_sets(), 'all'])}"
        raise ArgumentError("tune", "--set", "nothing", limit)
    found = from_sets(sets, only) + [parse(text) for text in problems]
    left = [case for case in found if not ops or (BACKWARD[case.op] if case.backward else case.op) in ops]
    if not left:
        raise ArgumentError("tune", "--op", ", ".join(ops), "must be the op of a problem that is asked for")
    return left


def _base(path: Path, backend: str, name: str) -> str | None:
    """What is merged into: the file itself where there is one, else the one that comes with portattn; or nothing."""
    from portattn.planning.registry import Registry
    from portattn.tools.tune.entries import read_base

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


def _keep_base(path: Path, base: str | None) -> None:
    """What the classes were made of, for --resume: by then the file itself has new entries."""
    from portattn.files import write_whole

    if base is None:
        path.unlink(missing_ok=True)
    else:
        write_whole(path, base.encode())


def _device(where: Target) -> Any:
    """This machine's device, if it is the target and the compiler is the installed one; else None."""
    import torch

    from portattn.planning.detect_target import devices
    from portattn.planning.registry import Registry
    from portattn.schema.toolchain import installed_toolchain

    here = any(one.name == where.name for one in devices()) and str(where.toolchain) == str(installed_toolchain())
    kind = Registry.load().backends[where.backend].device_type
    return torch.device(kind, getattr(torch, kind).current_device()) if here and kind == "cuda" else None
