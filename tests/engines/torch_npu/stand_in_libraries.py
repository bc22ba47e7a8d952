"""Libraries in the place of CANN's, so that torch_npu loads on a machine without CANN, and of CUDA's, where torch is a
build for CUDA: x86-64, g++ and binutils."""

import re
import subprocess
from pathlib import Path

TABLES = r"_ZT[ISV]"  # mangled names of a class's virtual functions and type: data, of at most as many bytes
TABLE_BYTES = 4096
LOOKED_UP = ("libopapi.so",)  # loaded by torch_npu 2.7.1 while it is imported, and linked to by no library


def make(folder: Path, torch_npu: Path, torch: Path, answers: Path) -> Path:
    """Write to `folder` the libraries that torch_npu and torch need and this machine lacks; return the one to preload.

    All are one library under many names. It has the functions of `answers`, a C++ file, and a function that returns 0
    for every other symbol that nothing defines.

    folder            a folder for LD_LIBRARY_PATH
    torch_npu, torch  folders of the installed packages
    """
    own = [*torch_npu.glob("*.so"), *torch_npu.glob("lib/*.so"), *torch.glob("lib/*.so*")]
    others = [path for package in (torch_npu, torch) for path in package.parent.glob(f"{package.name}.libs/*.so*")]
    needed = {name for path in own for name in re.findall(r"NEEDED\s+(\S+)", _output("objdump", "-p", path))}
    found = {name: Path(_output("g++", f"-print-file-name={name}").strip()) for name in needed}
    system = [path for path in found.values() if path.is_absolute()]  # g++ prints the bare name of a missing library
    defined = {name for path in (*own, *others, *system) for name in _symbols(path, "--defined-only")}
    undefined = {name: version for path in own for name, version in _symbols(path, "--undefined-only").items()}
    missing = {n: undefined[n] for n in sorted(undefined.keys() - defined) if not n.startswith(("Py", "_Py"))}

    source, versions, library = (folder / name for name in ("missing.s", "versions", "libcann.so"))
    source.write_text("".join(_symbol(*one) for one in missing.items()) + '.section .note.GNU-stack,"",@progbits\n')
    versions.write_text("".join(f"{version} {{}};\n" for version in sorted({*missing.values()} - {""})))
    script = [f"-Wl,--version-script={versions}"] if any(missing.values()) else []
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-o", library, source, answers, *script], check=True)
    for name in (needed | {*LOOKED_UP}) - {path.name for path in (*own, *others, *system)}:
        (folder / name).symlink_to(library)
    return library


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _symbols(library: Path, which: str) -> dict[str, str]:
    """Return symbols that are not weak references, and their versions, empty if they have none."""
    lines = map(str.split, _output("nm", "-D", which, library).splitlines())
    names = (line[-1].partition("@") for line in lines if line[-2] not in "wv")
    return {name: version.removeprefix("@") for name, _, version in names}


def _symbol(name: str, version: str) -> str:
    """Return the assembly of a missing symbol. It is weak: a function of the C++ file takes its place."""
    head = f".symver {name},{name}@@{version}\n.weak {name}\n" if version else f".weak {name}\n"
    if re.match(TABLES, name):
        return f"{head}.data\n.type {name},@object\n.size {name},{TABLE_BYTES}\n{name}: .zero {TABLE_BYTES}\n"
    return f"{head}.text\n.type {name},@function\n{name}: xor %eax,%eax\n ret\n"
