"""What `portattn quirks upgrade` and `portattn ci` print alike: variants, schedules and figures that carry over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from portattn.cli.output import heading, pairs, plural

if TYPE_CHECKING:
    from portattn.tools.upgrade.compare import Upgrade
    from portattn.tools.upgrade.entries import QuirkChange
    from portattn.tools.upgrade.published_results import Page
    from portattn.tools.upgrade.schedules import ScheduleTiming
    from portattn.tools.upgrade.variants import VariantUpgrade

OUTCOMES = (
    '"probed there: TARGET: OUTCOME" is what the probe saw without the work-around. "fail:signature" is how the bug '
    'shows itself, as the entry describes it; "fail:" and another word a failure of another kind; "pass" none'
)
NAMED = 3  # targets and problems that a line names; of more it gives the number


def show_carried(made: Upgrade) -> None:
    """Variants, schedules and figures, a line each; what never was timed on any chip is counted alone."""
    if made.variants:
        heading(f"variants: {len(made.variants)}")
        pairs((f"{one.name} on {one.target}", variant_line(one)) for one in made.variants)
    timed = [one for one in made.schedules if one.timed_with]
    if timed:
        heading(f"schedules that were timed: {sum(one.carries for one in timed)} of {len(timed)} carry over")
        pairs((f"{one.kernel} on {one.target}", schedule_line(one, made.after)) for one in timed)
    if never := len(made.schedules) - len(timed):
        click.echo(f"\n{plural(never, 'schedule')} never timed on the chip")
    if made.figures:
        _show_pages(made)


def _show_pages(made: Upgrade) -> None:
    """The pages with published figures, a line each."""
    from portattn.tools.upgrade.published_results import pages

    found = pages(made.figures)
    some = sum(one.in_part for one in found)
    in_part = f", {some} in part" if some else ""
    heading(f"pages with figures: {sum(one.carries for one in found)} of {len(found)} carry over{in_part}")
    pairs((one.page, page_line(one)) for one in found)


def tell_outcomes(entries: Iterable[QuirkChange]) -> None:
    """What the outcomes of probes mean, once, where a line below has one that reads as if the tool had failed."""
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
    where = names_or_count(one.problems, "problem")
    return (
        f"timed with {one.timed_with}; {where}" if one.carries else f"timed with {one.timed_with}, not {after}; {where}"
    )


def page_line(page: Page) -> str:
    """Whether a page's figures carry over, and the releases that it has figures of."""
    if page.carries:
        releases = dict.fromkeys(release for one in page.figures for release in one.releases)
        return f"carries over: has figures of {', '.join(releases)} on {page.target}"
    word = "carries over in part" if page.in_part else "does not carry over"
    parts = (
        f"of {one.measured_with}{'' if one.carries else ' alone'} for {one.what}"
        for one in sorted(page.figures, key=lambda one: not one.carries)
    )
    return f"{word}: has figures on {page.target} {'; '.join(parts)}"


def names_or_count(names: tuple[str, ...], noun: str) -> str:
    return ", ".join(names) if len(names) <= NAMED else plural(len(names), noun)
