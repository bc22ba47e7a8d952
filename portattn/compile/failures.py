"""How long a failed compile counts: what is shaped like a compiler's failure lasts, anything else passes.

A record that lasts is kept on disk and keeps every later process from a kernel, so it must be the compiler's word on
the program. Everything whose shape is not known here, and everything that the machine may have done (a full disk, a
limit, a missing program, a signal that somebody sent), is only remembered for some time.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Hashable
from pathlib import Path

from portattn.schema.compile_record import Standing
from portattn.worker.client import Reply
from portattn.worker.exit_status import OWN_SIGNALS, death

TIMEOUT_STANDS = 86_400.0  # seconds: a compiler that hangs costs the whole limit each time it is asked
PASSING_STANDS = 300.0  # seconds; twice as long each time it happens again, since asking may take long
PASSING_STANDS_AT_MOST = 3_600.0
ROOM = 16 << 20  # bytes; with less on a disk that compilers write to, what they do says nothing about them

# Where the worker stands before it enters a compiler, and where it reads what one made.
_OUTSIDE = ("", "start", "import", "protocol", "read")
# Not SIGBUS: where Triton runs it is a page of a mapped file that could not be had (a full disk, a file cut short), and
# a wild pointer is SIGSEGV.
LASTING_SIGNALS = tuple(name for name in OWN_SIGNALS if name != "SIGBUS")
# Triton's and triton-ascend's exceptions for programs that they refuse; OutOfResources is also our own.
_REFUSALS = (
    "CompilationError", "CompileTimeAssertionFailure", "UnsupportedLanguageConstruct", "OutOfResources", "PTXASError",
    "MLIRCompilationError",
)  # fmt: skip
# The same said in words: by MLIR, LLVM, ptxas and Ascend's programs, whatever type carries them.
_DIAGNOSTICS = re.compile(
    r"PassManager::run failed|LLVM ERROR|\bAssertion [`'].*failed|UNREACHABLE executed|failed to legalize|map::at"
    r"|:\d+:\d+: error: |loc\(.*\): error: |Cannot select|ran out of registers|Internal Triton PTX codegen error"
    r"|ptxas (error|fatal)|`ptxas` failed with error code 255|triton-adapter-opt exit status 1\b"
    r"|Command '\[?'?[^ ',]*(triton-adapter-opt|triton-opt|bishengir-\w+|ld\.lld)\b.* returned non-zero exit status 1\."
    r"|out of resource: |ub overflow|uses too much shared data"
)
# The machine's part, in any of these texts: operating systems, loaders, C++ and Python say so in these words.
_MACHINE = re.compile(
    r"No space left on device|Disk quota exceeded|Read-only file system|Too many open files|Cannot allocate memory"
    r"|File too large|File size limit exceeded|Input/output error|Permission denied|Operation not permitted"
    r"|Resource temporarily unavailable|No such file or directory|Not a directory|Is a directory|Stale file handle"
    r"|Text file busy|Exec format error|Broken pipe|Too many levels of symbolic links|File name too long"
    r"|bad_alloc|out of memory|memory exhausted|Memory allocation failure|can't allocate memory"
    r"|error while loading shared libraries|cannot open shared object file|version `GLIBC"
    r"|command not found|could not be opened|Python\.h|\b\w+_(?:PATH|HOME|DIR) is not set"
    r"|\b(?:Memory|OS|IO|Permission|FileNotFound|FileExists|IsADirectory|NotADirectory|Import|ModuleNotFound|Timeout"
    r"|BrokenPipe|Interrupted|BlockingIO|ChildProcess|ProcessLookup|Connection)Error\b|KeyboardInterrupt",
    re.IGNORECASE,
)
_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "TEMP", "TMP", "HOME", "XDG_CACHE_HOME", "CC", "CXX", "CPATH",
    "C_INCLUDE_PATH", "LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "HIP_PATH",
)  # fmt: skip
COMPILER_VARIABLES = ("TRITON_", "AMDGCN_", "ASCEND_", "MLIR_", "LLVM_")  # how the names of compilers' own begin


def standing(reply: Reply, *, room: bool = True) -> Standing:
    """Return how long a failure stands, by its reply.

    room  whether the disks had room when it happened (see `has_room`)
    """
    if not room or reply.stage in _OUTSIDE or machines(reply):
        return "passing"
    if reply.outcome == "hang":
        return "timeout"
    signal = death(reply)
    if signal:
        return "lasting" if signal in LASTING_SIGNALS else "passing"
    if reply.outcome == "crash":  # it left by itself: LLVM's fatal errors do
        return "lasting" if _DIAGNOSTICS.search(f"{reply.message}\n{reply.log}") else "passing"
    refused = reply.kind in _REFUSALS or _DIAGNOSTICS.search(reply.message)
    return "lasting" if refused else "passing"


def machines(reply: Reply) -> bool:
    """Return whether the failure is the machine's: the worker was unavailable, or a text of the reply says so."""
    return reply.unavailable or _MACHINE.search(f"{reply.kind}\n{reply.message}\n{reply.log}") is not None


def surroundings() -> Hashable:
    """What decides whether a passing failure happens again, as far as this process sees it cheaply: the variables that
    compilers, linkers and loaders read. Disks and memory are left to time."""
    return tuple(
        (name, value)
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(COMPILER_VARIABLES)
    )


def has_room() -> bool:
    """Whether the disks that compilers write to, for temporary files and Triton's cache, have room."""
    try:
        folders = [Path(tempfile.gettempdir())]
    except OSError:  # it looked for a folder that takes a file
        return False
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.join(
        os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache"
    )
    folders.append(Path(os.path.abspath(cache)))
    return all(_free(folder) >= ROOM for folder in folders)


def _free(folder: Path) -> int:
    """Bytes free on the disk of a folder, or of the nearest one above that is there."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0
