"""`portattn quirks new`: from a log or an incident to a draft of an entry, its program, and the text of a report.

A known failure is not drafted: its words, kernel, stage, chip and version agree, as many bugs are worded alike."""

import contextlib
import fnmatch
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import msgspec

from portattn.config import current
from portattn.errors import ArgumentError, DataError, PortattnError
from portattn.files import cache_folder
from portattn.planning.registry import Registry, shipped_quirks
from portattn.schema import conditions, toml_reader
from portattn.schema.quirk import Quirk, launch_holds
from portattn.schema.target import Arch, Target
from portattn.schema.toolchain import Toolchain, installed_toolchain, is_installed
from portattn.tools import lab
from portattn.tools.display_text import setting
from portattn.tools.quirks import draft_texts, probe
from portattn.tools.quirks.failure_facts import OP, Facts
from portattn.tools.quirks.probe_plans import plan_line
from portattn.tools.quirks.probe_results import fails_as
from portattn.tools.quirks.recognise import UNKNOWN
from portattn.worker.client import Worker

_EXCEPTION = re.compile(r"^\s*(?:[A-Za-z_][\w.]*(?:Error|Exception)\b:?\s*)+")
_FRONT_END = {"parse", "ttir"}  # triton-ascend's worker names both so: from the source to TTIR is one stage of it
# Of these every kernel that is too large or too slow has the words: only the conditions tell one entry from another.
_AMOUNTS = ("resource-limit", "slow")


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An entry with the failure's signature."""

    id: str
    title: str
    is_it: bool  # everything that tells bugs apart agrees: the failure is the entry's
    in_cause: bool = True  # the signature is in the words of the fault, and not only somewhere in the log
    in_range: bool | None = None  # it applies in the failure's environment; None if unknown
    because: str = ""  # agreeing parts; but: differing or unknown parts, empty if is_it
    but: str = ""
    says: str = ""  # the advice, for people

    def __str__(self) -> str:
        rest = f"; {self.says}" if self.says else ""
        if self.is_it:
            return f"this is {self.id}: {self.title}{rest}"
        return f"this looks like {self.id}: {self.title} (because {self.because}; but {self.but}){rest}"


class _Compared(msgspec.Struct, frozen=True):
    """One property that tells bugs apart. agrees: None if unknown; said: in words, for either case."""

    what: str
    agrees: bool | None
    said: str = ""


def find_known_failures(facts: Facts, registry: Registry) -> list[KnownFailure]:
    """Return every entry whose signature the text matches: the failure's own first, then the nearest."""
    target = facts.target(registry)
    found: list[tuple[Quirk, bool, list[_Compared]]] = []
    for quirk in (*registry.quirks.values(), *registry.retired.values()):
        signature = quirk.evidence.signature
        if quirk.when.backend not in (None, facts.backend) or not signature:
            continue
        in_cause = re.search(signature, _cause(facts)) is not None
        if in_cause or re.search(signature, facts.log):
            found.append((quirk, in_cause, list(_compared(quirk, in_cause, facts, target, registry))))
    fitting = [quirk.id for quirk, _, compared in found if all(part.agrees for part in compared)]
    made = [
        _known(quirk, in_cause, compared, facts, target, [one for one in fitting if one != quirk.id])
        for quirk, in_cause, compared in found
    ]
    return sorted(made, key=lambda entry: (not entry.is_it, not entry.in_cause, entry.in_range is not True, entry.id))


def _known(
    quirk: Quirk, in_cause: bool, compared: list[_Compared], facts: Facts, target: Target | None, others: list[str]
) -> KnownFailure:
    open_ = _open_conditions(quirk, facts)
    doubts = [part.said for part in compared if not part.agrees]
    if not doubts and open_ and (others or quirk.symptom in _AMOUNTS):
        also = f", as {', '.join(others)} would" if others else ""
        doubts = [f"it holds only where {', '.join(open_)}{also}, which the log does not tell"]
    same = [part.what for part in compared if part.agrees]
    return KnownFailure(
        id=quirk.id, title=quirk.title, is_it=not doubts, in_cause=in_cause, in_range=_in_range(compared),
        because="its " + (_listed(same) if same else "signature is somewhere in the log") + (" agree" if same else ""),
        but="; ".join(doubts), says=_advice(quirk, compared, target, open_ if not doubts else []),
    )  # fmt: skip


