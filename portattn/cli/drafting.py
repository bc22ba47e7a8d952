"""`portattn quirks new|reduce`: from a failed compile to a drafted entry, and to a smaller program that fails alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from portattn.cli.errors import RED
from portattn.cli.named import quirk_of
from portattn.cli.output import emit_json, heading, json_option, pairs, plural, status
from portattn.errors import ArgumentError
from portattn.files import read_limited
from portattn.schema import quirk_names
from portattn.tools import shell_values
from portattn.tools.number_ranges import SECONDS

if TYPE_CHECKING:
    from portattn.planning.registry import Registry
    from portattn.schema.compile_record import Incident
    from portattn.tools.quirks.lifecycle.reduce import Reduction, ReductionStep, Subject

LARGEST_LOG = 64 * 2**20  # bytes; a larger file is no compiler's output but a whole build's, to be cut first
_FRESH = {"TRITON_ALWAYS_COMPILE": "1"}  # of the child that reduces: a cache would answer in a compiler's place


@click.command()
@click.option("--from-log", "log", type=click.Path(path_type=Path), metavar="FILE", help="Output of a failed compile.")
@click.option(
    "--from-incident", "incident_id", metavar="ID", help="A failure that portattn has kept (doctor lists them)."
)
@click.option("--backend", metavar="NAME", help="The backend, where the log does not say.")
@click.option(
    "--target", type=shell_values.TARGET, metavar="BACKEND:ARCH", help="The chip, where the log does not say."
)
@click.option(
    "--toolchain",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler, where the log does not say.",
)
@click.option("--kernel", metavar="NAME", help="Our kernel, as in dense_forward, where the log does not say.")
@click.option("--failure", "number", type=int, metavar="N", help="Of several failures in a log only the Nth.")
@click.option("--words", metavar="WORDS", default="", help="What the id says after its number, as in four-stages.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder; by default quirks/drafts of a checkout, and ./quirk-drafts of the working folder where portattn is "
    "installed from a wheel.",
)
@click.option("--force", is_flag=True, help="Draft although the failure is an entry's, or a draft has it.")
@click.option("--no-replay", is_flag=True, help="Do not run the draft's program here.")
@json_option
def new(
    log: Path | None,
    incident_id: str | None,
    backend: str | None,
    target: str | None,
    toolchain: str | None,
    kernel: str | None,
    number: int | None,
    words: str,
    out: Path | None,
    force: bool,
    no_replay: bool,
    as_json: bool,
) -> None:
    """Draft an entry from a log or an incident: the TOML, a program that fails the same way, and a report.

    A log may hold several failures: each is reported, and drafted. What the log does not tell is a line FILL-IN-…,
    which the loader refuses. Exit status 1: a failure is an entry's, or the folder has a draft of it, and nothing was
    written for it (--force drafts all the same). What only looks like an entry is drafted.
    """
    from portattn.planning.registry import Registry
    from portattn.tools.quirks.lifecycle import failure_report
    from portattn.tools.quirks.lifecycle import new as drafting

    if (log is None) == (incident_id is None):
        if log:
            raise ArgumentError("quirks new", "--from-incident", incident_id, "goes without --from-log")
        limit = "must be given, the output of a failed compile, or --from-incident ID (`portattn doctor` lists them)"
        raise ArgumentError("quirks new", "--from-log", None, limit)
    registry = Registry.load()
    if log is not None:
        found = failure_report.from_log(_read(log), log.name, registry, target, toolchain, backend, kernel)
    else:
        for option, value in (
            ("--backend", backend), ("--target", target), ("--toolchain", toolchain), ("--kernel", kernel),
            ("--failure", number),
        ):  # fmt: skip
            if value is not None:
                raise ArgumentError("quirks new", option, value, "goes with --from-log: an incident knows where it was")
        incident, others = _incident(incident_id or "")
        found = [failure_report.from_incident(incident, others, registry)]
    if number is not None and not 1 <= number <= len(found):
        raise ArgumentError("quirks new", "--failure", number, f"must be from 1 to {len(found)}, which the log holds")
    asked = [number] if number is not None else range(1, len(found) + 1)
    with status("drafting") as say:
        made = {
            n: drafting.make(found[n - 1], registry, out, words=words, force=force, replay=not no_replay, say=say)
            for n in asked
        }
    if as_json:
        emit_json({"of": len(found), "failures": [{"number": n, **_json_of(draft)} for n, draft in made.items()]})
    else:
        for n, draft in made.items():
            _show_failure(draft, n, len(found))
        left = len(found) - len(made)
        if left:
            click.echo(f"{plural(left, 'other failure')} in the log: leave --failure out to draft each")
    if any(not draft.files and not draft.failure["not_a_bug"] for draft in made.values()):
        raise click.exceptions.Exit(RED)


def _json_of(draft: Any) -> dict[str, Any]:
    import msgspec

    told: dict[str, Any] = msgspec.to_builtins(draft)
    return told


def _show_failure(made: Any, number: int, of: int) -> None:
    """One failure: what it is, what it looks like, and its draft."""
    if of > 1:
        who = f", of {', '.join(made.streams)}" if made.streams else ""
        often = f", {made.times} times" if made.times > 1 else ""
        heading(f"failure {number} of {of}, from line {made.failure['line']} on{who}{often}")
    for entry in made.known:
        click.secho(str(entry), fg="yellow")
    click.echo(f"{made.failure['symptom']} at stage {made.failure['stage']}: {made.failure['cause']}")
    if made.cut:
        click.secho("the log ends inside these words: what is missing of them is not in the signature", fg="yellow")
    for text in made.left_out:
        click.secho(f"left out: {text}", fg="yellow")
    if made.files:
        _show_draft(made)
    elif made.failure["not_a_bug"]:
        click.echo(f"no compiler's failure, and not drafted: {made.failure['not_a_bug']}")
    else:
        click.echo("nothing was written: --force drafts an entry all the same")


def _show_draft(made: Any) -> None:
    heading(made.id)
    for file in made.files:
        click.echo(f"  {file}")
    if made.replay:
        click.secho(made.replay, fg={True: "green", False: "red"}.get(made.reproduced))
    if made.open:
        heading("to be filled in")
        pairs((f"{made.files[-1]}:{line}", text) for line, text in made.open)


@click.command()
@click.argument("subject_id", metavar="ID", type=shell_values.QUIRK)
@click.option(
    "--toolchain",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler; by default the one that it failed on.",
)
@click.option("--seconds", type=SECONDS, default=120.0, show_default=True, help="Time limit of one compile.")
@click.option("--most", default=400, show_default=True, help="Compiles after which the smallest so far is the result.")
@click.option("--write", is_flag=True, help="Write the result: into the quirk's probe, or as an incident ID-reduced.")
@json_option
def reduce(subject_id: str, toolchain: str | None, seconds: float, most: int, write: bool, as_json: bool) -> None:
    """Shrink the specialisation of an incident, or of a quirk with a "plan:" probe, while it fails in the same way."""
    from portattn.planning.registry import Registry
    from portattn.tools import lab
    from portattn.tools.quirks.lifecycle import reduce as reducing
    from portattn.tools.quirks.lifecycle.specialised import permitted_env

    if most <= 0:
        raise ArgumentError("quirks reduce", "--most", most, "must be more than 0")
    registry = Registry.load()
    subject, incident = _subject(subject_id, registry, toolchain)
    for text in permitted_env(incident.environment_set, registry)[1] if incident else ():
        click.secho(f"left out: {text}", fg="yellow", err=True)
    with status("reducing") as say, lab.worker(str(subject.target.toolchain), environment=_FRESH) as worker:

        def step(tried: ReductionStep, compiles: int) -> None:
            say(f"{plural(compiles, 'compile')}: {tried.step}: {tried.ended}")

        made = reducing.reduce(subject, registry, worker, seconds=seconds, most=most, say=step)
    written = _write_reduced(made, incident, registry) if write else ""
    if as_json:
        emit_json({"reduced": made, "written": written})
        return
    click.secho(f"{made.id} on {made.target} with {made.toolchain}: {plural(made.compiles, 'compile')}", bold=True)
    pairs([("changed", change) for change in made.changed] or [("changed", "nothing: it is as small as it gets")])
    if not made.complete:
        click.secho(f"--most {most} compiles were not enough: there may be a smaller one", fg="yellow")
    if made.probe:
        heading("as a probe")
        click.echo(made.probe)
    heading("as a command")
    click.echo(made.command)
    if written:
        click.echo(f"\nwritten: {written}")


def _subject(subject_id: str, registry: Registry, toolchain: str | None) -> tuple[Subject, Incident | None]:
    from portattn.tools.quirks.lifecycle import reduce as reducing

    if quirk_names.matching(subject_id, registry.quirks):
        return reducing.of_quirk(quirk_of("quirks reduce", subject_id, registry), registry, toolchain), None
    incident, _ = _incident(subject_id, registry.quirks)
    return reducing.subject_of_incident(incident, registry, toolchain), incident


def _write_reduced(made: Reduction, incident: Incident | None, registry: Registry) -> str:
    from portattn.compile.store import store
    from portattn.config import current
    from portattn.tools.quirks.lifecycle import reduce as reducing

    if incident is not None:
        smaller = reducing.incident_of(made, incident, registry)
        store(current()).add_incident(smaller)
        return f"incident {smaller.id}"
    return reducing.write_probe(made, registry)


def _read(path: Path) -> str:
    from portattn.tools.quirks.lifecycle.normalise import decode_text

    try:
        return decode_text(read_limited(path, LARGEST_LOG))
    except OSError as error:
        raise ArgumentError("quirks new", "--from-log", str(path), f"cannot be read: {error.strerror}") from None


def _incident(incident_id: str, quirks: Collection[str] = ()) -> tuple[Incident, Iterator[Incident]]:
    """The incident, and all that this machine keeps. Raises ArgumentError on an unknown id, naming quirks near it."""
    from portattn.compile.store import store
    from portattn.config import current

    kept = store(current())
    known = [incident.id for incident in kept.incidents()]
    if incident_id not in known:
        shown = (", ".join(known[-5:]) or "there are none") + quirk_names.did_you_mean(incident_id, quirks)
        raise ArgumentError(
            "quirks", "ID", incident_id, f"must be a quirk's or an incident's id; the latest incidents: {shown}"
        )
    found = kept.incident(incident_id)
    assert found is not None
    return found, kept.incidents()
