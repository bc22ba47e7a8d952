"""`portattn quirks new|reduce|bisect|retire`: the life cycle of an entry."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from portattn.cli import RED, output
from portattn.cli.output import heading, pairs, plural
from portattn.errors import ArgumentError
from portattn.files import read_limited
from portattn.schema import quirk
from portattn.tools import param_types
from portattn.tools.display_text import names_or_count
from portattn.tools.param_types import FLAG, SECONDS, options

if TYPE_CHECKING:
    from portattn.planning.registry import Registry
    from portattn.schema.compile_record import Incident
    from portattn.tools.compare.registry_changes import QuirkChange, ScheduleTiming, Upgrade, VariantUpgrade
    from portattn.tools.quirks.reduce import Reduction, ReductionStep, Subject


LARGEST_LOG = 64 * 2**20  # bytes; a larger file is no compiler's output but a whole build's, to be cut first
_FRESH = {"TRITON_ALWAYS_COMPILE": "1"}  # of the child that reduces: a cache would answer in a compiler's place


@click.command()
@click.option("--from-log", "log", type=click.Path(path_type=Path), metavar="FILE", help="Output of a failed compile.")
@click.option(
    "--from-incident", "incident_id", metavar="ID", help="A failure that portattn has kept (doctor lists them)."
)
@click.option("--backend", metavar="NAME", help="The backend, where the log does not say.")
@output.target_option("The chip, where the log does not say.")
@output.toolchain_option("The compiler, where the log does not say.")
@options(
    ("--kernel", {"metavar": "NAME"}, "The kernel, as in dense_forward; any package's, where the log does not say."),
    ("--failure number", {"type": int, "metavar": "N"}, "Of several failures in a log only the Nth."),
    ("--words", {"metavar": "WORDS", "default": ""}, "What the id says after its number, as in four-stages."),
    ("--out", {"type": click.Path(path_type=Path, file_okay=False)},
     "Folder; by default quirks/drafts of a checkout, and ./quirk-drafts of the working folder where portattn is "
     "installed from a wheel."),
    ("--force", FLAG, "Draft although the failure is an entry's, or a draft has it."),
    ("--no-replay", FLAG, "Do not run the draft's program here."),
)  # fmt: skip
@output.json_option
def new(
    log: Path | None, incident_id: str | None, backend: str | None, target: str | None, toolchain: str | None,
    kernel: str | None, number: int | None, words: str, out: Path | None, force: bool, no_replay: bool, as_json: bool,
) -> None:  # fmt: skip
    """Draft an entry from a log or an incident: the TOML, a program that fails the same way, and a report.

    A log may hold several failures: each is reported, and drafted. What the log does not tell is a line FILL-IN-…,
    which the loader refuses. Exit status 1: a failure is an entry's, or the folder has a draft of it, and nothing was
    written for it (--force drafts all the same). What only looks like an entry is drafted."""
    from portattn.planning.registry import Registry
    from portattn.tools.quirks import drafts, failure_facts

    if (log is None) == (incident_id is None):
        if log:
            raise ArgumentError("quirks new", "--from-incident", incident_id, "goes without --from-log")
        limit = "must be given, the output of a failed compile, or --from-incident ID (`portattn doctor` lists them)"
        raise ArgumentError("quirks new", "--from-log", None, limit)
    registry = Registry.load()
    if log is not None:
        found = failure_facts.from_log(_read(log), log.name, registry, target, toolchain, backend, kernel)
    else:
        named = {"backend": backend, "target": target, "toolchain": toolchain, "kernel": kernel, "failure": number}
        for option, value in named.items():
            if value is not None:
                raise ArgumentError(
                    "quirks new", f"--{option}", value, "goes with --from-log: an incident knows its own"
                )
        incident, others = _incident(incident_id or "")
        found = [failure_facts.from_incident(incident, others, registry)]
    if number is not None and not 1 <= number <= len(found):
        raise ArgumentError("quirks new", "--failure", number, f"must be from 1 to {len(found)}, which the log holds")
    asked = [number] if number is not None else range(1, len(found) + 1)
    with output.status("drafting") as say:
        made = {
            n: drafts.make(found[n - 1], registry, out, words=words, force=force, replay=not no_replay, say=say)
            for n in asked
        }
    if as_json:
        output.emit_json(
            {"of": len(found), "failures": [{"number": n, **msgspec.to_builtins(draft)} for n, draft in made.items()]}
        )
    else:
        for n, draft in made.items():
            _show_failure(draft, n, len(found))
        if left := len(found) - len(made):
            click.echo(f"{plural(left, 'other failure')} in the log: leave --failure out to draft each")
    if any(not draft.files and not draft.failure["not_a_bug"] for draft in made.values()):
        raise click.exceptions.Exit(RED)


def _show_failure(made: Any, number: int, of: int) -> None:
    if of > 1:
        who = f", of {', '.join(made.streams)}" if made.streams else ""
        often = f", {made.times} times" if made.times > 1 else ""
        heading(f"failure {number} of {of}, from line {made.failure['line']} on{who}{often}")
    for entry in made.known:
        click.secho(str(entry), fg="yellow")
    click.echo(f"{made.failure['symptom']} at stage {made.failure['stage']}: {made.failure['cause']}")
    if made.cut:
        click.secho("the log ends inside this message: the signature has only its beginning", fg="yellow")
    for text in made.left_out:
        click.secho(f"left out: {text}", fg="yellow")
    if made.files:
        heading(made.id)
        for file in made.files:
            click.echo(f"  {file}")
        if made.replay:
            click.secho(made.replay, fg={True: "green", False: "red"}.get(made.reproduced))
        if made.open:
            heading("to be filled in")
            pairs((f"{made.files[-1]}:{line}", text) for line, text in made.open)
    elif made.failure["not_a_bug"]:
        click.echo(f"not drafted: {made.failure['not_a_bug']}")
    else:
        click.echo("nothing was written: --force drafts an entry all the same")


@click.command()
@click.argument("subject_id", metavar="ID", type=param_types.QUIRK)
@output.toolchain_option("The compiler; by default the one that it failed on.")
@click.option("--seconds", type=SECONDS, default=120.0, show_default=True, help="Time limit of one compile.")
@click.option("--most", default=400, show_default=True, help="Compiles after which the smallest so far is the result.")
@click.option("--write", is_flag=True, help="Write the result: into the quirk's probe, or as an incident ID-reduced.")
@output.json_option
def reduce(subject_id: str, toolchain: str | None, seconds: float, most: int, write: bool, as_json: bool) -> None:
    """Shrink the specialisation of an incident, or of a quirk with a "plan:" probe, while it fails in the same way."""
    from portattn.planning.registry import Registry
    from portattn.tools import lab
    from portattn.tools.quirks import reduce as reducing
    from portattn.tools.quirks.failure_facts import permitted_env

    if most <= 0:
        raise ArgumentError("quirks reduce", "--most", most, "must be more than 0")
    registry = Registry.load()
    subject, incident = _subject(subject_id, registry, toolchain)
    for text in permitted_env(incident.environment_set, registry)[1] if incident else ():
        click.secho(f"left out: {text}", fg="yellow", err=True)
    with output.status("reducing") as say, lab.worker(str(subject.target.toolchain), environment=_FRESH) as worker:

        def step(tried: ReductionStep, compiles: int) -> None:
            say(f"{plural(compiles, 'compile')}: {tried.step}: {tried.ended}")

        made = reducing.reduce(subject, registry, worker, seconds=seconds, most=most, say=step)
    written = _write_reduced(made, incident, registry) if write else ""
    if as_json:
        output.emit_json({"reduced": made, "written": written})
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
    from portattn.tools.quirks import reduce as reducing

    if quirk.matching(subject_id, registry.quirks):
        return reducing.of_quirk(registry.quirk(subject_id, "quirks reduce", "ID"), registry, toolchain), None
    incident, _ = _incident(subject_id, registry.quirks)
    return reducing.subject_of_incident(incident, registry, toolchain), incident


def _write_reduced(made: Reduction, incident: Incident | None, registry: Registry) -> str:
    from portattn.compile.record_store import store
    from portattn.config import current
    from portattn.tools.quirks import reduce as reducing

    if incident is not None:
        smaller = reducing.incident_of(made, incident, registry)
        store(current()).add_incident(smaller)
        return f"incident {smaller.id}"
    return reducing.write_probe(made, registry)


def _read(path: Path) -> str:
    from portattn.tools.quirks.failure_log import decode_text

    try:
        return decode_text(read_limited(path, LARGEST_LOG))
    except OSError as error:
        raise ArgumentError("quirks new", "--from-log", str(path), f"cannot be read: {error.strerror}") from None


def _incident(incident_id: str, quirks: Collection[str] = ()) -> tuple[Incident, Iterator[Incident]]:
    """Return the incident, and all kept ones. Raises ArgumentError on an unknown id, naming quirks near it."""
    from portattn.compile.record_store import store
    from portattn.config import current

    kept = store(current())
    known = [incident.id for incident in kept.incidents()]
    if incident_id not in known:
        shown = (", ".join(known[-5:]) or "there are none") + quirk.did_you_mean(incident_id, quirks)
        limit = f"must be a quirk's or an incident's id; the latest incidents: {shown}"
        raise ArgumentError("quirks", "ID", incident_id, limit)
    found = kept.incident(incident_id)
    assert found is not None
    return found, kept.incidents()


def add_to(group: click.Group) -> None:
    for command in (new, reduce, bisect, retire):
        group.add_command(command)


@click.command()
@click.argument("quirk_id", metavar="ID", type=param_types.QUIRK)
@click.option("--between", nargs=2, metavar="A B", help="Only toolchains from A to B, both NAME==VERSION.")
@output.target_option("The chip; by default the probe's own.")
@click.option("--all", "every", is_flag=True, help="Test every toolchain, whatever the first ones say.")
@click.option("--create", is_flag=True, help="Make environments of the lab that are missing (a few minutes each).")
@output.json_option
def bisect(
    quirk_id: str, between: tuple[str, str] | None, target: str | None, every: bool, create: bool, as_json: bool
) -> None:
    """Find the first and the last toolchain of the lab that has the bug, and the range that this means.

    Releases between them that were not tested are named. A failure that the entry's file has recorded stays in the
    range. Exit status 1: the range in the entry is another one, it was seen nowhere, or what is seen contradicts the
    file."""
    from portattn.planning.registry import Registry
    from portattn.tools import lab
    from portattn.tools.quirks import bisect_retire as bisecting
    from portattn.tools.quirks import probe

    registry = Registry.load()
    quirk = registry.quirk(quirk_id, "quirks bisect", "ID")
    target = registry.target(target, "none").name if target is not None else None
    compiler = bisecting.compiler_of(quirk)
    toolchains = bisecting.candidates(compiler, lab.toolchains(), between)
    with output.status("bisecting") as say:

        def off(entry: Any, toolchain: str) -> probe.Arm:
            from portattn.schema.toolchain import is_installed

            if create and not is_installed(toolchain) and lab.find(toolchain) is None:
                lab.create(toolchain, say)
            say(f"probing {toolchain}")
            return probe.off(entry, toolchain, target, registry=registry)

        made = bisecting.bisect(
            quirk, toolchains, off, every=every, target=probe.place(quirk, None, target, registry).name,
            say=lambda one: say(f"{one.toolchain}: {one.seen}"),
        )  # fmt: skip
    now = quirk.when.toolchain.get(compiler, "")
    same = _same_range(made.range, now, toolchains)
    if as_json:
        output.emit_json(
            {"bisected": made, "range_now": now, "agrees": same and bool(made.last_bad) and not made.contradicts}
        )
    else:
        output.table(["toolchain", "seen", "said"], [(one.toolchain, one.seen, one.detail) for one in made.tested])
        if made.says:
            click.secho(made.says, fg="yellow")
        for name, value in (("last good before", made.last_good_before), ("first bad", made.first_bad),
                            ("last bad", made.last_bad), ("first good", made.first_good)):  # fmt: skip
            if value:
                click.echo(f"{name}: {value}")
        if made.last_bad:
            every_one = f"every {compiler} that was tested: no bound"
            bounds = f'{{ {compiler} = "{made.range}" }}' if made.range else every_one
            click.secho(f"when.toolchain: {bounds}", bold=True)
            click.echo("as in the entry" if same else f'the entry has: {{ {compiler} = "{now}" }}')
    if not made.last_bad or not same or made.contradicts:
        raise click.exceptions.Exit(RED)


def _same_range(one: str, two: str, toolchains: list[str]) -> bool:
    from portattn.schema.toolchain import parse_range

    versions = [toolchain.partition("==")[2] for toolchain in toolchains]
    first, second = (parse_range(text) for text in (one, two))
    return all(first.contains(v, prereleases=True) is second.contains(v, prereleases=True) for v in versions)


@click.command()
@click.argument("quirk_id", metavar="ID", type=param_types.QUIRK)
@click.option("--reason", required=True, help="Why it is needed no more.")
@output.toolchain_option("The first compiler without the bug.", "--fixed-in", default="")
@click.option("--replaced-by", default="", type=param_types.QUIRK, metavar="ID", help="The entry that takes its place.")
@click.option("--force", is_flag=True, help="Also where a supported compiler has the bug.")
@output.json_option
def retire(quirk_id: str, reason: str, fixed_in: str, replaced_by: str, force: bool, as_json: bool) -> None:
    """Turn an entry into a tombstone: it applies no more, and its id stays taken.

    Exit status 2 where a probe has confirmed it on a supported compiler, or a newer one, and nothing else since."""
    from portattn.planning.registry import Registry
    from portattn.tools.quirks.bisect_retire import retire as bury

    registry = Registry.load()
    quirk_id = registry.quirk(quirk_id, "quirks retire", "ID").id
    if replaced_by:
        replaced_by = registry.quirk(replaced_by, "quirks retire", "--replaced-by").id
    made = bury(quirk_id, registry, reason, fixed_in=fixed_in, replaced_by=replaced_by, force=force)
    if as_json:
        output.emit_json(made)
        return
    click.echo(f"{made.id} is retired since {made.date}: {made.file}")
    if made.still_in_range:
        names = ", ".join(made.still_in_range)
        click.secho(f"its range has supported compilers, which lose its work-around: {names}", fg="yellow")


OUTCOMES = (
    '"probed there: TARGET: OUTCOME" is what the probe saw without the work-around. "fail:signature" is how the bug '
    'shows itself, as the entry describes it; "fail:" and another word a failure of another kind; "pass" none'
)


def show_carried(made: Upgrade) -> None:
    if made.variants:
        heading(f"variants: {len(made.variants)}")
        pairs((f"{one.name} on {one.target}", variant_line(one)) for one in made.variants)
    timed = [one for one in made.schedules if one.timed_with]
    if timed:
        heading(f"schedules that were timed: {sum(one.carries for one in timed)} of {len(timed)} carry over")
        pairs((f"{one.kernel} on {one.target}", schedule_line(one, made.after)) for one in timed)
    if never := len(made.schedules) - len(timed):
        click.echo(f"\n{plural(never, 'schedule')} never timed on the chip")


def tell_outcomes(entries: Iterable[QuirkChange]) -> None:
    seen = [outcome.rpartition(": ")[2] for entry in entries for outcome in entry.verified]
    if any(outcome.startswith("fail") for outcome in seen):
        click.echo(f"\n{OUTCOMES}")


def entry_line(entry: QuirkChange) -> str:
    seen = f"probed there: {', '.join(entry.verified)}" if entry.verified else "unverified there"
    if entry.verified and entry.unprobed:
        seen += f" (not on {names_or_count(entry.unprobed, 'target')})"
    return "; ".join(part for part in (entry.title, names_or_count(entry.targets, "target"), seen, entry.note) if part)


def variant_line(one: VariantUpgrade) -> str:
    why = next(iter((one.refuses or one.leaves).values()), "")
    said = f"{one.said}: {why}" if why else one.said
    return f"{said}; {one.evidence}" if one.evidence else said


def schedule_line(one: ScheduleTiming, after: str) -> str:
    lost = "" if one.carries else f", not {after}"
    return f"timed with {one.timed_with}{lost}; {names_or_count(one.problems, 'problem')}"
