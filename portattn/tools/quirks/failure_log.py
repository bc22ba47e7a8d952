"""Read a log: remove colours and prefixes, separate processes, and cut each process's lines into episodes.

patterns.toml has the texts as data: prefixes, failures, stages, chips, versions and functions."""

import codecs
import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from portattn.schema import toml_reader
from portattn.schema.quirk import Symptom

PATTERNS = Path(__file__).with_name("patterns.toml")


class _Pattern(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    name: str
    pattern: str
    source: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE)


class Prefix(_Pattern, frozen=True, kw_only=True):
    on_every_line: bool = False


class Recogniser(_Pattern, frozen=True, kw_only=True):
    """One kind of failure; patterns.toml describes the fields."""

    family: str
    symptom: Symptom
    stage: str = ""
    signature: str = ""
    passes_on: bool = False
    not_a_bug: str = ""
    beside: str = ""


class Patterns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of patterns.toml, with its fragments inserted."""

    fragments: dict[str, str]
    chips: tuple[str, ...]
    functions: tuple[str, ...]
    stages: tuple[tuple[str, str], ...]
    variable: tuple[tuple[str, str], ...]
    any_failure: tuple[str, ...]
    foreign: dict[str, tuple[str, ...]]
    versions: dict[str, tuple[str, ...]]
    switches: tuple[str, ...]
    symptoms: dict[Symptom, dict[str, str]]
    trackers: dict[str, str]
    moved: dict[str, str]
    prefix: tuple[Prefix, ...]
    failure: tuple[Recogniser, ...]


@functools.cache
def patterns() -> Patterns:
    """Return the patterns. Raises DataError (file, line, key) if the file departs from its schema."""
    data, text = toml_reader.read(PATTERNS)
    fragments = data["fragments"]

    def insert(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"\{([A-Z]+)\}", lambda match: fragments[match[1]], value)
        if isinstance(value, list):
            return [insert(one) for one in value]
        return {name: insert(one) for name, one in value.items()} if isinstance(value, dict) else value

    for row in data["failure"]:
        row.update({key: "".join(row[key]) for key in ("pattern", "beside") if key in row})
    return toml_reader.convert(insert(data), Patterns, PATTERNS, text)


# Text behind a line: Ray's for lines that it leaves out (ray-project/ray#53825), vLLM's behind an exception that it
# quotes (vllm-project/vllm#17581).
_SUFFIX = re.compile(r" \[repeated \d+x across cluster\]$|', please check the stack trace above for the root cause$")
# Of a terminal: colours and titles. Copied from a page, a colour has lost its first character.
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|[\x00-\x08\x0e-\x1a\x7f]"
    r"|\[(?:0|1|[39]\d(?:;\d{1,3})*|0?1;3\d|4\d)m|(?<!\w)\[m(?!\w)"
)
_NEARLY_ALL = 0.9  # of a log's lines, before a plain prefix is taken for one
_FEW = 3  # lines, too few to tell whether all lines of a log have a prefix
_MOST_PREFIXES = 8  # of one line
_LONGEST_LINE = 2**15  # characters
# An exception in the words of repr(): its line breaks are two characters.
_QUOTED = re.compile(r"(?:Error|Exception|OutOfResources)\(['\"]")
_QUOTED_BREAK = re.compile(r"(?<!\\)\\n")
_END_OF_REPR = re.compile(r"['\"]\)>?\s*$")
_ASSERTING = re.compile(r"\w\.(?:cpp|h|cc|inc):\d+:")
_MOST_WRAPPED = 6  # lines that follow the first of an assertion
_JSON_FILE = re.compile(r'\{"log":".*\}\s*$')
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


class _Stored(msgspec.Struct, frozen=True):
    log: str


class Line(msgspec.Struct, frozen=True):
    """A line. number: in the file, from 1; stream: its process, or "" if unknown; goes_on: a collector has cut it."""

    number: int
    text: str
    stream: str = ""
    goes_on: bool = False


class Stream(msgspec.Struct, frozen=True, dict=True):
    """The lines of one process, or of a whole log. ended: the last line ends with a line break."""

    name: str
    lines: tuple[Line, ...]
    ended: bool = True

    @cached_property
    def text(self) -> str:
        return "".join(f"{line.text}\n" for line in self.lines)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((len(line.text) + 1 for line in self.lines[:-1]), initial=0))

    def index(self, at: int) -> int:
        return bisect_right(self.starts, at) - 1

    @cached_property
    def streams(self) -> "tuple[Stream, ...]":
        """Return the lines of each process; the lines without a process come first."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.stream, []).append(line)
        return tuple(Stream(name, tuple(found[name])) for name in sorted(found, key=lambda name: name != ""))


