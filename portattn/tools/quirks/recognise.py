"""Recognise the failures in a log, each once, and the environment (chip, compiler, kernel) that the log names."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from packaging.version import Version

from portattn.planning import target_names
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry
from portattn.schema import compilers
from portattn.schema.quirk import Symptom
from portattn.schema.target import Arch
from portattn.tools.quirks.failure_log import Episodes, Line, Recogniser, Stream, patterns

# portattn's own message, as in an incident: "timeout at ttgir: no answer in 120 s".
_OWN_WORDS = re.compile(r"^[\w. ]+ at (parse|ttir|ttgir|llir|ptx|cubin|amdgcn|hsaco|ttadapter|load): ", re.MULTILINE)
UNKNOWN = "unknown"
_CRASHED = re.compile(
    r"SIGSEGV|SIGABRT|Segmentation fault|^Aborted|\bAborted +\(core dumped\)|IOT instruction|LLVM ERROR|Assertion [`']"
    r"|UNREACHABLE executed|exit ?(?:status|code)\s*[:=]?\s*(?:134|139|-6|-11)\b|died of signal|core dumped",
    re.MULTILINE,
)
_RAISED = re.compile(r"^\S*(?:Error|Exception)\b", re.MULTILINE)  # behind a traceback's title


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    kind: str  # name of the row in patterns.toml; `also` are the other rows that the text holds
    family: str
    stage: str
    symptom: Symptom
    cause: str
    line: int  # number of the cause's line, from 1
    signature: str  # regular expression; empty for a hang, which has no text of its own
    not_a_bug: str = ""  # why it is not drafted: the remedy, if it is no compiler's failure, or the lacking option
    also: tuple[str, ...] = ()


class LoggedFailure(msgspec.Struct, frozen=True, kw_only=True):
    failure: Failure  # with its line number in the file
    text: str  # its lines, normalised: all of its process's if the log has no other failure and no test
    test: str  # heading of the test that pytest reports it of, or ""
    rest: str  # all lines of the log but other tests', used if `text` says nothing
    at: int  # number of the cause's line in `text`, from 1
    streams: tuple[str, ...]  # ranks or processes whose lines have it; empty names left out
    times: int  # how often it occurs
    cut: bool  # the log ends inside the cause


class _Match(NamedTuple):
    rank: int  # of the row in patterns.toml
    row: Recogniser
    match: re.Match[str]


def _matches(text: str) -> list[_Match]:
    """Return every match of a row, the most specific first; of two with overlapping causes the more specific one."""
    taken: list[tuple[int, int]] = []  # spans of causes, in order; none of them overlaps another
    found = []
    for rank, row in enumerate(patterns().failure):
        found_here = row.regex.finditer(text) if re.search(row.beside, text) else ()
        free = [match for match in found_here if not _overlaps(match.span("cause"), taken)]
        found += [_Match(rank, row, match) for match in free]
        taken = sorted([*taken, *(match.span("cause") for match in free)])
    return found


def _overlaps(span: tuple[int, int], taken: list[tuple[int, int]]) -> bool:
    start, end = span
    at = bisect_left(taken, (start, end))
    return (at > 0 and taken[at - 1][1] > start) or (at < len(taken) and taken[at][0] < end)


def recognise(text: str) -> Failure | None:
    """Return the most specific failure of a text; None without one."""
    found = _matches(text)
    best = next((one for one in found if not one.row.passes_on), found[0] if found else None)
    return _describe(best, text, text, [one.row.name for one in found]) if best else None


def _describe(found: _Match, text: str, around: str, names: Iterable[str], cut: bool = False) -> Failure:
    """Return the failure of a match in `text`; `around` tells stage and symptom, `names` are the rows found there."""
    _, row, match = found
    parts = match.groupdict()
    # An assertion's line holds a whole C++ signature: the file and the condition say what it is.
    shown = f"{parts['file']}: {parts['said']}" if "said" in parts else match["cause"]
    # A compiler that printed an error and then died has crashed its caller.
    traced = around.find("Traceback (most recent call last)")
    died = _CRASHED.search(around) is not None and (traced < 0 or _RAISED.search(around, traced) is None)
    return Failure(
        kind=row.name, family=row.family, stage=row.stage or stage_of(around),
        symptom="compiler-crash" if row.symptom == "compile-error" and died else row.symptom,
        cause=" ".join(shown.split()), line=text.count("\n", 0, match.start("cause")) + 1,
        signature=_signature(row, match, cut), not_a_bug=row.not_a_bug,
        also=tuple(name for name in dict.fromkeys(names) if name != row.name),
    )  # fmt: skip


def stage_of(text: str) -> str:
    """Return the compiler stage in which a text was printed, in incidents' terms, or "unknown"."""
    own = _OWN_WORDS.search(text)
    return own[1] if own else next(_stages(text), UNKNOWN)


