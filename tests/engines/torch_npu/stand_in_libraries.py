"""Libraries in the place of CANN's, so that torch_npu loads on a machine without CANN: x86-64, gcc and binutils."""

import re
import subprocess
from pathlib import Path

TABLES = r"_ZT[ISV]"  # mangled names of a class's virtual functions and type: data, of at most as many bytes
TABLE_BYTES = 4096


def make(folder: Path, torch_npu: Path, torch: Path, answers: Path) -> None:
    """Write to `folder` the libraries that torch_npu needs and this machine lacks.

    All are one library under many names. It has the functions of `answers`, a C file, and a function that returns 0 for
    every other symbol that nothing defines.

    folder            a folder for LD_LIBRARY_PATH
    torch_npu, torch  folders of the installed packages
    """
    own = [*torch_npu.glob("*.so"), *torch_npu.glob("lib/*.so")]
    others = [*(torch / "lib").glob("*.so*"), *(torch_npu.parent / "torch_npu.libs").glob("*.so*")]
    needed = {name for path in own for name in re.findall(r"NEEDED\s+(\S+)", _output("objdump", "-p", path))}
    found = {name: Path(_output("gcc", f"-print-file-name={name}").strip()) for name in needed}
    system = [path for path in found.values() if path.is_absolute()]  # gcc prints the bare name of a missing library
    defined = {name for path in (*own, *others, *system) for name in _symbols(path, "--defined-only")}
    undefined = {name for path in own for name in _symbols(path, "--undefined-only")} - defined
    missing = sorted(name for name in undefined if not name.startswith(("Py", "_Py")))

    source, library = folder / "missing.s", folder / "libcann.so"
    source.write_text("".join(map(_symbol, missing)) + '.section .note.GNU-stack,"",@progbits\n')
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, answers], check=True)
    for name in needed - {path.name for path in (*own, *others, *system)}:
        (folder / name).symlink_to(library)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _symbols(library: Path, which: str) -> set[str]:
    lines = _output("nm", "-D", which, library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.split()[-2] != "w"}


def _symbol(name: str) -> str:
    """Assembly of a missing symbol. It is weak: a function of the C file takes its place."""
    if re.match(TABLES, name):
        return f".data\n.weak {name}\n.type {name},@object\n.size {name},{TABLE_BYTES}\n{name}: .zero {TABLE_BYTES}\n"
    return f".text\n.weak {name}\n.type {name},@function\n{name}: xor %eax,%eax\n ret\n"