def decode_text(data: bytes) -> str:
    """Decode a file's bytes: UTF-8, or by its byte order mark (PowerShell writes UTF-16)."""
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), "utf-8")
    return data.decode(encoding, errors="replace")


def normalise(text: str) -> Stream:
    """Return a log's lines with the compiler's own words alone; every line keeps its number in the file."""
    lines = [
        Line(number, _ESCAPES.sub("", part))
        for number, stored in enumerate(text.split("\n"), 1)
        for whole in [_of_a_file_driver(stored)]
        for part in (whole.rstrip("\r").split("\r") if "\r" in whole else [whole])
    ]
    if lines and not lines[-1].text:
        lines.pop()
    for _ in range(2):  # a collector's time before a launcher's rank, or the other way round
        for prefix in patterns().prefix:
            if prefix.on_every_line and _has_nearly_all(lines, prefix):
                lines = [_without(line, prefix) or line for line in lines]
        lines = _joined([_stripped(line) for line in lines])
    parts = [(line, _limited(part.rstrip())) for line in lines for part in _unquoted(line.text)]
    unquoted = [Line(line.number, part, line.stream) for line, part in parts]
    return Stream("", tuple(_unwrapped(unquoted)), ended=text.endswith("\n") or not text)


def _of_a_file_driver(line: str) -> str:
    if not _JSON_FILE.match(line):
        return line
    try:
        return msgspec.json.decode(line, type=_Stored).log.removesuffix("\n")
    except (msgspec.DecodeError, RecursionError):  # cut off, or another program's
        return line


def _has_nearly_all(lines: list[Line], prefix: Prefix) -> bool:
    said = [line.text for line in lines if line.text.strip() and not line.text.startswith("# ")]  # a report's title
    return len(said) >= _FEW and sum(map(bool, map(prefix.regex.match, said))) >= _NEARLY_ALL * len(said)


def _without(line: Line, prefix: Prefix) -> Line | None:
    match = prefix.regex.match(line.text)
    if match is None:
        return None
    said = match.groupdict()
    names = [name for name in (*line.stream.split("/"), said.get("stream") or "") if name]
    goes_on = line.goes_on or said.get("part") == "P"
    return Line(line.number, line.text[match.end() :], "/".join(dict.fromkeys(names)), goes_on)


def _stripped(line: Line) -> Line:
    for _ in range(_MOST_PREFIXES if line.text else 0):
        tried = (_without(line, prefix) for prefix in patterns().prefix if not prefix.on_every_line)
        found = next(filter(None, tried), None)
        if found is None:
            break
        line = found
    return msgspec.structs.replace(line, text=_SUFFIX.sub("", line.text))


def _joined(lines: Iterable[Line]) -> list[Line]:
    made: list[Line] = []
    open_: dict[str, int] = {}
    for line in lines:
        before = open_.pop(line.stream, None)
        if before is not None:
            made[before] = Line(made[before].number, made[before].text + line.text, line.stream)
        else:
            before = len(made)
            made.append(Line(line.number, line.text, line.stream))
        if line.goes_on:
            open_[line.stream] = before
    return made


def _unquoted(text: str) -> list[str]:
    quoted = _QUOTED.search(text)  # the first one: a search for both at once takes a time that grows with the square
    broken = quoted and _QUOTED_BREAK.search(text, quoted.end())
    return _QUOTED_BREAK.split(_END_OF_REPR.sub("", text)) if broken else [text]


