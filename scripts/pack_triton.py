"""Pack a released Triton so small that it can be carried to a machine with a GPU and without a network.

    python scripts/pack_triton.py 3.8.0 triton-3.8.0.txz [--python cp312] [--arch sm_90]

There (docs/testing.md, "Another Triton on a machine with a GPU"):

    mkdir /tmp/triton && tar xJf triton-3.8.0.txz -C /tmp/triton && PYTHONPATH=/tmp/triton python3 …

The wheel is of Linux on x86_64, less what a run on an NVIDIA GPU up to sm_90 never reads: symbols, AMD's code
generator, the profiler, plug-ins, disassemblers, and the ptxas of newer chips where sm_90 has another one
(backends/cuda/ptxas.toml). With `--arch` only the ptxas of that chip stays. It takes minutes, and 2 GB of memory.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from portattn.backends.cuda import releases
from portattn.schema import compilers
from portattn.schema.toolchain import Toolchain

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
CHIP = 90  # the newest compute capability that is compiled for, where --arch names none
# Of the folder triton/, as globs.
UNUSED = (
    "FileCheck", "include", "plugins", "profiler", "instrumentation", "_C/libproton*", "backends/*/include/triton",
    "backends/amd/lib/*codegen*", "backends/amd/include", "backends/nvidia/lib/cupti*", "**/*.a",
    "backends/nvidia/bin/nvdisasm", "backends/nvidia/bin/cuobjdump",
)  # fmt: skip
# Of x86's code calls and jumps by absolute addresses, and a window as wide as libtriton.so. It takes 2 GB of memory and
# one core. By -9 alone, and with the two programs that take code apart, 3.9.0 for sm_90 had 55.7 MB in place of 49.5.
XZ = ("xz", "-T1", "--x86", "--lzma2=preset=9,dict=192MiB", "-c")
STRIPPED_FROM = 1 << 20  # bytes: smaller libraries gain nothing


class Failed(Exception):
    """The command failed; the text is for people."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="of Triton, such as 3.8.0")
    parser.add_argument("out", type=Path, help="the archive, a name that ends in .txz")
    parser.add_argument("--python", default="cp312", metavar="TAG", help="the GPU machine's Python, such as cp311")
    parser.add_argument("--arch", default="", metavar="ARCH", help="for this chip alone, such as sm_90")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also that leaves nothing behind
    try:
        print(pack(given.version, given.out, given.python, given.arch))
    except (Failed, OSError) as failed:
        print(f"pack_triton: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pack_triton: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def pack(version: str, out: Path, tag: str, arch: str = "") -> str:
    """Make the archive, for one chip if `arch` names one; return its description. Raises Failed."""
    _check(version, out, tag, arch)
    with tempfile.TemporaryDirectory(prefix="pack-triton-") as folder, _whole(out) as part:
        wheel = _downloaded(version, tag, Path(folder))
        tree = Path(folder) / "tree"
        try:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(tree)
        except (OSError, zipfile.BadZipFile) as error:
            raise Failed(f"{wheel.name} cannot be unpacked: {error}") from None
        _reduce(tree, version, arch)
        _archive(tree, part)
    return f"{out}: {out.stat().st_size / 1e6:.1f} MB, from {wheel.name}"


def _check(version: str, out: Path, tag: str, arch: str) -> None:
    """Check the arguments before 250 MB are fetched."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:\.post\d+)?", version):
        raise Failed(
            f"{version!r} is no release such as 3.8.0; known: {', '.join(compilers.released_versions('triton'))}"
        )
    if not re.fullmatch(r"cp3\d+", tag):
        raise Failed(f"{tag!r} is no tag of a Python such as cp312")
    if arch and not re.fullmatch(r"sm_\d{2,3}", arch):
        raise Failed(f"--arch {arch!r} is no chip such as sm_90")
    if out.suffix != ".txz":
        raise Failed(f"{out}: the archive's name must end in .txz")
    if out.is_dir() or not out.parent.is_dir():
        raise Failed(f"{out}: " + ("a folder has this name" if out.is_dir() else "its folder is not there"))
    if missing := [name for name in ("strip", "xz") if shutil.which(name) is None]:
        raise Failed(f"needs {' and '.join(missing)} on PATH (packages binutils, xz-utils)")


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a file beside `out`, which is renamed at the end of the block, and removed if the block fails."""
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise Failed(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout.strip()[-2000:]}")


def _downloaded(version: str, tag: str, folder: Path) -> Path:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    of_python = ["--implementation", "cp", "--python-version", tag.removeprefix("cp"), "--abi", tag]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-input", "--no-deps", "--only-binary=:all:"]
    _run([*command, *of_python, *platforms, "-d", str(folder), f"triton=={version}"])
    (wheel,) = folder.glob("triton-*.whl")
    return wheel


def _reduce(tree: Path, version: str, arch: str) -> None:
    """Remove files that no run needs, and symbols."""
    triton = tree / "triton"
    for pattern in (*UNUSED, *(f"backends/nvidia/bin/{spare}" for spare in _spare_ptxas(version, arch))):
        for path in triton.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    for program in (triton / "backends" / "nvidia" / "bin").iterdir():
        program.chmod(0o755)
    for path in sorted(triton.rglob("*.so*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size >= STRIPPED_FROM:
            _run(["strip", "--strip-unneeded", str(path)])


def _spare_ptxas(version: str, arch: str) -> list[str]:
    """Return the release's spare ptxas: for newer chips only, or not for `arch`; none if unknown."""
    named = Toolchain.parse(f"triton=={version}")
    release = next((one for one in releases() if named.within("triton", one.triton)), None)
    if not (release and release.blackwell):
        return []
    if release.blackwell_from > (int(arch.removeprefix("sm_")) if arch else CHIP):
        return ["ptxas-blackwell"]
    return ["ptxas"] if arch else []


def _archive(tree: Path, part: Path) -> None:
    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
        return member

    with part.open("wb") as file:
        xz = subprocess.Popen(XZ, stdin=subprocess.PIPE, stdout=file)
        try:
            assert xz.stdin is not None
            with tarfile.open(fileobj=xz.stdin, mode="w|", format=tarfile.GNU_FORMAT) as tar:
                for top in sorted(tree.iterdir()):  # `add` sorts what is below
                    tar.add(top, top.name, filter=plain)
            xz.stdin.close()
        except BrokenPipeError:
            pass  # xz has ended, and says below how
        except BaseException:
            xz.kill()
            xz.wait()
            raise
        if xz.wait():
            raise Failed(f"xz ended with {xz.returncode}: is there room for {part}?")


if __name__ == "__main__":
    sys.exit(main())
