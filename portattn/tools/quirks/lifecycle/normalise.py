"""A log as the compiler wrote it: without colours, without what others put before its lines, ranks apart."""

from __future__ import annotations

import codecs
import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property

import msgspec


class Prefix(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One form of a prefix.

    on_every_line  the form is so plain that it counts only where nearly all lines of a log have it
    """

    name: str
    pattern: str
    source: str
    on_every_line: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


_DAY = r"\d{4}-\d\d-\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_SHARD = r"(?:TP|DP|PP|EP)\d+"
_LEVEL = r"(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)"

# The longer forms first. They are taken away one after the other, as long as one matches.
PREFIXES: tuple[Prefix, ...] = (
    Prefix(
        name="journal, ISO time",
        pattern=rf"{_DAY}T{_CLOCK}(?:Z|[+-]\d\d:?\d\d) \S+ [\w.@/-]+\[(?P<stream>\d+)\]: ?",
        source="journalctl -o short-iso",
    ),
    Prefix(
        name="RFC 3339 time",
        pattern=rf"{_DAY}T{_CLOCK}(?:Z|[+-]\d\d:?\d\d)(?: std(?:out|err) (?P<part>[FP]))?(?: |$)",
        source="docker logs -t, kubectl logs --timestamps, Kubernetes' log files, GitHub Actions",
    ),
    Prefix(
        name="journal",
        pattern=rf"[A-Z][a-z]{{2}} [ \d]\d {_CLOCK} \S+ [\w.@/-]+\[(?P<stream>\d+)\]: ?",
        source="journalctl, syslog",
    ),
    Prefix(
        name="process",
        pattern=r"\([A-Za-z_][^\n]{0,120}?\bpid=(?P<stream>\d+)(?:, ip=[\d.:a-f]+)?\)(?: |$)",
        source="Ray (ray-project/ray#52377), vLLM (vllm-project/vllm-ascend#8037)",
    ),
    Prefix(
        name="rank",
        pattern=r"\[(?:rank|default|local_rank|Rank )(?P<stream>\d+)\]:(?: |(?=\S)|$)",
        source="torchrun, torch's own exceptions (huggingface/nanoVLM#61, mlcommons/training#826)",
    ),
    Prefix(name="MPI", pattern=r"\[\d+,(?P<stream>\d+)\]<std(?:out|err)>:", source="mpirun --tag-output"),
    Prefix(name="pod", pattern=r"\[pod/[\w.-]+/(?P<stream>[\w.-]+)\] ?", source="kubectl logs --prefix"),
    Prefix(name="step", pattern=r"\d{4}-steps/(?P<stream>\d+)(?: |$)", source="mlcommons/training#826"),
    Prefix(
        name="vLLM's logger",
        pattern=rf"{_LEVEL} +\d\d-\d\d {_CLOCK} \[?[\w./]+:\d+\](?: |$)",
        source="vllm-project/vllm#12498, vllm-project/vllm-ascend#8037",
    ),
    Prefix(
        name="glog",
        pattern=r"[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [^\]\n]{1,200}\](?: \[\d+/\d+(?:_\d+)?\])?(?: |$)",
        source="torch's compiler: huggingface/nanoVLM#61, karpathy/nanochat#502",
    ),
    Prefix(
        name="Ray's logger",
        pattern=rf"\[{_DAY} {_CLOCK} [EWIF] \d+ \d+\] [\w.]+:\d+: ?",
        source="LiveCodeBench/LiveCodeBench#14",
    ),
    Prefix(
        name="time in brackets",
        pattern=rf"\[{_DAY} {_CLOCK}(?: (?P<stream>{_SHARD}(?: {_SHARD})*))?\](?: {_LEVEL}:?)?(?: |$)",
        source="SGLang's logger",
    ),
    Prefix(
        name="clock in brackets",
        pattern=rf"\[{_CLOCK}\](?: \w+/{_LEVEL}(?: |$))?(?: |$)",
        source="FlashML-org/FreeToken#246",
    ),
    Prefix(
        name="Python's logging",
        pattern=rf"{_DAY} {_CLOCK} - (?:[\w.]+ - )?{_LEVEL} -(?: [\w.]+:\d+ -)?(?: |$)",
        source="logging.basicConfig, InternLM/lmdeploy#3410",
    ),
    Prefix(name="pytest", pattern=r"E(?: {3}|$)", source="pytest; flagos-ai/FlagTree#304"),
    Prefix(
        name="Slurm",
        pattern=r" *(?P<stream>\d{1,5}):(?: |$)",
        source="srun --label",
        on_every_line=True,
    ),
    Prefix(
        name="compose",
        pattern=r"(?P<stream>[\w.-]+?-\d+) +\|(?: |$)",
        source="docker compose logs",
        on_every_line=True,
    ),
    Prefix(name="quotation", pattern=r">(?: |$)", source="a report that was answered by mail", on_every_line=True),
)
# What is put behind a line: by Ray for lines that it leaves out (ray-project/ray#53825), by vLLM behind an exception
# that it quotes (vllm-project/vllm#17581).
SUFFIX = re.compile(r" \[repeated \d+x across cluster\]$|', please check the stack trace above for the root cause$")


# Of a terminal: colours and titles. Copied from a page, a colour has lost its first character.
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|[\x00-\x08\x0e-\x1a\x7f]"
    r"|\[(?:0|1|[39]\d(?:;\d{1,3})*|0?1;3\d|4\d)?m"
)
_NEARLY_ALL = 0.9  # of a log's lines, before a plain prefix is taken for one
_FEW = 3  # lines, of which none says what a log looks like
_MOST_PREFIXES = 8  # of one line
# An exception in the words of repr(): its line breaks are two characters.
_QUOTED = re.compile(r"(?:CompilationError|OutOfResources)\((['\"])at \d+:\d+:\\n")
_END_OF_REPR = re.compile(r"['\"]\)>?\s*$")
_JSON_FILE = re.compile(r'\{"log":".*\}\s*$')
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class _Stored(msgspec.Struct, frozen=True):
    """A line in a file of Docker's json-file driver, without what else the driver says of it."""

    log: str


class Line(msgspec.Struct, frozen=True):
    """A line. number: in the file, from 1; stream: whose it is, empty where nothing says."""

    number: int
    text: str
    stream: str = ""


class Stream(msgspec.Struct, frozen=True, dict=True):
    """The lines of one process, in order."""

    name: str
    lines: tuple[Line, ...]

    @cached_property
    def text(self) -> str:
        return "".join(f"{line.text}\n" for line in self.lines)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where in the text each line begins."""
        return tuple(itertools.accumulate((len(line.text) + 1 for line in self.lines[:-1]), initial=0))

    def index(self, at: int) -> int:
        """The line, from 0, that a place in the text is on."""
        return bisect_right(self.starts, at) - 1


class Log(msgspec.Struct, frozen=True, dict=True):
    """A whole log. ended: whether its last line is a whole one, as far as a line break tells."""

    lines: tuple[Line, ...]
    ended: bool = True

    @cached_property
    def text(self) -> str:
        return "".join(f"{line.text}\n" for line in self.lines)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """Lines of each process for themselves: what no process is named for comes first."""
        found: dict[str, list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.stream, []).append(line)
        return tuple(Stream(name, tuple(found[name])) for name in sorted(found, key=lambda name: name != ""))


def decode_text(data: bytes) -> str:
    """A file's text: UTF-8, or what its first bytes say (PowerShell writes UTF-16)."""
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), "utf-8")
    return data.decode(encoding, errors="replace")


