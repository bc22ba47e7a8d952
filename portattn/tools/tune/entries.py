"""The entry that comes of a class, merged into a tuning file: every other entry, and every comment, stays."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Table

from portattn.errors import DataError
from portattn.files import write_whole
from portattn.planning.data_files import load_tuning
from portattn.planning.kernel_specs import KERNEL_NAMES
from portattn.schema import toml_reader
from portattn.schema.toolchain import Toolchain
from portattn.schema.tuning import SPLIT_THRESHOLD, Tuning
from portattn.tools import run_log
from portattn.tools.tune.classes import Class
from portattn.tools.tune.records import Origin, Outcome

DIGITS = 4  # significant ones that a figure keeps
LOCK_S = 60.0  # that another run may take to put an entry in: it takes far less than one second


class TuningFile:
    """A tuning file that classes are written into, one after the other. The file is replaced as a whole each time.

    Several runs may write one file, each with a log of its own: what is there is read anew before each entry.

    path     where it is written
    base     the text that it begins from where there is no such file; None for a new one
    """

    def __init__(self, path: Path, base: str | None, origin: Origin, backend: str) -> None:
        self.path, self.origin, self.backend = path, origin, backend
        self.base = base
        self.document = self._read()

    def _new(self) -> tomlkit.TOMLDocument:
        document = tomlkit.document()
        how = "timed on the chip" if self.origin.measured else "compiled and not timed"
        document.add(tomlkit.comment(f"Choices for {self.origin.target}, {how}, by `portattn tune`."))
        head = tomlkit.table()
        head.update(
            {
                "chip": self.origin.chip,
                "toolchain": self.origin.toolchain,
                "date": self.origin.date,
                "measured": self.origin.measured,
            }
        )
        document.add("provenance", head)
        return document

    def put(self, of: Class, outcome: Outcome) -> bool:
        """Put a class's choice in, and write the file; False where the entry that is there says as much already.

        An entry for the same kernel and conditions is replaced; otherwise the new one goes before the entry that holds
        today, or to the end. Raises DataError where what would be written is no tuning file.
        """
        if outcome.choice is None:
            return False
        with self._locked():
            self.document = self._read()
            return self._put(of, outcome)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file among runs: what one reads, another must not replace before it has written."""
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
        """What the file holds now, or what it begins from."""
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
        same = next((i for i, e in enumerate(entries) if _is(e, of)), None)
        made = entry(of, outcome, self.origin)
        if same is not None:
            _replace(entries[same], made)
        else:
            place = self._place(of)
            if place is None:
                entries.append(made)
            else:
                entries.insert(place, made)
        self.write()
        return True

    def write(self) -> None:
        """Write the file, if a reader takes it."""
        text = tomlkit.dumps(self.document)
        beside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")  # files.sweep knows such names
        try:
            beside.write_text(text, encoding="utf-8")
            load_tuning(beside, self.backend)
        finally:
            beside.unlink(missing_ok=True)
        write_whole(self.path, text.encode())

    def _worth(self, of: Class, outcome: Outcome) -> bool:
        """A new choice; or one that stays, and was timed now and not before with this compiler, or has an entry of its
        own."""
        if outcome.replaces or of.incumbent is None:
            return True
        own = any(_is(e, of) for e in self.document.get("entry", ()))
        return outcome.measured and (own or not of.measured or bool(of.timed_with))

    def _place(self, of: Class) -> int | None:
        """The number of the entry that holds for the class in the document as it is now."""
        # tomlkit's types are subclasses of the plain ones, which msgspec does not take.
        tuning = toml_reader.convert(self.document.unwrap(), Tuning, self.path, "")
        features, toolchain = of.workloads[0].problem.features(), Toolchain.parse(self.origin.toolchain)
        return tuning.position(of.kernel, features, toolchain, variant=of.kernel not in KERNEL_NAMES)


def _is(table: Any, of: Class) -> bool:
    same = table.get("kernel") == of.kernel and set(table.get("when", ())) == set(of.when)
    return same and dict(table.get("toolchain", {})) == of.toolchain


def _replace(table: Table, made: Table) -> None:
    """The new contents in the place of the old, comments after the entry untouched."""
    for name in list(table):
        if name not in made:
            table.remove(name)
    for name, value in made.items():
        table[name] = value


def entry(of: Class, outcome: Outcome, origin: Origin) -> Table:
    """The entry of a class as a TOML table, with its provenance."""
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
    made.add("provenance", _provenance(outcome, origin))
    made.add(tomlkit.nl())
    return made


def _provenance(outcome: Outcome, origin: Origin) -> Table:
    source = tomlkit.table()
    known: dict[str, Any] = {
        "chip": origin.chip,
        "target": origin.target,
        "toolchain": origin.toolchain,
        "ptxas": origin.ptxas,
        "torch": origin.torch,
        "date": origin.date,
        "measured": outcome.measured,
        "portattn": origin.portattn,
        "kernels": origin.kernels,
        "commit": origin.commit,
        "command": origin.command,
        "runner_up": str(outcome.runner_up) if outcome.runner_up else "",
        "registers": outcome.registers,
        "spills": outcome.spills,
        "scratchpad_bytes": outcome.scratchpad_bytes,
    }
    for name, value in known.items():
        if value not in (None, ""):
            source.add(name, value)
    figures = tomlkit.array()
    for result in outcome.results:
        times = result.times
        seen = {
            "problem": result.problem,
            "us": times.median if times else None,
            "least": times.least if times else None,
            "most": times.most if times else None,
            "runner_up": result.runner_up,
            "incumbent": result.incumbent,
            "error": result.error,
            "budget": result.budget,
        }
        figures.add_line(_inline({name: _short(value) for name, value in seen.items() if value is not None}))
    if outcome.results:
        figures.add_line(indent="")
        source.add("figures", figures)
    return source


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _inline(settings: dict[str, Any]) -> Any:
    """An inline table, written as the shipped files have them."""
    pairs = (f"{name} = {tomlkit.item(value).as_string()}" for name, value in settings.items())
    return tomlkit.value(f"{{ {', '.join(pairs)} }}")


def read_base(path: Path) -> str:
    """The text of a tuning file that classes are to be merged into. Raises DataError where it cannot be read."""
    try:
        return run_log.read(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(path, None, f"cannot be read: {error}") from None
