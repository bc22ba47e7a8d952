"""The text of a lowered kernel: what it is called and takes, and what upstream MLIR does not know taken out of it.

triton-ascend's adapter writes one `func.func`: two byte buffers of its own (a lock and a workspace), the kernel's
run-time arguments, and six integers: the grid's three sizes, then the program's three ids.
"""

from __future__ import annotations

import re

import msgspec

from portattn.backends.ascend.linalg.tools import LinalgError

OWN_BUFFERS = 2  # arguments before the kernel's
GRID_ARGUMENTS = 6  # arguments after them
_FUNCTION = re.compile(r"func\.func @(\w+)\((.*?)\)\s*(?:attributes|\{)", re.DOTALL)
_ARGUMENT = re.compile(r"%\w+: (memref<\?x(\w+)>|[a-z]+\d*(?![\w<]))")
# An attribute dictionary with one of the backend's own names behind an operation: {hivm.unlikely_condition}
_OWN_ATTRIBUTES = re.compile(r"[ \t]*\{[^{}\n]*\b(?:hivm|hfusion|ExtractedLoadOrStore|DiscreteMemAccess)\b[^{}\n]*\}")
_MARK = re.compile(r"^\s*annotation\.mark\b.*$", re.MULTILINE)
_FOREIGN = re.compile(r"(?:^|=)\s*\"?((?:tt|hivm|hfusion|annotation|linalg_ext|triton_\w+)\.[\w.]+)", re.MULTILINE)
_CALL = re.compile(r"\bcall @(\w+)")


class Argument(msgspec.Struct, frozen=True):
    """A run-time argument. kind: the type of the elements of a pointer, or of a number (`f16`, `i32`)."""

    pointer: bool
    kind: str


class LoweredKernel(msgspec.Struct, frozen=True):
    """A lowered kernel. arguments: its own, without those that the adapter adds."""

    name: str
    arguments: tuple[Argument, ...]


def kernel_of(text: str) -> LoweredKernel:
    """The kernel that a text holds. Raises LinalgError where it is not what the adapter writes."""
    found = _FUNCTION.search(text)
    if found is None:
        raise LinalgError("the lowered text holds no func.func")
    given = [Argument(bool(m[2]), m[2] or m[1]) for m in _ARGUMENT.finditer(found[2])]
    if len(given) != found[2].count("%"):
        raise LinalgError(f"{found[1]}: an argument of another type than memref<?xT>, integer and float")
    own, last = given[:OWN_BUFFERS], given[-GRID_ARGUMENTS:]
    if len(given) < OWN_BUFFERS + GRID_ARGUMENTS or any(a != Argument(True, "i8") for a in own):
        raise LinalgError(f"{found[1]}: does not begin with the adapter's two byte buffers")
    if any(a != Argument(False, "i32") for a in last):
        raise LinalgError(f"{found[1]}: does not end with the grid's sizes and the program's ids")
    return LoweredKernel(found[1], tuple(given[OWN_BUFFERS:-GRID_ARGUMENTS]))


def upstream(text: str) -> str:
    """The text as upstream MLIR reads it. Raises LinalgError naming an operation that has no meaning there.

    Attributes of the backend and `annotation.mark` say how to place and pipeline, not what to compute: they go.
    """
    text = _MARK.sub("", _OWN_ATTRIBUTES.sub("", text))
    foreign = _FOREIGN.search(text)
    if foreign:
        raise LinalgError(f"the lowered text has {foreign[1]}, which only the vendor's compiler knows")
    called = sorted(set(_CALL.findall(text)))
    if called:
        raise LinalgError(f"the lowered text calls {', '.join(called)} of the vendor's library")
    return text