# Without the exception's name, which many bugs share.
def _cause(facts: Facts) -> str:
    lines = facts.log.splitlines()[facts.at - 1 :]
    return "\n".join(_EXCEPTION.sub("", text) for text in (facts.failure.cause, *lines[:1]))


def _compared(
    quirk: Quirk, in_cause: bool, facts: Facts, target: Target | None, registry: Registry
) -> Iterator[_Compared]:
    yield _Compared("signature", in_cause, "its signature is in the log, and not in what went wrong")
    if quirk.retired:
        fixed = f", fixed in {quirk.retired.fixed_in}" if quirk.retired.fixed_in else ""
        yield _Compared("life", False, f"it was retired on {quirk.retired.date}{fixed}")
    yield _stage(quirk, facts)
    yield _kernel(quirk, facts)
    yield _chip(quirk, facts, registry)
    yield _versions(quirk, facts, target)
    if wrong := [text for text, holds in _conditions(quirk, facts) if holds is False]:
        yield _Compared("conditions", False, f"it holds only where {', '.join(wrong)}, which is not so here")


def _stage(quirk: Quirk, facts: Facts) -> _Compared:
    asked, seen = quirk.evidence.stage, facts.failure.stage
    if not asked:
        return _Compared("stage", None, "its file does not say in which stage of the compiler it is seen")
    if seen in ("", UNKNOWN):
        return _Compared("stage", None, f"its stage is {asked}, and the log does not tell in which this was")
    same = asked == seen or {asked, seen} <= _FRONT_END
    return _Compared("stage", same, f"its stage is {asked}, and this is {seen}")


def _kernel(quirk: Quirk, facts: Facts) -> _Compared:
    asked = ", ".join(quirk.when.kernels)
    if not quirk.when.kernels or "*" in quirk.when.kernels:
        return _Compared("kernel", True)
    if facts.kernels:
        same = any(fnmatch.fnmatchcase(name, pattern) for name in facts.kernels for pattern in quirk.when.kernels)
        return _Compared("kernel", same, f"its kernels are {asked}, and this is {', '.join(facts.kernels)}")
    if facts.function:
        return _Compared("kernel", False, f"its kernels are {asked}, and this is {facts.function}")
    return _Compared("kernel", None, f"its kernels are {asked}, and the log names none: give --kernel")


def _chip(quirk: Quirk, facts: Facts, registry: Registry) -> _Compared:
    asked = ", ".join(quirk.when.arch)
    if not facts.arches:
        if facts.chip and quirk.when.arch:
            return _Compared("chip", False, f"its chips are {asked}, and this is {facts.chip}")
        if facts.chip or not quirk.when.arch:
            return _Compared("chip", True)
        return _Compared("chip", None, f"its chips are {asked}, and the log names none: give --target")
    arches = registry.arches.get(facts.backend, {})
    other = [name for name in facts.arches if not _has_arch(quirk, name, arches.get(name))]
    return _Compared("chip", not other, f"its chips are {asked}, and this is {', '.join(other)}")


def _versions(quirk: Quirk, facts: Facts, target: Target | None) -> _Compared:
    if not quirk.when.toolchain:
        return _Compared("range of versions", True)
    asked = ", ".join(f"{name} {text}" for name, text in quirk.when.toolchain.items())
    if target is None:
        missing = "--toolchain" if not facts.compiler else "--target"
        return _Compared(
            "range of versions", None, f"its range is {asked}, and the log names no version: give {missing}"
        )
    for name, text in quirk.when.toolchain.items():
        within = target.toolchain.within(name, text)
        if within is not True:
            version = target.toolchain.component(name)
            this = f"this is {version or target.toolchain}" if within is False else "its version is not known"
            return _Compared("range of versions", within, f"its range is {name} {text}, and {this}")
    return _Compared("range of versions", True)


