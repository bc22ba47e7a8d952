"""Compile records and incidents on disk, and how long a failure counts.

A record is one sealed JSON file, written whole, safe among processes. A compiler's failure lasts and keeps every later
process from a kernel. A failure of unknown shape, or one that the machine may have caused (a full disk, a limit, a
missing program, a signal from outside), is only remembered for some time.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from portattn.config import Settings
from portattn.errors import warn_caller
from portattn.files import UntrustedPath, cache_folder, hold_lock, read_limited, sweep, write_whole
from portattn.schema.compile_record import CompileRecord, Incident, Standing
from portattn.worker.client import OWN_SIGNALS, Reply, death

TIMEOUT_STANDS = 86_400.0  # seconds: a compiler that hangs costs the whole limit each time it is asked
PASSING_STANDS = 300.0  # seconds; twice as long each time it happens again, since asking may take long
PASSING_STANDS_AT_MOST = 3_600.0
ROOM = 16 << 20  # bytes; with less on a disk that compilers write to, their failures say nothing about them

# The worker's stages before it enters a compiler, and as it reads the result.
_OUTSIDE = ("", "start", "import", "protocol", "read")
# Not SIGBUS: where Triton runs it is a page of a mapped file that could not be had (a full disk, a file cut short), and
# a wild pointer is SIGSEGV.
LASTING_SIGNALS = tuple(name for name in OWN_SIGNALS if name != "SIGBUS")
# Triton's and triton-ascend's exceptions for programs that they refuse; OutOfResources is also our own.
_REFUSALS = (
    "CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "OutOfResources", "PTXASError",
    "MLIRCompilationError",
)  # fmt: skip
# The same said in words: by MLIR, LLVM, ptxas and Ascend's programs, whatever type carries them.
_DIAGNOSTICS = re.compile(
    r"PassManager::run failed|LLVM ERROR|\bAssertion [`'].*failed|UNREACHABLE executed|failed to legalize|map::at"
    r"|:\d+:\d+: error: |loc\(.*\): error: |Cannot select|ran out of registers|Internal Triton PTX codegen error"
    r"|ptxas (error|fatal)|`ptxas` failed with error code 255|triton-adapter-opt exit status 1\b"
    r"|Command '\[?'?[^ ',]*(triton-adapter-opt|triton-opt|bishengir-\w+|ld\.lld)\b.* returned non-zero exit status 1\."
    r"|out of resource: |ub overflow|uses too much shared data"
)
# The machine's part, in any of these texts: operating systems, loaders, C++ and Python say so in these words.
_MACHINE = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Too many open files|Cannot allocate memory"
    r"|File too large|File size limit exceeded|Input/output error|Permission denied|Operation not permitted"
    r"|Resource temporarily unavailable|No such file or directory|Not a directory|Is a directory|Stale file handle"
    r"|Text file busy|Exec format error|Broken pipe|Too many levels of symbolic links|File name too long"
    r"|bad_alloc|out of memory|memory exhausted|Memory allocation failure|can't allocate memory"
    r"|error while loading shared libraries|cannot open shared object file|version `GLIBC"
    r"|command not found|could not be opened|Python\.h|\b\w+_(?:PATH|HOME|DIR) is not set"
    r"|\b(?:Memory|OS|IO|Permission|FileNotFound|FileExists|IsADirectory|NotADirectory|Import|ModuleNotFound|Timeout"
    r"|BrokenPipe|Interrupted|BlockingIO|ChildProcess|ProcessLookup|Connection)Error\b|KeyboardInterrupt",
    re.IGNORECASE,
)
_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "TEMP", "TMP", "HOME", "XDG_CACHE_HOME", "CC", "CXX", "CPATH",
    "C_INCLUDE_PATH", "LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "HIP_PATH",
)  # fmt: skip
COMPILER_VARIABLES = ("TRITON_", "AMDGCN_", "ASCEND_", "MLIR_", "LLVM_")  # how the names of compilers' own begin


def standing(reply: Reply, *, room: bool = True) -> Standing:
    """Return how long a failure stands, by its reply; `room`: whether the disks had room (see `has_room`)."""
    if not room or reply.stage in _OUTSIDE or machines(reply):
        return "passing"
    if reply.outcome == "hang":
        return "timeout"
    signal = death(reply)
    if signal:
        return "lasting" if signal in LASTING_SIGNALS else "passing"
    if reply.outcome == "crash":  # it left by itself: LLVM's fatal errors do
        return "lasting" if _DIAGNOSTICS.search(f"{reply.message}\n{reply.log}") else "passing"
    refused = reply.kind in _REFUSALS or _DIAGNOSTICS.search(reply.message)
    return "lasting" if refused else "passing"


def machines(reply: Reply) -> bool:
    """Return whether the failure is the machine's: the worker was unavailable, or a text of the reply says so."""
    return reply.unavailable or _MACHINE.search(f"{reply.kind}\n{reply.message}\n{reply.log}") is not None


def surroundings() -> Hashable:
    """Return the variables that compilers, linkers and loaders read: with others a passing failure may not recur."""
    return tuple(
        (name, value)
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(COMPILER_VARIABLES)
    )


def has_room() -> bool:
    """Return whether the disks of temporary files and of Triton's cache have room."""
    try:
        folders = [Path(tempfile.gettempdir())]
    except OSError:  # it looked for a folder that takes a file
        return False
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.join(
        os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache"
    )
    folders.append(Path(os.path.abspath(cache)))
    return all(_free(folder) >= ROOM for folder in folders)