def _stages(text: str) -> Iterator[str]:
    return (stage for stage, pattern in patterns().stages if re.search(pattern, text))


def _signature(row: Recogniser, match: re.Match[str], cut: bool = False) -> str:
    """Return the regular expression that finds a failure again; empty for a hang, which has no text of its own."""
    if row.symptom == "hang":
        return ""
    text = match.group()
    made = re.sub(r"<(\w+)>", lambda group: generalise(match[group[1]]), row.signature or "<cause>")
    if cut and not (row.signature and re.search(made, text)):
        made = generalise(match["cause"].strip().rpartition(" ")[0] or match["cause"])
    # A signature that does not match its own log would never be found again.
    return made if re.search(made, text) else re.escape(match["cause"][:80])


_LONGEST = 180  # characters of a cause that go into a signature: its end is often a whole type or a list of users
_PLAIN = "-#&~"  # escaped by re.escape for the verbose mode, or inside brackets, alone


def generalise(cause: str) -> str:
    """Return a regular expression that matches the line, whatever its SSA names, addresses, folders, sizes, shapes."""
    text = cause.strip()
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rpartition(" ")[0] or text[:_LONGEST]
    parts, at, variable = [], 0, patterns().variable
    for match in re.finditer("|".join(f"({found})" for found, _ in variable), text):
        parts += [_escape(text[at : match.start()]), variable[(match.lastindex or 1) - 1][1]]
        at = match.end()
    return "".join([*parts, _escape(text[at:])])


def _escape(text: str) -> str:
    made = "".join(char if char in _PLAIN or char.isspace() else re.escape(char) for char in text)
    return re.sub(r"\s+", lambda blanks: " " if blanks[0] == " " else r"\s+", made)


class _Hit(NamedTuple):
    found: _Match
    episodes: Episodes
    episode: int

    @property
    def stream(self) -> Stream:
        return self.episodes.stream

    @property
    def start(self) -> int:
        return self.found.match.start("cause")

    @property
    def number(self) -> int:
        return self.stream.lines[self.stream.index(self.start)].number


def split(log: Stream) -> list[LoggedFailure]:
    """Return the failures of a log, in order: of each episode the most specific one, equal ones together."""
    streams = [Episodes(stream) for stream in log.streams]
    hits = [
        _Hit(found, episodes, episodes.of(found.match.start("cause")))
        for episodes in streams
        for found in _matches(episodes.stream.text)
    ]
    best: dict[tuple[str, int], _Hit] = {}
    for hit in sorted((hit for hit in hits if not hit.found.row.passes_on), key=lambda hit: hit.found.rank):
        best.setdefault((hit.stream.name, hit.episode), hit)
    # Without a word of its own, what passes a failure on is all that there is: of all processes together, once.
    causes = list(best.values()) or sorted(hits, key=lambda hit: hit.found.rank)[:1]
    groups: dict[tuple[str, str], list[_Hit]] = {}
    for hit in causes:
        groups.setdefault((hit.found.row.name, _signature(hit.found.row, hit.found.match)), []).append(hit)
    made = [_logged(group, causes, hits, streams, log) for group in groups.values()]
    return sorted(made, key=lambda found: found.failure.line)


