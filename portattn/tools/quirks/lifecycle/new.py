"""`portattn quirks new`: from a log or an incident to a draft of an entry, its program, and the text of a report."""

from __future__ import annotations

import contextlib
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
from portattn.errors import ArgumentError, PortattnError
from portattn.files import cache_folder
from portattn.planning.registry import Registry, shipped_quirks
from portattn.schema.target import Target
from portattn.schema.toolchain import is_installed
from portattn.tools import lab
from portattn.tools.quirks.lifecycle import entry, issue, programs
from portattn.tools.quirks.lifecycle.failure_report import OP, Facts
from portattn.tools.quirks.lifecycle.known_failures import KnownFailure, find_drafts, find_known_failures
from portattn.tools.quirks.lifecycle.repro_command import plan_line
from portattn.tools.quirks.lifecycle.specialised import CompileOutcome, is_it
from portattn.worker.client import Worker

LOCK_SECONDS = 30.0
_NUMBERED = re.compile(r"^([a-z][a-z0-9_]*)-(\d{4})-")
DRAFTS = "drafts"


def drafts_folder() -> Path:
    """Where drafts go: quirks/drafts/ of a checkout, which the registry does not read, else ./quirk-drafts."""
    shipped = shipped_quirks()
    return shipped / DRAFTS if (shipped.parent / "pyproject.toml").is_file() else Path.cwd() / "quirk-drafts"


def next_number(backend: str, out: Path, registry: Registry) -> int:
    """The number after the highest that was ever used: of entries, tombstones, and drafts under `out`."""
    names = [*registry.quirks, *registry.retired]
    for folder in {out, drafts_folder()}:
        names += [path.stem for path in folder.glob("*/*.toml")]
    taken = [int(m[2]) for name in names if (m := _NUMBERED.match(name)) and m[1] == backend]
    return max(taken, default=0) + 1


@contextlib.contextmanager
def numbering(out: Path) -> Iterator[None]:
    """Among processes one at a time takes a number under `out`. Raises PortattnError when another takes too long."""
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
    """Write files that do not exist, in the order given: an error, or an interruption, leaves none of them.

    The last one is what makes the others count: who dies in between (SIGKILL) leaves no entry behind. Raises
    ArgumentError when one of them exists, or cannot be written.
    """
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
                raise ArgumentError(
                    "quirks new", "--out", str(path), "must not exist: nothing is overwritten"
                ) from None
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
            raise ArgumentError("quirks new", "--out", str(path), reason) from error
        raise


SECONDS = 180.0  # limit of running a draft's program
_WORDS = re.compile(r"^[a-z0-9]+(-[a-z0-9]+)*$")
LARGEST_TEXT = 2 * 2**20  # characters of IR that are saved beside a draft
FRESH = {"TRITON_ALWAYS_COMPILE": "1"}


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What running a draft's program gave.

    reproduced  whether it failed as the log did; None if it was not run
    says        that, or why not, for people
    ttir        the TTIR that the compiler had made before it failed, or empty
    """

    reproduced: bool | None
    says: str
    ttir: str = ""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The draft of `quirks new`.

    streams, times  processes whose log lines tell of the failure, and how often; cut: the log ends inside its cause
    known  entries that the failure is, or looks like
    files  paths that were written, the entry last; empty if the failure is known, or is no compiler's
    open   (line of the entry, text) of each place to fill in
    left_out  variables, options or a kernel of the log or incident that the program lacks
    """

    id: str
    title: str
    failure: dict[str, Any]
    known: tuple[KnownFailure, ...] = ()
    streams: tuple[str, ...] = ()
    times: int = 1
    cut: bool = False
    files: tuple[str, ...] = ()
    open: tuple[tuple[int, str], ...] = ()
    reproduced: bool | None = None
    replay: str = ""
    left_out: tuple[str, ...] = ()


