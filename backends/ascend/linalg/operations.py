"""The operations of a lowered text, one line each, with what they read and where the loops around them are.

A reader for lints, not a parser of MLIR: it knows the shape in which mlir's printer writes the operations that
triton-ascend emits. The printer gives a number to several values, in loops side by side: here a value's name is
followed by the line that makes it (`%12@40`), and arguments of functions and loops keep theirs.
"""

from __future__ import annotations

import re

import msgspec

_LINE = re.compile(r"^\s*(?:(?P<results>%[^=]*?)\s*=\s*)?\"?(?P<name>[a-z_]\w*(?:\.\w+)+|call|return)\"?(?P<rest>.*)$")
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_TYPE = re.compile(r"\b(?:tensor|memref)<((?:[\d?]+x)*)([a-z]+\d*)")
_CONSTANT = re.compile(r"arith\.constant (-?\d+) : (?:index|i\d+)")
WIDTHS = {"i1": 1, "index": 8}  # bytes of an element; others say their bits


class Loop(msgspec.Struct, frozen=True):
    """An scf.for, from its `first` line to its `last`.

    trips       how often it runs, where its bounds are constants
    attributes  what its closing line says
    carries     types of the values that it hands from one step to the next
    """

    trips: int | None
    first: int
    last: int
    attributes: str
    carries: str


class Operation(msgspec.Struct, frozen=True):
    """One operation. line: its place in the text; reads: values that it names, results without their `#n`."""

    line: int
    name: str
    results: tuple[str, ...]
    reads: tuple[str, ...]
    text: str

    def type_of_result(self) -> tuple[tuple[int, ...], str] | None:
        """Shape and element type of the last tensor or memref that it names; None where it names none."""
        found = tensors(self.text)
        return found[-1] if found else None


class Module(msgspec.Struct, frozen=True):
    """A lowered text. made: the operation that gives each value; loops: every scf.for, outermost first."""

    operations: tuple[Operation, ...]
    made: dict[str, Operation]
    loops: tuple[Loop, ...]

    def around(self, line: int) -> list[Loop]:
        """The loops that hold a line, outermost first."""
        return [loop for loop in self.loops if loop.first < line < loop.last]


def read(text: str) -> Module:
    """Read a lowered text."""
    operations: list[Operation] = []
    constants: dict[str, int] = {}
    opened: list[tuple[int, Operation | None]] = []
    loops: list[Loop] = []
    scopes: list[dict[str, str]] = [{}]

    def resolved(name: str) -> str:
        name = name.partition("#")[0]
        return next((scope[name] for scope in reversed(scopes) if name in scope), name)

    for number, line in enumerate(text.splitlines()):
        stripped = line.strip()
        if stripped.startswith("}") and opened:
            first, operation = opened.pop()
            scopes.pop()
            if operation is not None and operation.name == "scf.for":
                attributes = stripped[1:].strip()
                carries = operation.text.partition("->")[2]
                loops.append(Loop(_trips(operation, constants), first, number, attributes, carries))
        found = _LINE.match(line)
        operation = None
        if found and not stripped.startswith(("}", "func.func")):
            names = [name.partition(":")[0].strip() for name in (found["results"] or "").split(",") if name]
            results = tuple(f"{name}@{number}" for name in names)
            reads = tuple(map(resolved, _VALUE.findall(found["rest"])))
            operation = Operation(number, found["name"], results, reads, stripped)
            operations.append(operation)
            scopes[-1] |= dict(zip(names, results, strict=True))
            constant = _CONSTANT.search(stripped)
            if constant:
                constants[results[0]] = int(constant[1])
        if stripped.endswith("{"):
            opened.append((number, operation))
            scopes.append({})
    made = {result: operation for operation in operations for result in operation.results}
    return Module(tuple(operations), made, tuple(sorted(loops, key=lambda loop: loop.first)))


def tensors(text: str) -> list[tuple[tuple[int, ...], str]]:
    """Shape and element type of every tensor and memref type in a text; -1 for a size that is not known."""
    return [
        (tuple(-1 if size == "?" else int(size) for size in sizes.split("x") if size), element)
        for sizes, element in _TYPE.findall(text)
    ]


def _trips(loop: Operation, constants: dict[str, int]) -> int | None:
    bounds = loop.reads[1:4]  # after the loop's own variable
    if len(bounds) != 3 or any(name not in constants for name in bounds):
        return None
    first, last, step = (constants[name] for name in bounds)
    return max(-(-(last - first) // step), 0) if step > 0 else None


def size_of(shape: tuple[int, ...], element: str) -> int:
    """Bytes of a tile; sizes that are not known count as 1."""
    width = WIDTHS.get(element) or -(-int(re.sub(r"\D", "", element) or 8) // 8)
    for size in shape:
        width *= max(size, 1)
    return width
