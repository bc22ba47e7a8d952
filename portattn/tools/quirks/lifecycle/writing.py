"""Writing new files together: all of them or none, and never over one that exists."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import filelock

from portattn.config import current
from portattn.errors import ArgumentError, PortattnError
from portattn.files import cache_folder
from portattn.planning.registry import Registry, shipped_quirks

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
