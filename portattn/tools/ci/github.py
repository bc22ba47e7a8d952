"""GitHub's runners: the summary of a job, and annotations.

Sources: "Workflow commands for GitHub Actions" (`::error`, escapes, GITHUB_STEP_SUMMARY, 1 MiB a step), and the limit
of 10 annotations of a kind that a step shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from portattn.errors import DataError
from portattn.tools.ci import summary
from portattn.tools.ci.report import CiReport

ACTIONS = "GITHUB_ACTIONS"  # "true" on a runner
SUMMARY = "GITHUB_STEP_SUMMARY"  # the file that a step appends its summary to
SHOWN = 10  # annotations of a kind that a step shows
LEAST = 512  # bytes without which a summary says nothing


def on_runner(environment: Mapping[str, str]) -> bool:
    return environment.get(ACTIONS) == "true"


def append(path: Path, report: CiReport) -> bool:
    """Append the summary to the step's, within the limit of a step. False where the step's is full.

    Raises DataError where the file cannot be written.
    """
    try:
        room = summary.LIMIT - (path.stat().st_size if path.exists() else 0)
        if room < LEAST:
            return False
        data = summary.render(report, room).encode()
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise DataError(path, None, f"the summary cannot be written: {error.strerror}") from None
    return True


def annotation_lines(report: CiReport) -> Iterator[str]:
    """A line for each loss, and for each note, as a runner reads them; of more than it shows, the last says so."""
    title = f"portattn ci: {report.before} to {report.after}"
    errors = []
    for loss in report.losses:
        where = ", ".join(loss.targets[:SHOWN]) + (" and more" if len(loss.targets) > SHOWN else "")
        count = f"{len(loss.problems)} problems" if len(loss.problems) > 1 else "".join(loss.problems)
        parts = (f"{', '.join(loss.kinds)}: {loss.what}", where, count, loss.cause, loss.todo)
        errors.append("\n".join(filter(None, parts)))
    yield from _lines("error", title, errors)
    yield from _lines("warning", title, list(report.notes))


def _lines(word: str, title: str, texts: list[str]) -> Iterator[str]:
    shown = texts if len(texts) <= SHOWN else texts[: SHOWN - 1]
    for text in shown:
        yield command(word, title, text)
    if len(texts) > len(shown):
        yield command(word, title, f"{len(texts) - len(shown)} more: the job's summary has them")


def command(word: str, title: str, text: str) -> str:
    """A workflow command, its title and text escaped."""
    return f"::{word} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(text)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
