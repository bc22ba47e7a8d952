"""The failures that a log tells of: each once, however many ranks print it and however often.

A log is read process by process. In each, the words of one failure stand together: the compiler's, then those of every
wrapper that passes the exception on. An exception that nothing catches, or a death, ends them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import NamedTuple

import msgspec

from portattn.tools.quirks.lifecycle.formats.row import Recogniser
from portattn.tools.quirks.lifecycle.formats.table import TABLE
from portattn.tools.quirks.lifecycle.normalise import Log, Stream
from portattn.tools.quirks.lifecycle.recognise import UNKNOWN, Failure, described, signature_of, the_stage_of

# What ends a failure's words: the last line of a traceback, the end of Ascend's report, a death, a test's heading.
_ENDS = re.compile(
    r"^(?:[\w.]+(?:Error|Exception)|[\w.]+\.OutOfResources)\b(?![^\n]*codegen error)[^\n]*[^\n:]$"
    r"(?!\n+(?:[ \t]|///|During handling|The above exception|loc\(|\[Convert|error:|[\"')]))"
    r"|^\s*///-+\[ERROR\]\[Triton\]\[END\]-*$"
    r"|^(?:.*\bcore dumped\b.*|Aborted|Segmentation fault|exit status \d+)$"
    r"|^(?:FAILED|PASSED|ERROR) \S+::.*$|^_{5,} .* _{5,}$",
    re.MULTILINE,
)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of a log.

    failure  its line is that of the file
    text     the lines that tell of it, normalised: all of its process's where the log tells of no other failure
    at       number of the cause's line in `text`, from 1
    streams  whose lines have it: ranks or processes; empty names left out
    times    how often it stands there
    cut      the log ends inside its cause
    """

    failure: Failure
    text: str
    at: int
    streams: tuple[str, ...]
    times: int
    cut: bool


class _Hit(NamedTuple):
    row: Recogniser
    match: re.Match[str]
    stream: Stream
    episode: int


def split(log: Log) -> list[Found]:
    """Every failure, in the order of the lines on which they are first told; none where nothing is recognised."""
    hits = [hit for stream in log.streams for hit in _hits(stream)]
    roots = [hit for hit in hits if not hit.row.passes_on]
    # Without a word of its own, what passes a failure on is all that there is: of all processes together, once.
    told = _first_of_each(roots) if roots else hits[:1] and [min(hits, key=_rank)]
    groups: dict[tuple[str, str], list[_Hit]] = {}
    for hit in told:
        groups.setdefault((hit.row.name, signature_of(hit.row, hit.match)), []).append(hit)
    made = [_found(group, hits, log, alone=len(groups) == 1) for group in groups.values()]
    return sorted(made, key=lambda found: found.failure.line)


def _rank(hit: _Hit) -> int:
    return TABLE.index(hit.row)


def _hits(stream: Stream) -> list[_Hit]:
    """Every match of a row in a stream; of two that share their cause's words the more telling one."""
    text, ends = stream.text, _ends_of(stream)
    taken: list[tuple[int, int]] = []  # spans of causes, in order; none of them overlaps another
    found = []
    for row in TABLE:
        free = [match for match in row.regex.finditer(text) if not _overlaps(match.span("cause"), taken)]
        found += [_Hit(row, match, stream, bisect_left(ends, match.start("cause"))) for match in free]
        taken = sorted([*taken, *(match.span("cause") for match in free)])
    return found


def _ends_of(stream: Stream) -> list[int]:
    """Where in a stream's text the words of a failure end."""
    return [match.end() for match in _ENDS.finditer(stream.text)]


def _overlaps(span: tuple[int, int], taken: list[tuple[int, int]]) -> bool:
    start, end = span
    at = bisect_left(taken, (start, end))
    return (at > 0 and taken[at - 1][1] > start) or (at < len(taken) and taken[at][0] < end)


def _first_of_each(roots: list[_Hit]) -> list[_Hit]:
    """The most telling one of each episode of each stream."""
    best: dict[tuple[str, int], _Hit] = {}
    for hit in roots:
        place = (hit.stream.name, hit.episode)
        if place not in best or _rank(hit) < _rank(best[place]):
            best[place] = hit
    return list(best.values())


def _found(group: list[_Hit], hits: list[_Hit], log: Log, alone: bool) -> Found:
    first = min(group, key=_number)
    stream = first.stream
    at, text, around = stream.index(first.match.start("cause")), stream.text, log.text
    if not alone:
        begin, end = _episode(first)
        around = text[begin:end]
        at -= stream.index(begin)
    also = [
        hit.row.name
        for hit in hits
        if hit.row is not first.row and (alone or (hit.stream is stream and hit.episode == first.episode))
    ]
    cut = not log.ended and first.match.end("cause") >= len(text.rstrip("\n"))
    failure = described(first.row, first.match, text, around, also, cut)
    stage = failure.stage if failure.stage != UNKNOWN else the_stage_of(log.text)
    return Found(
        failure=msgspec.structs.replace(failure, line=_number(first), stage=stage),
        text=text if alone else around,
        at=at + 1,
        streams=tuple(dict.fromkeys(hit.stream.name for hit in group if hit.stream.name)),
        times=len(group),
        cut=cut,
    )


def _number(hit: _Hit) -> int:
    """The cause's line in the file."""
    return hit.stream.lines[hit.stream.index(hit.match.start("cause"))].number


def _episode(hit: _Hit) -> tuple[int, int]:
    """Where the words of a failure begin and end in its stream."""
    ends = _ends_of(hit.stream)
    begin = ends[hit.episode - 1] if hit.episode else 0
    return begin, ends[hit.episode] if hit.episode < len(ends) else len(hit.stream.text)