def _logged(
    group: list[_Hit], causes: list[_Hit], hits: list[_Hit], streams: list[Episodes], log: Stream
) -> LoggedFailure:
    first = min(group, key=lambda hit: hit.number)
    stream, test = first.stream, first.episodes.heading(first.start)
    alone = len(causes) == len(group) and not test
    at, text, around = stream.index(first.start), stream.text, log.text
    if not alone:
        begin, end = first.episodes.span(first.episode)
        at -= stream.index(begin)
        around = text[begin:end]
        if test and not around.startswith(test):  # a later one of the failures that a test has printed
            around, at = test + around, at + 1
    names = [hit.found.row.name for hit in hits if alone or (hit.stream is stream and hit.episode == first.episode)]
    cut = not log.ended and first.found.match.end("cause") >= len(text.rstrip("\n"))
    failure = _describe(first.found, text, around, names, cut)
    elsewhere = _of_other_tests(first, streams)
    if failure.stage == UNKNOWN:  # the one stage that the log names beside other failures
        own = set(map(id, group))
        others = [line for hit in causes if id(hit) not in own for line in _lines(hit)]
        named = set(_stages(_without(log, [*elsewhere, *others])))
        failure = msgspec.structs.replace(failure, stage=named.pop() if len(named) == 1 else UNKNOWN)
    return LoggedFailure(
        failure=msgspec.structs.replace(failure, line=first.number), text=text if alone else around,
        test=test.rstrip("\n"), rest=_without(log, elsewhere), at=at + 1,
        streams=tuple(dict.fromkeys(hit.stream.name for hit in group if hit.stream.name)), times=len(group), cut=cut,
    )  # fmt: skip


def _of_other_tests(hit: _Hit, streams: list[Episodes]) -> list[Line]:
    own = hit.episodes.test(hit.start)
    if own is None:
        return []
    spans = [(one, span) for one in streams for span in one.tests if (one, span) != (hit.episodes, own)]
    return [line for one, span in spans for line in one.lines(*span)]


def _lines(hit: _Hit) -> tuple[Line, ...]:
    return hit.episodes.lines(*hit.episodes.span(hit.episode))


def _without(log: Stream, lines: list[Line]) -> str:
    left_out = set(lines)
    return "".join(f"{line.text}\n" for line in log.lines if line not in left_out) if lines else log.text


# ---- the environment

# What a text says of the chip that something takes, and that this one may not be: "requires .target sm_100 or higher".
_WANTED = re.compile(
    r"(?:\b(?:requir\w*|needs?|at least|instead of|works?|only|unlike|not on|older)\b"
    r"|(?<!not )(?<!not being )(?<!n't )\bsupported\b)"
    r"[^\n]*|\bpre[- ]\w+|\b\w+(?:\+|,? (?:or|and) (?:higher|newer|later|above|greater|up)\b)"
    r"|\b\w*ARCH\w*=[^\s;,]+[;,]\S*|-gencode\S*|architecture flags:[^\n]*",  # the chips that something was built for
    re.IGNORECASE,
)


class LogValue(msgspec.Struct, frozen=True):
    """A value, and the words of the log that say so."""

    value: str
    words: str


class LoggedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment in a log; None and empty for missing parts."""

    backend: LogValue | None = None
    arch: LogValue | None = None
    chip: str = ""  # the compiler's name of a chip that portattn has no arch for
    versions: dict[str, LogValue] = {}  # compiler and components by name; a component with two versions is left out
    function: LogValue | None = None
    kernels: tuple[str, ...] = ()  # portattn's names of the core kernels with the source `function`
    foreign: str = ""  # a compiler of chips that no backend has; then neither backend nor chip is read

    def completed(self, other: "LoggedEnvironment") -> "LoggedEnvironment":
        """Fill in missing parts from another text: the chip if the backends agree, and all versions."""
        same = self.backend is None or (other.backend is not None and other.backend.value == self.backend.value)
        chip = self if self.arch or self.chip or not same else other
        versions, foreign = other.versions | self.versions, self.foreign or ("" if self.backend else other.foreign)
        named = {} if foreign else {"backend": self.backend or other.backend, "arch": chip.arch, "chip": chip.chip}
        return msgspec.structs.replace(self, versions=versions, foreign=foreign, **named)

    def described(self) -> str:
        chip = self.arch.value if self.arch else self.chip
        where = f"{self.backend.value}:{chip}".rstrip(":") if self.backend else chip
        versions = [f"{name}=={version.value}" for name, version in self.versions.items()]
        kernel = f"kernel {self.function.value}" if self.function else ""
        return ", ".join(filter(None, [self.foreign, where, *versions, kernel]))

    @property
    def compiler(self) -> str:
        """Return NAME==VERSION of the compiler, or ""; the base Triton of a triton-ascend names no compiler."""
        owner = Registry.load().backends.get(self.backend.value) if self.backend else None
        names = (owner.compiler,) if owner and owner.compiler != "triton" else ("triton-ascend", "triton")
        return next((f"{name}=={self.versions[name].value}" for name in names if name in self.versions), "")


def environment_in(text: str, family: str, registry: Registry) -> LoggedEnvironment:
    """Read the environment in a log; `family` is the failure's, `registry` has the known chips."""
    versions = {name: one for name, found in _versions().items() if (one := _version(text, found)) is not None}
    foreign = next((name for name, words in patterns().foreign.items() if next(_found(text, words), None)), "")
    owner = _backend(text, "" if foreign else family, registry, {} if foreign else versions)
    backend, arch, chip = (None, None, "") if foreign and not owner else _chip(text, registry, owner)
    name = match["name"] if (match := next(_found(text, patterns().functions), None)) else ""
    return LoggedEnvironment(
        backend=backend or owner, arch=arch, chip=chip, versions=versions,
        function=LogValue(name, " ".join(match.group().split())) if match else None,
        kernels=tuple(kernel.name for kernel in CORES.values() if name in kernel.functions),
        foreign="" if owner else foreign,
    )  # fmt: skip


