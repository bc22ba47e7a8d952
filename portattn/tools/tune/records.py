"""Records of a run, a line of JSON each, and the entry merged into a tuning file, which keeps its comments."""

import contextlib
import datetime
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import filelock
import msgspec
import tomlkit
import torch
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Table

import portattn
from portattn.errors import DataError
from portattn.files import write_whole
from portattn.launch.torch_compat import chip_name, timed_device
from portattn.planning.core_path import kernel_source_digest
from portattn.planning.data_files import load_tuning
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.planning.registry import Registry
from portattn.schema import toml_reader
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain
from portattn.schema.tuning import SPLIT_THRESHOLD, Tuning
from portattn.source_tree import source_commit_text
from portattn.tools import run_log
from portattn.tools.tune.classes import Class
from portattn.tools.tune.race import Times
from portattn.tools.tune.tunable import Choice, Only

SCHEMA = 1  # raised when a reader of the version before would misread it

# refused       the planner, or the variant, does not take it
# twin          the same launches as an earlier candidate
# ruled out     it does not compile, does not fit, spills, or over-subscribes a core
# compiles      compile-only: it fits and does not spill
# wrong         its numbers are over the error budget; never timed
# broke         it raised, or ended the process, when it was first run
# abandoned     clearly slower after one short timing
# slower        timed to the end of its turn, and not the best
# within noise  the best of the challengers, and no faster than the incumbent by more than the noise
# chosen        the best; what is written into the tuning file
# kept          the incumbent, which nothing replaces
# not reached   the budget was spent before
CandidateState = Literal[
    "refused", "twin", "ruled out", "compiles", "wrong", "broke", "abandoned", "slower", "within noise",
    "chosen", "kept", "not reached",
]  # fmt: skip
RED: frozenset[str] = frozenset({"wrong", "broke"})
# Of these nothing is worth a row of a table by default: they cost no device time and say only why.
QUIET: frozenset[str] = frozenset({"refused", "twin", "ruled out", "not reached"})


class Origin(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """The first line: the origin of the figures."""

    schema: int = SCHEMA
    target: str
    chip: str  # the device's name, or the chip's title if it is not here
    measured: bool  # anything was timed
    toolchain: str
    ptxas: str
    torch: str
    portattn: str
    kernels: str
    commit: str
    command: str
    date: datetime.date
    classes: dict[str, tuple[str, ...]]  # the requested classes by name; workloads by class
    spills: int = 0
    by_bound: bool = False  # bounds chose among what compiles
    only: dict[str, tuple[str, ...]] = {}  # the settings that candidates were restricted to


class CodeRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="code"):
    """The result of compiling one code: see tunable.CompileResult."""

    code: str
    failure: str = ""
    facts: dict[str, int | str | float] | None = None


class Trying(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trying"):
    """A candidate is about to run for the first time; if no record follows, it ended the process."""

    name: str
    problem: str
    choice: str


class Interruption(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stopped"):
    """The run was interrupted knowingly: the candidate under trial is not to blame."""


class CandidateRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="candidate"):
    """One candidate's result on one problem; error, mean_error: against float64; budget: the largest error's limit."""

    name: str
    problem: str
    choice: Choice
    verdict: CandidateState
    reason: str = ""
    error: float | None = None
    mean_error: float | None = None
    budget: float | None = None
    times: Times | None = None
    registers: int | None = None
    spills: int | None = None
    scratchpad_bytes: int | None = None


class ProblemResult(msgspec.Struct, frozen=True, kw_only=True):
    """One problem's median microseconds in the final round, by the candidate's role."""

    problem: str
    times: Times | None = None
    incumbent: float | None = None
    runner_up: float | None = None
    # lower bounds on its time, and on that of the incumbent, if bounds decided
    bound: float | None = None
    incumbent_bound: float | None = None
    error: float | None = None
    budget: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="class"):
    """The result of a class, which is then not searched again."""

    name: str
    choice: Choice | None  # the class's choice; None if there is none
    replaces: bool  # it differs from the tuning file's choice
    measured: bool
    incumbent: Choice | None = None
    runner_up: Choice | None = None
    ratio: float | None = None  # its mean time over the incumbent's; noise: the margin by which it had to be below 1
    noise: float | None = None
    results: tuple[ProblemResult, ...] = ()
    registers: int | None = None
    spills: int | None = None
    scratchpad_bytes: int | None = None
    counts: dict[str, int] = {}
    reason: str = ""
    complete: bool = True  # False if the budget was spent before every candidate was tried
    seconds: float = 0.0
    by_bound: bool = False  # a bound chose it
    timed_with: str = ""  # another compiler that the incumbent was timed with, or ""


