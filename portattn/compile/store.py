"""Compile records and incidents on disk: one sealed JSON file each, written whole, safe among processes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from portattn.compile import failures
from portattn.config import Settings
from portattn.errors import warn_caller
from portattn.files import UntrustedPath, cache_folder, hold_lock, read_limited, sweep, write_whole
from portattn.schema.compile_record import CompileRecord, Incident

T = TypeVar("T")
FORMAT = 2  # before there was no envelope
MOST = 64 << 20  # bytes of a file: an incident with its log has some 100 kB


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    kind: str
    key: str
    sha256: str
    body: msgspec.Raw


def seal(kind: str, key: str, body: msgspec.Struct) -> bytes:
    """A file's bytes. Text that is no valid Unicode (names of files, variables) is written with replacements."""
    # People read incidents: the whole is laid out, and the body digested as it stands in it.
    raw = msgspec.json.format(_encoded(body))
    envelope = _Envelope(format=FORMAT, kind=kind, key=key, sha256=_digest(kind, key, raw), body=msgspec.Raw(raw))
    return msgspec.json.encode(envelope) + b"\n"


def unseal(data: bytes, kind: str, key: str, of: type[T]) -> T | None:
    """What was sealed under a kind and a key; None where the bytes are anything else, or of another format."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        raw = bytes(envelope.body)
        if (envelope.format, envelope.kind, envelope.key) != (FORMAT, kind, key):
            return None
        if envelope.sha256 != _digest(kind, key, raw):
            return None
        return msgspec.json.decode(raw, type=of)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        # Broken bytes raise DecodeError, UnicodeDecodeError, or RecursionError where they nest deeply; a body of
        # another release raises ValidationError.
        return None


_distrusted: set[Path] = set()  # folders that were warned about


def read(path: Path, kind: str, key: str, of: type[T]) -> T | None:
    """Return what a file holds for a key; None if there is none, if it cannot be read, or if it is another key's.

    A file that another user owns or can change counts as absent, with one warning for each folder.
    """
    try:
        data = read_limited(path, MOST, owned=True)
    except UntrustedPath as error:
        if path.parent not in _distrusted:
            _distrusted.add(path.parent)
            warn_caller(
                f"{error}: it and all like it in that folder count as absent. To have them counted, make them "
                "yours (chown, chmod go-w); or set PORTATTN_CACHE_DIR to your own folder"
            )
        return None
    except (OSError, ValueError):  # ValueError: a key that can be no file's name
        return None
    return unseal(data, kind, key, of)


def _digest(kind: str, key: str, raw: bytes) -> str:
    named = f"{kind}\0{key}\0".encode(errors="surrogatepass")
    return hashlib.sha256(named + raw).hexdigest()


def _encoded(body: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid(msgspec.to_builtins(body)))


def _valid(value: object) -> object:
    """The same with "?" for what os.fsdecode made of bytes that are no UTF-8."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_valid(name): _valid(item) for name, item in value.items()}
    return [_valid(item) for item in value] if isinstance(value, (list, tuple)) else value


RECORD, INCIDENT = "record", "incident"  # kinds of sealed files


class _Passing(msgspec.Struct, frozen=True):
    """A failure of this process that may pass. until: by the monotonic clock."""

    record: CompileRecord
    until: float
    surroundings: Hashable

    def counts(self) -> bool:
        return time.monotonic() < self.until and self.surroundings == failures.surroundings()


