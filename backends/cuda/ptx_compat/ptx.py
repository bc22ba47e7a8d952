"""What a PTX text says of itself: the version and target it needs, its entry, and the entry's parameters and threads.

Triton's calling convention differs between its versions (3.2 appends nothing to a kernel's arguments, 3.3 and 3.4 a
pointer to scratch memory, 3.5 to 3.9 a second one, for profiles); the text states what it takes, so no table of
versions is needed.

Source: NVIDIA, PTX ISA, "PTX Module Directives", "Kernel and Function Directives: .entry", "Performance-Tuning
Directives: .reqntid".
"""

from __future__ import annotations

import math
import re

import msgspec

from portattn.errors import PortattnError

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_VERSION = re.compile(r"^\s*\.version\s+(\d+\.\d+)", re.MULTILINE)
_TARGET = re.compile(r"^\s*\.target\s+(sm_(\d+)([a-z]?))\b", re.MULTILINE)
# An entry: its name, its parameters, and the directives before its body.
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
_PARAMETER = re.compile(r"\s*\.param\s+(?:\.align\s+\d+\s+)?\.([busf])(8|16|32|64)\b(.*)", re.DOTALL)
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+(?:\s*,\s*\d+)*)")


class BadPtx(PortattnError):
    """A PTX text that cannot be run here; the message says what it has and what it must have."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of an entry.

    size      bytes
    floating  declared as .f…
    """

    size: int
    floating: bool = False


class Ptx(msgspec.Struct, frozen=True, kw_only=True):
    """A module with one entry.

    version     of the PTX ISA, which the driver must know
    target      as written: sm_80, sm_90a
    capability  the target's number
    portable    whether later chips run it; an `a` target is for one chip, an `f` target for one family
    entry       the kernel's name
    parameters  of the entry, in order
    threads     of a block, as the entry demands them; 0 where it demands nothing
    """

    version: str
    target: str
    capability: int
    portable: bool
    entry: str
    parameters: tuple[Parameter, ...]
    threads: int


def read(text: str) -> Ptx:
    """Read a module's directives. Raises BadPtx on a text without them, of several entries, or cut off in its entry."""
    bare = _COMMENT.sub("", text)
    version, target, entries = _VERSION.search(bare), _TARGET.search(bare), _ENTRY.findall(bare)
    for found, what in ((version, ".version"), (target, ".target sm_NN")):
        if found is None:
            raise BadPtx(f"the PTX text has no {what}; it begins {text[:60]!r}")
    assert version is not None
    assert target is not None
    if len(entries) != 1:
        names = ", ".join(name for name, _, _ in entries) or "none"
        raise BadPtx(f"the PTX text must have one whole .entry, and has {names}")
    name, parameters, directives = entries[0]
    threads = _THREADS.search(directives)
    return Ptx(
        version=version.group(1),
        target=target.group(1),
        capability=int(target.group(2)),
        portable=not target.group(3),
        entry=name,
        parameters=tuple(_parameter(part, name) for part in parameters.split(",") if part.strip()),
        threads=math.prod(int(number) for number in threads.group(1).split(",")) if threads else 0,
    )


def _parameter(text: str, entry: str) -> Parameter:
    found = _PARAMETER.fullmatch(text)
    if found is None or "[" in found.group(3):  # an array: a struct by value, which Triton's kernels have none of
        raise BadPtx(f"{entry}: the parameter {' '.join(text.split())!r} is not a number or a pointer")
    return Parameter(size=int(found.group(2)) // 8, floating=found.group(1) == "f")
