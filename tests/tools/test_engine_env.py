"""scripts/engine_env.py: environments of engines are made whole or not at all. Packages are a few lines here."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "engine_env.py"
OTHERS = {"torch": "", "msgspec": "", "numpy": ""}
# In pytest's place: what a test would find.
PYTEST = """
import importlib.metadata, json, os, sys
import portattn, portattn.quirks
entries = [e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "portattn"]
print(json.dumps({"arguments": sys.argv[1:], "entries": entries, "file": portattn.__file__, "own": os.environ["OWN"]}))
sys.exit(5)
"""


def wheel(folder, name, files):
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-tool = {name}:main\n",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for name in (*OTHERS, "toy"):
        wheel(folder, name, {f"{name}/__init__.py": ""})
    wheel(folder, "pytest", {"pytest/__init__.py": "", "pytest/__main__.py": PYTEST})
    return folder


@pytest.fixture
def script(tmp_path, wheels, monkeypatch):
    """The module, with lists of its own, an empty folder of environments, and wheels instead of an index."""
    spec = importlib.util.spec_from_file_location("engine_env", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine_env", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LISTS", tmp_path / "lists")
    module.LISTS.mkdir()
    for name, value in {
        "ENGINES_HOME": str(tmp_path / "engines"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return module


def listed(script, version="1.0", head="", lines=""):
    packages = "\n".join(f"{name}==1.0" for name in (*OTHERS, "pytest", "toy"))
    text = f"# a list\n#: size 1\n#: env OWN=yes\n{head}\n{packages}\n{lines}\n"
    (script.LISTS / f"toy-{version}.txt").write_text(text)


def made(tmp_path):
    return sorted(path.name for path in (tmp_path / "engines").iterdir() if not path.name.endswith(".lock"))


def test_made_once(script, tmp_path, capfd):
    listed(script)
    assert script.main(["list"]) == 0
    assert re.search(r"toy-1.0 +absent", capfd.readouterr().out)
    assert script.main(["make", "toy==1.0"]) == 0
    told = capfd.readouterr()
    assert "toy-1.0: made: " in told.out
    assert "5 packages" in told.err
    folder = tmp_path / "engines" / "toy-1.0"
    assert made(tmp_path) == ["toy-1.0"]
    assert not list(folder.glob("tmp"))
    assert all(path.name.startswith("python") for path in (folder / "bin").iterdir())
    before = (folder / script.MARKER).stat().st_mtime_ns
    assert script.main(["make", "toy-1.0"]) == 0
    assert "there already" in capfd.readouterr().out
    assert (folder / script.MARKER).stat().st_mtime_ns == before
    # Another list is another environment.
    listed(script, lines="# changed")
    assert script.main(["list"]) == 0
    assert re.search(r"toy-1.0 +outdated: its list has changed", capfd.readouterr().out)
    assert script.main(["make", "toy==1.0"]) == 0
    assert (folder / script.MARKER).stat().st_mtime_ns != before


def test_tests_see_the_checkout(script, capfd):
    listed(script)
    assert script.main(["test", "toy-1.0"]) == script.CANNOT
    assert "its environment is absent; `python scripts/engine_env.py make toy==1.0` makes it" in capfd.readouterr().err
    script.main(["make", "toy==1.0"])
    capfd.readouterr()
    # pytest's own status is the result.
    site = next((script.recipe("toy-1.0").folder / "lib").glob("python3*/site-packages"))
    for name in ("msgspec", "numpy", "torch"):  # portattn imports the real ones
        shutil.rmtree(site / name)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    assert script.main(["test", "toy==1.0", "-q", "-k", "x"]) == 5
    seen = json.loads(capfd.readouterr().out)
    assert seen["arguments"] == ["-p", "no:cacheprovider", "-q", "-k", "x", "tests/engines/toy"]
    assert "portattn.integrations.vllm:register" in seen["entries"]
    assert (seen["file"], seen["own"]) == (str(ROOT / "portattn" / "__init__.py"), "yes")


@pytest.mark.parametrize(
    ("head", "lines", "options", "reason"),
    [
        ("#: try import absent_module", "", [], "No module named 'absent_module'"),
        ("", "nowhere==2.0", [], "No matching distribution found for nowhere==2.0"),
        ("#: size 99999999", "", [], "needs 99999999 MB while it is made, and .* MB left; ENGINES_HOME names another"),
        (
            "#: try import time; time.sleep(60)", "", ["--seconds", "6"],
            r"not made within 6 s \(--seconds allows more\)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_made_leaves_nothing(script, tmp_path, capfd, head, lines, options, reason):
    listed(script, head=head, lines=lines)
    assert script.main(["make", "toy==1.0", *options]) == script.CANNOT
    assert re.search(reason, capfd.readouterr().err)
    assert made(tmp_path) == []


def test_bad_input(script, capfd):
    listed(script)
    for arguments, reason in (
        (["make", "absent==1.0"], "there is no list of its packages in .* those there are: toy-1.0"),
        (["make", "toy"], "there is no list of its packages"),
        (["make", "../lists/toy==1.0"], "there is no list of its packages"),
        (["make", "toy==1.0", "--seconds", "0"], "--seconds must be greater than 0, not 0.0"),
    ):
        assert script.main(arguments) == script.BAD
        assert re.search(reason, capfd.readouterr().err)
    for lines, reason in (
        ("other>=1.0", r"toy-1.0.txt:\d+: must be NAME==VERSION, an exact one, not 'other>=1.0'"),
        ("#: size much", "size must be a number of megabytes, not 'much'"),
        ("#: what 3", "must be `#: size MB`, `#: try STATEMENT` or `#: env NAME=VALUE`"),
    ):
        listed(script, lines=lines)
        assert script.main(["make", "toy==1.0"]) == script.BAD
        assert re.search(reason, capfd.readouterr().err)
    (script.LISTS / "toy-1.0.txt").write_text("toy==1.0\n")
    assert script.main(["make", "toy==1.0"]) == script.BAD
    assert "lacks msgspec, numpy, pytest, torch" in capfd.readouterr().err


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_ended_while_making(script, tmp_path, capfd, kill):
    listed(script, head="#: try import time; time.sleep(8)")
    code = f"import sys; from pathlib import Path; sys.path.insert(0, {str(SCRIPT.parent)!r}); import engine_env; "
    code += f"engine_env.LISTS = Path({str(script.LISTS)!r}); sys.exit(engine_env.main(['make', 'toy==1.0']))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "trying it" in line:
            break
    process.send_signal(kill)
    _, told = process.communicate(timeout=30)
    if kill is signal.SIGTERM:
        assert process.returncode == script.INTERRUPTED
        assert "make was interrupted" in told
        assert made(tmp_path) == []
    else:
        assert all(name.startswith(script.MAKING) for name in made(tmp_path))
    assert script.recipe("toy-1.0").state == "absent"
    listed(script)
    assert script.main(["make", "toy==1.0"]) == 0
    assert made(tmp_path) == ["toy-1.0"]


def test_newest_and_every_list(script, capfd, monkeypatch):
    for version in ("0.9", "0.10", "0.10.1"):
        listed(script, version)
    assert (script.main(["list", "--newest"]), capfd.readouterr().out) == (0, "toy==0.10.1\n")
    monkeypatch.setattr(script, "LISTS", ROOT / "tests" / "engines" / "requirements")
    assert script.known()
    # torch_npu is of one release of torch each.
    engines = [name for name in script.known() if not name.startswith("torch_npu")]
    assert all({"torch==2.13.0", "triton==3.6.0"} <= set(script.recipe(name).packages) for name in engines)


def make_engines(engines, tmp_path):
    command = ["make", "--no-print-directory", "engines", "VENV=", f"PYTHON={sys.executable}", f"ENGINES={engines}",
               "ENGINE_SECONDS=0.01"]  # fmt: skip
    environment = {**os.environ, "ENGINES_HOME": str(tmp_path)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_engines(tmp_path):
    """An engine whose environment cannot be made is named. A run that tests nothing fails, and so does a wrong name."""
    newest = "vllm==0.33.0"
    without = make_engines(newest, tmp_path)
    assert without.returncode != 0
    assert f"no environment could be made, and no test was run, of: {newest}" in without.stderr
    assert "engines: nothing was tested" in without.stderr
    wrong = make_engines("absent==1.0", tmp_path)
    assert wrong.returncode != 0
    assert "there is no list of its packages" in wrong.stderr