class CompileStore:
    """CompileRecords by key and incidents by id, under one folder.

    A record that fails is kept as well: what did not compile here once is not tried again until the kernels, the
    toolchain or portattn change, which changes the key. One whose `standing` is less than lasting counts for its time.
    A file that cannot be read, or was sealed for another key, counts as absent. Nothing here raises for what is on the
    disk, or for what it does not take.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, CompileRecord] = {}
        self._passing: dict[str, _Passing] = {}
        self._complained = self._swept = False

    def get(self, key: str, /, seconds: float = 0.0) -> CompileRecord | None:
        """The record for a key, or None. What was read once is kept; an absent one is looked for again.

        seconds  time that a compile would have now: a time-out that had less does not count
        """
        passing = self._passing.get(key)
        if passing is not None and passing.counts():
            return passing.record
        found = self._seen.get(key)
        if found is None:
            found = read(self._record_path(key), RECORD, key, CompileRecord)
            if found is not None:
                self._seen[key] = found
        if found is not None and not _stands(found, seconds):
            self._seen.pop(key, None)
            return None
        return found

    def put(self, record: CompileRecord) -> CompileRecord:
        """Keep a record, for other processes too, and return it as it counts: the time of a time-out begins now."""
        if record.standing == "timeout":
            now = datetime.datetime.now(datetime.timezone.utc)
            until = now + datetime.timedelta(seconds=failures.TIMEOUT_STANDS)
            record = msgspec.structs.replace(record, wait=failures.TIMEOUT_STANDS, until=until)
        self._passing.pop(record.key, None)
        self._seen[record.key] = record
        self._save(self._record_path(record.key), seal(RECORD, record.key, record))
        return record

    def add_incident(self, incident: Incident) -> bool:
        """Keep an incident; whether the disk took it."""
        return self._save(self._incident_path(incident.id), seal(INCIDENT, incident.id, incident))

    def remember(self, record: CompileRecord, *, passing: bool = True) -> CompileRecord:
        """Keep a record for this process only. A failure that is `passing` counts for a while, and in the surroundings
        of now: twice as long when it happens again."""
        if record.passed or not passing:
            self._seen[record.key] = record
            return record
        before, now = self._passing.get(record.key), failures.surroundings()
        wait = failures.PASSING_STANDS
        if before is not None and before.surroundings == now:
            wait = min(2 * before.record.wait, failures.PASSING_STANDS_AT_MOST)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=wait)
        record = msgspec.structs.replace(record, standing="passing", wait=wait, until=until)
        self._passing[record.key] = _Passing(record, time.monotonic() + wait, now)
        return record

    def happened(self, key: str) -> CompileRecord | None:
        """The last failure of this process under a key that might pass, whether it still counts or not."""
        passing = self._passing.get(key)
        return passing.record if passing is not None else None

    def _save(self, path: Path, data: bytes) -> bool:
        """Write, or warn once when the folder takes no files (a read-only home): this process then remembers alone."""
        try:
            # Not synced: a file that a power failure left empty counts as absent, and costs one more compile.
            write_whole(path, data, durable=False, mode=0o644, parents=True)  # no group may write: see `read`
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            if not self._complained:
                self._complained = True
                text = f"compile records cannot be kept under {self.folder} ({error}): set PORTATTN_CACHE_DIR"
                warn_caller(text)
            return False
        if not self._swept:
            self._swept = True
            for folder in ("records", "incidents"):
                sweep(self.folder / folder)
            self._remove_earlier()
        return True

    def incident(self, name: str) -> Incident | None:
        return read(self._incident_path(name), INCIDENT, name, Incident)

    def incidents(self) -> Iterator[Incident]:
        """Every incident, oldest first."""
        found = [self.incident(name) for name in _names(self.folder / "incidents")]
        return iter(sorted((i for i in found if i), key=lambda i: i.date))

    @contextlib.contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """A lock among processes for one key, so that a specialisation is tried by one of them at a time.

        Where nothing can be locked, or after `seconds` of waiting, the block runs unlocked
        (`files.hold_lock`): a second compile is only slower.
        """
        with hold_lock(self.folder / "locks" / f"{key}.lock", seconds):
            yield

    def count(self) -> tuple[int, int]:
        """(records on the disk, files in their place that count as absent)."""
        names = _names(self.folder / "records")
        whole = sum(read(self._record_path(name), RECORD, name, CompileRecord) is not None for name in names)
        return whole, len(names) - whole

    def empty(self) -> bool:
        """Whether nothing was ever recorded here, as on a machine where portattn has not yet compiled anything."""
        return not (self._seen or self._passing or _names(self.folder / "records"))

    def clear(self) -> int:
        """Forget every record (incidents stay); the number of files that are gone."""
        self._seen.clear()
        self._passing.clear()
        gone = 0
        for name in _names(self.folder / "records"):
            with contextlib.suppress(OSError):  # it stays, and was not counted
                self._record_path(name).unlink()
                gone += 1
        return gone

    def _remove_earlier(self) -> None:
        """Remove what earlier releases kept: records in another folder, which nothing reads any more."""
        earlier = self.folder / "verdicts"
        with contextlib.suppress(OSError):  # others may be at it
            for path in list(earlier.iterdir()):
                path.unlink()
            earlier.rmdir()

    def _record_path(self, key: str) -> Path:
        return self.folder / "records" / f"{key}.json"

    def _incident_path(self, name: str) -> Path:
        return self.folder / "incidents" / f"{name}.json"


def _stands(record: CompileRecord, seconds: float) -> bool:
    """Whether a record still counts for a compile that would have so many seconds."""
    if record.standing != "timeout" or record.until is None:
        return True
    # The clock may have been set back since: it never counts for longer than it should have.
    left = (record.until - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    return 0 < left <= record.wait and seconds <= record.limit


def _names(folder: Path) -> list[str]:
    """The names of a folder's JSON files, in order; none where it is not there or cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and name[0] != ".")


@functools.lru_cache(maxsize=8)
def _store(folder: str) -> CompileStore:
    return CompileStore(Path(folder))


def store(settings: Settings) -> CompileStore:
    """The store that the settings name, or the platform's user cache."""
    return _store(str(cache_folder(settings.cache_dir)))