_Arches = Mapping[str, Mapping[str, Arch]]
# What precedes a number in an arch's name: what begins so is a chip, known or not.
_PREFIX = re.compile(r"^[a-z_]+")
# A line that tells the machine, of a report that names other chips, too.
_LABELLED = re.compile(r"^[^\n:=|]{0,20}\b(?:GPU|NPU|device|hardware)s?\b[^\n:=|]{0,30}[:=|][^\n]*", re.I | re.M)
_VARIANT = re.compile(r"(?<=\d)[a-z]$")  # of a chip whose name for Triton is a number, as ptxas writes it: sm_90a


def _chip(text: str, registry: Registry, owner: LogValue | None) -> tuple[LogValue | None, LogValue | None, str]:
    """Return (backend, arch, chip without an arch); of several bare names the chips of the compiler's `owner` count."""
    arches = registry.arches
    every = [(backend, arch) for backend, known in arches.items() for arch in known.values()]
    kinds = {arch.compiler_target[0]: backend for backend, arch in every if arch.compiler_target}
    # The beginnings of names of chips that Triton compiles for: `sm_`, `gfx`.
    prefixes = {m.group(): b for b, arch in every if arch.compiler_target and (m := _PREFIX.match(arch.name))}
    # A glob's `*` would run over what follows the name.
    globs = [
        glob.replace("?", "[0-9A-Za-z]").replace("*", "[0-9A-Za-z]*") for _, arch in every for glob in arch.devices
    ]
    devices = rf"\b(?P<chip>{'|'.join(glob for glob in globs if glob[:1].isalpha())})\b"
    for match in _found(text, (*patterns().chips, devices)):
        kind, chip, words = match.groupdict().get("kind") or "", match["chip"], " ".join(match.group().split())
        if (kind and kind not in kinds) or not (kind or chip.isdigit() or chip.lower().startswith((*prefixes,))):
            continue
        found = _arch_of(kind, chip, arches)
        if found:
            return LogValue(found[0], words), LogValue(found[1], words), ""
        return (LogValue(kinds[kind], words) if kind else None), None, _spelled(kind, chip, arches)
    # No compiler's own words: a name alone counts where the log names one chip only, and does not ask for it.
    words_of = {backend: described.device_words for backend, described in registry.backends.items()}
    bare = _WANTED.sub("", text)
    for part in ("\n".join(_LABELLED.findall(bare)), bare):
        products = target_names.mentioned_chips(part, arches, words_of)
        named: dict[tuple[str, str], str] = {}
        unknown: dict[tuple[str, str], str] = {}
        for prefix, backend in prefixes.items():  # sm87 is written for sm_87, too
            for number in re.findall(rf"\b{re.escape(prefix.rstrip('_'))}_?(\d{{2,4}}[a-z]?)\b", part.lower()):
                chip, family = prefix + number, _VARIANT.sub("", prefix + number)
                name = next((each for each in (chip, family) if each in arches[backend]), "")
                of_several = any(each.startswith(chip) for each in arches[backend])  # gfx11 is a family's beginning
                (named if name else unknown)[backend, name or ("" if of_several else chip)] = chip
        if named or products or len(unknown) != 1:  # a product counts less than an arch, whoever names it
            named |= products if named else target_names.bare_chips(part, arches) | products
        else:
            named = unknown
        if len(named) == 1:
            break
    if len(named) > 1 and owner:
        named = {pair: words for pair, words in named.items() if pair[0] == owner.value}
    if len(named) == 1:
        [((found_in, name), words)] = named.items()
        known = name in arches[found_in]
        return LogValue(found_in, words), LogValue(name, words) if known else None, "" if known else name
    makers = {found_in: words for (found_in, _), words in named.items()}
    return (LogValue(*makers.popitem()) if len(makers) == 1 else None), None, ""


