"""Disks that are full, folders that take no files, and file systems without locks: nothing is raised out of a call."""

import errno
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import filelock
import pytest
from store_children import become_nobody, forked, no_file_over
from test_store_corruption import KEYS, incident, record

from portattn.compile.record_store import CompileStore
from portattn.files import cache_folder, hold_lock, read_limited, sweep, takes_no_file, write_named, write_whole

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, or mount a disk")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _put_under_a_limit(folder: Path) -> tuple[bool, list[str], int]:
    kept = CompileStore(folder)
    no_file_over(200)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept.put(record(KEYS[0], reason="new"))
        taken = kept.add_incident(incident("x"))
    assert kept.get(KEYS[0]).reason == "new", "this process remembers"
    return taken, [str(one.message) for one in said], len(list(folder.rglob("*")))


def test_a_limit_on_files_leaves_the_old_one_and_one_warning(tmp_path: Path) -> None:
    CompileStore(tmp_path).put(record(KEYS[0], reason="old"))
    taken, said, _ = forked(_put_under_a_limit, tmp_path)
    assert not taken
    assert len(said) == 1
    assert "PORTATTN_CACHE_DIR" in said[0]
    assert "File too large" in said[0]
    assert CompileStore(tmp_path).get(KEYS[0]).reason == "old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{KEYS[0]}.json"]


@needs_root
def test_a_full_disk(small_disk: Path) -> None:
    kept = CompileStore(small_disk)
    kept.put(record(KEYS[0], reason="old"))
    handle = os.open(small_disk / "ballast", os.O_WRONLY | os.O_CREAT)
    while os.write(handle, bytes(4096)) == 4096 and os.statvfs(small_disk).f_bavail:
        pass
    os.close(handle)
    with pytest.warns(UserWarning, match="No space left on device"):
        kept.put(record(KEYS[0], reason="new"))
    with kept.lock(KEYS[0], 5.0):
        pass
    assert CompileStore(small_disk).get(KEYS[0]) == record(KEYS[0], reason="old")
    assert [path.name for path in (small_disk / "records").iterdir()] == [f"{KEYS[0]}.json"]
    (small_disk / "ballast").unlink()
    kept.put(record(KEYS[0], reason="new"))
    assert CompileStore(small_disk).get(KEYS[0]) == record(KEYS[0], reason="new")


def _as_nobody(folder: Path) -> tuple[str, str | None, int]:
    become_nobody()
    kept = CompileStore(folder)
    before = kept.get(KEYS[0])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept.put(record(KEYS[1]))
        with kept.lock(KEYS[1], 5.0):
            pass
    gone = kept.clear()
    return str(said[0].message), before.reason if before else None, gone


