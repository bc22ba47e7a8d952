"""A library in the cache folder that is not whole, or may be somebody else's, does not run, and nothing dies of it."""

import os
import random
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from store_children import FORK, NOBODY, SECONDS, become_nobody, forked

from portattn.files import UntrustedPath
from portattn.launch import native
from portattn.launch.native import BuildError

pytestmark = [
    pytest.mark.skipif(
        not Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h").exists(), reason="Python.h is not installed"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
NOT_MADE = "not made in this test"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("native")
    module, why = forked(_loaded_again, folder)
    assert module, why
    return native.path(str(folder)).read_bytes()


@pytest.fixture
def place(tmp_path: Path, library: bytes) -> Iterator[Path]:
    """Where the library lies in a cache folder that other users reach."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp") and folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o055)
    place = native.path(str(tmp_path / "cache"))
    place.parent.mkdir(parents=True)
    place.write_bytes(library)
    place.chmod(0o644)
    yield place
    native._loaded.pop(place, None)


def _loaded_again(folder: Path) -> tuple[bool, str]:
    native._loaded.clear()
    module, why = native.load(str(folder))
    return (module is not None and module.Kind is not None), why


def _only_loaded(folder: Path) -> tuple[bool, str]:
    """As `_loaded_again`, where nothing can be compiled."""
    native._compile = Mock(side_effect=BuildError(NOT_MADE))
    return _loaded_again(folder)


def _as_nobody(folder: Path) -> tuple[bool, str]:
    become_nobody()
    return _only_loaded(folder)


@pytest.mark.parametrize("parts", range(17))
def test_a_library_that_was_cut_short(place: Path, library: bytes, parts: int) -> None:
    """Mapping one may end the process by SIGBUS."""
    place.write_bytes(library[: len(library) * parts // 17])
    assert forked(_only_loaded, place.parents[1]) == (False, NOT_MADE)


def test_a_library_that_was_changed(place: Path, library: bytes) -> None:
    chance = random.Random(3)
    for _ in range(200):
        at, kind = chance.randrange(len(library)), chance.randrange(3)
        changed = {0: library[:at] + bytes([library[at] ^ 1 << chance.randrange(8)]) + library[at + 1 :],
            1: library[:at] + b"\0" + library[at:], 2: library + chance.randbytes(8)}[kind]  # fmt: skip
        place.write_bytes(changed)
        with pytest.raises(UntrustedPath, match="not whole"):
            native.open_library(place)
    place.write_bytes(library)
    os.close(native.open_library(place))


def theirs(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def unseal(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.read_bytes().rindex(b"\nportattn sealed ")])


WHOLE, GONE = (True, ""), (False, NOT_MADE)
# What is done with the library, or its folder; then what is loaded where nothing can be compiled, and where it can.
STRANGE = (False, f"belongs to user {NOBODY} (mode 0755), and this process is user 0's")
LEFT: dict[str, tuple[Callable[[Path], Any], tuple[bool, str], tuple[bool, str]]] = {
    "a whole library": (lambda place: None, WHOLE, WHOLE), "cut short": (shorten, GONE, WHOLE),
    "of an older release, without a digest": (unseal, GONE, WHOLE), "of another user": (theirs, GONE, WHOLE),
    "in another user's folder": (lambda place: theirs(place.parent), STRANGE, STRANGE),
    # In a sticky folder others can add files, and not replace ours.
    "in a sticky folder": (lambda place: place.parent.chmod(0o1777), WHOLE, WHOLE),
    "of another user in a sticky folder": (lambda place: (place.parent.chmod(0o1777), theirs(place)), GONE, WHOLE),
    # Earlier releases made it by the user's umask; what lies in it is looked at file by file.
    "in our own folder that a group may write to": (lambda place: place.parent.chmod(0o775), WHOLE, WHOLE),
    **{f"with mode {mode:o}": (lambda place, mode=mode: place.chmod(mode), GONE, WHOLE)
       for mode in (0o666, 0o664, 0o777)},
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_there(place: Path, name: str) -> None:
    change, alone, anew = LEFT[name]
    if "another user" in name and os.geteuid():
        pytest.skip("only root can give files to other users")
    change(place)
    for load, (loaded, why) in ((_only_loaded, alone), (_loaded_again, anew)):
        found = forked(load, place.parents[1])
        assert (found[0], why in found[1]) == (loaded, True), found
    if anew == WHOLE:
        assert (place.stat().st_uid, place.stat().st_mode & 0o022) == (os.geteuid(), 0)
        assert forked(_only_loaded, place.parents[1]) == WHOLE, "what was made anew is kept"
    if "group" in name:
        assert place.parent.stat().st_mode & 0o777 == 0o755


# As another user, who can compile nothing here: what is done first, and why nothing is loaded.
SEEN_BY_NOBODY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "root's library": (lambda place: None, ""),
    "an empty folder that is only read": (lambda place: place.unlink(), f"^{NOT_MADE}$|Permission denied"),
    "root's folder that everybody writes to": (
        lambda place: place.parent.chmod(0o777), r"^the folder \S+ may be written by others \(mode 0777\)$"),
}  # fmt: skip


@needs_root
@pytest.mark.parametrize("name", SEEN_BY_NOBODY)
def test_what_another_user_loads(place: Path, name: str) -> None:
    change, reason = SEEN_BY_NOBODY[name]
    change(place)
    loaded, why = forked(_as_nobody, place.parents[1])
    assert loaded is (not reason)
    assert re.search(reason, why)


def test_symbolic_links_are_not_followed(place: Path) -> None:
    elsewhere = place.parents[1] / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    assert forked(_only_loaded, place.parents[1]) == (False, NOT_MADE)
    assert forked(_loaded_again, place.parents[1]) == (True, "")
    assert not place.is_symlink()
    assert elsewhere.exists()
    real = place.parents[1] / "real"
    place.parent.rename(real)
    place.parent.symlink_to(real)
    loaded, why = forked(_loaded_again, place.parents[1])
    assert not loaded
    assert why == f"{place.parent} is no folder, or a symbolic link"


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_what_is_no_file(place: Path, what: str) -> None:
    place.unlink()
    place.mkdir() if what == "folder" else os.mkfifo(place)
    loaded, why = forked(_loaded_again, place.parents[1])
    assert (loaded, "Is a directory" in why) == ((False, True) if what == "folder" else (True, False))


def test_what_was_checked_is_what_is_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = native.open_library

    def exchanged(at: Path) -> int:
        handle = check(at)
        at.unlink()
        at.write_bytes(b"another file")
        return handle

    monkeypatch.setattr(native, "open_library", exchanged)
    assert native._import(place).Launches is not None
    assert place.read_bytes() == b"another file"


def test_sixteen_processes_make_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, compiler = tmp_path / "made", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho x >> {made}\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with FORK.Pool(16) as pool:
        found = pool.map_async(_loaded_again, [tmp_path / "cache"] * 16, chunksize=1).get(SECONDS)
    assert found == [(True, "")] * 16
    assert made.read_text() == "x\n", "it is compiled once"
    names = sorted(path.name for path in (tmp_path / "cache" / "native").iterdir())
    place = native.path(str(tmp_path / "cache"))
    assert names == [f".{place.name}.lock", place.name]


def test_a_library_that_does_not_import_in_a_child_is_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.unlink()
    for python, said in (("", "sys.executable names no Python"), ("/bin/true", "no Python that could try it")):
        monkeypatch.setattr(sys, "executable", python)
        loaded, why = forked(_loaded_again, place.parents[1])
        assert not loaded
        assert said in why
        assert not place.exists()
