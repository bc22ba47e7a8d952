"""scripts/hub_kernel.py: what it writes is whole and loads where no portattn is installed, and transformers' paths
through it give what eager gives."""

import base64
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import WITHOUT_PORTATTN

from portattn.version import __version__
from portattn.worker.own_kernels import load

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path(__file__).parent
VARIANT = "build/torch-cpu"
# Logits are of size 1 to 5 and float32. Twice eager's own error, as everywhere, and units in their last place for what
# lies between attention and logits: layers add their own differences of rounding, some 1e-6 each.
FACTOR, REST = 2.0, 5e-6


@pytest.fixture(scope="module")
def script():
    return load(str(ROOT / "scripts" / "hub_kernel.py"))


@pytest.fixture(scope="module")
def repository(script, tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "portattn"
    script.write(out, ["torch-cpu"])
    return out


def child(repository, *command):
    """What a process prints that has no installed portattn, from a folder that is no source tree."""
    environment = {**os.environ, "LOCAL_KERNELS": f"portattn/portattn={repository}", "HF_HUB_OFFLINE": "1"}
    environment[WITHOUT_PORTATTN] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS),
        *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p) != ROOT)])  # fmt: skip
    ran = subprocess.run([sys.executable, *command], cwd=repository.parent, env=environment, capture_output=True,
        text=True, timeout=500)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_what_is_written(script, tmp_path):
    out = tmp_path / "kernel"
    report = script.write(out, ["torch-cpu", "torch-cuda"])
    assert (report["folder"], report["portattn"]) == (str(out), __version__)
    assert [variant["name"] for variant in report["variants"]] == ["torch-cpu", "torch-cuda"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel"]
    for variant in report["variants"]:
        folder = out / "build" / variant["name"]
        files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
        assert len(files) == variant["files"]
        metadata = json.loads(files.pop("metadata.json").read_bytes())
        assert metadata["id"] == variant["id"]
        assert metadata["id"].isidentifier()
        assert metadata["backend"] == {"type": variant["name"].removeprefix("torch-")}
        digests = {path: base64.b64encode(hashlib.sha256(p.read_bytes()).digest()).decode()
            for path, p in files.items()}  # fmt: skip
        assert metadata["digest"] == {"algorithm": "sha256", "files": digests}


def test_the_library_is_whole(repository):
    """All modules and data of the source tree: a module that is left out is found by the first call that needs it."""
    library = repository / VARIANT / "library" / "portattn"
    written = {p.relative_to(library).as_posix() for p in library.rglob("*") if p.is_file()}
    own = {f"{prefix}{p.relative_to(ROOT / folder).as_posix()}"
        for folder, prefix in (("portattn", ""), ("backends", "backends/"), ("quirks", "quirks/"))
        for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".toml", ".c", ".jinja", ".js")
        and "__pycache__" not in p.parts}  # fmt: skip
    assert (own - written, {path for path in written if "__pycache__" in path}) == (set(), set())


def test_what_it_has_not_written_is_not_replaced(script, tmp_path, repository, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert script.main(["--out", str(tmp_path), "--variants", "torch-cpu"]) == 2
    assert "must be a kernel repository of portattn, an empty folder or nothing yet" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert script.main(["--out", str(tmp_path / "new"), "--variants", "torch-xpu"]) == 2
    assert "--variants has 'torch-xpu', but must be of torch-cpu" in capsys.readouterr().err
    assert script.main(["--out", str(tmp_path / "notes.txt")]) == 2
    assert "a file, but must be a folder" in capsys.readouterr().err
    old = shutil.copytree(repository, tmp_path / "old")
    (old / "left.txt").write_text("of an earlier one")
    assert script.main(["--out", str(old), "--variants", "torch-cpu"]) == 0
    assert not (old / "left.txt").exists()


def test_another_portattn_in_the_process_is_said(repository):
    code = ("import importlib.util, json, sys, types; sys.modules['portattn'] = types.ModuleType('portattn')\n"
        "sys.modules['portattn'].__version__, sys.modules['portattn'].__file__ = '9.9', 'elsewhere'\n"
        f"spec = importlib.util.spec_from_file_location('kernel', {str(repository / VARIANT / '__init__.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n" "try: spec.loader.exec_module(module)\n"
        "except ImportError as error: print(json.dumps(str(error)))\n")  # fmt: skip
    text = child(repository, "-c", code)
    assert text.startswith(f"the portattn kernel holds portattn {__version__}, and portattn 9.9 is imported already")


def kernels_reason():
    if importlib.util.find_spec("kernels") is None:
        return "the kernels package is not installed"
    from transformers.utils import import_utils

    if import_utils.is_kernels_available():
        return ""
    return (
        f"transformers takes kernels {import_utils.KERNELS_MIN_VERSION} and later, below the next, and this is another"
    )


@pytest.mark.transformers
@pytest.mark.parametrize("loader", ["kernels", "direct"])
def test_transformers_through_the_kernel(repository, loader):
    """Padded, packed, with each cache, in chunks and token by token; and a model with sinks."""
    pytest.importorskip("transformers", reason="the transformers package is not installed")
    if loader == "kernels" and kernels_reason():
        pytest.skip(kernels_reason())
    found = child(repository, str(TESTS / "hub_child.py"), loader)
    assert found["library"] == str(repository / VARIANT / "library" / "portattn" / "__init__.py")
    assert len(found["paths"]) == 11
    for path, (ours, eager) in found["paths"].items():
        assert ours <= FACTOR * eager + REST, path
    ours, without = found["sinks"]
    assert ours < 6e-5  # as the other tests of this model's (tiny_models.TOLERANCE)
    assert without > 0.05  # and leaving the sinks out would show
