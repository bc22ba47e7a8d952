"""What `portattn ci` prints: the report as text, and as one document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from portattn.cli.output import heading, pairs, plural
from portattn.cli.upgrade_sections import entry_line, named, show_carried, tell_outcomes

if TYPE_CHECKING:
    from portattn.tools.ci.report import Report


def document(found: Report) -> dict[str, object]:
    import msgspec

    from portattn.tools.ci.summary import verdict

    return {"verdict": verdict(found), "lost": len(found.losses)} | msgspec.structs.asdict(found)


def show(found: Report) -> None:
    """The report as text: losses first."""
    from portattn.tools.ci.report import alike
    from portattn.tools.ci.summary import verdict

    made = found.upgrade
    click.secho(f"{found.before} -> {found.after} on {named(found.targets, 'target')}", bold=True)
    for loss in found.losses:
        click.secho(f"\nLOST  {', '.join(loss.kinds)}: {loss.what}", fg="red")
        rows = (("on", ", ".join(loss.targets)), ("of", named(loss.problems, "problem")), ("cause", loss.cause))
        pairs([row for row in (*rows, ("do", loss.todo)) if row[1]], indent=6)
    for title, changes in (("won", found.won), ("changed", found.changed)):
        if changes:
            heading(f"{title}: {plural(len(changes), 'cell')}")
            for one in alike(changes):
                click.echo(f"  {named(one.targets, 'target')}; {named(one.problems, 'problem')}: {one.what}")
    shown = {
        "quirks that fall away": [one for one in made.entries if one.change == "falls away"],
        "quirks that newly apply": [one for one in made.entries if one.change == "newly applies"],
        f"quirks that stay, not probed on every target with {found.after}": [
            one for one in made.entries if one.change == "stays" and one.unprobed
        ],
    }
    tell_outcomes(one for entries in shown.values() for one in entries)
    for title, entries in shown.items():
        if entries:
            heading(f"{title}: {len(entries)}")
            pairs((one.id, entry_line(one)) for one in entries)
    show_carried(made)
    click.echo()
    for note in found.notes:
        click.echo(f"note: {note}")
    click.secho(verdict(found), fg="red" if found.losses else "green")