Record = Origin | CodeRecord | Trying | Interruption | CandidateRecord | Outcome


DIGITS = 4  # significant ones that a figure keeps
LOCK_S = 60.0  # that another run may take to put an entry in: it takes far less than one second


class TuningFile:
    """A tuning file, read anew before each entry, as several runs may write it; `base`: the text without a file."""

    def __init__(self, path: Path, base: str | None, origin: Origin, backend: str) -> None:
        self.path, self.origin, self.backend = path, origin, backend
        self.base = base
        self.document = self._read()

    def _new(self) -> tomlkit.TOMLDocument:
        document = tomlkit.document()
        how = "timed on the chip" if self.origin.measured else "compiled and not timed"
        document.add(tomlkit.comment(f"Choices for {self.origin.target}, {how}, by `portattn tune`."))
        head = tomlkit.table()
        head.update({name: getattr(self.origin, name) for name in ("chip", "toolchain", "date", "measured")})
        document.add("provenance", head)
        return document

    def put(self, of: Class, outcome: Outcome) -> bool:
        """Put a class's choice in before today's entry; return False if nothing changes. Raises DataError."""
        if outcome.choice is None:
            return False
        with self._locked():
            self.document = self._read()
            return self._put(of, outcome)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock among runs: no run may replace a file that another has read and not yet written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path.with_name(f".{self.path.name}.lock"))
            lock.acquire(timeout=LOCK_S)
        except filelock.Timeout:
            limit = f"another run has held it for {LOCK_S:g} s; what was chosen is in the log: --resume puts it in"
            raise DataError(self.path, None, limit) from None
        except OSError as error:
            raise DataError(self.path, None, f"cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            lock.release()

    def _read(self) -> tomlkit.TOMLDocument:
        text = read_base(self.path) if self.path.exists() else self.base
        try:
            return tomlkit.parse(text) if text is not None else self._new()
        except TOMLKitError as error:  # somebody has written it since the run began
            raise DataError(self.path, None, f"is no TOML: {error}") from None

    def _put(self, of: Class, outcome: Outcome) -> bool:
        if not self._worth(of, outcome):
            return False
        entries = self.document.get("entry")
        if entries is None:
            entries = tomlkit.aot()
            self.document.add("entry", entries)
        assert isinstance(entries, AoT)
        same = next((one for one in entries if _is(one, of)), None)
        made = entry(of, outcome, self.origin)
        if same is not None:
            for name in [name for name in same if name not in made]:
                same.remove(name)
            same.update(made)
        else:
            place = self._place(of)
            entries.insert(len(entries) if place is None else place, made)
        self.write()
        return True

    def write(self) -> None:
        text = tomlkit.dumps(self.document)
        beside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")  # files.sweep knows such names
        try:
            beside.write_text(text, encoding="utf-8")
            load_tuning(beside, self.backend)
        finally:
            beside.unlink(missing_ok=True)
        write_whole(self.path, text.encode())

    def _worth(self, of: Class, outcome: Outcome) -> bool:
        """Return whether to write: a new choice, or a kept one newly timed with this compiler or with its own entry."""
        if outcome.replaces or of.incumbent is None:
            return True
        own = any(_is(e, of) for e in self.document.get("entry", ()))
        return outcome.measured and (own or not of.measured or bool(of.timed_with))

    def _place(self, of: Class) -> int | None:
        # tomlkit's types are subclasses of the plain ones, which msgspec does not take.
        tuning = toml_reader.convert(self.document.unwrap(), Tuning, self.path, "")
        features, toolchain = of.workloads[0].problem.features(), Toolchain.parse(self.origin.toolchain)
        return tuning.position(of.kernel, features, toolchain, variant=of.kernel not in KERNEL_NAMES)


def _is(table: Any, of: Class) -> bool:
    same = table.get("kernel") == of.kernel and set(table.get("when", ())) == set(of.when)
    return same and dict(table.get("toolchain", {})) == of.toolchain


def entry(of: Class, outcome: Outcome, origin: Origin) -> Table:
    choice = outcome.choice
    assert choice is not None
    made = tomlkit.table()
    made.add("kernel", of.kernel)
    made.add("when", list(of.when))
    if of.toolchain:
        made.add("toolchain", _inline(of.toolchain))
    for name in ("launch", "lowering", "flags"):
        settings = getattr(choice, name)
        if settings:
            made.add(name, _inline(settings))
    if choice.occupancy != 1:
        made.add("occupancy", choice.occupancy)
    if choice.split_threshold != SPLIT_THRESHOLD:
        made.add("split_threshold", choice.split_threshold)
    if not outcome.measured:
        made.add("timed", False)
    if outcome.by_bound:
        made.add("by_bound", True)
    made.add("provenance", _provenance(outcome, origin))
    made.add(tomlkit.nl())
    return made


FIGURES = ("runner_up", "incumbent", "bound", "incumbent_bound", "error", "budget")


def _provenance(outcome: Outcome, origin: Origin) -> Table:
    source = tomlkit.table()
    of_run = ("chip", "target", "toolchain", "ptxas", "torch", "date")
    known: dict[str, Any] = {name: getattr(origin, name) for name in of_run} | {"measured": outcome.measured}
    known |= {name: getattr(origin, name) for name in ("portattn", "kernels", "commit", "command")}
    known |= {"runner_up": str(outcome.runner_up) if outcome.runner_up else ""}
    known |= {name: getattr(outcome, name) for name in ("registers", "spills", "scratchpad_bytes")}
    for name, value in known.items():
        if value not in (None, ""):
            source.add(name, value)
    figures = tomlkit.array()
    for result in outcome.results:
        of_best = {"us": "median", "least": "least", "most": "most"}
        seen = {"problem": result.problem} | {name: getattr(result.times, of, None) for name, of in of_best.items()}
        seen |= {name: getattr(result, name) for name in FIGURES}
        figures.add_line(_inline({name: _short(value) for name, value in seen.items() if value is not None}))
    if outcome.results:
        figures.add_line(indent="")
        source.add("figures", figures)
    return source


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _inline(settings: dict[str, Any]) -> Any:
    pairs = (f"{name} = {tomlkit.item(value).as_string()}" for name, value in settings.items())
    return tomlkit.value(f"{{ {', '.join(pairs)} }}")


def read_base(path: Path) -> str:
    try:
        return run_log.read(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(path, None, f"cannot be read: {error}") from None


def origin(
    target: Target, measured: bool, classes: Sequence[Class], command: str, spills: int, commit: str = "",
    only: Only = MappingProxyType({}), by_bound: bool = False,
) -> Origin:  # fmt: skip
    """Return the Origin of a run that begins now; `measured`: on this device; an empty `commit` is git's."""
    device = timed_device() if measured else None
    chip = f"{target.arch.title}, not present" if device is None else chip_name(device)
    # A device's own target knows its driver, and a named one its assembler: here both are wanted.
    known = Registry.load().backends[target.backend].components(target.arch, target.toolchain)
    components = known | dict(target.toolchain.components)
    return Origin(
        target=target.name, chip=chip, measured=measured, toolchain=str(target.toolchain),
        ptxas=components.get("ptxas", ""), torch=str(torch.__version__) if measured else "",
        portattn=portattn.__version__, kernels=kernel_source_digest(),
        commit=commit or source_commit_text(Path(portattn.__file__).parent), command=command,
        date=datetime.date.today(), classes={one.name: tuple(load.name for load in one.workloads) for one in classes},
        spills=spills, only=dict(only), by_bound=by_bound,
    )  # fmt: skip
