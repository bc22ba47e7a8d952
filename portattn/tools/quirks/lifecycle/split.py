"""The failures that a log tells of: each once, however many ranks print it and however often.

A log is read process by process. In each, the words of one failure stand together: the compiler's, then the words of
every wrapper that passes the exception on. An uncaught exception, or a death, ends the episode (Episodes).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import msgspec

from portattn.tools.quirks.lifecycle.formats.row import Recogniser
from portattn.tools.quirks.lifecycle.formats.table import TABLE
from portattn.tools.quirks.lifecycle.normalise import Line, Log, Stream
from portattn.tools.quirks.lifecycle.recognise import UNKNOWN, Failure, describe_failure, signature_of, the_stage_of

# The end of a failure's words: the last line of a traceback, the end of Ascend's report, a death, a test's result.
_ENDS = re.compile(
    r"^(?:[\w.]+(?:Error|Exception)|[\w.]+\.OutOfResources)\b(?![^\n]*codegen error)[^\n]*[^\n:]$"
    r"(?!\n+(?:[ \t]|///|During handling|The above exception|loc\(|\[Convert|error:|[\"')]))"
    r"|^\s*///-+\[ERROR\]\[Triton\]\[END\]-*$"
    r"|^(?:.*\bcore dumped\b.*|Aborted|Segmentation fault|exit status \d+)$"
    r"|^(?:FAILED|PASSED|ERROR) \S+::.*$",
    re.MULTILINE,
)
# Headings of pytest: of a test, with one underscore at least on either side, and of the parts of its report.
_TEST = re.compile(r"^_+ (?=[^\W_])[^\n]* _+$", re.MULTILINE)
_PART = re.compile(
    r"^=+ (?:FAILURES|ERRORS|PASSES|XFAILURES|XPASSES|warnings summary\b[^\n]*|short test summary info"
    r"|slowest [^\n]*|\d+ (?:failed|passed|error|skipped|deselected|xfailed|xpassed|warning)[^\n]*) =+$",
    re.MULTILINE,
)
_CAPTURED = re.compile(r"^-+ Captured [^\n]* -+$", re.MULTILINE)


class Episodes:
    """The episodes of a stream, counted from 0: each holds the words of one failure at most.

    A test fails once: pytest's text about its exception, and the output captured up to the next end, are one episode.
    """

    def __init__(self, stream: Stream) -> None:
        text = stream.text
        headings = [match.start() for match in _TEST.finditer(text)]
        borders = sorted([*headings, *(match.start() for match in _PART.finditer(text)), len(text)])
        # (begin, end) of pytest's text about each test, in order.
        self.tests = [(begin, borders[bisect_right(borders, begin)]) for begin in headings]
        told = [(begin, _reported(text, begin, end)) for begin, end in self.tests]
        ends = [match.end() for match in _ENDS.finditer(text) if not _holding(match.start(), told)]
        self._ends = sorted({*ends, *borders})
        self.stream = stream

    def of(self, at: int) -> int:
        """The episode that a place in the text is in."""
        return bisect_left(self._ends, at)

    def span(self, episode: int) -> tuple[int, int]:
        """Where it begins and ends in the text."""
        begin = self._ends[episode - 1] if episode else 0
        return begin, self._ends[episode] if episode < len(self._ends) else len(self.stream.text)

    def test(self, at: int) -> tuple[int, int] | None:
        """Where the report on a test begins and ends that a place in the text is in; None outside of one."""
        return _holding(at, self.tests)

    def heading(self, at: int) -> str:
        """The heading, with its line break, of the test that a place in the text is in; empty outside of one."""
        test, text = self.test(at), self.stream.text
        return text[test[0] : text.index("\n", test[0]) + 1] if test else ""

    def lines(self, begin: int, end: int) -> tuple[Line, ...]:
        """The lines that begin in a part of the text."""
        starts = self.stream.starts
        return self.stream.lines[bisect_left(starts, begin) : bisect_left(starts, end)]


def _reported(text: str, begin: int, end: int) -> int:
    """Return the place in a test's report at which its exception ends and its printed output begins."""
    captured = _CAPTURED.search(text, begin, end)
    return captured.start() if captured else end


