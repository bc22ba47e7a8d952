"""portattn's files: folders, trust, whole writes, limited reads, locks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import grp
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock
import platformdirs

_PART = re.compile(r"\..*\.[0-9a-z_]{8}\.part")
_OLD = "old"  # in a workshop: the folder that is being replaced, under its own name
_LINKS = 40  # as Linux follows
_TRIAL_BYTES = 1 << 16  # more than a file system keeps beside a file's name: a full disk does not take it
_LEFT_OVER_SECONDS = 3600.0  # nothing of portattn's writes one file for so long
LARGEST_GIVEN = 256 << 20  # bytes of a file that a user names: a matrix of 100,000 cells has some 100 MB
_ROOM = 1 << 16  # bytes that are asked for beyond a file's size
_ACCOUNTS, _GROUPS = Path("/etc/passwd"), Path("/etc/group")
_KINDS: dict[int, str] = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class UntrustedPath(Exception):
    """A file or folder that another user owns or can change; the text names its owner or its mode."""


def cache_folder(given: str = "") -> Path:
    """Return the given cache folder, or the platform's; an account without a home has `_temporary_cache`."""
    if given:
        return Path(given)
    with contextlib.suppress(RuntimeError):  # raised by some releases of platformdirs; others give a relative folder
        found = Path(platformdirs.user_cache_dir("portattn", appauthor=False))
        if found.is_absolute():
            return found
    return _temporary_cache(tempfile.gettempdir(), os.geteuid())


