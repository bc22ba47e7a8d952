"""Where in a process's text the words of one failure begin and end, and which test of a pytest report they are of."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right

from portattn.tools.quirks.lifecycle.normalise import Line, Stream

# What ends a failure's words: the last line of a traceback, the end of Ascend's report, a death, a test's result.
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

    A test fails once: what pytest shows of its exception, and what was captured up to the next end, are one episode.
    """

    def __init__(self, stream: Stream) -> None:
        text = stream.text
        headings = [match.start() for match in _TEST.finditer(text)]
        borders = sorted([*headings, *(match.start() for match in _PART.finditer(text)), len(text)])
        # (begin, end) of what pytest says of each test, in order.
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
    """Where the report on a test goes over from its exception to what the test had printed."""
    captured = _CAPTURED.search(text, begin, end)
    return captured.start() if captured else end


def _holding(at: int, spans: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The one of some spans in order, none of which overlaps another, that holds a place."""
    index = bisect_right(spans, at, key=lambda span: span[0]) - 1
    return spans[index] if index >= 0 and at < spans[index][1] else None