def _limited(text: str) -> str:
    """Return a line without the middle of a long one: most patterns are searched at each of its characters."""
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE // 2]} … {text[-_LONGEST_LINE // 2 :]}"


def _unwrapped(lines: list[Line]) -> Iterator[Line]:
    """Yield the lines, with each assertion that a terminal or a page has wrapped as one line again."""
    at = 0
    while at < len(lines):
        line, end = lines[at], at + 1
        if _ASSERTING.search(line.text) and "' failed" not in line.text:
            rest = lines[at + 1 : at + 1 + _MOST_WRAPPED]
            others = (n for n, one in enumerate(rest) if one.stream != line.stream or _ASSERTING.search(one.text))
            rest = rest[: next(others, len(rest))]
            wholes = itertools.accumulate((one.text.strip() for one in (line, *rest)), _rejoined)
            last, whole = next(((n, text) for n, text in enumerate(wholes) if "' failed" in text), (0, ""))
            if "Assertion `" in whole or "Assertion '" in whole:
                line, end = Line(line.number, whole, line.stream), at + last + 1
        yield line
        at = end


def _rejoined(text: str, rest: str) -> str:
    # A terminal cuts a name of C++ in two; between two words of a message is a blank.
    cut = text[-1:].isalnum() and rest[:1].isalnum() and text.count('"') % 2 == 0
    return text + ("" if cut else " ") + rest


# The end of a failure's words: the last line of a traceback, the end of Ascend's report, a death, a test's result.
_ENDS = re.compile(
    r"^(?:[\w.]+(?:Error|Exception)|[\w.]+\.OutOfResources)\b(?![^\n]*codegen error)[^\n]*[^\n:]$"
    r"(?!\n+(?:[ \t]|///|During handling|The above exception|loc\(|\[Convert|error:|[\"')]))"
    r"|^[^\S\n]*///-+\[ERROR\]\[Triton\]\[END\]-*$"
    r"|^(?:.*\bcore dumped\b.*|Aborted|Segmentation fault|exit status \d+)$"
    r"|^.*(?:Assertion [`'].*' failed\.?|UNREACHABLE executed at .*|LLVM ERROR: (?!Cannot select: (?:0x|t\d)).*)"
    r"(?:\nPipeline failed while .*)?$"
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
    """Episodes of a stream, from 0, each of at most one failure: pytest's report and captured output are one."""

    def __init__(self, stream: Stream) -> None:
        text = stream.text
        headings = [match.start() for match in _TEST.finditer(text)]
        borders = sorted([*headings, *(match.start() for match in _PART.finditer(text)), len(text)])
        # (begin, end) of pytest's text about each test, in order.
        self.tests = [(begin, borders[bisect_right(borders, begin)]) for begin in headings]
        reports = [(begin, _end_of_report(text, begin, end)) for begin, end in self.tests]
        ends = [match.end() for match in _ENDS.finditer(text) if not _holding(match.start(), reports)]
        self._ends = sorted({*ends, *borders})
        self.stream = stream

    def of(self, at: int) -> int:
        return bisect_left(self._ends, at)

    def span(self, episode: int) -> tuple[int, int]:
        begin = self._ends[episode - 1] if episode else 0
        return begin, self._ends[episode] if episode < len(self._ends) else len(self.stream.text)

    def test(self, at: int) -> tuple[int, int] | None:
        return _holding(at, self.tests)

    def heading(self, at: int) -> str:
        test, text = self.test(at), self.stream.text
        return text[test[0] : text.index("\n", test[0]) + 1] if test else ""

    def lines(self, begin: int, end: int) -> tuple[Line, ...]:
        starts = self.stream.starts
        return self.stream.lines[bisect_left(starts, begin) : bisect_left(starts, end)]


def _end_of_report(text: str, begin: int, end: int) -> int:
    captured = _CAPTURED.search(text, begin, end)
    return captured.start() if captured else end


def _holding(at: int, spans: list[tuple[int, int]]) -> tuple[int, int] | None:
    index = bisect_right(spans, at, key=lambda span: span[0]) - 1
    return spans[index] if index >= 0 and at < spans[index][1] else None