def _holding(at: int, spans: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the span that holds a place. spans: in order, without overlaps."""
    index = bisect_right(spans, at, key=lambda span: span[0]) - 1
    return spans[index] if index >= 0 and at < spans[index][1] else None


class LoggedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One failure of a log.

    failure  its line is that of the file
    text     the lines that tell of it, normalised: all of its process's where the log tells of no other failure, and of
             no test
    test     heading of the test that pytest reports it of; empty where it is no test's
    rest     all lines of the log, whose words count where `text` says nothing; without those on other tests
    at       number of the cause's line in `text`, from 1
    streams  whose lines have it: ranks or processes; empty names left out
    times    how often it stands there
    cut      the log ends inside its cause
    """

    failure: Failure
    text: str
    test: str
    rest: str
    at: int
    streams: tuple[str, ...]
    times: int
    cut: bool


class _Hit(NamedTuple):
    row: Recogniser
    match: re.Match[str]
    episodes: Episodes
    episode: int

    @property
    def stream(self) -> Stream:
        return self.episodes.stream

    @property
    def start(self) -> int:
        """Where its cause begins in the stream's text."""
        return self.match.start("cause")


def split(log: Log) -> list[LoggedFailure]:
    """Every failure, in the order of the lines on which they are first told; none where nothing is recognised."""
    streams = [Episodes(stream) for stream in log.streams]
    hits = [hit for episodes in streams for hit in _hits(episodes)]
    roots = [hit for hit in hits if not hit.row.passes_on]
    # Without a word of its own, what passes a failure on is all that there is: of all processes together, once.
    told = _first_of_each(roots) if roots else hits[:1] and [min(hits, key=_rank)]
    groups: dict[tuple[str, str], list[_Hit]] = {}
    for hit in told:
        groups.setdefault((hit.row.name, signature_of(hit.row, hit.match)), []).append(hit)
    made = [_found(group, told, hits, streams, log) for group in groups.values()]
    return sorted(made, key=lambda found: found.failure.line)


def _rank(hit: _Hit) -> int:
    return TABLE.index(hit.row)


def _hits(episodes: Episodes) -> list[_Hit]:
    """Every match of a row in a stream; of two that share their cause's words the more telling one."""
    text = episodes.stream.text
    taken: list[tuple[int, int]] = []  # spans of causes, in order; none of them overlaps another
    found = []
    for row in TABLE:
        free = [match for match in row.regex.finditer(text) if not _overlaps(match.span("cause"), taken)]
        found += [_Hit(row, match, episodes, episodes.of(match.start("cause"))) for match in free]
        taken = sorted([*taken, *(match.span("cause") for match in free)])
    return found


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


def _found(group: list[_Hit], told: list[_Hit], hits: list[_Hit], streams: list[Episodes], log: Log) -> LoggedFailure:
    first = min(group, key=_number)
    stream, test = first.stream, first.episodes.heading(first.start)
    alone = len(told) == len(group) and not test
    at, text, around = stream.index(first.start), stream.text, log.text
    if not alone:
        begin, end = first.episodes.span(first.episode)
        at -= stream.index(begin)
        around = text[begin:end]
        if test and not around.startswith(test):  # a later one of the failures that a test has printed
            around, at = test + around, at + 1
    also = [
        hit.row.name
        for hit in hits
        if hit.row is not first.row and (alone or (hit.stream is stream and hit.episode == first.episode))
    ]
    cut = not log.ended and first.match.end("cause") >= len(text.rstrip("\n"))
    failure = describe_failure(first.row, first.match, text, around, also, cut)
    elsewhere = _of_other_tests(first, streams)
    own = set(map(id, group))
    others = [line for hit in told if id(hit) not in own for line in _lines(hit)]
    stage = failure.stage if failure.stage != UNKNOWN else the_stage_of(_without(log, [*elsewhere, *others]))
    return LoggedFailure(
        failure=msgspec.structs.replace(failure, line=_number(first), stage=stage),
        text=text if alone else around,
        test=test.rstrip("\n"),
        rest=_without(log, elsewhere),
        at=at + 1,
        streams=tuple(dict.fromkeys(hit.stream.name for hit in group if hit.stream.name)),
        times=len(group),
        cut=cut,
    )


def _number(hit: _Hit) -> int:
    """The cause's line in the file."""
    return hit.stream.lines[hit.stream.index(hit.start)].number


def _of_other_tests(hit: _Hit, streams: list[Episodes]) -> list[Line]:
    """What pytest says of other tests than the one that a failure is of."""
    own = hit.episodes.test(hit.start)
    if own is None:
        return []
    spans = [(one, span) for one in streams for span in one.tests if (one, span) != (hit.episodes, own)]
    return [line for one, span in spans for line in one.lines(*span)]


def _lines(hit: _Hit) -> tuple[Line, ...]:
    """The lines of a failure's episode."""
    return hit.episodes.lines(*hit.episodes.span(hit.episode))


def _without(log: Log, lines: list[Line]) -> str:
    """The text of a log without some of its lines."""
    left_out = set(lines)
    return "".join(f"{line.text}\n" for line in log.lines if line not in left_out) if lines else log.text