def normalise(text: str) -> Log:
    """Take away what is not the compiler's. Every line keeps its number in the file."""
    lines = [
        Line(number, _ESCAPES.sub("", part))
        for number, stored in enumerate(text.split("\n"), 1)
        for whole in [_of_a_file_driver(stored)]
        for part in (whole.rstrip("\r").split("\r") if "\r" in whole else [whole])
    ]
    ended = text.endswith("\n") or not text
    if lines and not lines[-1].text:
        lines.pop()
    for _ in range(2):  # a collector's time before a launcher's rank, or the other way round
        for prefix in PREFIXES:
            if prefix.on_every_line and _has_nearly_all(lines, prefix):
                lines = [_without(line, prefix) or line for line in lines]
        lines = _joined([_stripped(line) for line in lines])
    return Log(tuple(Line(n.number, n.text.rstrip(), n.stream) for n in _unquoted(lines)), ended)


def _of_a_file_driver(line: str) -> str:
    """The line that Docker's json-file driver stored as JSON; any other line as it is."""
    if not _JSON_FILE.match(line):
        return line
    try:
        return msgspec.json.decode(line, type=_Stored).log.removesuffix("\n")
    except (msgspec.DecodeError, RecursionError):  # cut off, or another program's
        return line


def _has_nearly_all(lines: list[Line], prefix: Prefix) -> bool:
    said = [line for line in lines if line.text.strip()]
    return len(said) >= _FEW and sum(prefix.regex.match(line.text) is not None for line in said) >= _NEARLY_ALL * len(
        said
    )


class _Part(Line, frozen=True):
    """A line that a collector has cut: the next one of its stream goes on with it."""


def _without(line: Line, prefix: Prefix) -> Line | None:
    match = prefix.regex.match(line.text)
    if match is None:
        return None
    said = match.groupdict()
    names = [name for name in (*line.stream.split("/"), said.get("stream") or "") if name]
    kind = _Part if said.get("part") == "P" else type(line)
    return kind(line.number, line.text[match.end() :], "/".join(dict.fromkeys(names)))


def _stripped(line: Line) -> Line:
    """A line without the prefixes that are plain enough to be known alone."""
    for _ in range(_MOST_PREFIXES):
        found = next((made for p in PREFIXES if not p.on_every_line and (made := _without(line, p))), None)
        if found is None:
            break
        line = found
    text = SUFFIX.sub("", line.text)
    return line if text == line.text else Line(line.number, text, line.stream)


def _joined(lines: Iterable[Line]) -> list[Line]:
    """Lines that a collector cut in parts (Kubernetes' `P`), whole again."""
    made: list[Line] = []
    open_: dict[str, int] = {}
    for line in lines:
        before = open_.pop(line.stream, None)
        if before is not None:
            made[before] = Line(made[before].number, made[before].text + line.text, line.stream)
        else:
            before = len(made)
            made.append(Line(line.number, line.text, line.stream))
        if isinstance(line, _Part):
            open_[line.stream] = before
    return made


def _unquoted(lines: Iterable[Line]) -> Iterable[Line]:
    for line in lines:
        if _QUOTED.search(line.text):
            for part in _END_OF_REPR.sub("", line.text).split("\\n"):
                yield Line(line.number, part, line.stream)
        else:
            yield line
