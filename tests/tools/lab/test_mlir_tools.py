"""The MLIR tools: the machine's, or Debian's packages unpacked into the environment. apt is planted."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from portattn.backends.ascend.linalg import llvm_tools as linalg_tools

APT = """#!/bin/sh
echo "$@" >> {log}
case "$1 $2" in
  "install -s") printf 'Inst libllvm19 (1:19.1.7 Debian [amd64])\\n'
                printf 'Inst zlib [1.1] (1.2 Debian [amd64])\\nConf zlib (1.2)\\n' ;;
  "install"*) exit 9 ;;
  "download -q") for name in $3 $4; do : > "$name.deb"; done; echo "Get:1 $3" ;;
esac
"""
# A program that says with which libraries it was called.
TOOL = """#!/bin/sh
test "$1" = --version && echo "LLVM version 19.1.7" || echo "$LD_LIBRARY_PATH $@"
"""
DPKG = """#!/bin/sh
bin=$3/usr/lib/llvm-19/bin lib=$3/usr/lib/x86_64-linux-gnu
mkdir -p $bin $lib
for name in {names}; do cp {tool} $bin/$name; done
echo code > $lib/libLLVM.so.19.1
ln -sf libLLVM.so.19.1 $lib/libLLVM-19.so
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without LLVM whose PATH is one folder, which holds little more than a shell."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "cp", "mkdir", "ln", "dirname", "readlink", "printf"):
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(linalg_tools, "PREFIX", Path("/usr/lib/llvm-19/bin"))
    real = os.access
    monkeypatch.setattr(linalg_tools.os, "access", lambda p, m: not str(p).startswith("/usr/lib/llvm") and real(p, m))
    return programs


def plant(folder: Path, names: tuple[str, ...] = linalg_tools.LLVM) -> Path:
    """Put an apt whose packages hold these programs into a folder; the file of its calls."""
    log, tool = folder / "apt.log", folder / "tool"
    tool.write_text(TOOL)
    for name, text in (("apt-get", APT.format(log=log)), ("dpkg-deb", DPKG.format(names=" ".join(names), tool=tool))):
        (folder / name).write_text(text)
    for path in (tool, folder / "apt-get", folder / "dpkg-deb"):
        path.chmod(0o755)
    return log


def test_programs_of_the_machine_are_found(bare: Path, tmp_path: Path) -> None:
    assert (linalg_tools.missing(tmp_path), linalg_tools.tools(tmp_path)) == (list(linalg_tools.LLVM), {})
    for name in ("llc-19", "mlir-opt-19", "mlir-translate-19", "gcc"):
        (bare / name).write_text(TOOL)
        (bare / name).chmod(0o755)
    assert linalg_tools.tools(tmp_path) == {
        "mlir-opt": str(bare / "mlir-opt-19"), "mlir-translate": str(bare / "mlir-translate-19"),
        "llc": str(bare / "llc-19"), "cc": str(bare / "gcc"),
    }  # fmt: skip
    assert linalg_tools.missing(tmp_path) == []


def test_packages_are_unpacked_and_their_programs_find_their_libraries(bare: Path, tmp_path: Path) -> None:
    log = plant(bare)
    folder, said = tmp_path / "environment", []
    folder.mkdir()
    versions = linalg_tools.fetch(folder, list(linalg_tools.LLVM), said.append)
    assert versions == dict.fromkeys(linalg_tools.LLVM, "19.1.7")
    assert log.read_text().splitlines() == [
        "install -s -qq --no-install-recommends mlir-19-tools llvm-19",  # nothing is installed
        "download -q libllvm19=1:19.1.7 zlib=1.2",
    ]
    assert "fetching 2 Debian packages" in said
    assert [path.name for path in folder.iterdir()] == ["mlir"]
    assert linalg_tools.missing(folder) == []

    moved = tmp_path / "moved"
    folder.rename(moved)
    tools = linalg_tools.tools(moved)
    assert tools["llc"] == str(moved / "mlir" / "bin" / "llc")
    seen = subprocess.run([tools["llc"], "-O2"], capture_output=True, text=True, check=True, env={"PATH": str(bare)})
    library, argument = seen.stdout.split()
    assert Path(library).resolve() == moved / "mlir" / "lib"
    assert (argument, (moved / "mlir" / "lib" / "libLLVM-19.so").read_text()) == ("-O2", "code\n")


@pytest.mark.parametrize(
    "spoiled", ["no apt", "apt refuses", "nothing to fetch", "a program is missing", "does not run"]
)
def test_where_they_cannot_be_fetched_it_says_what_to_install(bare: Path, tmp_path: Path, spoiled: str) -> None:
    reason = "this machine has no apt"
    if spoiled != "no apt":
        plant(bare, linalg_tools.LLVM[:2] if spoiled == "a program is missing" else linalg_tools.LLVM)
    if spoiled == "apt refuses":
        (bare / "apt-get").write_text("#!/bin/sh\necho 'E: Unable to locate package mlir-19-tools'\nexit 100\n")
        reason = "Unable to locate package mlir-19-tools"
    elif spoiled == "nothing to fetch":
        (bare / "apt-get").write_text("#!/bin/sh\n")
        reason = "are installed, and their programs are not in"
    elif spoiled == "a program is missing":
        reason = "the packages hold no llc"
    elif spoiled == "does not run":
        (bare / "tool").write_text("#!/bin/sh\necho cannot load libLLVM >&2\nexit 127\n")
        reason = "mlir-opt of the packages does not run: cannot load libLLVM"
    folder = tmp_path / "environment"
    folder.mkdir()
    with pytest.raises(linalg_tools.NoTools) as refused:
        linalg_tools.fetch(folder, list(linalg_tools.LLVM), lambda _: None)
    assert reason in str(refused.value)
    assert "install mlir-19-tools and llvm-19" in str(refused.value)
    assert list(folder.iterdir()) == []
