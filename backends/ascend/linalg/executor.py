"""What triton-ascend makes of a plan's kernels, executed on a CPU through MLIR and read by lints: the parent's side."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from portattn.backends.ascend.linalg.text import OWN_BUFFERS
from portattn.backends.ascend.linalg.tools import missing
from portattn.launch import KernelCall, signature
from portattn.schema.target import Target
from portattn.testing.executor import Executor
from portattn.testing.findings import Facts, Lint, LintName
from portattn.worker.client import Reply

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


# Tiles of these are never stored: constants and repeated rows are operands of the operation that reads them.
_FREE = ("tensor.empty", "linalg.fill", "linalg.broadcast", "arith.constant", "tensor.expand_shape",
         "tensor.collapse_shape", "tensor.extract_slice", "linalg.transpose")  # fmt: skip
_LOADED = "bufferization.to_tensor"
# Operands of products lie in the cube unit's own buffers.
_PRODUCTS = ("linalg.matmul", "linalg.batch_matmul")


def footprint(module: Module) -> int:
    """Bytes of the tiles that live at the line where most do."""
    readers: dict[str, list[Operation]] = defaultdict(list)
    for operation in module.operations:
        for name in operation.reads:
            readers[name].append(operation)
    change: dict[int, int] = defaultdict(int)
    for operation in module.operations:
        shape = operation.type_of_result()
        if operation.name in _FREE or not operation.results or shape is None or len(operation.results) != 1:
            continue
        if operation.name.startswith(("memref.", "scf.", "bufferization.")) and operation.name != _LOADED:
            continue
        # What a loop hands to its next step is counted with the loop.
        used = [reader for reader in readers[operation.results[0]] if reader.name != "scf.yield"]
        if not used or all(_into_product(reader, operation.results[0], readers) for reader in used):
            continue
        change[operation.line] += size_of(*shape)
        change[max(_end(module, operation, reader) for reader in used)] -= size_of(*shape)
    for loop in module.loops:  # what a loop carries lives as long as it runs
        for shape in tensors(loop.carries):
            change[loop.first] += size_of(*shape)
            change[loop.last] -= size_of(*shape)
    live = most = 0
    for line in sorted(change):
        live += change[line]
        most = max(most, live)
    return most


def _into_product(reader: Operation, value: str, readers: dict[str, list[Operation]]) -> bool:
    """Whether a reader is a product that takes the value as an operand, at once or transposed."""
    if reader.name in _PRODUCTS:
        return value in reader.reads[:2]
    if reader.name == "linalg.transpose":
        return all(_into_product(next_, reader.results[0], readers) for next_ in readers[reader.results[0]])
    return False


def _end(module: Module, operation: Operation, reader: Operation) -> int:
    """The line before which a value that this reader takes must live."""
    for loop in module.around(reader.line):
        if operation.line < loop.first:
            return loop.last
    in_place = reader.name.startswith(("arith.", "math.")) or (
        reader.name.startswith("linalg.") and reader.reads[-1] == operation.results[0]
    )
    return reader.line if in_place else reader.line + 1


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
    """Yield the reductions whose accumulator is uninitialised."""
    for operation in module.operations:
        if operation.name != "linalg.reduce":
            continue
        for name in operation.reads[len(operation.reads) // 2 :]:  # as many accumulators as inputs, and after them
            origin = module.made.get(name)
            if origin is not None and origin.name in ("tensor.empty", "bufferization.alloc_tensor"):
                yield operation
                break


def _loaded_whole(module: Module, value: str) -> str | None:
    """Return the argument that a tile was copied from without a mask, or None."""
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


TEXT = "linalg"  # the lowered text among a worker's facts


class LinalgExecutor(Executor):
    """Lowered launches, executed on this machine's CPU."""

    name = "lowered"
    level = "lowering-checked"
    task = "portattn.backends.ascend.linalg.execute:compare"
    code_task = "portattn.backends.ascend.linalg.execute:run_code"
    asks = "text"
    lowers_to = "linalg"

    def lacks(self, target: Target) -> str:
        return self.declines(target) or missing()

    def where(self, target: Target) -> str:
        return f"x86, as {target.toolchain} lowers it for {target.arch.name}"

    def piece(self, launch: KernelCall, reply: Reply) -> str:
        return str(reply.facts.get(TEXT, ""))

    def analyze(self, reply: Reply, launch: KernelCall, target: Target) -> tuple[Facts, list[Lint]]:
        """Facts and lints of one lowered launch; the reply's facts hold its text, the facts returned do not."""
        facts = dict(reply.facts)
        text = str(facts.pop(TEXT, ""))
        names = tuple(signature(launch).types)
        arch = target.arch
        # Double buffering, which is on unless it is switched off, takes the other half.
        room = arch.scratchpad_bytes if launch.launch.get("multibuffer") is False else arch.scratchpad_bytes // 2
        found = lints(text, launch.function, names, launch.grid, arch.max_programs, room)
        facts["tile_bytes"] = footprint(read(text))
        for lint in found:
            name = lint.name.replace("-", "_")
            facts[name] = int(facts.get(name, 0)) + lint.value
        return facts, found
