"""Reads lowered MLIR text: its kernel and arguments, operations and loops, the footprint of its tiles, and lints.

triton-ascend's func.func has two byte buffers (lock, workspace), run-time arguments, grid sizes and program ids."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from portattn.backends.ascend.linalg.llvm_tools import LinalgError
from portattn.testing.findings import Lint, LintName

OWN_BUFFERS = 2  # arguments before the kernel's
GRID_ARGUMENTS = 6  # arguments after them
_FUNCTION = re.compile(r"func\.func @(\w+)\((.*?)\)\s*(?:attributes|\{)", re.DOTALL)
_ARGUMENT = re.compile(r"%\w+: (memref<\?x(\w+)>|[a-z]+\d*(?![\w<]))")
# An attribute dictionary with one of the backend's own names behind an operation: {hivm.unlikely_condition}
_OWN_ATTRIBUTES = re.compile(r"[ \t]*\{[^{}\n]*\b(?:hivm|hfusion|ExtractedLoadOrStore|DiscreteMemAccess)\b[^{}\n]*\}")
_MARK = re.compile(r"^\s*annotation\.mark\b.*$", re.MULTILINE)
_FOREIGN_OPERATION = re.compile(
    r"(?:^|=)\s*\"?((?:tt|hivm|hfusion|annotation|linalg_ext|triton_\w+)\.[\w.]+)", re.MULTILINE
)
_DECLARATION = re.compile(r"^ *func\.func private @.*$", re.MULTILINE)
_CALL = re.compile(r"\bcall @(\w+)")
# HFusion is the vendor's dialect that the adapter's pass triton-to-hfusion writes; of a scan it makes a function call.
_VENDORS = re.compile(r"(?:^|=)\s*(hfusion\.\w+)|\bcall @(\w+?)(?:_\d+)?\(", re.MULTILINE)


# The call that the adapter makes of tl.cumsum along the last axis: (tensor, axis, whether backwards).
_RUNNING_SUM = re.compile(
    r"^ *(?P<result>%\w+) = (?:func\.)?call @triton_cumsum_\d+\((?P<numbers>%\w+), %c(?P<axis>\d)_i32, %false\) : "
    r"\((?P<type>tensor<(?:(?P<rows>\d+)x)?(?P<columns>\d+)x(?P<element>i32|f32)>), i32, i1\) -> (?P=type)$",
    re.MULTILINE,
)


def _running_sum(call: re.Match[str]) -> str:
    """Return loops in place of the call; along another axis the call itself."""
    result, numbers, kind, element = call["result"], call["numbers"], call["type"], call["element"]
    if int(call["axis"]) != (call["rows"] is not None):
        return call[0]
    new, add, zero = f"%sum_{result[1:]}", *(("arith.addi", "0") if element == "i32" else ("arith.addf", "0.0"))
    places = f"{new}_row, {new}_column" if call["rows"] else f"{new}_column"
    return f"""\
    {new}_0 = arith.constant 0 : index
    {new}_1 = arith.constant 1 : index
    {new}_rows = arith.constant {call["rows"] or 1} : index
    {new}_columns = arith.constant {call["columns"]} : index
    {new}_zero = arith.constant {zero} : {element}
    {new}_empty = tensor.empty() : {kind}
    {result} = scf.for {new}_row = {new}_0 to {new}_rows step {new}_1 iter_args({new}_made = {new}_empty) -> ({kind}) {{
      {new}_line:2 = scf.for {new}_column = {new}_0 to {new}_columns step {new}_1 iter_args({new}_filled = {new}_made,
          {new}_before = {new}_zero) -> ({kind}, {element}) {{
        {new}_number = tensor.extract {numbers}[{places}] : {kind}
        {new}_now = {add} {new}_before, {new}_number : {element}
        {new}_next = tensor.insert {new}_now into {new}_filled[{places}] : {kind}
        scf.yield {new}_next, {new}_now : {kind}, {element}
      }}
      scf.yield {new}_line#0 : {kind}
    }}"""


class Argument(msgspec.Struct, frozen=True):
    """A run-time argument; `kind` is its element type (`f16`, `i32`)."""

    pointer: bool
    kind: str


class LoweredKernel(msgspec.Struct, frozen=True):
    name: str
    arguments: tuple[Argument, ...]


def kernel_of(text: str) -> LoweredKernel:
    """Parse a text's kernel. Raise LinalgError if the adapter would not write it."""
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


def vendor_parts(text: str) -> set[str]:
    """Return operations and library functions that the adapter leaves to the vendor's compiler on purpose."""
    return {operation or function for operation, function in _VENDORS.findall(_RUNNING_SUM.sub("", text))}


