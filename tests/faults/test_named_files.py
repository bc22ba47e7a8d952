"""Files that a user names: what is no regular file is written into, and stays what it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from portattn.files import read_limited, takes_no_file, write_named


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


def test_a_link_to_no_file_makes_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    write_named(link, b"new")
    assert (link.is_symlink(), (tmp_path / "file").read_bytes()) == (True, b"new")


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


def test_a_device_stays_one() -> None:
    device = Path("/dev/null")
    write_named(device, b"text")
    assert device.is_char_device()


def test_a_folder_is_none(tmp_path: Path) -> None:
    assert takes_no_file(tmp_path) == "it is a folder"
    with pytest.raises(IsADirectoryError):
        write_named(tmp_path, b"text")


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
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
