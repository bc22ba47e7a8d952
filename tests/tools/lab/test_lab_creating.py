"""Making environments, with an index of planted wheels: whole or not at all."""

import datetime
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from packaging.specifiers import SpecifierSet

from portattn import config
from portattn.errors import ArgumentError
from portattn.schema import compilers
from portattn.tools import lab
from portattn.tools.lab import LabError, creating, folders
from portattn.tools.lab.creating import CommandError, Python, quiet, run_command

NAME = "triton==9.1.0"


def left() -> list[str]:
    return sorted(path.name for path in folders.root().glob("*") if path.suffix != ".lock")


def test_from_nothing_to_an_environment_and_back(publish, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))  # would send everything there
    publish()
    assert lab.find(NAME) is None
    with pytest.raises(LabError, match=r"is not there; `portattn lab create triton==9\.1\.0` makes it"):
        lab.need(NAME)

    said: list[str] = []
    made = lab.create(NAME, said.append)
    assert made == lab.find(NAME) == lab.need(NAME)
    assert made in lab.environments()
    assert (made.toolchain, made.created, made.tools) == (NAME, datetime.date.today(), {})
    assert (made.python_version, made.versions["triton"]) == (sys.version.split()[0], "9.1.0")
    assert any("Successfully installed triton-9.1.0" in line for line in said)
    assert not (tmp_path / "elsewhere").exists()
    assert left() == ["triton-9.1.0"]

    files = {path.name for path in made.folder.rglob("*") if path.is_file()}
    assert "libtriton.so" in files
    assert not files & {"libproton.so", "libcupti.so", "static.a", "libPrint.so"}
    assert all(path.name.startswith("python") for path in (made.folder / "bin").iterdir())
    on_disk = sum(path.lstat().st_size for path in made.folder.rglob("*") if path.is_file() and not path.is_symlink())
    assert 0 < made.bytes <= on_disk + 10_000
    # Its Python has that Triton and nothing of this one's, torch least of all.
    seen = subprocess.run(
        [made.python, "-c", "import triton, importlib.util as u; print(triton.__version__, u.find_spec('torch'))"],
        capture_output=True, text=True, check=True, env={},
    )  # fmt: skip
    assert seen.stdout.split() == ["9.1.0", "None"]

    said.clear()
    assert lab.create(NAME, said.append) == made  # there already
    assert said == []
    with monkeypatch.context() as patch:
        patch.setattr(creating, "ask", lambda path: Python(path, "3.10.99"))
        with pytest.raises(ArgumentError, match="remove it first"):
            lab.create(NAME, python="/usr/bin/other")

    assert lab.remove(NAME) >= made.bytes
    assert (lab.find(NAME), left()) == (None, [])
    with pytest.raises(LabError, match="no lab environment to remove"):
        lab.remove(NAME)


def test_a_worker_compiles_under_its_python_and_no_other(publish, tmp_path: Path, monkeypatch) -> None:
    publish()
    made = lab.create(NAME)
    (tmp_path / "shadow" / "triton").mkdir(parents=True)
    (tmp_path / "shadow" / "triton" / "__init__.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shadow"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/another/ptxas")
    with lab.worker(NAME) as worker:
        reply = worker.request("hello", 60)
        assert (reply.outcome, reply.toolchain) == ("ok", "9.1.0"), reply
        assert reply.facts == {"python": made.python_version, "triton": "9.1.0"}
        assert worker.environment["TRITON_PTXAS_PATH"] is None
    assert lab.worker(None).python == sys.executable
    with pytest.raises(LabError, match=r"lab create triton==9\.2\.0"):
        lab.worker("triton==9.2.0")


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (NAME, {"triton/__init__.py": "import no_such_module\n"}, "cannot be imported: ModuleNotFoundError"),
        (NAME, {"other/__init__.py": ""}, "cannot be imported: ModuleNotFoundError: No module named 'triton'"),
        (NAME, {"triton/__init__.py": "import os\nos._exit(7)\n"}, "cannot be imported: exit status 7"),
    ],
    ids=["needs-more", "no-triton", "dies"],
)
def test_a_compiler_that_cannot_be_imported_leaves_nothing(publish, name, files, message) -> None:
    publish(files=files)
    with pytest.raises(LabError, match=message):
        lab.create(name)
    assert left() == []


