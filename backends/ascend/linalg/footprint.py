"""How much of the unified buffer a lowered kernel's tiles may take at once: an estimate from above.

Every tensor that one operation makes and another reads lives from the one to the other; one that is made before a loop
and read in it lives to the loop's end. Elementwise operations, and what adds to an accumulator, are taken to work in
place. What else the vendor's compiler does (splitting a tile over a core's two vector units, fusing, double buffering)
is not known here.
"""

from __future__ import annotations

from collections import defaultdict

from portattn.backends.ascend.linalg.operations import Module, Operation, size_of, tensors

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
