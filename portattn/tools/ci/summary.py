"""The summary in Markdown: losses first, each with its cause and what to do; everything else folded."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from portattn.tools.ci.regressions import Loss
from portattn.tools.ci.report import Alike, CiReport, alike
from portattn.tools.quirks.markdown import table

LIMIT = 1024 * 1024  # bytes. Source: GitHub's limit of a step's summary
CUT = "\n\n**The summary is cut here: more than {} bytes. `portattn ci --json` has all of it.**\n"
NAMED = 3  # targets and problems that a row names; of more it gives the number
_MARKS = re.compile(r"([\\`*\[\]~])")


def render(report: CiReport, limit: int = LIMIT) -> str:
    """The summary, of at most `limit` bytes as UTF-8."""
    return cut("".join(_parts(report)), limit)


def verdict(report: CiReport) -> str:
    """One sentence: what is lost, of how much, and how that was looked at."""
    how = "compiled and compared" if report.compiled else "compared"
    against = f" with {report.against}" if report.against else ""
    only = "" if report.compiled else " by their plans; nothing was compiled"
    cells = f"{_plural(report.compared, 'cell')} of {_plural(len(report.targets), 'target')} {how}{against}{only}"
    if report.idle and not report.losses:
        return f"Nothing could be compiled: {cells}"
    if not report.losses:
        return f"Nothing is lost: {cells}"
    inside = f" in {_plural(report.cells_lost, 'cell')}" if report.cells_lost else ""
    return f"{_plural(len(report.losses), 'loss', 'losses')}{inside}: {cells}"


def cut(text: str, limit: int) -> str:
    """The text's first lines that fit, with a note where there are more. What is folded is closed."""
    if len(text.encode()) <= limit:
        return text
    note, end = CUT.format(limit), "\n</details>\n"
    room, kept, folded = limit - len((note + end).encode()), [], 0
    for line in text.splitlines(keepends=True):
        room -= len(line.encode())
        if room < 0:
            break
        kept.append(line)
        folded += line.count("<details>") - line.count("</details>")
    return "".join(kept) + (end if folded else "") + note


def plain(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return _MARKS.sub(r"\\\1", html.escape(text, quote=False))


def _parts(report: CiReport) -> Iterator[str]:
    yield f"## portattn ci: {plain(report.before)} → {plain(report.after)}\n\n"
    yield f"**{plain(verdict(report))}.**\n"
    if report.losses:
        columns = ("lost", "targets", "problems", "cause", "what to do")
        yield "\n" + table(columns, map(_row, report.losses))
    for note in report.notes:
        yield f"\n- {plain(note)}"
    yield "\n" if report.notes else ""
    if report.expected:
        yield f"\n{_plural(len(report.expected), 'cell')} failed as expected.\n"
    yield from _folded("Won", ("targets", "problems", "what"), map(_alike, alike(report.won)))
    yield from _folded("Changed, nothing lost", ("targets", "problems", "what"), map(_alike, alike(report.changed)))
    yield from _registry(report)


def _registry(report: CiReport) -> Iterator[str]:
    made = report.upgrade
    quirks = [one for one in made.entries if one.change != "stays" or one.unprobed]
    yield from _folded(
        "Quirks that fall away, newly apply, or were not probed there on every target",
        ("quirk", "change", "targets", "probed there", "what"),
        (
            (
                plain(one.id), one.change, _named(one.targets, "target"), plain(", ".join(one.verified)) or "no",
                plain("; ".join(filter(None, (one.title, one.note)))),
            )
            for one in quirks
        ),
    )  # fmt: skip
    yield from _folded(
        "Plans that take the same path in another way",
        ("problem", "targets", "what"),
        (
            (plain(one.problem), _named(one.targets, "target"), plain("; ".join(one.differs)))
            for one in made.moved
            if one.before == one.after
        ),
    )
    yield from _folded(
        "Variants that do not simply carry over",
        ("variant", "target", "what"),
        (
            (plain(one.name), one.target, plain("; ".join((one.said, *dict.fromkeys(one.refuses.values())))))
            for one in made.variants
            if one.said != "carries over"
        ),
    )
    yield from _folded(
        f"Schedules that were not timed with {plain(made.after)} (this concerns speed alone)",
        ("kernel", "target", "timed with", "problems"),
        (
            (plain(one.kernel), one.target, plain(one.timed_with), _named(one.problems, "problem"))
            for one in made.schedules
            if one.timed_with and not one.carries
        ),
    )
    yield from _folded(
        f"Published figures that were not measured with {plain(made.after)}",
        ("page", "target", "measured with", "what"),
        ((one.page, one.target, plain(one.measured_with), one.what) for one in made.figures if not one.carries),
    )


def _folded(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield a folded table with its number of rows; nothing if it has no row."""
    found = list(rows)
    if found:
        yield f"\n<details><summary>{title}: {len(found)}</summary>\n\n{table(columns, found)}\n</details>\n"


def _row(loss: Loss) -> tuple[str, ...]:
    return (
        f"**{', '.join(loss.kinds)}**: {plain(loss.what)}",
        _named(loss.targets, "target"),
        _named(loss.problems, "problem"),
        plain(loss.cause),
        loss.todo,
    )


def _alike(cells: Alike) -> tuple[str, ...]:
    return _named(cells.targets, "target"), _named(cells.problems, "problem"), plain(cells.what)


def _named(names: Sequence[str], noun: str) -> str:
    return plain(", ".join(names)) if len(names) <= NAMED else _plural(len(names), noun)


def _plural(count: int, noun: str, many: str = "") -> str:
    return f"{count} {noun if count == 1 else many or f'{noun}s'}"