@functools.lru_cache(maxsize=4)
def _temporary_cache(parent: str, user: int) -> Path:
    """Return `portattn-UID` among the temporary files; a new folder, removed at exit, if another user has it."""
    place = Path(parent, f"portattn-{user}")
    try:
        with trusted_folder(place, make=True):
            return place
    except OSError:
        return place  # there is nothing to take over; a later write raises the reason
    except UntrustedPath as error:
        text = (
            f"portattn keeps nothing for later processes: {error}; set HOME, or PORTATTN_CACHE_DIR to your own folder"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    made, owner = tempfile.mkdtemp(prefix=f"{place.name}-", dir=parent), os.getpid()
    # A forked process has the same exit functions, and its parent still needs the folder.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)
    return Path(made)


def check_owner(seen: os.stat_result, name: str, kind: str, *, private_group: bool = False) -> None:
    """Raise UntrustedPath unless this user or root owns the file or folder, and no other user may write to it.

    With `private_group` the user's private group may: Debian and RHEL make one for each user, and a umask of 0002."""
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid not in (os.geteuid(), 0):
        raise UntrustedPath(
            f"the {kind} {name} belongs to user {seen.st_uid} (mode {mode:04o}), "
            f"and this process is user {os.geteuid()}'s"
        )
    # In a sticky folder others can add files, but neither replace nor remove ours.
    if stat.S_ISLNK(seen.st_mode) or (kind == "folder" and mode & stat.S_ISVTX):
        return
    others = mode & 0o022
    if others == 0o020 and private_group and _is_private(seen.st_gid, os.geteuid()):
        return
    if others:
        raise UntrustedPath(f"the {kind} {name} may be written by others (mode {mode:04o})")


@functools.lru_cache(maxsize=16)
def _is_private(group: int, user: int) -> bool:
    """Return whether a group has the user's name and no other member. Never group 0, which containers share."""
    if group == 0:
        return False
    try:
        # Accounts of /etc/passwd only: a directory service (LDAP) need not list its own, and may be slow.
        accounts, groups = _table(_ACCOUNTS), _table(_GROUPS)
        found = grp.getgrgid(group)  # with the members that a directory service adds
    except (OSError, KeyError):
        return False
    own = {name for name, _, uid, *_ in accounts if uid == str(user)}
    primary = {name for name, _, _, gid, *_ in accounts if gid == str(group)}
    listed = {name for _, _, gid, names, *_ in groups if gid == str(group) for name in names.split(",") if name}
    return found.gr_name in own & primary and primary | listed | {*found.gr_mem} <= own


def _table(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return [fields for line in lines if len(fields := line.split(":")) >= 4]


@contextlib.contextmanager
def trusted_folder(path: Path, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of a trusted folder; raise UntrustedPath or OSError.

    With `make`, create it, and take others' right to write to our own: earlier releases left that to the umask."""
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise UntrustedPath(f"{path} is no folder, or a symbolic link") from None
    try:
        seen = os.fstat(handle)
        if make and seen.st_uid == os.geteuid() and seen.st_mode & 0o022 and not seen.st_mode & stat.S_ISVTX:
            os.fchmod(handle, stat.S_IMODE(seen.st_mode) & ~0o022)
            seen = os.fstat(handle)
        check_owner(seen, str(path), "folder")
        yield handle
    finally:
        os.close(handle)


def check_tree(folder: Path) -> None:
    """Check a folder, all in it, and the targets of its links; raise UntrustedPath, or OSError if unreadable.

    A target is checked with the folder that holds it, since its writers can replace the target. A missing target
    passes, as does this process's own Python, whose owner's code runs already."""
    if folder.is_symlink():
        check_owner(os.lstat(folder), str(folder), "file", private_group=True)
        _check_targets(str(folder))
    waiting = [os.path.realpath(folder)]
    known = set(waiting)
    for place in waiting:  # grows meanwhile
        check_owner(os.lstat(place), place, "folder", private_group=True)
        with os.scandir(place) as entries:
            for entry in entries:
                inner = entry.path
                if not entry.is_dir(follow_symlinks=False):
                    check_owner(entry.stat(follow_symlinks=False), inner, "file", private_group=True)
                    if not entry.is_symlink():
                        continue
                    _check_targets(inner)
                    inner = os.path.realpath(inner)
                if inner not in known and os.path.isdir(inner):
                    known.add(inner)
                    waiting.append(inner)


def _check_targets(link: str) -> None:
    """Check a link's target and the folder that holds it, and so on while the target is a link."""
    for _ in range(_LINKS):
        folder, name = os.path.split(os.path.join(os.path.dirname(link), os.readlink(link).rstrip("/")))
        folder = os.path.realpath(folder)
        link = os.path.join(folder, name)
        if not os.path.lexists(link) or link == os.path.realpath(sys.executable):
            return
        seen = os.lstat(link)
        check_owner(os.lstat(folder), folder, "folder", private_group=True)
        check_owner(seen, link, "folder" if stat.S_ISDIR(seen.st_mode) else "file", private_group=True)
        if not stat.S_ISLNK(seen.st_mode):
            return


def write_whole(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666, parents: bool = False) -> None:
    """Write beside the file and rename over it: readers see the old file or the new one, after an OSError the old one.

    Unless `durable`, a power failure may leave an empty file: enough for a cache whose files carry a checksum."""
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        # Not by tempfile.mkstemp: the file gets the permissions that the user's umask gives to any other.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            part.unlink(missing_ok=True)
        raise


def write_named(path: Path, data: bytes) -> None:
    """Write a user's file: whole if regular or new, else into it (a pipe, a device, an open file: /dev/stdout).

    A link stays, and its target is replaced. Raises OSError."""
    place = _place(path)
    if isinstance(place, int):
        handle = os.dup(place)
    elif place.is_file() or not place.exists():
        write_whole(place, data)
        return
    else:
        handle = os.open(place, os.O_WRONLY | os.O_CLOEXEC)
    with open(handle, "wb") as file:
        file.write(data)


def takes_no_file(path: Path) -> str:
    """Return why a user's file cannot be written, or an empty string."""
    try:
        place = _place(path)
    except OSError as error:
        return error.strerror or str(error)
    if isinstance(place, int):
        return ""
    if place.is_dir():
        return "it is a folder"
    return takes_no_files(place.parent) if place.is_file() or not place.exists() else ""


def _place(path: Path) -> Path | int:
    """Return the target of a path's links, or the descriptor if this process has it open."""
    # Links there show the names by which files were opened, which may be other files by now.
    opened = Path("/proc/self/fd").resolve()
    for _ in range(_LINKS):
        folder = path.parent.resolve()
        if folder == opened and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return path
        path = folder / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def read_limited(path: Path, most: int, *, owned: bool = False) -> bytes:
    """Return a regular file's bytes, checking its owner if `owned`; raise OSError otherwise or over `most` bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if owned:
            check_owner(os.fstat(handle), str(path), "file", private_group=True)
        return read_open(handle, path, most)
    finally:
        os.close(handle)


def read_open(handle: int, path: Path, most: int) -> bytes:
    """Return all bytes of an open descriptor, from its beginning; raise OSError like `read_limited`."""
    seen = os.fstat(handle)
    if stat.S_ISDIR(seen.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(seen.st_mode):
        kind = _KINDS.get(stat.S_IFMT(seen.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are read", str(path))
    parts, place, size = [], 0, seen.st_size
    # Growing files, and files of /proc, have more bytes than they say.
    while size <= most and (part := os.pread(handle, min(most + 1, size + _ROOM) - place, place)):
        parts.append(part)
        place += len(part)
        size = max(size, place)
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
    return b"".join(parts)


def takes_no_files(folder: Path) -> str:
    """Return why a folder takes no files, or an empty string. Creates the folder, and a file that is removed again."""
    if folder.exists() and not folder.is_dir():
        return "it is not a folder"
    trial = folder / f".trial.{secrets.token_hex(4)}"
    try:
        write_whole(trial, bytes(_TRIAL_BYTES), parents=True)
        trial.unlink(missing_ok=True)
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror}"
    return ""


@contextlib.contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """Yield a new folder inside a folder, removed with its files after the block or at the end of the process."""
    with tempfile.TemporaryDirectory(prefix=".making.", suffix=".part", dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


def replace_folder(folder: Path, files: Iterable[tuple[str, bytes]]) -> int:
    """Write a folder beside its place and rename it: readers find the old or the new one. Return the number of files.

    After an OSError or an interrupt the old folder is in place. If a process is killed between the two renames, the
    next `replace_folder` beside it puts the old one back. Files are not synced."""
    folder = folder.resolve()  # a link stays, and its target is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    _put_back(folder.parent)
    sweep(folder.parent)
    count = 0
    with workshop(folder.parent) as place:
        new, old = place / "new", place / _OLD / folder.name
        new.mkdir()
        old.parent.mkdir()
        for name, data in files:
            file = new / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            count += 1
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException as error:
            if old.exists() and not folder.exists():
                old.rename(folder)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise OSError(errno.EBUSY, "another process writes it at this moment", str(folder)) from None
            raise
    return count


def _put_back(parent: Path) -> None:
    """Put back folders of processes that were killed between the two renames; a live process there raises EBUSY."""
    for old in parent.glob(f".*.part/{_OLD}/*"):
        if _PART.fullmatch(old.parent.parent.name) and not os.path.lexists(parent / old.name):
            with contextlib.suppress(OSError):  # another process put it back, or it is not ours
                old.rename(parent / old.name)


def sweep(folder: Path) -> None:
    """Remove the unfinished files and folders of killed processes from a folder."""
    old = time.time() - _LEFT_OVER_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if not _PART.fullmatch(entry.name) or entry.stat(follow_symlinks=False).st_mtime > old:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)


@contextlib.contextmanager
def hold_lock(path: Path, seconds: float) -> Iterator[bool]:
    """Hold a lock among processes inside the block, and yield whether it is held; the kernel frees a dead holder's.

    The block runs without it if the folder takes no files, its file system has no locks, or another process keeps the
    lock for over `seconds`. So the work must be safe to do twice."""
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        lock.acquire(timeout=seconds)
    except (OSError, filelock.Timeout, NotImplementedError, RuntimeError):
        # NotImplementedError and RuntimeError: filelock's own, for file systems without locks, and around a fork.
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it ends with its descriptor
                lock.release()