def _arch_of(kind: str, chip: str, arches: _Arches) -> tuple[str, str] | None:
    """Return (backend, arch) of a chip by any name: sm_90a, 90 and sm_90 are one, as Ascend910B2 and ascend910b2."""
    for name in (chip, chip.lower(), _VARIANT.sub("", chip)):
        for backend, known in arches.items():
            for arch in known.values():
                target = arch.compiler_target
                if kind and (target is None or target[0] != kind):
                    continue
                if name not in (chip, chip.lower()) and not _is_numbered(arch):
                    continue
                numbered = target is not None and (kind or chip.isdigit()) and name == str(target[1])
                if name == arch.name or numbered or arch.is_device(name):
                    return backend, arch.name
    return None


# Letters after such a number in a name mean a variant.
def _is_numbered(arch: Arch) -> bool:
    return arch.compiler_target is not None and isinstance(arch.compiler_target[1], int)


def _spelled(kind: str, chip: str, arches: _Arches) -> str:
    """Return an unknown chip's name in the form of its kind's arches: 75 is sm_75."""
    for arch in (arch for known in arches.values() for arch in known.values() if _is_numbered(arch)):
        assert arch.compiler_target is not None, "_is_numbered asks"
        if chip.isdigit() and kind in ("", arch.compiler_target[0]):
            return arch.name.replace(str(arch.compiler_target[1]), chip)
        prefix = _PREFIX.match(arch.name)
        if prefix and chip.startswith(prefix.group()):
            return _VARIANT.sub("", chip)
    return chip.lower()


def _backend(text: str, family: str, registry: Registry, versions: Mapping[str, LogValue]) -> LogValue | None:
    slashed = text.replace("\\", "/")  # a compiler's folder on Windows
    backends = registry.backends.items()
    for kind in ("compiler_folders", "compiler_says"):  # a folder tells more than a word
        for name, words in ((name, words) for name, backend in backends for words in getattr(backend, kind)):
            if words in text or words in slashed:
                return LogValue(name, words)
    owners = [name for name, backend in registry.backends.items() if family in backend.compiler_words]
    if owners:
        return LogValue(owners[0], family)
    usual = [(name, b.compiler) for name, b in registry.backends.items() if b.compilers and b.compiler in versions]
    return LogValue(usual[0][0], versions[usual[0][1]].words) if len(usual) == 1 else None


def _versions() -> dict[str, tuple[str, ...]]:
    known = patterns()
    own = compilers.own()
    found = dict(known.versions)
    for name, one in compilers.all_compilers().items():
        if name not in own:
            words = "|".join(re.escape(each).replace(r"\-", "[-_]") for each in (name, *one.aliases))
            found[name] = (rf"\b(?:{words})(?:==|[-: ]+v?){known.fragments['VERSION']}",)
    return found


def _version(text: str, found: Iterable[str]) -> LogValue | None:
    versions: dict[str, LogValue] = {}
    for match in _found(text, found):
        try:
            version = str(Version(match["version"]))
        except ValueError:  # InvalidVersion, or a number of more digits than Python reads
            continue
        # A build's label is no other version: 3.6.0 and 3.6.0+git0.
        versions.setdefault(version.partition("+")[0], LogValue(version, " ".join(match.group().split())))
    # `3.6` in a sentence is 3.6.0's, or another release's beside the installed one's whole version.
    whole = [found for version, found in versions.items() if version.count(".") > 1] or [*versions.values()]
    return whole[0] if len(whole) == 1 else None


def _found(text: str, expressions: Iterable[str]) -> Iterator[re.Match[str]]:
    for expression in expressions:
        yield from re.finditer(expression, text, re.MULTILINE)
