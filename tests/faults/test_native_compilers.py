"""Whatever CC is and does, native.load gives the functions or one reason; nothing half done is left."""

import functools
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_children import FORK, SECONDS, forked, no_file_over
from support import interruptible

from portattn.launch import native, preload

CRASHES = "void __attribute__((constructor)) f(void) { __builtin_trap(); }"
# What stands for a compiler: a script, whose $out is where the library shall be; and what the reason holds.
COMPILERS = {
    "makes nothing": ("exit 0", "made no library"),
    "fails without a word": ("exit 1", "exit status 1: it said nothing"),
    "no UTF-8": (r"printf 'error \377\376' >&2; exit 1", "exit status 1: error ��"),
    "says much": ("yes no | head -c 3000000; exit 1", "exit status 1: n"), "dies": ("kill -SEGV $$", "died of SIGSEGV"),
    "reads its input": ("cat; exit 1", "exit status 1"), "an empty file": (': > "$out"', "ImportError"),
    "no library": ('echo text > "$out"', "ImportError"), "a folder": ('mkdir "$out"', "made no library"),
    "crashes as it is loaded": (f"echo '{CRASHES}' | gcc -shared -fPIC -x c - -o \"$out\"", "died of SIG"),
    "half a library": (
        'echo "int f(void) { return 1; }" | gcc -shared -fPIC -x c - -o "$out"; truncate -s 9000 "$out"', "died of SIG",
    ),
    "another library": ('echo "int f;" | gcc -shared -fPIC -x c - -o "$out"', "does not define module export function"),
    "hangs": ("sleep 1000", "has not ended after 1 s"),
    "leaves a child that hangs": ("sleep 1000 & exit 1", "exit status 1"),
    "hangs with children": ("sleep 1000 & sleep 1000", "has not ended after 1 s"),
    "a library that hangs": (
        "echo 'int pause(void); void __attribute__((constructor)) f(void) { pause(); }'"
        ' | gcc -shared -fPIC -x c - -o "$out"', "has not ended after 2 s",
    ),
}  # fmt: skip


def script(folder: Path, does: str) -> str:
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{does}\n')
    path.chmod(0o755)
    return str(path)


def _load(folder: Path) -> tuple[bool, str]:
    native._loaded.clear()
    native.TRIAL_SECONDS = float(os.environ.get("TRIAL_SECONDS", "20"))
    module, why = native.load(str(folder))
    return module is not None, why


def _load_soon(folder: Path) -> tuple[bool, str]:
    native.SECONDS = 1.0
    return _load(folder)


def left(folder: Path) -> list[str]:
    if not (folder / "native").is_dir():
        return []
    return [path.name for path in (folder / "native").iterdir() if not path.name.endswith(".lock")]


def refused(load: Callable[[Path], tuple[bool, str]], folder: Path) -> str:
    loaded, why = forked(load, folder)
    assert not loaded
    assert left(folder) == []
    return why


@pytest.mark.parametrize("name", COMPILERS)
def test_whatever_the_compiler_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    does, said = COMPILERS[name]
    monkeypatch.setenv("CC", script(tmp_path, does))
    monkeypatch.setenv("TRIAL_SECONDS", "2" if name == "a library that hangs" else "20")
    begun = time.monotonic()
    why = refused(_load_soon if "hangs" in name and "library" not in name else _load, tmp_path / "cache")
    assert said in why
    assert "\n" not in why
    assert len(why) <= 300
    assert time.monotonic() - begun < SECONDS / 2


@pytest.mark.parametrize(("named", "said"), [
    ('gcc "', "is no command: No closing quotation"), ("  ", "names no program"),
    ("/", "cannot be started: Permission denied"),
    ("/does/not/exist -O3", "cannot be started: No such file or directory"),
    ("/etc/hostname", "cannot be started: "),
])  # fmt: skip
def test_whatever_cc_is(named: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    assert said in refused(_load, tmp_path / "cache")


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    assert forked(_load, tmp_path / "cache") == (False,
        "no C compiler: none of gcc, clang, cc is on the path, and CC is not set")  # fmt: skip


def _without_header(folder: Path) -> tuple[bool, str]:
    find = sysconfig.get_config_var
    sysconfig.get_config_var = lambda name: str(folder) if name == "INCLUDEPY" else find(name)
    return _load(folder / "cache")


def test_without_python_h(tmp_path: Path) -> None:
    assert "Python.h" in refused(_without_header, tmp_path)


def _under_a_limit(size: int, folder: Path) -> tuple[bool, str]:
    no_file_over(size)
    return _load(folder)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    assert refused(functools.partial(_under_a_limit, 4096), tmp_path / "cache")
    why = refused(functools.partial(_under_a_limit, 1024), tmp_path)  # what a compiler says has no place either
    assert why.startswith(f"native.c was not compiled: no file can be written in {tmp_path}")
    assert why.endswith(": No space left on device")


def test_a_cache_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    why = refused(_load, tmp_path / "file" / "cache")
    assert "Not a directory" in why or "no folder" in why


def test_without_a_home(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= {"TMPDIR": str(tmp_path), "CC": "false"}
    code = "from portattn.launch import native; print(native.load()[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment,
        timeout=SECONDS, check=True)  # fmt: skip
    assert done.stdout.strip()


def test_native_c_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SOURCE", tmp_path / "native.c")
    monkeypatch.setenv("CC", "another, so that no digest is kept")
    module, why = native.load(str(tmp_path))
    assert module is None
    assert "native.c cannot be read" in why


INTERRUPTED = textwrap.dedent(
    """
    import sys
    from portattn.launch import native
    print("begun", flush=True)
    try:
        native.load(sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted", native._loaded)
    """
)


def test_an_interrupt_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a compiler runs: it ends with all it started, and leaves no half file."""
    started = tmp_path / "started"
    monkeypatch.setenv("CC", script(tmp_path, f'echo half > "$out"\nsleep 1000 &\necho $! > {started}\nwait'))
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path / "cache")], stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=interruptible)  # fmt: skip
    end = time.monotonic() + SECONDS
    while not (started.exists() and started.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=SECONDS)
    assert (said.splitlines(), left(tmp_path / "cache")) == (["begun", "interrupted {}"], [])
    sleeper = int(started.read_text())
    while Path(f"/proc/{sleeper}").exists() and time.monotonic() < end:
        if Path(f"/proc/{sleeper}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{sleeper}").exists(), "what the compiler started goes on"


def test_an_interrupted_block_does_not_wait_for_what_is_made_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(preload, "_triton_driver", lambda: over.wait(SECONDS))
    monkeypatch.setattr(preload, "_triton_key", lambda: None)
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), preload.meanwhile("rocm", ""):
            raise KeyboardInterrupt
        assert time.monotonic() - begun < SECONDS / 2
    finally:
        over.set()


def _after_a_fork() -> bool:
    native._lock.acquire(timeout=SECONDS)
    return preload._lock.acquire(timeout=SECONDS)


def test_locks_of_the_parents_threads_are_not_the_childs() -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with native._lock, preload._lock:
            held.set()
            go.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(SECONDS)
    try:
        here, there = FORK.Pipe(duplex=False)
        child = FORK.Process(target=lambda: there.send(_after_a_fork()))
        child.start()
        assert here.poll(SECONDS / 2)
        assert here.recv() is True
        child.join(SECONDS)
    finally:
        go.set()
        thread.join()
