"""The log of a run: JSON lines as they happen, and a table for people, rewritten after each class."""

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.tools import display_text, run_log
from portattn.tools.run_log import UNREADABLE, RunLog, encode_record, lines
from portattn.tools.tune.records import (
    QUIET,
    SCHEMA,
    CandidateRecord,
    CodeRecord,
    Origin,
    Outcome,
    Record,
    Trying,
)

OP = "tune"
WIDTH = 240  # columns of the table for people
COLUMNS = (
    "problem", "candidate", "max error", "mean error", "min µs", "median µs", "max µs", "registers", "spills",
    "memory", "verdict",
)  # fmt: skip
# Of which another run's log would be another run.
_SAME = ("target", "toolchain", "portattn", "kernels", "measured", "classes", "spills", "only", "by_bound")


class _LogVersion(msgspec.Struct):
    schema: int | None = None


_decoder = msgspec.json.Decoder(Record)


class TuneLog(RunLog):
    """One run's log; a context that holds the file's lock. Raises ArgumentError if it is held or unwritable."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path.with_name(f".{path.name}.lock"), op=OP, option="--log", shown=path)

    @property
    def table(self) -> Path:
        return self.path.with_suffix(".txt")

    def begin(self, origin: Origin) -> Path | None:
        """Begin a new file; return the dated path of an earlier one, or None."""
        kept = self.rotate()
        write_whole(self.path, encode_record(origin))
        return kept

    def resume(self, origin: Origin) -> list[Record]:
        """Return the records of this run, without a truncated line. Raises ArgumentError for another run."""
        if not self.path.exists():
            raise ArgumentError(OP, "--resume", str(self.path), "there is no such file to go on with")
        records = read(self.path, resumed=True)
        begun = records[0]
        assert isinstance(begun, Origin)
        for name in _SAME:
            if getattr(begun, name) != getattr(origin, name):
                limit = f"it was begun with another {name} ({getattr(begun, name)}); run without --resume"
                raise ArgumentError(OP, "--resume", str(self.path), limit)
        write_whole(self.path, b"".join(map(encode_record, records)))
        return records

    def show(self, records: Sequence[Record]) -> None:
        write_whole(self.table, text(records).encode())


def read(path: Path, resumed: bool = False) -> list[Record]:
    """Return all records, the Origin first; `resumed`: see `run_log.lines`. Raises DataError (file, line)."""
    data = run_log.read(path)
    records: list[Record] = []
    for number, line in lines(path, data, resumed):
        try:
            version = msgspec.json.decode(line, type=_LogVersion).schema
            if number == 1 and version not in (None, SCHEMA):
                raise DataError(path, number, f"schema version {version}; this portattn reads version {SCHEMA}")
            records.append(_decoder.decode(line))
        except UNREADABLE as error:
            raise DataError(path, number, f"not a line of a tune log: {error}") from None
    if not records or not isinstance(records[0], Origin):
        raise DataError(path, 1, "the first line, which says where the figures come from, is missing")
    return records


class History:
    """An earlier run: compile results by code, outcomes by class, (problem, choice) that ended the process."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.codes: dict[str, CodeRecord] = {}
        self.done: dict[str, Outcome] = {}
        self.fatal: set[tuple[str, str]] = set()
        trying: Trying | None = None
        for record in records:
            if isinstance(record, CodeRecord):
                self.codes[record.code] = record
                continue
            if trying is not None and isinstance(record, Trying | Origin):
                self.fatal.add((trying.problem, trying.choice))
            trying = record if isinstance(record, Trying) else None
            if isinstance(record, Outcome):
                self.done[record.name] = record
        if trying is not None:
            self.fatal.add((trying.problem, trying.choice))
        # What was told to be at fault then is so now.
        for record in records:
            if isinstance(record, CandidateRecord) and record.verdict == "broke":
                self.fatal.add((record.problem, record.choice.key))


def row(record: CandidateRecord) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    t = record.times
    reason = f"{record.verdict}: {record.reason}" if record.reason else record.verdict
    return (
        record.problem, str(record.choice), number(record.error, ".2e"), number(record.mean_error, ".2e"),
        *(number(time, ".1f") for time in ((t.least, t.median, t.most) if t else (None, None, None))),
        number(record.registers, "d"), number(record.spills, "d"), number(record.scratchpad_bytes, "d"), reason,
    )  # fmt: skip


def latest(records: Sequence[Record], name: str) -> list[CandidateRecord]:
    found: dict[tuple[str, str], CandidateRecord] = {}
    for record in records:
        if isinstance(record, CandidateRecord) and record.name == name:
            found[record.problem, record.choice.key] = record
    problems = list(dict.fromkeys(problem for problem, _ in found))
    by_time: Callable[[CandidateRecord], tuple[int, float]] = lambda c: (  # noqa: E731
        problems.index(c.problem),
        c.times.median if c.times else float("inf"),
    )
    return sorted(found.values(), key=by_time)


def text(records: Sequence[Record]) -> str:
    """Return a log as tables, one a class; candidates that cost no device time are only counted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    origin = records[0]
    assert isinstance(origin, Origin)
    head = "timed" if origin.measured else "compiled only, nothing timed"
    ptxas = f"ptxas {origin.ptxas}, " if origin.ptxas else ""
    console.print(Text(f"{origin.target}, {origin.chip}, {origin.toolchain}, {ptxas}{origin.date}; {head}"))
    console.print(Text(f"portattn {origin.portattn} {origin.commit} (kernels {origin.kernels}): {origin.command}"))
    for line in display_text.of_kernels(name.partition(":")[0] for name in origin.classes):
        console.print(Text(line))
    outcomes = {record.name: record for record in records if isinstance(record, Outcome)}
    for name in origin.classes:
        rows = latest(records, name)
        if not rows:
            continue
        console.print(Text(f"\n{name}", style="bold"))
        table = Table(box=None, pad_edge=False)
        for column in COLUMNS:
            figure = column not in ("problem", "candidate", "verdict")
            table.add_column(
                column, justify="right" if figure else "left", no_wrap=column != "verdict", overflow="fold"
            )
        for record in rows:
            if record.verdict not in QUIET:
                table.add_row(*(Text(cell) for cell in row(record)))
        if table.row_count:
            console.print(table)
        counts = Counter(record.verdict for record in rows)
        console.print(Text(", ".join(f"{number} {verdict}" for verdict, number in counts.items())))
        if name in outcomes:
            console.print(Text(sentence(outcomes[name])))
    return console.file.getvalue()  # type: ignore[attr-defined]


def sentence(outcome: Outcome) -> str:
    if outcome.choice is None:
        return f"nothing: {outcome.reason}"
    how = "measured" if outcome.measured else "by a bound, never timed" if outcome.by_bound else "not measured"
    text = f"{'chosen' if outcome.replaces else 'kept'}, {how}: {outcome.choice}"
    if outcome.ratio is not None and outcome.incumbent is not None:
        text += f" ({outcome.ratio:.3f} of the incumbent's time, noise {outcome.noise or 0:.1%})"
    if outcome.timed_with:
        text += f"; what was the best with {outcome.timed_with} {'no longer is' if outcome.replaces else 'still is'}"
    text += f"; {outcome.reason}" if outcome.reason else ""
    return text if outcome.complete else f"{text}; the budget was spent before all candidates were looked at"