def _conditions(quirk: Quirk, facts: Facts) -> Iterator[tuple[str, bool | None]]:
    what = facts.specialised
    features = what.problem.features() if what else None
    for condition in conditions.parse_all(quirk.when.features):
        holds = None if features is None or condition.name not in features else condition.holds(features)
        yield condition.text, holds
    for name, value in quirk.when.lowering.items():
        yield f"{name} = {value}", getattr(what.lowering, name) == value if what else None
    for name, wanted in quirk.when.launch.items():
        yield setting(name, wanted), launch_holds(what.launch.get(name), wanted) if what else None


def _open_conditions(quirk: Quirk, facts: Facts) -> list[str]:
    return [text for text, holds in _conditions(quirk, facts) if holds is None]


def _in_range(compared: list[_Compared]) -> bool | None:
    parts = [part.agrees for part in compared if part.what not in ("signature", "stage")]
    return False if False in parts else None if None in parts else True


def _advice(quirk: Quirk, compared: list[_Compared], target: Target | None, open_: list[str]) -> str:
    differs = {part.what for part in compared if part.agrees is False}
    if "life" in differs:
        return "if it is, it is back: the draft logs it anew"
    if differs == {"chip"}:
        return "if it is, add the chip to its file"
    if differs == {"range of versions"}:
        return "if it is, its range is too narrow: `portattn quirks bisect` finds it"
    if any(part.agrees is not True for part in compared):
        return ""
    unverified = target is not None and quirk.newer_than_seen(target.toolchain)
    caution = f", though last seen on {quirk.evidence.last_seen}" if unverified else ""
    where = f" where {', '.join(open_)}" if open_ else ""
    if quirk.effect.note is not None:
        return f"in range here{caution}, and no plan can avoid it: {quirk.effect.note}"
    return f"in range here{caution}: its work-around should have been applied{where}"


def find_drafts(facts: Facts, out: Path) -> list[KnownFailure]:
    """Return drafts under a folder with the same signature on the same chips and compiler."""
    found = []
    wanted = (facts.failure.signature, list(facts.arches), facts.compiler)
    for path in sorted((out / facts.backend).glob("*.toml")) if facts.failure.signature else ():
        try:
            draft = toml_reader.read(path)[0]
        except (OSError, DataError):  # being written, or no draft
            continue
        when, evidence = (draft[name] if isinstance(draft.get(name), dict) else {} for name in ("when", "evidence"))
        if (evidence.get("signature"), when.get("arch", []), evidence.get("last_seen", "")) == wanted:
            says = f"drafted already, in {path}"
            found.append(KnownFailure(id=path.stem, title=str(draft.get("title")), is_it=True, says=says))
    return found


def _has_arch(quirk: Quirk, name: str, arch: Arch | None) -> bool:
    patterns = quirk.when.arch
    matches = arch.matches if arch else functools.partial(fnmatch.fnmatchcase, name)
    return not patterns or any(matches(pattern) for pattern in patterns)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


LOCK_SECONDS = 30.0
_NUMBERED = re.compile(r"^([a-z][a-z0-9_]*)-(\d{4})-")
DRAFTS = "drafts"


def drafts_folder() -> Path:
    """Return the drafts' folder: quirks/drafts/ of a checkout (not read by the registry), else ./quirk-drafts."""
    shipped = shipped_quirks()
    return shipped / DRAFTS if (shipped.parent / "pyproject.toml").is_file() else Path.cwd() / "quirk-drafts"


def next_number(backend: str, out: Path, registry: Registry) -> int:
    """Return the number after the highest ever used: of entries, tombstones, and drafts under `out`."""
    names = [*registry.quirks, *registry.retired]
    for folder in {out, drafts_folder()}:
        names += [path.stem for path in folder.glob("*/*.toml")]
    taken = [int(m[2]) for name in names if (m := _NUMBERED.match(name)) and m[1] == backend]
    return max(taken, default=0) + 1


@contextlib.contextmanager
def numbering(out: Path) -> Iterator[None]:
    """Hold the lock for taking a number under `out`. Raises PortattnError after a timeout."""
    digest = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
    # Not among the temporary files, where any user can hold a lock of this name.
    place = cache_folder(current().cache_dir) / "locks" / f"quirks-{digest}.lock"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(place).acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        raise PortattnError(f"another process has been writing to {out} for {LOCK_SECONDS:g} s: try again") from None
    except OSError as error:
        raise PortattnError(f"{place}: cannot be locked: {error.strerror}; set PORTATTN_CACHE_DIR") from None
    with held:
        yield