def upstream(text: str) -> str:
    """Return the text for upstream MLIR, without attributes that only place and pipeline. Raise LinalgError."""
    text = _MARK.sub("", _OWN_ATTRIBUTES.sub("", _DECLARATION.sub("", text)))
    text = _RUNNING_SUM.sub(_running_sum, text)
    foreign = _FOREIGN_OPERATION.search(text)
    if foreign:
        raise LinalgError(f"the lowered text has {foreign[1]}, which only the vendor's compiler knows")
    called = sorted(set(_CALL.findall(text)))
    if called:
        raise LinalgError(f"the lowered text calls {', '.join(called)} of the vendor's library")
    return text


_LINE = re.compile(r"^\s*(?:(?P<results>%[^=]*?)\s*=\s*)?\"?(?P<name>[a-z_]\w*(?:\.\w+)+|call|return)\"?(?P<rest>.*)$")
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_TYPE = re.compile(r"\b(?:tensor|memref)<((?:[\d?]+x)*)([a-z]+\d*)")
_CONSTANT = re.compile(r"arith\.constant (-?\d+) : (?:index|i\d+)")
WIDTHS = {"i1": 1, "index": 8}  # bytes of an element; others say their bits


class Loop(msgspec.Struct, frozen=True):
    """An scf.for, from its `first` line to its `last`."""

    trips: int | None  # if its bounds are constants
    first: int
    last: int
    attributes: str  # of its closing line
    carries: str  # types of its iteration arguments


class Operation(msgspec.Struct, frozen=True):
    """One operation; `reads` are its operands, results without their `#n`."""

    line: int
    name: str
    results: tuple[str, ...]
    reads: tuple[str, ...]
    text: str

    def type_of_result(self) -> tuple[tuple[int, ...], str] | None:
        """Return shape and element type of its last tensor or memref, or None."""
        found = tensors(self.text)
        return found[-1] if found else None


class Module(msgspec.Struct, frozen=True):
    """A lowered text. made: value -> its operation; loops: every scf.for, outermost first."""

    operations: tuple[Operation, ...]
    made: dict[str, Operation]
    loops: tuple[Loop, ...]

    def around(self, line: int) -> list[Loop]:
        return [loop for loop in self.loops if loop.first < line < loop.last]


def read(text: str) -> Module:
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
    """Return shape and element type of every tensor and memref type in a text; -1 for an unknown size."""
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
    """Return a tile's bytes; unknown sizes count as 1."""
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
    for loop in module.loops:  # a loop's carried values live as long as it runs
        for shape in tensors(loop.carries):
            change[loop.first] += size_of(*shape)
            change[loop.last] -= size_of(*shape)
    live = most = 0
    for line in sorted(change):
        live += change[line]
        most = max(most, live)
    return most


def _into_product(reader: Operation, value: str, readers: dict[str, list[Operation]]) -> bool:
    """Return whether a reader is a product that takes the value as an operand, directly or transposed."""
    if reader.name in _PRODUCTS:
        return value in reader.reads[:2]
    if reader.name == "linalg.transpose":
        return all(_into_product(next_, reader.results[0], readers) for next_ in readers[reader.results[0]])
    return False


def _end(module: Module, operation: Operation, reader: Operation) -> int:
    """Return the line until which a value that this reader takes must live."""
    for loop in module.around(reader.line):
        if operation.line < loop.first:
            return loop.last
    in_place = reader.name.startswith(("arith.", "math.")) or (
        reader.name.startswith("linalg.") and reader.reads[-1] == operation.results[0]
    )
    return reader.line if in_place else reader.line + 1


GATHER = "ExtractedLoadOrStore"  # the adapter's mark on a loop that it has made of one load or store
_FOREIGN = re.compile(r"(?:^|=)\s*\"?((?:tt|hivm|triton_\w+)\.[\w.]+)\"?[( ]", re.MULTILINE)


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
    """Return every lint that fires on a lowered kernel; scratchpad_bytes: of the unified buffer, 0 skips its lint."""
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
    """Yield loads and stores that became a loop over elements or rows."""
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
    """Yield loads that read a whole tile and select by the mask afterwards."""
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
    """Yield masked stores that became load, select, store: they overwrite other programs' changes."""
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
    """Return the argument whose elements a loop gathers into its tile."""
    loop = next(loop for loop in module.loops if loop.first == operation.line)
    if GATHER not in loop.attributes:
        return None
    inside = (o for o in module.operations if loop.first < o.line < loop.last and o.name == "memref.load")
    return next((_base(module, load.reads[0]) for load in inside), None)


def _base(module: Module, value: str) -> str:
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
