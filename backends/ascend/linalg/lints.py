"""Lints: what can be seen in a lowered text without running it. docs/ascend.md says of each what it misses.

A lint fires on what is slow on the chip, or may go wrong there and not on a CPU. Those of findings.LIMITS say that the
kernel cannot be right or cannot run there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from portattn.backends.ascend.linalg.footprint import footprint
from portattn.backends.ascend.linalg.operations import Module, Operation, read
from portattn.backends.ascend.linalg.text import OWN_BUFFERS
from portattn.testing.findings import Lint, LintName

GATHER = "ExtractedLoadOrStore"  # the adapter's mark on a loop that it has made of one load or store
_FOREIGN = re.compile(r"(?:^|=)\s*\"?((?:tt|hivm|hfusion|triton_\w+)\.[\w.]+)\"?[( ]", re.MULTILINE)


# What reads or writes memory: its word, and which of the values that it names is the memory.
_MEMORY_OF = {
    "memref.copy": ("load", 0),
    "memref.load": ("load", 0),
    "memref.store": ("store", 1),
    "bufferization.materialize_in_destination": ("store", 1),
}


def lints(
    text: str,
    function: str,
    arguments: Sequence[str] = (),
    grid: Sequence[int] = (),
    max_programs: int = 65535,
    scratchpad_bytes: int = 0,
) -> list[Lint]:
    """Every lint that fires on a lowered kernel.

    arguments     names of its run-time arguments in order, for messages
    grid          of the launch; max_programs: what the chip launches
    scratchpad_bytes  bytes of the chip's unified buffer that tiles can have; 0 leaves its lint out
    """
    module = read(text)
    names = {f"%arg{OWN_BUFFERS + index}": name for index, name in enumerate(arguments)}
    found = [*_gathers(module, names), *_whole_tiles(module, names), *_masked_stores(module, names)]
    left = sorted(set(_FOREIGN.findall(text)))
    if left:
        found.append(("leftover", len(left), f"left unconverted: {', '.join(left)}", 0))
    bare = list(_uninitialised(module))
    if bare:
        lines = ", ".join(str(operation.line + 1) for operation in bare)
        found.append(
            ("uninitialised-reduction", len(bare), f"the reduction starts from whatever was there (line {lines})", 0)
        )
    programs = 1
    for size in grid:
        programs *= size
    if programs > max_programs:
        found.append(("programs", programs, f"{programs} programs, the chip launches {max_programs}", max_programs))
    if scratchpad_bytes:
        used = footprint(module)
        if used > scratchpad_bytes:
            message = f"about {used} bytes of tiles live at once, the unified buffer has room for {scratchpad_bytes}"
            found.append(("unified-buffer", used, message, scratchpad_bytes))
    return [Lint(name=n, function=function, value=v, message=m, limit=limit) for n, v, m, limit in found]


_Found = tuple[LintName, int, str, int]


def _gathers(module: Module, names: dict[str, str]) -> Iterator[_Found]:
    """Loads and stores that became a loop: of one element, or of one row a step."""
    total: dict[tuple[LintName, str, str], int] = {}
    for operation in module.operations:
        if operation.name not in _MEMORY_OF:
            continue
        around = [loop for loop in module.around(operation.line) if GATHER in loop.attributes]
        if not around:
            continue
        copies = 1
        for loop in around:
            copies *= loop.trips or 1
        what, place = _MEMORY_OF[operation.name]
        memory = operation.reads[place]
        source = _base(module, memory)
        if not source.startswith("%arg"):
            continue
        single = operation.name in ("memref.load", "memref.store") or _elements(module, memory) == 1
        key: tuple[LintName, str, str] = ("scalar-loop" if single else "row-loop", what, names.get(source, source))
        total[key] = max(total.get(key, 0), copies)
    for (name, what, source), copies in total.items():
        each = "one element" if name == "scalar-loop" else "one row"
        yield name, copies, f"a {what} of {source} is {copies} copies of {each}, one after another", 0


def _whole_tiles(module: Module, names: dict[str, str]) -> Iterator[_Found]:
    """Loads that read a whole tile, and select by the mask afterwards."""
    found: dict[str, int] = {}
    for select in module.operations:
        if select.name != "arith.select" or len(select.reads) != 3:
            continue
        loaded = _loaded_whole(module, select.reads[1])
        if loaded and _loaded_whole(module, select.reads[2]) is None:
            found[loaded] = found.get(loaded, 0) + 1
    for source, count in found.items():
        name = names.get(source, source)
        times = "once" if count == 1 else f"in {count} places"
        yield "whole-tile-load", count, f"{name} is read whole and masked afterwards, {times}", 0


def _masked_stores(module: Module, names: dict[str, str]) -> Iterator[_Found]:
    """Masked stores that became load, select, store: they write back what other programs may have changed."""
    found: dict[str, int] = {}
    for store in module.operations:
        if store.name != "bufferization.materialize_in_destination":
            continue
        value, into = module.made.get(store.reads[0]), _base(module, store.reads[-1])
        if value is None or value.name != "arith.select" or len(value.reads) != 3:
            continue
        if any(_loaded_whole(module, source) == into for source in value.reads[1:]):
            found[into] = found.get(into, 0) + 1
    for source, count in found.items():
        name = names.get(source, source)
        yield "masked-store", count, f"a masked store to {name} reads the tile, and writes all of it back", 0


def _uninitialised(module: Module) -> Iterator[Operation]:
    """Reductions whose accumulator nobody has filled."""
    for operation in module.operations:
        if operation.name != "linalg.reduce":
            continue
        for name in operation.reads[len(operation.reads) // 2 :]:  # as many accumulators as inputs, and after them
            origin = module.made.get(name)
            if origin is not None and origin.name in ("tensor.empty", "bufferization.alloc_tensor"):
                yield operation
                break


def _loaded_whole(module: Module, value: str) -> str | None:
    """The argument that a tile was copied from without regard to a mask; None where it was not."""
    origin = module.made.get(value)
    while origin is not None and origin.name in ("arith.extf", "arith.extsi", "arith.extui", "arith.trunci"):
        origin = module.made.get(origin.reads[0])
    if origin is not None and origin.name == "scf.for":
        return _looped(module, origin)
    if origin is None or origin.name != "bufferization.to_tensor":
        return None
    held = origin.reads[0]
    for copy in module.operations:
        if copy.name != "memref.copy" or _base(module, copy.reads[1]) != held:
            continue
        source = module.made.get(copy.reads[0])
        # What the mask bounds is a subview of run-time size.
        if source is not None and source.name == "memref.reinterpret_cast":
            return _base(module, copy.reads[0])
    return None


def _looped(module: Module, operation: Operation) -> str | None:
    """The argument whose elements a loop puts into the tile that it gives."""
    loop = next(loop for loop in module.loops if loop.first == operation.line)
    if GATHER not in loop.attributes:
        return None
    inside = (o for o in module.operations if loop.first < o.line < loop.last and o.name == "memref.load")
    return next((_base(module, load.reads[0]) for load in inside), None)


def _base(module: Module, value: str) -> str:
    """The allocation that a view is of."""
    origin = module.made.get(value)
    while origin is not None and origin.name in ("memref.subview", "memref.reinterpret_cast", "memref.cast"):
        value = origin.reads[0]
        origin = module.made.get(value)
    return value


def _elements(module: Module, value: str) -> int:
    origin = module.made.get(value)
    found = origin.type_of_result() if origin is not None else None
    count = 1
    for size in found[0] if found else ():
        count *= size if size > 0 else 2  # a size that is not known: at least not one element
    return count