@pytest.mark.parametrize("version", ["3.2.1", "3.2.2"])
def test_a_release_that_no_index_has_comes_from_a_folder(publish, monkeypatch, version: str) -> None:
    name = f"triton-ascend=={version}"
    monkeypatch.setattr(creating, "candidates", lambda supported: iter([creating.ask(sys.executable)]))
    monkeypatch.setattr(folders, "programs", lambda toolchain: None)
    publish("pybind11", "3.0", {"pybind11/__init__.py": ""})
    where = rf"No matching distribution.*\n.*a wheel triton_ascend-{version}-\*\.whl in a folder that PIP_FIND_LINKS"
    with pytest.raises(LabError, match=where):
        lab.create(name)
    assert left() == []
    publish("triton-ascend", version)
    assert lab.create(name).versions["triton-ascend"] == version
    with lab.worker(name) as worker:
        assert worker.request("hello", 60).toolchain == version


def test_an_interrupt_leaves_nothing_and_a_killed_maker_is_cleaned_up_after(publish) -> None:
    publish()

    def interrupted(text: str) -> None:
        if text == "trying it":  # installed, and not yet in its place
            assert [name.startswith(".making-triton-9.1.0-") for name in left()] == [True]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.create(NAME, interrupted)
    assert left() == []
    assert lab.find(NAME) is None

    killed = folders.root() / ".making-triton-9.1.0-0123abcd"
    other = folders.root() / ".making-triton-9.3.0-0123abcd"  # another toolchain's: somebody may be at it
    for folder in (killed, other):
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "half.so").write_text("x" * 1000)
    assert folders.states()[-1].environment is None
    lab.create(NAME)
    assert left() == [other.name, "triton-9.1.0"]


def test_two_makers_of_one_environment_make_it_once(publish) -> None:
    publish()
    said: list[str] = []
    threads = [threading.Thread(target=lab.create, args=(NAME, said.append)) for _ in range(2)]
    # Threads of their own have not this test's settings; the environment variable says the same.
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(LabError, match="another process is making or removing it now"):
        lab.remove(NAME)
    for thread in threads:
        thread.join(120)
    assert sum("Successfully installed" in line for line in said) == 1
    assert lab.find(NAME) is not None


def _marker(change: dict[str, object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / folders.MARKER
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | change))

    return spoil


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no marker": (lambda folder: (folder / folders.MARKER).unlink(), r"environment\.json is missing"),
    "cut off": (lambda folder: (folder / folders.MARKER).write_text('{"schema": 1,'), "cannot be understood"),
    "another schema": (_marker({"schema": 99}), "schema version 99; this portattn reads version 1"),
    "another toolchain": (_marker({"toolchain": "triton==9.0.0"}), r"says triton==9\.0\.0"),
    "Python gone": (lambda folder: (folder / "bin" / "python").unlink(), "its Python .* is gone"),
    "Triton gone": (
        lambda folder: next(folder.glob("lib/python*/site-packages/triton/__init__.py")).unlink(),
        "the triton package is not in it",
    ),
}


def test_a_broken_environment_is_told_and_replaced(publish, tmp_path: Path) -> None:
    publish()
    folder = lab.create(NAME).folder
    shutil.copytree(folder, tmp_path / "whole", symlinks=True)
    for what, (spoil, why) in BROKEN.items():
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "whole", folder, symlinks=True)
        assert lab.find(NAME) is not None
        spoil(folder)
        assert next(state for state in lab.states() if state.toolchain == NAME).environment is None, what
        assert lab.find(NAME) is None
        with pytest.raises(LabError, match=f"is broken: .*{why}.*; `portattn lab create"):
            lab.need(NAME)
    assert lab.create(NAME).folder.name == "triton-9.1.0"
    assert left() == ["triton-9.1.0"]
    (folders.folder_of(NAME) / folders.MARKER).unlink()
    assert lab.remove(NAME) > 0  # a broken one too


STRANGER = 12345


def _given_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def _linked(folder: Path, mode: int, owner: int) -> None:
    """Lead an environment's Python to a copy of it beside the lab, by two links."""
    elsewhere = folder.parent.parent / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(folder / "bin" / "python", elsewhere / "python")
    (elsewhere / "python").chmod(mode)
    os.chown(elsewhere / "python", owner, owner)
    (folder.parent / "step").symlink_to("../elsewhere/python")
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to(folder.parent / "step")


UNTRUSTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "the lab": (lambda folder: _given_away(folder.parent), f"/lab belongs to user {STRANGER}"),
    "the folder": (_given_away, f"belongs to user {STRANGER} .mode 0755., and this process is user 0's"),
    "its Python": (lambda folder: _given_away(folder / "bin" / "python"), f"/bin/python belongs to user {STRANGER}"),
    "its Python's target": (
        lambda folder: _linked(folder, 0o777, STRANGER), rf"/elsewhere/python belongs to user {STRANGER} .mode 0777.",
    ),
    "its Python's target of everybody's": (
        lambda folder: _linked(folder, 0o777, 0), r"/elsewhere/python may be written by others .mode 0777.",
    ),
    "the folder of its Python's target": (
        lambda folder: [_linked(folder, 0o755, 0), (folder.parent.parent / "elsewhere").chmod(0o777)],
        r"/elsewhere may be written by others .mode 0777.",
    ),
    "a linked folder's module": (
        lambda folder: [
            _linked(folder, 0o666, 0), (folder / "bin" / "python").unlink(),
            (folder / "lib" / "more").symlink_to(folder.parent.parent / "elsewhere"),
        ],
        r"/elsewhere/python may be written by others .mode 0666.",
    ),
    "a module": (
        lambda folder: _given_away(next(folder.glob("lib/python*/site-packages/triton/__init__.py"))),
        rf"triton/__init__\.py belongs to user {STRANGER}",
    ),
    "a folder of everybody's": (
        lambda folder: next(folder.glob("lib/python*/site-packages/triton")).chmod(0o777),
        "triton may be written by others .mode 0777.",
    ),
    "a group's file": (
        lambda folder: [os.chown(folder / "pyvenv.cfg", 0, STRANGER), (folder / "pyvenv.cfg").chmod(0o664)],
        r"pyvenv\.cfg may be written by others .mode 0664.",
    ),
}  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_an_environment_that_another_user_can_change_does_not_run(publish, tmp_path: Path, monkeypatch) -> None:
    publish()
    umask = os.umask(0o002)
    try:
        folder = lab.create(NAME).folder
    finally:
        os.umask(umask)
    assert not any(path.lstat().st_mode & 0o022 for path in folder.rglob("*") if not path.is_symlink())
    for what, (spoil, why) in UNTRUSTED.items():
        shutil.copytree(folder.parent, tmp_path / what / "lab", symlinks=True)
        monkeypatch.setenv("PORTATTN_CACHE_DIR", str(tmp_path / what))
        config.environment_settings.cache_clear()
        assert lab.find(NAME) is not None, what
        spoil(folders.folder_of(NAME))
        with pytest.raises(LabError, match=f"is broken: not to be run: .*{why}.*; `portattn lab create"):
            lab.worker(NAME)
        assert NAME not in {one.toolchain for one in lab.environments()}
        if what == "the lab":
            with pytest.raises(LabError, match=f"{why}.*PORTATTN_CACHE_DIR names another folder"):
                lab.create(NAME)
        else:
            assert lab.create(NAME).folder.stat().st_uid == 0, "it is made anew"


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("triton", "must be NAME==VERSION"), ("triton==x", "no PEP 440 version|is not a PEP 440 version"),
        ("gcc==12", "no known compiler"), ("flagtree==0.3.0", "must be one of triton, triton-ascend"),
        ("none", "must be one of triton, triton-ascend"),
    ],
)  # fmt: skip
def test_a_name_that_is_none(name: str, limit: str) -> None:
    for function in (lab.find, lab.need, lab.create, lab.remove):
        with pytest.raises(ArgumentError, match=limit) as refused:
            function(name)
        assert (refused.value.argument, refused.value.value) == ("toolchain", name)


def test_versions_are_those_that_the_lab_writes_and_every_known_toolchain_has_a_state() -> None:
    for text, name in (("triton==3.4", "triton==3.4.0"), ("pytorch-triton==3.6.0,ptxas==13.0.1", "triton==3.6.0")):
        assert lab.canonical(text) == name
    assert all(lab.canonical(name) == name for name in ("triton==3.3.0", *lab.toolchains()))
    assert [state.toolchain for state in lab.states()] == list(lab.toolchains())
    assert not any(state.environment or state.broken for state in lab.states())


def test_triton_ascend_takes_a_python_that_it_is_built_for(monkeypatch, tmp_path: Path) -> None:
    there = {sys.executable: "3.13.1", "/bin/a": "3.12.9", "/bin/b": "3.10.4", "/bin/c": "3.10.9"}
    on_path = {"python3.12": "/bin/a", "python3.10": "/bin/b", "python3": "/bin/c"}
    monkeypatch.setattr(creating, "ask", lambda path: Python(path, there[path]) if path in there else None)
    monkeypatch.setattr(creating.shutil, "which", on_path.get)
    for range_, paths in ((">=3.10,<3.12", ["/bin/b"]), (">=3.10", [sys.executable, "/bin/b", "/bin/a"])):
        found = [python.path for python in creating.candidates(SpecifierSet(range_))]
        assert found == paths, "each minor version once"
    del there["/bin/b"], there["/bin/c"]
    with pytest.raises(LabError, match=r"triton-ascend==3\.2\.0: needs CPython <3\.12,>=3\.10, and neither"):
        lab.create("triton-ascend==3.2.0")
    with pytest.raises(ArgumentError, match=r"--python is '/bin/a', but is Python 3\.12\.9; triton-ascend needs"):
        lab.create("triton-ascend==3.2.0", python="/bin/a")
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="must be a CPython interpreter"):
        lab.create(NAME, python="/bin/false")