def write_new(files: Mapping[Path, str]) -> None:
    """Write new files in order, all or none; the last makes the others count. Raises ArgumentError if one exists."""
    made: list[Path] = []
    folders: list[Path] = []
    try:
        for path, text in files.items():
            folders += [folder for folder in reversed((path.parent, *path.parent.parents)) if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}", suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(name, 0o644)
                os.link(name, path)  # unlike a rename it never replaces
            except FileExistsError:
                raise ArgumentError(OP, "--out", str(path), "must not exist: nothing is overwritten") from None
            finally:
                Path(name).unlink(missing_ok=True)
            made.append(path)
    except BaseException as error:
        for written in made:
            written.unlink(missing_ok=True)
        for folder in reversed(folders):
            with contextlib.suppress(OSError):  # never made, or another process has a file in it
                folder.rmdir()
        if isinstance(error, OSError):
            reason = f"cannot be written: {error.strerror or error}"
            raise ArgumentError(OP, "--out", str(path), reason) from error
        raise


_WORDS = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")
LARGEST_TEXT = 2 * 2**20  # characters of IR that are saved beside a draft


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    reproduced: bool | None  # it failed as the log did; None if it was not run
    says: str  # the result or the reason, for people
    ttir: str = ""  # the TTIR that the compiler had made before it failed, or ""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    title: str
    failure: dict[str, Any]
    known: tuple[KnownFailure, ...] = ()  # entries that the failure is, or looks like
    # streams, times: processes whose log lines tell of the failure, and how often; cut: the log ends inside its cause
    streams: tuple[str, ...] = ()
    times: int = 1
    cut: bool = False
    files: tuple[str, ...] = ()  # written paths, the entry last; empty if the failure is known, or is no compiler's
    open: tuple[tuple[int, str], ...] = ()  # (line of the entry, text) of each place to fill in
    reproduced: bool | None = None
    replay: str = ""
    left_out: tuple[str, ...] = ()  # variables, options or a kernel of the log or incident that the program lacks


def make(
    facts: Facts, registry: Registry, out: Path | None = None, *, words: str = "", force: bool = False,
    replay: bool = True, worker: Worker | None = None, say: Callable[[str], None] = lambda text: None,
) -> Draft:  # fmt: skip
    """Draft an entry and write its files under `out`, all or none; a known failure's only with `force`.

    `worker` is a child under the failing compiler, by default started if that is here. Raises ArgumentError."""
    if words and not _WORDS.match(words):
        raise ArgumentError(OP, "--words", words, "must be lower-case words with dashes, as in four-stages")
    told = {
        "title": draft_texts.title_of(facts), "failure": msgspec.to_builtins(facts.failure), "streams": facts.streams,
        "times": facts.times, "cut": facts.cut, "left_out": facts.left_out,
    }  # fmt: skip
    if facts.failure.not_a_bug:
        return Draft(id="", **told)
    title = told["title"]
    out = (out or drafts_folder()).resolve()
    target = facts.target(registry)
    with numbering(out):
        entries = find_known_failures(facts, registry)
        ids = {entry.id for entry in entries}
        seen = (*entries, *(draft for draft in find_drafts(facts, out) if draft.id not in ids))
        if any(entry.is_it for entry in seen) and not force:
            return Draft(id="", known=seen, **told)
        number = next_number(facts.backend, out, registry)
        quirk_id = f"{facts.backend}-{number:04d}-{words or draft_texts.words_of(facts)}"
        name = quirk_id.replace("-", "_")
        text = draft_texts.program(facts, name, title, target)
        beside = _beside(facts, name)
        replayed = ReplayResult(reproduced=None, says="")
        if replay:
            replayed = _replay(facts, registry, target, text, beside, name, worker, say)
        if replayed.ttir and (not beside or draft_texts.form_of(facts) == "specialisation"):
            beside = {f"{name}.ttir": replayed.ttir}
        saved = next(iter(beside), "")
        files = {out / "probes" / file: draft_texts.private(content) for file, content in beside.items()}
        files[out / "probes" / f"{name}.py"] = text
        files[out / "issues" / f"{quirk_id}.md"] = draft_texts.issue(facts, title, f"{name}.py", saved, replayed.says)
        written = draft_texts.entry(facts, quirk_id, title, _probe(facts, registry, target, name), f"probes/{name}.py")
        files[out / facts.backend / f"{quirk_id}.toml"] = written
        write_new(files)
    return Draft(
        id=quirk_id, **told, known=seen, files=tuple(str(path) for path in files),
        open=tuple(draft_texts.open_lines(written)), reproduced=replayed.reproduced, replay=replayed.says,
    )  # fmt: skip


