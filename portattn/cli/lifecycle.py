"""`portattn quirks bisect|retire|upgrade`: what becomes of an entry as compilers change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from portattn.cli.drafting import new, reduce
from portattn.cli.errors import RED
from portattn.cli.named import quirk_of, tell_unknown
from portattn.cli.output import emit_json, heading, json_option, pairs, plural, status, table
from portattn.cli.upgrade_sections import entry_line, show_carried, tell_outcomes
from portattn.tools import shell_values

if TYPE_CHECKING:
    from portattn.tools.quirks.lifecycle.bisect import ToolchainResult
    from portattn.tools.upgrade.compare import Upgrade


def add_to(group: click.Group) -> None:
    """Add the commands to `portattn quirks`."""
    for command in (new, reduce, bisect, retire, upgrade):
        group.add_command(command)


@click.command()
@click.argument("quirk_id", metavar="ID", type=shell_values.QUIRK)
@click.option("--between", nargs=2, metavar="A B", help="Only toolchains from A to B, both NAME==VERSION.")
@click.option(
    "--target", type=shell_values.TARGET, metavar="BACKEND:ARCH", help="The chip; by default the probe's own."
)
@click.option("--all", "every", is_flag=True, help="Test every toolchain, whatever the first ones say.")
@click.option("--create", is_flag=True, help="Make environments of the lab that are missing (a few minutes each).")
@json_option
def bisect(
    quirk_id: str, between: tuple[str, str] | None, target: str | None, every: bool, create: bool, as_json: bool
) -> None:
    """Find the first and the last toolchain of the lab that has the bug, and the range that this means.

    Releases between them that were not tested are named. A failure that the entry's file has recorded stays in the
    range. Exit status 1: the range in the entry is another one, it was seen nowhere, or what is seen contradicts the
    file.
    """
    from portattn.planning.registry import Registry
    from portattn.tools import lab
    from portattn.tools.quirks import probe
    from portattn.tools.quirks.lifecycle import bisect as bisecting

    registry = Registry.load()
    quirk = quirk_of("quirks bisect", quirk_id, registry)
    target = registry.target(target, "none").name if target is not None else None
    compiler = bisecting.compiler_of(quirk)
    toolchains = bisecting.candidates(compiler, lab.toolchains(), between)
    with status("bisecting") as say:

        def off(entry: Any, toolchain: str) -> probe.Arm:
            from portattn.schema.toolchain import is_installed

            if create and not is_installed(toolchain) and lab.find(toolchain) is None:
                lab.create(toolchain, say)
            say(f"probing {toolchain}")
            return probe.off(entry, toolchain, target, registry=registry)

        made = bisecting.bisect(
            quirk,
            toolchains,
            off,
            every=every,
            target=probe.place(quirk, None, target, registry).name,
            say=lambda one: say(f"{one.toolchain}: {one.seen}"),
        )
    now = quirk.when.toolchain.get(compiler, "")
    same = _same_range(made.range, now, toolchains)
    if as_json:
        emit_json({"bisected": made, "range_now": now, "agrees": same and bool(made.last_bad) and not made.contradicts})
    else:
        _show_bisected(made.tested)
        if made.says:
            click.secho(made.says, fg="yellow")
        for name, value in (("last good before", made.last_good_before), ("first bad", made.first_bad),
                            ("last bad", made.last_bad), ("first good", made.first_good)):  # fmt: skip
            if value:
                click.echo(f"{name}: {value}")
        if made.last_bad:
            bounds = (
                f'{{ {compiler} = "{made.range}" }}' if made.range else f"every {compiler} that was tested: no bound"
            )
            click.secho(f"when.toolchain: {bounds}", bold=True)
            click.echo("as in the entry" if same else f'the entry has: {{ {compiler} = "{now}" }}')
    if not made.last_bad or not same or made.contradicts:
        raise click.exceptions.Exit(RED)


def _show_bisected(tested: tuple[ToolchainResult, ...]) -> None:
    table(["toolchain", "seen", "said"], [(one.toolchain, one.seen, one.detail) for one in tested])


def _same_range(one: str, two: str, toolchains: list[str]) -> bool:
    """Whether two ranges have the same ones of these toolchains."""
    from portattn.schema.toolchain import parse_range

    versions = [toolchain.partition("==")[2] for toolchain in toolchains]
    first, second = (parse_range(text) for text in (one, two))
    return all(first.contains(v, prereleases=True) is second.contains(v, prereleases=True) for v in versions)


@click.command()
@click.argument("quirk_id", metavar="ID", type=shell_values.QUIRK)
@click.option("--reason", required=True, help="Why it is needed no more.")
@click.option(
    "--fixed-in",
    default="",
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The first compiler without the bug.",
)
@click.option(
    "--replaced-by", default="", type=shell_values.QUIRK, metavar="ID", help="The entry that takes its place."
)
@click.option("--force", is_flag=True, help="Also where a supported compiler has the bug.")
@json_option
def retire(quirk_id: str, reason: str, fixed_in: str, replaced_by: str, force: bool, as_json: bool) -> None:
    """Turn an entry into a tombstone: it applies no more, and its id stays taken.

    Exit status 2 where a probe has confirmed it on a supported compiler, or a newer one, and nothing else since.
    """
    from portattn.planning.registry import Registry
    from portattn.tools.quirks.lifecycle.retire import retire as bury

    registry = Registry.load()
    quirk_id = quirk_of("quirks retire", quirk_id, registry).id
    if replaced_by:
        replaced_by = quirk_of("quirks retire", replaced_by, registry, "--replaced-by").id
    made = bury(quirk_id, registry, reason, fixed_in=fixed_in, replaced_by=replaced_by, force=force)
    if as_json:
        emit_json(made)
        return
    click.echo(f"{made.id} is retired since {made.date}: {made.file}")
    if made.still_in_range:
        names = ", ".join(made.still_in_range)
        click.secho(f"its range has supported compilers, which lose its work-around: {names}", fg="yellow")


@click.command()
@click.option(
    "--from",
    "before",
    required=True,
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler that is left.",
)
@click.option(
    "--to",
    "after",
    required=True,
    type=shell_values.TOOLCHAIN,
    metavar="NAME==VERSION",
    help="The compiler that comes.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=shell_values.TARGET,
    metavar="BACKEND:ARCH",
    help="A chip; may be given several times.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Red too: an entry that is less sure with the new compiler (no probe has looked there, and it newly applies, "
    "falls away, or was probed with the old one), and a variant that refuses what it took.",
)
@json_option
def upgrade(before: str, after: str, targets: tuple[str, ...], strict: bool, as_json: bool) -> None:
    """List the changes that another compiler brings: entries that fall away, stay or newly apply, and changed plans.

    It also lists the variants that carry over, are tried by their canaries or refuse, the compiler that each schedule
    was timed with, and the published figures that were measured with the new compiler.

    The plans are as in `portattn matrix run --quick`. Exit status 1: a problem loses its core kernel or has no plan.
    """
    from portattn.planning.registry import Registry
    from portattn.tools.quirks.lifecycle.upgrade import OP
    from portattn.tools.quirks.lifecycle.upgrade import upgrade as compare
    from portattn.tools.upgrade.compilers import parse_compiler

    registry = Registry.load()
    sides = {"from": parse_compiler(OP, "--from", before), "to": parse_compiler(OP, "--to", after)}
    tell_unknown(sides.values())
    targets = tuple(registry.target(target, "none").name for target in targets)
    with status("planning") as say:
        made = compare(before, after, registry, targets, say)
    less_sure = [entry.id for entry in made.entries if entry.less_sure]
    if as_json:
        unverified = [entry.id for entry in made.entries if entry.unverified]
        known = {name: {"toolchain": str(one), "known": not one.unknown_release()} for name, one in sides.items()}
        emit_json(
            {**known, "upgrade": made, "lost": made.lost, "unverified": unverified, "less_sure": less_sure},
        )
    else:
        _show_upgrade(made)
    if made.lost or (strict and (less_sure or any(one.refuses for one in made.variants))):
        raise click.exceptions.Exit(RED)


def _show_upgrade(made: Upgrade) -> None:
    """The answer as text: entries by what becomes of them, plans that change, what carries over, what is less sure."""
    click.secho(f"{made.before} -> {made.after} on {plural(len(made.targets), 'target')}", bold=True)
    tell_outcomes(made.entries)
    for change in ("falls away", "newly applies", "stays"):
        found = [entry for entry in made.entries if entry.change == change]
        heading(f"{change}: {len(found)}")
        pairs((entry.id, entry_line(entry)) for entry in found)
    heading(f"plans that change: {sum(len(m.targets) for m in made.moved)} of {made.plans}")
    for moved in made.moved:
        click.secho(f"  {moved.problem} on {', '.join(moved.targets)}", fg="red" if moved.lost else None)
        for line in moved.differs:
            click.echo(f"    {line}")
    show_carried(made)
    if unverified := sum(entry.unverified for entry in made.entries):
        click.echo(f"\nunverified on {made.after}: {unverified}")
    if less_sure := [entry.id for entry in made.entries if entry.less_sure]:
        click.echo(f"less sure than with {made.before}: {len(less_sure)}: {', '.join(less_sure)}")


_FRESH = {"TRITON_ALWAYS_COMPILE": "1"}