def test_a_failed_command_says_its_last_lines() -> None:
    with pytest.raises(CommandError, match="exit status 3") as failed:
        run_command(["sh", "-c", "seq 1 100; exit 3"], quiet)
    assert failed.value.lines == [str(n) for n in range(89, 101)]
    with pytest.raises(CommandError, match="no-such-program: cannot be started"):
        run_command(["/no-such-program"], quiet)


# Environments of a compiler that another package brings: made as its recipe says.


RECIPE_NAME = "triton-musa==2.0"
RECIPE = """
[triton-musa]
package = "triton_musa"
spelling = '(\\d+\\.\\d+)\\.post'

[triton-musa.lab]
releases = ["1.0"]
python = ">=3.9"
also = { "triton==9.1.0" = ">=2", "absent-package" = "<2" }
index = "https://example.com/simple"
programs = "{programs}"
"""


@pytest.fixture
def bring(tmp_path: Path) -> Iterator[Callable[..., None]]:
    compilers.all_compilers()
    before = compilers._brought.compilers or {}

    def add(programs: str = "") -> None:
        (tmp_path / "compilers.toml").write_text(RECIPE.replace("{programs}", programs))
        compilers.bring(before | compilers.read(tmp_path, "portattn-musa 0.1"))

    yield add
    compilers.bring(before)


def test_it_is_made_with_what_the_recipe_names(publish, bring: Callable[..., None]) -> None:
    publish()
    publish("triton-musa", "2.0", {"triton_musa/__init__.py": ""})
    with pytest.raises(ArgumentError, match="'triton-musa' is no known compiler"):
        lab.create(RECIPE_NAME)
    bring()
    assert lab.toolchains()[-1] == "triton-musa==1.0"
    made = lab.create(RECIPE_NAME)
    assert (made.toolchain, made.versions["triton"], made.versions["triton-musa"]) == (RECIPE_NAME, "9.1.0", "2.0")
    with lab.worker(RECIPE_NAME) as worker:
        assert worker.request("hello", 60).toolchain == "9.1.0"
    assert lab.states()[-1].environment == made
    (made.folder / "lib").rename(made.folder / "gone")
    assert lab.find(RECIPE_NAME) is None
    with pytest.raises(LabError, match="its lab environment is broken: the triton package is not in it"):
        lab.need(RECIPE_NAME)
    lab.remove(RECIPE_NAME)


def test_a_release_that_pip_does_not_find_and_another_distribution_in_its_place_are_said(publish, bring) -> None:
    publish()
    bring()
    with pytest.raises(LabError, match=r"it is published at https://example\.com/simple: PIP_EXTRA_INDEX_URL"):
        lab.create(RECIPE_NAME)
    publish("triton-musa", "2.0", {"elsewhere/__init__.py": ""})
    with pytest.raises(LabError, match=r"triton-musa==2\.0: installed, but triton_musa/ in it belongs to"):
        lab.create(RECIPE_NAME)


def test_programs_beside_python(publish, bring: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of triton-ascend, by another package's module; one that cannot be imported breaks no other environment."""
    module = ModuleType("musa_programs")
    fetched: list[list[str]] = []

    def fetch(folder: Path, names: list[str], say: object) -> dict[str, str]:
        fetched.append(names)
        (folder / "musa-opt").touch()
        return {"musa-opt": "7"}

    module.ALL, module.NoTools, module.fetch = ("musa-opt",), LookupError, fetch  # type: ignore[attr-defined]
    module.tools = lambda folder: {"musa-opt": "x"} if (folder / "musa-opt").exists() else {}  # type: ignore[attr-defined]
    module.missing = lambda folder: [n for n in module.ALL if n not in module.tools(folder)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "musa_programs", module)
    publish()
    publish("triton-musa", "2.0", {"triton_musa/__init__.py": ""})
    bring("musa_programs")
    made = lab.create(RECIPE_NAME)
    assert (fetched, made.tools, made.versions["musa-opt"]) == ([["musa-opt"]], {"musa-opt": "x"}, "7")
    bring("no_such_module")
    states = {state.toolchain: state for state in lab.states()}
    assert "its module of programs, no_such_module: ModuleNotFoundError" in states[RECIPE_NAME].broken
    assert states["triton==3.6.0"].broken == ""
