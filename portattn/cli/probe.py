"""`portattn quirks probe`: is a quirk's bug still there, and does its work-around still help?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from portattn.cli.errors import INTERRUPTED, RED, require_some
from portattn.cli.named import quirk_of
from portattn.cli.output import emit_json, json_option, plural, table
from portattn.errors import ArgumentError
from portattn.tools import shell_values
from portattn.tools.number_ranges import SECONDS

if TYPE_CHECKING:
    from portattn.planning.registry import Registry
    from portattn.schema.quirk import Quirk
    from portattn.tools.quirks.probe import ProbeResult

OP = "quirks probe"


@click.command()
@click.argument("ids", metavar="[ID]...", nargs=-1, type=shell_values.QUIRK)
@click.option(
    "--toolchain",
    multiple=True,
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler, of the lab or installed; repeat it. The installed one by default.",
)
@click.option("--all-toolchains", is_flag=True, help="Every toolchain that the lab has, and the installed one.")
@click.option("--target", type=shell_values.TARGET, metavar="BACKEND:ARCH", help="Another chip than the probe's own.")
@click.option("--record", is_flag=True, help="Write what was seen into the quirks' files, as [[verified]] tables.")
@click.option("--jobs", type=click.IntRange(1, 64), default=2, show_default=True, help="Probes run at a time.")
@click.option(
    "--seconds",
    type=SECONDS,
    default=180.0,
    show_default=True,
    help="Limit of each arm: a compiler that takes longer hangs.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Quirk files to probe; portattn's own and installed packages' by default.",
)
@json_option
def probe(
    ids: tuple[str, ...],
    toolchain: tuple[str, ...],
    all_toolchains: bool,
    target: str | None,
    record: bool,
    jobs: int,
    seconds: float,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Compile without and with the work-around of each quirk named by ID (all by default), and say what it means.

    A control kernel comes first. ID may be the beginning of an id up to its number, such as rocm-0015. Verdicts:
    confirmed, absent (out of range, and not there); stale, changed, ineffective, too narrow and broken are red;
    inconclusive; unverified, with what is missing.

    Exit status 1: a verdict is red. 3: no probe could run here. Ctrl-C keeps what has been recorded.
    """
    from portattn.planning.registry import Registry, find_backends
    from portattn.tools.quirks.probe import many
    from portattn.tools.quirks.probe.record import record as write

    if toolchain and all_toolchains:
        raise ArgumentError(OP, "--toolchain", ", ".join(toolchain), "goes without --all-toolchains")
    registry = Registry.read(find_backends(), folder) if folder else Registry.load()
    names, missing = _toolchains(toolchain, all_toolchains, registry)
    quirks = _chosen(ids, registry)
    target = registry.target(target, "none").name if target is not None else None
    if target is not None and not ids:
        quirks = [quirk for quirk in quirks if _concerns(quirk, target, registry)]
    wanted = many.jobs(quirks, names, target, registry)
    pairs: list[tuple[many.Job, ProbeResult]] = []
    written = 0

    def done(job: many.Job, result: ProbeResult) -> None:
        nonlocal written
        pairs.append((job, result))
        if record:
            written += write(job.quirk, [result])
        colour = {"fg": "red"} if result.red else {}
        text = f"[{len(pairs)}/{len(wanted)}] {result.verdict:<12} {job.quirk.id}  {result.target}  {result.toolchain}"
        click.secho(f"{text}  {result.seconds:.0f} s", err=True, **colour)  # type: ignore[arg-type]

    interrupted = False
    try:
        many.execute(wanted, registry, seconds, jobs, done)
    except KeyboardInterrupt:
        interrupted = True
    order = {(job.quirk.id, job.toolchain): index for index, job in enumerate(wanted)}
    pairs.sort(key=lambda pair: order[pair[0].quirk.id, pair[0].toolchain])
    results = many.with_diffs(pairs, registry)
    if as_json:
        found = {"results": results, "red": sum(r.red for r in results), "recorded": written, "missing": missing}
        emit_json(found | {"interrupted": interrupted})
    else:
        _tell(results, missing, written if record else None)
    if interrupted:
        click.echo(f"interrupted after {len(results)} of {plural(len(wanted), 'probe')}", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if any(result.red for result in results):
        raise click.exceptions.Exit(RED)
    reasons = [result.reason for result in results] or ["no entry has a probe there"]
    require_some(sum(result.verdict != "unverified" for result in results), "probed", reasons)


def _toolchains(named: tuple[str, ...], everything: bool, registry: Registry) -> tuple[list[str], list[str]]:
    """Return (toolchains to probe on, absent toolchains of the lab). Raises LabError if a named toolchain is absent."""
    from portattn.errors import PortattnError
    from portattn.schema.toolchain import installed_beside, installed_toolchain, is_installed
    from portattn.tools import lab
    from portattn.tools.quirks.probe import many
    from portattn.tools.quirks.probe.running import STAND_INS

    if everything:
        return many.toolchains(registry)
    if not named:
        if not installed_toolchain():
            raise PortattnError(
                f"{OP}: Triton is not installed; --toolchain names one of the lab (`portattn lab list`)"
            )
        return [str(one) for one in (installed_toolchain(), *installed_beside())], []
    for name in named:
        if not is_installed(name) and name not in STAND_INS:
            lab.need(name)
    return list(dict.fromkeys(named)), []


def _chosen(ids: tuple[str, ...], registry: Registry) -> list[Quirk]:
    """The quirks of these ids, or of their beginnings; all for none. Raises ArgumentError on one that nothing has."""
    if not ids:
        return list(registry.quirks.values())
    found = {quirk.id: quirk for quirk in (quirk_of(OP, text, registry) for text in ids)}
    return list(found.values())


def _concerns(quirk: Quirk, target: str, registry: Registry) -> bool:
    from portattn.tools.quirks.examples import arches_of

    return target in [f"{backend}:{arch}" for backend, arch in arches_of(quirk, registry)]


def _tell(results: list[ProbeResult], missing: list[str], written: int | None) -> None:
    rows = [
        (r.quirk, r.target, r.toolchain, r.off.word, r.on.word, r.verdict, r.reason if r.verdict != "confirmed" else "")
        for r in results
    ]
    table(["id", "target", "toolchain", "off", "on", "verdict", "what was seen"], rows)
    for result in results:
        if result.red:
            click.secho(f"{result.verdict}: {result.quirk} on {result.toolchain}: {result.reason}", fg="red")
            if result.diff:
                click.echo(result.diff)
    for name in missing:
        click.echo(f"{name} is not here: `portattn lab create {name}` makes it")
    counts = Counter(result.verdict for result in results)
    click.echo(
        f"{plural(len(results), 'probe')}: " + (", ".join(f"{n} {v}" for v, n in counts.most_common()) or "none")
    )
    if written is not None:
        click.echo(f"{plural(written, 'table')} recorded")
