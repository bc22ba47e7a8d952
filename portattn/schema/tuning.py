"""Tuning: block sizes and choices per arch and kernel, as data. No search at run time."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from portattn.errors import DataError
from portattn.schema import compilers, conditions, toml_reader
from portattn.schema.lowering import CHOICES, BackendOptions, OptionValue, check_launch_values
from portattn.schema.toolchain import Toolchain, nameable, parse_range, unknown_name

# Bytes a thread that code may spill if its choice was timed on the chip: the time includes their cost. Tiles that were
# timed best on an H200 spill up to 120; `portattn tune` times no tile that spills more than this.
TIMED_SPILLS = 256
SPLIT_THRESHOLD = 0.8  # programs a core from which on keys are not split. Source: measured on an H200


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of a file's choices. `measured` is True only if they were timed on the chip."""

    chip: str
    toolchain: str
    date: datetime.date
    measured: bool
    note: str = ""


class ProblemFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one problem that chose an entry: medians in microseconds, of candidates that took turns."""

    problem: str
    us: float | None = None  # the chosen candidate's median; `least` and `most`: its fastest and slowest call
    least: float | None = None
    most: float | None = None
    runner_up: float | None = None  # the next best candidate's
    incumbent: float | None = None  # the previous entry's
    bound: float | None = None  # the chosen candidate's least time by its code; `incumbent_bound`: the previous entry's
    incumbent_bound: float | None = None
    error: float | None = None  # largest error against float64; `budget`: its limit
    budget: float | None = None


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of one entry, written by `portattn tune`; an entry without one has its file's provenance."""

    chip: str  # the device's name; of an absent chip its title and "not present"
    toolchain: str
    date: datetime.date
    measured: bool  # True only if the choice was timed on the chip: then there are figures
    target: str = ""
    ptxas: str = ""
    torch: str = ""
    portattn: str = ""
    kernels: str = ""  # digest of the source of the timed kernels
    commit: str = ""
    command: str = ""
    runner_up: str = ""
    registers: int | None = None  # of its code, a thread
    spills: int | None = None  # bytes
    scratchpad_bytes: int | None = None  # a program
    figures: tuple[ProblemFigures, ...] = ()


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choices for kernels that match a glob, if all conditions of `when` hold; the first such entry is taken."""

    kernel: str
    when: tuple[str, ...] = ()
    toolchain: dict[str, str] = {}  # component -> PEP 440 range of compilers that it is for; empty: all
    launch: dict[str, OptionValue] = {}
    lowering: dict[str, str] = {}
    flags: dict[str, bool | int | str] = {}  # a variant's own settings; its entries name it in full
    core: bool = False  # a variant leaves these problems to the core kernel, which is faster; `note` says by how much
    occupancy: int = 1  # programs that one core runs at a time, for the split over keys (decode)
    split_threshold: float = SPLIT_THRESHOLD  # programs a core from which on keys are not split
    timed: bool = True  # False: only compiled, in a file whose other choices were timed
    by_bound: bool = False  # chosen by lower bounds on its time (`portattn tune --by-bound`), never timed
    # Bytes a thread that its code may spill, if more than TIMED_SPILLS: the spills of the matrix's problems with the
    # compiler that timed it, rounded up to a multiple of TIMED_SPILLS.
    spills: int = 0
    note: str = ""
    provenance: Source | None = None  # None: the file's

    def is_for(self, toolchain: Toolchain) -> bool:
        """Return whether the compiler lies in the entry's ranges; an unknown version lies in none."""
        return all(toolchain.within(name, text) is True for name, text in self.toolchain.items())


class Tuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provenance: Provenance
    entry: tuple[Entry, ...]

    def find(
        self, kernel: str, features: Mapping[str, Any], toolchain: Toolchain, variant: bool = False
    ) -> Entry | None:
        """Return the first entry for a kernel that holds; a variant's entries must name it in full."""
        place = self.position(kernel, features, toolchain, variant)
        return None if place is None else self.entry[place]

    def position(
        self, kernel: str, features: Mapping[str, Any], toolchain: Toolchain, variant: bool = False
    ) -> int | None:
        """Return the number of the entry that `find` returns."""
        # A core kernel's glob, such as `*_forward`, may match a variant's name by chance.
        matching = [
            (place, entry.when)
            for place, entry in enumerate(self.entry)
            if not entry.core
            and (entry.kernel == kernel if variant else fnmatch.fnmatchcase(kernel, entry.kernel))
            and entry.is_for(toolchain)
        ]
        return conditions.first_that_holds(matching, features)

    def left_to_core(self, variant: str, features: Mapping[str, Any], toolchain: Toolchain) -> str:
        """Return the note of the variant's first entry that holds if it leaves the problem to the core, else ""."""
        for entry in self.entry:
            if entry.kernel == variant and entry.is_for(toolchain) and conditions.texts_hold(entry.when, features):
                return entry.note if entry.core else ""
        return ""

    def source(self, entry: Entry) -> Source | Provenance:
        return entry.provenance or self.provenance

    def measured(self, entry: Entry) -> bool:
        return self.source(entry).measured and entry.timed

    def timed_with(self, entry: Entry) -> str:
        """Return the compiler that an entry's choice was timed with on the chip, NAME==VERSION, or an empty text."""
        return self.source(entry).toolchain if self.measured(entry) else ""

    def most_spilled(self, entry: Entry | None, toolchain: Toolchain) -> int:
        """Return the bytes a thread that an entry's code may spill: 0 unless this compiler timed its choice."""
        if entry is None or self.timed_with(entry) != str(toolchain):
            return 0
        recorded = entry.provenance.spills if entry.provenance else None
        return max(TIMED_SPILLS, entry.spills, recorded or 0)


def read_tuning(path: Path, backend: str, options: BackendOptions, two: Callable[[str], bool]) -> Tuning:
    """Read one tuning file of a backend. Raises DataError (file, line, key) if it departs from the schema.

    Args:
        options: compiler options, by backend
        two: whether an entry's name matches two kernels, one that holds keys and one that holds rows (Launch.of_rows)
    """
    data, text = toml_reader.read(path)
    tuning = toml_reader.convert(data, Tuning, path, text)
    for entry in tuning.entry:
        try:
            asked = conditions.names(entry.when)
            if "programs" in asked:
                condition = entry.when[asked.index("programs")]
                raise ValueError(f"condition {condition!r}: the number of programs follows from the entry's launch")
            if "splits" in entry.launch:
                raise ValueError("launch splits is computed from the sizes of a problem; `occupancy` steers it")
            check_launch_values(dict(entry.launch), backend, options, rows=two(entry.kernel))
            _check_toolchain(tuning, entry)
            if entry.flags and set("*?[") & set(entry.kernel):
                raise ValueError(f"flags belong to a variant, and {entry.kernel!r} must name it in full")
            if entry.core and (set("*?[") & set(entry.kernel) or entry.flags or not entry.note):
                raise ValueError(
                    "core = true is for a variant, named in full, without flags; `note` says how much faster"
                )
            if entry.spills and (entry.spills % TIMED_SPILLS or entry.spills <= TIMED_SPILLS):
                raise ValueError(
                    f"bytes spills = {entry.spills}: must be a multiple of {TIMED_SPILLS}, which all may, and more"
                )
            if entry.spills and not tuning.timed_with(entry):
                raise ValueError(
                    f"bytes spills = {entry.spills}: goes with a choice that was timed; others may spill nothing"
                )
            if entry.by_bound and tuning.measured(entry):
                raise ValueError("bounds chose an entry with by_bound = true, and it says that it was timed")
            if entry.provenance and entry.provenance.measured and not entry.provenance.figures:
                raise ValueError("provenance measured = true without figures: what was timed, and how long it took")
            for name, value in entry.lowering.items():
                if value not in CHOICES.get(name, ()):
                    raise ValueError(f"lowering {name} = {value!r} is outside {CHOICES.get(name, 'the known choices')}")
        except ValueError as error:
            line = next((n for n, s in enumerate(text.splitlines(), 1) if _mentions(s, str(error))), None)
            raise DataError(path, line, f"entry for {entry.kernel} when {list(entry.when)}: {error}") from None
    return tuning


def _check_toolchain(tuning: Tuning, entry: Entry) -> None:
    """Raise ValueError on an unknown component, a malformed range, or one without the compiler of the timing."""
    for name, text in entry.toolchain.items():
        if not nameable(name):
            raise ValueError(f"toolchain {name!r} is {unknown_name()}")
        parse_range(text)
    timed = tuning.timed_with(entry)
    if entry.toolchain and timed and Toolchain.parse(timed).distribution in entry.toolchain:
        named = {name: text for name, text in entry.toolchain.items() if compilers.is_compiler(name)}
        if not Entry(kernel=entry.kernel, toolchain=named).is_for(Toolchain.parse(timed)):
            raise ValueError(f"toolchain {named} leaves out {timed!r}, which its choice was timed with")


def _mentions(line: str, message: str) -> bool:
    """Return whether a line of the file holds the name that an error message quotes first."""
    quoted = message.split("'")[1] if "'" in message else message.split(" ")[1]
    return not line.lstrip().startswith("#") and quoted in line
