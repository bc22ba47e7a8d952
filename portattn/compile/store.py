"""Verdicts and incidents on disk: one sealed JSON file each, written whole or not at all, safe among processes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import time
import warnings
from collections.abc import Hashable, Iterator
from pathlib import Path

import msgspec

from portattn.compile import failures, sealed
from portattn.config import Settings
from portattn.files import cache_folder, locked, sweep, write_whole
from portattn.schema.outcome import Incident, Verdict

VERDICT, INCIDENT = "verdict", "incident"  # kinds of sealed files


class _Passing(msgspec.Struct, frozen=True):
    """A failure of this process that may pass. until: by the monotonic clock."""

    verdict: Verdict
    until: float
    surroundings: Hashable

    def counts(self) -> bool:
        return time.monotonic() < self.until and self.surroundings == failures.surroundings()


class VerdictStore:
    """Verdicts by key and incidents by id, under one folder.

    A verdict that fails is kept as well: what did not compile here once is not tried again until the kernels, the
    toolchain or portattn change, which changes the key. One whose `standing` is less than lasting counts for its time.
    A file that cannot be read, or was sealed for another key, counts as absent. Nothing here raises for what is on the
    disk, or for what it does not take.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, Verdict] = {}
        self._passing: dict[str, _Passing] = {}
        self._complained = self._swept = False

    def get(self, key: str, /, seconds: float = 0.0) -> Verdict | None:
        """The verdict for a key, or None. What was read once is kept; an absent one is looked for again.

        seconds  time that a compile would have now: a time-out that had less does not count
        """
        passing = self._passing.get(key)
        if passing is not None and passing.counts():
            return passing.verdict
        found = self._seen.get(key)
        if found is None:
            found = sealed.read(self._verdict_path(key), VERDICT, key, Verdict)
            if found is not None:
                self._seen[key] = found
        if found is not None and not _stands(found, seconds):
            self._seen.pop(key, None)
            return None
        return found

    def put(self, verdict: Verdict) -> Verdict:
        """Keep a verdict, for other processes too, and return it as it counts: the time of a time-out begins now."""
        if verdict.standing == "timeout":
            now = datetime.datetime.now(datetime.timezone.utc)
            until = now + datetime.timedelta(seconds=failures.TIMEOUT_STANDS)
            verdict = msgspec.structs.replace(verdict, wait=failures.TIMEOUT_STANDS, until=until)
        self._passing.pop(verdict.key, None)
        self._seen[verdict.key] = verdict
        self._save(self._verdict_path(verdict.key), sealed.seal(VERDICT, verdict.key, verdict))
        return verdict

    def add_incident(self, incident: Incident) -> bool:
        """Keep an incident; whether the disk took it."""
        return self._save(self._incident_path(incident.id), sealed.seal(INCIDENT, incident.id, incident))

    def remember(self, verdict: Verdict) -> Verdict:
        """Keep a verdict for this process only. A failure counts for a while, and in the surroundings of now: twice as
        long when it happens again."""
        if verdict.passed:
            self._seen[verdict.key] = verdict
            return verdict
        before, now = self._passing.get(verdict.key), failures.surroundings()
        wait = failures.PASSING_STANDS
        if before is not None and before.surroundings == now:
            wait = min(2 * before.verdict.wait, failures.PASSING_STANDS_AT_MOST)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=wait)
        verdict = msgspec.structs.replace(verdict, standing="passing", wait=wait, until=until)
        self._passing[verdict.key] = _Passing(verdict, time.monotonic() + wait, now)
        return verdict

    def happened(self, key: str) -> Verdict | None:
        """The last failure of this process under a key that might pass, whether it still counts or not."""
        passing = self._passing.get(key)
        return passing.verdict if passing is not None else None

    def _save(self, path: Path, data: bytes) -> bool:
        """Write, or warn once when the folder takes no files (a read-only home): this process then remembers alone."""
        try:
            # Not synced: a file that a power failure left empty counts as absent, and costs one more compile.
            write_whole(path, data, durable=False, parents=True)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            if not self._complained:
                self._complained = True
                text = f"verdicts cannot be kept under {self.folder} ({error}): set PORTATTN_CACHE_DIR"
                warnings.warn(text, stacklevel=2)
            return False
        if not self._swept:
            self._swept = True
            for folder in ("verdicts", "incidents"):
                sweep(self.folder / folder)
        return True

    def incident(self, name: str) -> Incident | None:
        return sealed.read(self._incident_path(name), INCIDENT, name, Incident)

    def incidents(self) -> Iterator[Incident]:
        """Every incident, oldest first."""
        found = [self.incident(name) for name in _names(self.folder / "incidents")]
        return iter(sorted((i for i in found if i), key=lambda i: i.date))

    @contextlib.contextmanager
    def lock(self, key: str, seconds: float) -> Iterator[None]:
        """A lock among processes for one key, so that a specialisation is tried by one of them at a time.

        Where nothing can be locked, or after `seconds` of waiting, the block runs unlocked (see `files.locked`): trying
        twice is only slower.
        """
        with locked(self.folder / "locks" / f"{key}.lock", seconds):
            yield

    def count(self) -> tuple[int, int]:
        """(verdicts on the disk, files in their place that count as absent)."""
        names = _names(self.folder / "verdicts")
        whole = sum(sealed.read(self._verdict_path(name), VERDICT, name, Verdict) is not None for name in names)
        return whole, len(names) - whole

    def clear(self) -> int:
        """Forget every verdict (incidents stay); the number of files that are gone."""
        self._seen.clear()
        self._passing.clear()
        gone = 0
        for name in _names(self.folder / "verdicts"):
            with contextlib.suppress(OSError):  # it stays, and was not counted
                self._verdict_path(name).unlink()
                gone += 1
        return gone

    def _verdict_path(self, key: str) -> Path:
        return self.folder / "verdicts" / f"{key}.json"

    def _incident_path(self, name: str) -> Path:
        return self.folder / "incidents" / f"{name}.json"


def _stands(verdict: Verdict, seconds: float) -> bool:
    """Whether a verdict still counts for a compile that would have so many seconds."""
    if verdict.standing != "timeout" or verdict.until is None:
        return True
    # The clock may have been set back since: it never counts for longer than it should have.
    left = (verdict.until - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
    return 0 < left <= verdict.wait and seconds <= verdict.limit


def _names(folder: Path) -> list[str]:
    """The names of a folder's JSON files, in order; none where it is not there or cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json") and name[0] != ".")


@functools.lru_cache(maxsize=8)
def _store(folder: str) -> VerdictStore:
    return VerdictStore(Path(folder))


def store(settings: Settings) -> VerdictStore:
    """The store that the settings name, or the platform's user cache."""
    return _store(str(cache_folder(settings.cache_dir)))