def _beside(facts: Facts, name: str) -> dict[str, str]:
    program = facts.program
    if program is not None and len(program.text) <= LARGEST_TEXT:
        return {f"{name}{program.suffix}": program.text}
    source = next((text for text in facts.texts if not text.compiles), None)
    return {f"{name}_source{source.suffix}": source.text} if source else {}


def _probe(facts: Facts, registry: Registry, target: Target | None, name: str) -> str:
    """Return the entry's probe: a plan of our own kernels if a plan states the failure, else the program."""
    what = facts.specialised
    if what is not None and target is not None and facts.failure.symptom != "wrong-result":
        line = plan_line(what, target, registry)
        if line:
            return line
    if draft_texts.form_of(facts) == "missing":
        return f"none: the log holds no program; probes/{name}.py is a skeleton without its kernel"
    return f"probes/{name}.py"


def _replay(
    facts: Facts, registry: Registry, target: Target | None, text: str, beside: dict[str, str], name: str,
    worker: Worker | None, say: Callable[[str], None],
) -> ReplayResult:  # fmt: skip
    reason = _cannot_replay(facts, target, worker)
    if reason or target is None:
        return ReplayResult(reproduced=None, says=f"Not reproduced here: {reason}")
    say(f"running the draft's program with {facts.compiler}")
    with tempfile.TemporaryDirectory(prefix="portattn-draft-") as folder:
        for file, content in {**beside, f"{name}.py": text}.items():
            (Path(folder) / file).write_text(content, encoding="utf-8")
        child = worker or lab.worker(facts.compiler)
        try:
            reply = child.request(
                "probe", probe.SECONDS, program=str(Path(folder) / f"{name}.py"), arm="off", name=target.name,
                target=list(registry.backends[target.backend].triton_target(target.arch)),
                env={**probe.FRESH, "TRITON_CACHE_DIR": str(Path(folder) / "cache")},
            )  # fmt: skip
        finally:
            if worker is None:
                child.close()
        ttir = _ttir(Path(folder) / "cache")
    here = f"here with {facts.compiler} on {target.name}"
    if fails_as(reply, facts.failure.symptom, facts.failure.signature):
        return ReplayResult(reproduced=True, says=f"Reproduced {here}", ttir=ttir)
    ended = "it compiles" if reply.outcome == "ok" else f"it fails otherwise, by {reply.kind}: {reply.message[:200]}"
    return ReplayResult(reproduced=False, says=f"Not reproduced {here}: {ended}", ttir=ttir)


def _cannot_replay(facts: Facts, target: Target | None, worker: Worker | None) -> str:
    if draft_texts.form_of(facts) == "missing":
        return "the log holds no program"
    if target is None:
        here = installed_toolchain()
        shown = f"; {here} is installed here" if here != Toolchain.none() else ""
        chip = {} if facts.arches else {f"on which {'known ' if facts.chip else ''}chip": "--target BACKEND:CHIP"}
        lacks = chip | ({} if facts.compiler else {"with which compiler": f"--toolchain NAME==VERSION{shown}"})
        return f"the log does not say {' and '.join(lacks)} it was written: give {' and '.join(lacks.values())}"
    if facts.failure.symptom == "wrong-result":
        return f"numbers are compared on the chip itself, {target.name}"
    if worker is None and not is_installed(facts.compiler) and lab.find(facts.compiler) is None:
        return f"{facts.compiler} is not here: `portattn lab create {facts.compiler}` makes it"
    return ""


# The largest: Triton writes every stage's text before it enters the next.
def _ttir(cache: Path) -> str:
    found = sorted(cache.glob("**/*.ttir"), key=lambda path: path.stat().st_size)
    return found[-1].read_text(encoding="utf-8") if found else ""