def _free(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, or of the nearest existing one above."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0


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
    """Return a file's bytes; text that is no valid Unicode (names of files, variables) gets replacements."""
    # People read incidents: the whole is laid out, and the body digested as it stands in it.
    raw = msgspec.json.format(_encoded(body))
    envelope = _Envelope(format=FORMAT, kind=kind, key=key, sha256=_digest(kind, key, raw), body=msgspec.Raw(raw))
    return msgspec.json.encode(envelope) + b"\n"


def unseal(data: bytes, kind: str, key: str, of: type[T]) -> T | None:
    """Return the body sealed under a kind and a key; None for any other bytes or format."""
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
    """Return a file's body for a key, or None: also for another key's, or a file that another user can change."""
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
    """Return the value with "?" for os.fsdecode's stand-ins for bytes that are no UTF-8."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_valid(name): _valid(item) for name, item in value.items()}
    return [_valid(item) for item in value] if isinstance(value, (list, tuple)) else value


RECORD, INCIDENT = "record", "incident"  # kinds of sealed files


class _Passing(msgspec.Struct, frozen=True):
    record: CompileRecord
    until: float  # by the monotonic clock
    surroundings: Hashable

    def counts(self) -> bool:
        return time.monotonic() < self.until and self.surroundings == surroundings()


class CompileStore:
    """CompileRecords by key and incidents by id, under one folder. No file, and no full disk, raises an error here.

    A negative record holds until the kernels, the toolchain or portattn change its key, or for its `standing`'s time. A
    file that is unreadable, or sealed for another key, counts as absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, CompileRecord] = {}
        self._passing: dict[str, _Passing] = {}
        self._complained = self._swept = False

    def get(self, key: str, /, seconds: float = 0.0) -> CompileRecord | None:
        """Return the record for a key, or None; a time-out with less than `seconds` does not count."""
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
        """Keep a record on disk, and return it as it counts: the time of a time-out begins now."""
        if record.standing == "timeout":
            now = datetime.datetime.now(datetime.timezone.utc)
            until = now + datetime.timedelta(seconds=TIMEOUT_STANDS)
            record = msgspec.structs.replace(record, wait=TIMEOUT_STANDS, until=until)
        self._passing.pop(record.key, None)
        self._seen[record.key] = record
        self._save(self._record_path(record.key), seal(RECORD, record.key, record))
        return record

    def add_incident(self, incident: Incident) -> bool:
        """Keep an incident; return whether the disk took it."""
        return self._save(self._incident_path(incident.id), seal(INCIDENT, incident.id, incident))

    def remember(self, record: CompileRecord, *, passing: bool = True) -> CompileRecord:
        """Keep a record in this process; a `passing` failure counts for a while, twice as long if it happens again."""
        if record.passed or not passing:
            self._seen[record.key] = record
            return record
        before, now = self._passing.get(record.key), surroundings()
        wait = PASSING_STANDS
        if before is not None and before.surroundings == now:
            wait = min(2 * before.record.wait, PASSING_STANDS_AT_MOST)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=wait)
        record = msgspec.structs.replace(record, standing="passing", wait=wait, until=until)
        self._passing[record.key] = _Passing(record, time.monotonic() + wait, now)
        return record

    def happened(self, key: str) -> CompileRecord | None:
        """Return this process's last failure under a key that might pass, even if it no longer counts."""
        passing = self._passing.get(key)
        return passing.record if passing is not None else None

    def _save(self, path: Path, data: bytes) -> bool:
        """Write a file; warn once if the folder takes none (a read-only home)."""
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
        found = [self.incident(name) for name in _names(self.folder / "incidents")]
        return iter(sorted((i for i in found if i), key=lambda i: i.date))

    @contextlib.contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """Hold a key's lock among processes; after `seconds`, run without it: a second compile is only slower."""
        with hold_lock(self.folder / "locks" / f"{key}.lock", seconds):
            yield

    def count(self) -> tuple[int, int]:
        """Return the number of records on disk, and of files in their place that count as absent."""
        names = _names(self.folder / "records")
        whole = sum(read(self._record_path(name), RECORD, name, CompileRecord) is not None for name in names)
        return whole, len(names) - whole

    def empty(self) -> bool:
        """Return whether no compile was ever recorded here."""
        return not (self._seen or self._passing or _names(self.folder / "records"))

    def clear(self) -> int:
        """Remove every record, but no incident; return the number of removed files."""
        self._seen.clear()
        self._passing.clear()
        gone = 0
        for name in _names(self.folder / "records"):
            with contextlib.suppress(OSError):  # it stays, and was not counted
                self._record_path(name).unlink()
                gone += 1
        return gone

    def _remove_earlier(self) -> None:
        """Remove earlier releases' records: nothing reads their folder any more."""
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
    """Return whether a record still counts for a compile with so many seconds."""
    if record.standing != "timeout" or record.until is None:
        return True
    # The clock may have been set back since: it never counts for longer than it should have.
    left = (record.until - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    return 0 < left <= record.wait and seconds <= record.limit


def _names(folder: Path) -> list[str]:
    """Return the names of a folder's JSON files, sorted; none if it cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and name[0] != ".")


@functools.lru_cache(maxsize=8)
def _store(folder: str) -> CompileStore:
    return CompileStore(Path(folder))


def store(settings: Settings) -> CompileStore:
    """Return the store that the settings name, or the one in the platform's user cache."""
    return _store(str(cache_folder(settings.cache_dir)))