@needs_root
def test_a_folder_that_is_only_read(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o001 == 0 and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    CompileStore(tmp_path).put(record(KEYS[0], reason="root's"))
    said, before, gone = forked(_as_nobody, tmp_path)
    assert "Permission denied" in said
    assert (before, gone) == ("root's", 0)
    assert CompileStore(tmp_path).get(KEYS[0]) is not None


@pytest.mark.parametrize("error", [
    OSError(errno.ENOLCK, "No locks available"), NotImplementedError(), RuntimeError("inherited across fork")
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_where_nothing_can_be_locked_the_block_runs(tmp_path, monkeypatch, error):
    monkeypatch.setattr(filelock.FileLock, "acquire", Mock(side_effect=error))
    with hold_lock(tmp_path / "x.lock", 1.0) as held:
        assert held is False


def test_a_lock_that_cannot_be_released_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = filelock.FileLock.release

    def refuse(self: filelock.FileLock, *arguments: object, **named: object) -> None:
        release(self)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(filelock.FileLock, "release", refuse)
    with hold_lock(tmp_path / "x.lock", 1.0) as held:
        assert held is True


def test_a_lock_that_somebody_holds_is_waited_for_and_then_done_without(tmp_path: Path) -> None:
    with filelock.FileLock(tmp_path / "x.lock"), hold_lock(tmp_path / "x.lock", 0.2) as held:
        assert held is False
    (tmp_path / "x.lock").write_text("left over by a process that died")
    with hold_lock(tmp_path / "x.lock", 5.0) as held:
        assert held is True
    with pytest.raises(ZeroDivisionError), hold_lock(tmp_path / "x.lock", 1.0):
        raise ZeroDivisionError


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x", b"1")
    assert list(tmp_path.iterdir()) == []


def test_what_killed_writers_left_goes_after_an_hour(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".k.json.0123abcd.part", ".k.json.0123abce.part", "k.part"))
    folder = tmp_path / ".making.abcd_012.part"
    folder.mkdir()
    (folder / "half.so").touch()
    for path in (old, new, other):
        path.touch()
    for path in (old, other, folder):
        os.utime(path, (1, 1))
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([new, other])
    sweep(tmp_path / "not there")


def test_permissions_are_the_users(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_without_a_home_the_cache_is_no_relative_folder() -> None:
    code = "import os; os.environ.pop('HOME', 0)\n"
    code += "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n"
    code += "os.environ.pop('XDG_CACHE_HOME', 0)\nfrom portattn.files import cache_folder\nprint(cache_folder())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(said).is_absolute()
    assert (Path(said).name, cache_folder("given")) == (f"portattn-{os.geteuid()}", Path("given"))


@needs_root
@pytest.mark.parametrize("made", ["folder", "open folder", "link"])
def test_a_cache_folder_that_another_user_made_first_is_not_taken_over(tmp_path: Path, made: str) -> None:
    """Everybody can make this name among the temporary files, and would own the folder of this user's records."""
    taken, theirs = tmp_path / "portattn-0", tmp_path / "theirs"
    theirs.mkdir()
    taken.symlink_to(theirs) if made == "link" else taken.mkdir()
    os.chown(taken, 12345, 12345, follow_symlinks=False)
    if made == "open folder":
        taken.chmod(0o777)
    code = """
import platformdirs, warnings
platformdirs.user_cache_dir = lambda *a, **k: "relative"
from portattn.files import cache_folder
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = cache_folder()
    assert cache_folder() == found
print(found, found.stat().st_mode & 0o777, found.stat().st_uid)
print([str(one.message) for one in said])
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    place, said = done.stdout.splitlines()
    folder, mode, owner = place.split()
    assert Path(folder).parent == tmp_path
    assert folder not in (str(taken), str(theirs))
    assert (int(mode), int(owner)) == (0o700, 0)
    assert not Path(folder).exists(), "it goes with the process"
    assert str(taken) in said
    assert "PORTATTN_CACHE_DIR" in said
    assert list(theirs.iterdir()) == []


def test_a_file_is_replaced_whole_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.write_bytes(b"long, and old")
    before = file.stat().st_ino
    link.symlink_to("folder/file")
    assert takes_no_file(link) == takes_no_file(tmp_path / "none yet") == ""
    write_named(link, b"new")
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_ino == before) == (b"new", False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "link"]
    file.unlink()
    write_named(link, b"made")
    assert (link.is_symlink(), file.read_bytes()) == (True, b"made")


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert takes_no_file(pipe) == ""
    write_named(pipe, b"text")
    reader.join(20)
    assert (read, pipe.is_fifo()) == ([b"text"], True)


@pytest.mark.parametrize("to_file", [False, True])
def test_standard_output_stays_what_it_is(tmp_path: Path, to_file: bool) -> None:
    """Also where it is a file, of which the kernel's link shows the name; what stands there is not lost."""
    out, link = tmp_path / "out", tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")  # as /dev/stdout is
    program = f"""
from pathlib import Path
from portattn.files import read_limited, takes_no_file, write_named
print("before", flush=True)
assert takes_no_file(Path({str(link)!r})) == ""
write_named(Path({str(link)!r}), b"text\\n")
print("after")
"""
    with out.open("wb") as file:
        into = file if to_file else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", program], stdout=into, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
    text = out.read_bytes() if to_file else done.stdout
    assert text.splitlines() == [b"before", b"text", b"after"]
    assert link.is_symlink()


def test_a_device_stays_one_and_folders_and_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    device = Path("/dev/null")
    write_named(device, b"text")
    assert device.is_char_device()
    assert takes_no_file(tmp_path) == "it is a folder"
    with pytest.raises(IsADirectoryError):
        write_named(tmp_path, b"text")
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    assert "symbolic links" in takes_no_file(tmp_path / "one")
    with pytest.raises(OSError, match="symbolic links"):
        write_named(tmp_path / "one", b"text")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("/dev/zero", "it is a character device"),
        ("pipe", "it is a pipe"),
        ("folder", "Is a directory"),
        ("large", "it has 11 bytes, and at most 10 are read"),
        ("/proc/self/environ", "bytes, and at most 10 are read"),  # a file that says that it is empty
    ],
)
def test_only_regular_files_are_read_and_only_up_to_a_limit(tmp_path: Path, kind: str, said: str) -> None:
    place = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "large":
        place.write_bytes(bytes(11))
    with pytest.raises(OSError, match=str(place)) as raised:
        read_limited(place, 10)
    assert said in str(raised.value)


def test_all_of_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    for size in (0, 1, 9, 10):
        (tmp_path / "file").write_bytes(b"x" * size)
        assert read_limited(tmp_path / "file", 10) == b"x" * size