def make(
    facts: Facts,
    registry: Registry,
    out: Path | None = None,
    *,
    words: str = "",
    force: bool = False,
    replay: bool = True,
    worker: Worker | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Draft:
    """Draft an entry from facts and write its files, all or none. Nothing is written for a failure that is an entry's,
    and for one that is no compiler's (its facts say what to do).

    out     folder of the draft: <backend>/<id>.toml, probes/<id>.py and issues/<id>.md go under it
    force   draft although the registry has an entry with this signature, or the folder a draft
    worker  a child under the compiler that failed; by default one is started, where that compiler is here

    Raises ArgumentError on bad words, where a file exists, and where nothing can be written.
    """
    if words and not _WORDS.match(words):
        raise ArgumentError(OP, "--words", words, "must be lower-case words with dashes, as in four-stages")
    told = {
        "title": entry.title_of(facts), "failure": msgspec.to_builtins(facts.failure), "streams": facts.streams,
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
        quirk_id = f"{facts.backend}-{number:04d}-{words or entry.words_of(facts)}"
        name = quirk_id.replace("-", "_")
        text = programs.program(facts, name, title, target)
        beside = _beside(facts, name)
        replayed = (
            _replay(facts, registry, target, text, beside, name, worker, say)
            if replay
            else ReplayResult(reproduced=None, says="")
        )
        if replayed.ttir and (not beside or programs.form_of(facts) == "specialisation"):
            beside = {f"{name}.ttir": replayed.ttir}
        saved = next(iter(beside), "")
        files = {out / "probes" / file: issue.private(content) for file, content in beside.items()}
        files[out / "probes" / f"{name}.py"] = text
        files[out / "issues" / f"{quirk_id}.md"] = issue.issue(facts, title, f"{name}.py", saved, replayed.says)
        written = entry.entry(facts, quirk_id, title, _probe(facts, registry, target, name), f"probes/{name}.py")
        files[out / facts.backend / f"{quirk_id}.toml"] = written
        write_new(files)
    return Draft(
        id=quirk_id,
        **told,
        known=seen,
        files=tuple(str(path) for path in files),
        open=tuple(entry.open_lines(written)),
        reproduced=replayed.reproduced,
        replay=replayed.says,
    )


def _beside(facts: Facts, name: str) -> dict[str, str]:
    """Return file name -> text of the program's input, or of the visible part of the source."""
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
    if programs.form_of(facts) == "missing":
        return f"none: the log holds no program; probes/{name}.py is a skeleton without its kernel"
    return f"probes/{name}.py"


def _replay(
    facts: Facts,
    registry: Registry,
    target: Target | None,
    text: str,
    beside: dict[str, str],
    name: str,
    worker: Worker | None,
    say: Callable[[str], None],
) -> ReplayResult:
    """Run the program's failing arm under the compiler that failed, where that is here."""
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
                "probe",
                SECONDS,
                program=str(Path(folder) / f"{name}.py"),
                arm="off",
                name=target.name,
                target=list(registry.backends[target.backend].triton_target(target.arch)),
                env={**FRESH, "TRITON_CACHE_DIR": str(Path(folder) / "cache")},
            )
        finally:
            if worker is None:
                child.close()
        ttir = _ttir(Path(folder) / "cache")
    outcome = CompileOutcome(reply=reply)
    if is_it(outcome, facts.failure.symptom, facts.failure.signature):
        return ReplayResult(reproduced=True, says=f"Reproduced here with {facts.compiler} on {target.name}", ttir=ttir)
    ended = "it compiles" if outcome.passed else f"it fails otherwise, by {reply.kind}: {reply.message[:200]}"
    return ReplayResult(
        reproduced=False, says=f"Not reproduced here with {facts.compiler} on {target.name}: {ended}", ttir=ttir
    )


def _cannot_replay(facts: Facts, target: Target | None, worker: Worker | None) -> str:
    if programs.form_of(facts) == "missing":
        return "the log holds no program"
    if target is None:
        return "the log does not say on which chip and with which compiler it was written"
    if facts.failure.symptom == "wrong-result":
        return f"numbers are compared on the chip itself, {target.name}"
    if worker is None and not is_installed(facts.compiler) and lab.find(facts.compiler) is None:
        return f"{facts.compiler} is not here: `portattn lab create {facts.compiler}` makes it"
    return ""


def _ttir(cache: Path) -> str:
    """What Triton left in its cache: it writes every stage's text before it enters the next."""
    found = sorted(cache.glob("**/*.ttir"), key=lambda path: path.stat().st_size)
    return found[-1].read_text(encoding="utf-8") if found else ""
