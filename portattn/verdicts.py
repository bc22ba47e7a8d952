"""Verdicts and incidents on disk: one JSON file each, written whole or not at all, safe among processes."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import filelock
import msgspec
import platformdirs

from portattn.config import Settings
from portattn.verdict import Incident, Verdict

T = TypeVar("T")


class VerdictStore:
    """Verdicts by key and incidents by id, under one folder.

    A verdict that fails is kept as well: what did not compile here once is not tried again until the kernels, the
    toolchain or portattn change, which changes the key. A file that cannot be read counts as absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, Verdict] = {}
        self._complained = False

    def get(self, key: str, /) -> Verdict | None:
        """The verdict for a key, or None. What was read once is kept; an absent one is looked for again."""
        found = self._seen.get(key)
        if found is None:
            found = _read(self._verdict_path(key), Verdict)
            if found is not None:
                self._seen[key] = found
        return found

    def put(self, verdict: Verdict) -> None:
        self._seen[verdict.key] = verdict
        self._save(self._verdict_path(verdict.key), msgspec.json.encode(verdict))

    def add_incident(self, incident: Incident) -> None:
        self._save(
            self.folder / "incidents" / f"{incident.id}.json", msgspec.json.format(msgspec.json.encode(incident))
        )

    def remember(self, verdict: Verdict) -> None:
        """Keep a verdict for this process only: what failed for a passing reason is tried again by the next one."""
        self._seen[verdict.key] = verdict

    def _save(self, path: Path, data: bytes) -> None:
        """Write, or warn once when the folder takes no files (a read-only home): this process then remembers alone."""
        try:
            _write(path, data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                text = f"verdicts cannot be kept under {self.folder} ({error}): set PORTATTN_CACHE_DIR"
                warnings.warn(text, stacklevel=2)

    def incident(self, name: str) -> Incident | None:
        return _read(self.folder / "incidents" / f"{name}.json", Incident)

    def incidents(self) -> Iterator[Incident]:
        """Every incident, oldest first."""
        found = [_read(path, Incident) for path in (self.folder / "incidents").glob("*.json")]
        return iter(sorted((i for i in found if i), key=lambda i: i.date))

    @contextlib.contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """A lock among processes for one key, so that a specialisation is tried by one of them at a time.

        Where the folder takes no files nothing is locked, and after `seconds` of waiting (the holder is stopped, or
        stuck) the block runs unlocked too: trying twice is only slower.
        """
        folder = self.folder / "locks"
        lock = filelock.FileLock(folder / f"{key}.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=seconds)
        except (OSError, filelock.Timeout):
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def clear(self) -> int:
        """Forget every verdict (incidents stay); the number of verdicts forgotten."""
        self._seen.clear()
        paths = list((self.folder / "verdicts").glob("*.json"))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _verdict_path(self, key: str) -> Path:
        return self.folder / "verdicts" / f"{key}.json"


@functools.lru_cache(maxsize=8)
def _store(folder: str) -> VerdictStore:
    return VerdictStore(Path(folder))


def store(settings: Settings) -> VerdictStore:
    """The store that the settings name, or the platform's user cache."""
    return _store(settings.cache_dir or platformdirs.user_cache_dir("portattn", appauthor=False))


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError):
        return None  # an older version's file, or a disk in trouble: the compile is simply tried again


def _write(path: Path, data: bytes) -> None:
    """Write beside the file and rename over it: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
