"""scripts/pack_triton.py: what it leaves out of a wheel, and that it writes a whole archive or none."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from portattn.worker.own_kernels import load

SCRIPT = Path(__file__).parent.parent / "scripts" / "pack_triton.py"
pytestmark = pytest.mark.skipif(
    not (shutil.which("strip") and shutil.which("xz")), reason="needs strip and xz (binutils, xz-utils)"
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load(str(SCRIPT))
    monkeypatch.setattr(module, "STRIPPED_FROM", 1)
    monkeypatch.setattr(module.signal, "signal", lambda *given: None)  # this process keeps its handlers
    return module


LIBRARY = Path(msgspec.__file__).parent  # a real one, with symbols or without
CONTENT = {
    "triton/__init__.py": "", "triton/language/core.py": "", "triton/profiler/profile.py": "", "triton/FileCheck": "",
    "triton/backends/nvidia/include/cuda.h": "", "triton/backends/nvidia/lib/libdevice.10.bc": "",
    "triton/backends/nvidia/lib/cupti/libcupti.so": "", "triton/backends/nvidia/bin/ptxas": "",
    "triton/backends/nvidia/bin/ptxas-blackwell": "", "triton/backends/amd/lib/libx_codegen.so": "",
    "triton/backends/nvidia/bin/nvdisasm": "", "triton/backends/amd/compiler.py": "", "triton/_C/libproton.so": "",
    "triton-3.8.0.dist-info/METADATA": "Name: t",
}  # fmt: skip
LEFT_OUT = {
    "triton/profiler/profile.py", "triton/FileCheck", "triton/backends/nvidia/lib/cupti/libcupti.so",
    "triton/backends/amd/lib/libx_codegen.so", "triton/_C/libproton.so", "triton/backends/nvidia/bin/nvdisasm",
}  # fmt: skip


@pytest.fixture
def wheel(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "triton-3.8.0-cp312-cp312-linux.whl"
    library = next(LIBRARY.glob("_core*.so"))
    with zipfile.ZipFile(made, "w") as packed:
        for name, text in CONTENT.items():
            packed.writestr(name, text)
        packed.write(library, "triton/_C/libtriton.so")
    monkeypatch.setattr(script, "_downloaded", lambda version, tag, folder: made)
    return made


def names(archive: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(archive, "r:xz") as tar:
        return {member.name: member for member in tar if member.isfile()}


@pytest.mark.parametrize(
    ("version", "spare"),
    [("3.8.0", {"triton/backends/nvidia/bin/ptxas-blackwell"}), ("3.9.0", set()), ("3.4.9", set())],
)
def test_what_sm_90_does_not_need_is_left_out(script, wheel, tmp_path, version, spare, capsys):
    """3.9.0 assembles for sm_90 with the ptxas that is called after Blackwell; of an unlisted release nobody knows."""
    out = tmp_path / "t.txz"
    assert script.main([version, str(out)]) == 0
    found = names(out)
    assert set(found) == {*CONTENT, "triton/_C/libtriton.so"} - LEFT_OUT - spare
    assert found["triton/backends/nvidia/bin/ptxas"].mode & 0o111 == 0o111
    assert "t.txz" in capsys.readouterr().out
    first = out.read_bytes()
    assert script.main([version, str(out)]) == 0
    assert out.read_bytes() == first, "the same wheel gives the same bytes"


@pytest.mark.parametrize(
    ("version", "arch", "spare"),
    [
        ("3.8.0", "sm_90", ["ptxas-blackwell"]), ("3.9.0", "sm_90", ["ptxas"]), ("3.9.0", "sm_80", ["ptxas-blackwell"]),
        ("3.8.0", "sm_100", ["ptxas"]), ("3.4.9", "sm_90", []), ("3.4.0", "sm_90", []),
    ],
)  # fmt: skip
def test_for_one_chip_only_its_assembler_stays(script, wheel, tmp_path, version, arch, spare):
    out = tmp_path / "t.txz"
    assert script.main([version, str(out), "--arch", arch]) == 0
    left = {"triton/backends/nvidia/bin/ptxas", "triton/backends/nvidia/bin/ptxas-blackwell"} - set(names(out))
    assert sorted(left) == [f"triton/backends/nvidia/bin/{name}" for name in spare]


def test_a_library_that_was_stripped_still_loads(script: ModuleType, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.txz"
    script.pack("3.8.0", out, "cp312")
    subprocess.run(["tar", "xJf", str(out), "-C", str(tmp_path)], check=True)
    code = "import ctypes, sys; ctypes.PyDLL(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "triton/_C/libtriton.so")], check=True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["3.x", "t.txz"], "'3.x' is no release such as 3.8.0; known: 2.0.0"),
        (["--python", "python3.12", "3.8.0", "t.txz"], "'python3.12' is no tag of a Python such as cp312"),
        (["--arch", "sm_90a", "3.8.0", "t.txz"], "--arch 'sm_90a' is no chip such as sm_90"),
        (["--arch", "H100", "3.8.0", "t.txz"], "--arch 'H100' is no chip such as sm_90"),
        (["3.8.0", "t.tar.gz"], "t.tar.gz: the archive's name must end in .txz"),
        (["3.8.0", "nowhere/t.txz"], "nowhere/t.txz: its folder is not there"),
        (["3.8.0", "folder.txz"], "folder.txz: a folder has this name"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_fetched(script, monkeypatch, tmp_path, capsys, arguments, told):
    monkeypatch.setattr(script, "_downloaded", lambda *given: pytest.fail("fetched"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.txz").mkdir()
    assert script.main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"pack_triton: {told}")
    assert os.listdir(tmp_path) == ["folder.txz"]


def spoilt(wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as packed:
        packed.writestr("triton/_C/other.so", "no library")


def cut(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:500])


@pytest.mark.parametrize(("damage", "told"), [(spoilt, "`strip --strip-unneeded"), (cut, "cannot be unpacked")])
def test_what_fails_leaves_the_older_archive_and_nothing_else(script, wheel, tmp_path, capsys, damage, told):
    out = tmp_path / "t.txz"
    out.write_bytes(b"older")
    damage(wheel)
    assert script.main(["3.8.0", str(out)]) == 1
    assert told in capsys.readouterr().err
    assert out.read_bytes() == b"older"
    assert sorted(os.listdir(tmp_path)) == ["t.txz", wheel.name]
