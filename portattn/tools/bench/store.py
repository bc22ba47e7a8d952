"""rows.jsonl, written line by line while a run goes on, and bench.json and bench.csv, written whole from it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.files import write_whole
from portattn.tools import run_log
from portattn.tools.bench.firstcall import FirstCall
from portattn.tools.bench.results import SCHEMA, BenchRun, Result, Row
from portattn.tools.run_log import UNREADABLE, RunLog, encode_record, lines

ROWS = "rows.jsonl"
# A run goes on with another's rows only where these agree: else the rows would not be of one thing.
SAME = ("portattn", "kernels", "chip", "toolchain", "commit", "backend", "core", "only_host", "rounds")
_lines = msgspec.json.Decoder(BenchRun | Row | FirstCall)


class _Versioned(msgspec.Struct):
    schema: int


class Store(RunLog):
    """The folder of a run. Use it as a context: it holds the folder's lock.

    Raises ArgumentError when the folder cannot be written, or another run writes there at this moment.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / ROWS, folder / ".lock", op="bench", option="--out", shown=folder)
        self.folder = folder

    def start(self) -> Path | None:
        """Begin with no rows; those that are there are kept under their date. Returns where they went."""
        kept = self.rotate()
        self.path.touch()
        return kept

    def resume(self, run: BenchRun) -> Result:
        """What the folder's rows hold, to go on with. A line that was cut off is dropped.

        Raises ArgumentError when there are none, or they are another thing's: see SAME.
        """
        if not self.path.exists():
            raise ArgumentError("bench", "--resume", str(self.path), "there is no such file to go on with")
        found = read(self.path, resumed=True)
        for name in SAME:
            before, now = getattr(found.runs[0], name), getattr(run, name)
            if before != now:
                raise ArgumentError(
                    "bench", "--resume", str(self.path), f"its {name} is {before!r} and this run's is {now!r}"
                )
        whole = self.path.read_bytes()
        if not whole.endswith(b"\n"):
            write_whole(self.path, whole[: whole.rfind(b"\n") + 1])
        return found

    def replace(self, result: Result) -> None:
        """Have these runs, rows and first calls and no others. The old file stays where the disk is full."""
        items = (*result.runs, *result.rows, *result.first_calls)
        write_whole(self.path, b"".join(encode_record(item) for item in items))


def read(path: Path, resumed: bool = False) -> Result:
    """The result in a rows.jsonl, a bench.json, or a folder that holds either.

    resumed  a run will go on with it: see `journal.lines`

    Raises DataError (file, line) when it is neither, or of another schema version.
    """
    if path.is_dir():
        path = path / ROWS if (path / ROWS).exists() else path / "bench.json"
    data = run_log.read(path)
    if path.suffix != ".jsonl":
        return _document(path, data)
    result = Result(runs=[], rows=[])
    for number, line in lines(path, data, resumed):
        try:
            item = _lines.decode(line)
        except UNREADABLE as error:
            raise DataError(path, number, f"not a line of bench results: {error}") from None
        if isinstance(item, BenchRun):
            _check(path, number, item.schema)
        result.add(item)
    if not result.runs:
        raise DataError(path, None, "holds no run")
    return result


def _document(path: Path, data: bytes) -> Result:
    try:
        _check(path, None, msgspec.json.decode(data, type=_Versioned).schema)
        return msgspec.json.decode(data, type=Result)
    except UNREADABLE as error:
        raise DataError(path, None, f"no results of portattn bench: {error}") from None


def _check(path: Path, line: int | None, version: int) -> None:
    if version != SCHEMA:
        raise DataError(path, line, f"schema version {version}; this portattn reads version {SCHEMA}")
