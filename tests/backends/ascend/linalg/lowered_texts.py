"""Lowered kernels written by hand, in the form in which triton-ascend's adapter writes them."""

# ruff: noqa: E501 - lines of MLIR

BEFORE = "%arg0: memref<?xi8>, %arg1: memref<?xi8>"
ATTRIBUTES = '{SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, mix_mode = "aiv", parallel_mode = "simd"}'


def kernel(body: str, *types: str, name: str = "kernel") -> str:
    """A module with one kernel: `types` are those of its own arguments, %arg2 on; after them come %grid and %id."""
    own = [f"%arg{2 + i}: {kind}" for i, kind in enumerate(types)]
    after = [f"%grid{axis}: i32" for axis in "xyz"] + [f"%id{axis}: i32" for axis in "xyz"]
    arguments = ", ".join([BEFORE, *own, *after])
    return f"module {{\n  func.func @{name}({arguments}) attributes {ATTRIBUTES} {{\n{body}\n    return\n  }}\n}}\n"


HISTOGRAM = "%counts = hfusion.histogram %digits, 256 : tensor<1024xi32> -> tensor<256xi32>"
# out[8·id + i] = 2·x[8·id + i], eight elements a program; the marks and attributes of the backend are in it.
DOUBLE = kernel(
    """\
    %c8_i32 = arith.constant 8 : i32
    %c2 = arith.constant 2.000000e+00 : f32
    %0 = arith.muli %idx, %c8_i32 : i32
    %1 = arith.index_cast %0 : i32 to index
    %from = memref.reinterpret_cast %arg2 to offset: [%1], sizes: [8], strides: [1] : memref<?xf32> to memref<8xf32, strided<[1], offset: ?>>
    %to = memref.reinterpret_cast %arg3 to offset: [%1], sizes: [8], strides: [1] : memref<?xf32> to memref<8xf32, strided<[1], offset: ?>>
    %alloc = memref.alloc() : memref<8xf32>
    annotation.mark %alloc {MayImplicitTransposeWithLastAxis} : memref<8xf32>
    %c0_i32 = arith.constant 0 : i32
    %late = arith.cmpi slt, %0, %c0_i32 : i32
    scf.if %late {
      %zero = arith.constant 0.000000e+00 : f32
      linalg.fill ins(%zero : f32) outs(%alloc : memref<8xf32>)
    } {hivm.unlikely_condition}
    memref.copy %from, %alloc : memref<8xf32, strided<[1], offset: ?>> to memref<8xf32>
    %2 = bufferization.to_tensor %alloc restrict writable : memref<8xf32>
    %3 = tensor.empty() : tensor<8xf32>
    %4 = linalg.fill ins(%c2 : f32) outs(%3 : tensor<8xf32>) -> tensor<8xf32>
    %5 = arith.mulf %2, %4 : tensor<8xf32>
    bufferization.materialize_in_destination %5 in writable %to : (tensor<8xf32>, memref<8xf32, strided<[1], offset: ?>>) -> ()""",
    "memref<?xf32> {tt.divisibility = 16 : i32, tt.tensor_kind = 0 : i32}",
    "memref<?xf32> {tt.tensor_kind = 1 : i32}",
)

# x[%arg4], written to out[0].
AT = kernel(
    """\
    %at = arith.index_cast %arg4 : i32 to index
    %v = memref.load %arg2[%at] : memref<?xf32>
    %c0 = arith.constant 0 : index
    memref.store %v, %arg3[%c0] : memref<?xf32>""",
    "memref<?xf32>", "memref<?xf32>", "i32",
)  # fmt: skip
# x[0], written to that index of out.
STORE_AT = kernel(
    """\
    %at = arith.index_cast %arg4 : i32 to index
    %c0 = arith.constant 0 : index
    %v = memref.load %arg2[%c0] : memref<?xf32>
    memref.store %v, %arg3[%at] : memref<?xf32>""",
    "memref<?xf32>", "memref<?xf32>", "i32",
)  # fmt: skip

# The sum of a row whose accumulator was never filled, into out[0].
UNFILLED = kernel(
    """\
    %from = memref.reinterpret_cast %arg2 to offset: [0], sizes: [8], strides: [1] : memref<?xf32> to memref<8xf32, strided<[1]>>
    %alloc = memref.alloc() : memref<8xf32>
    memref.copy %from, %alloc : memref<8xf32, strided<[1]>> to memref<8xf32>
    %0 = bufferization.to_tensor %alloc restrict writable : memref<8xf32>
    %1 = tensor.empty() : tensor<f32>
    %reduced = linalg.reduce ins(%0 : tensor<8xf32>) outs(%1 : tensor<f32>) dimensions = [0]
      (%in: f32, %init: f32) {
        %2 = arith.addf %in, %init : f32
        linalg.yield %2 : f32
      }
    %sum = tensor.extract %reduced[] : tensor<f32>
    %c0 = arith.constant 0 : index
    memref.store %sum, %arg3[%c0] : memref<?xf32>""",
    "memref<?xf32>", "memref<?xf32>",
)  # fmt: skip
FILLED = UNFILLED.replace(
    "    %1 = tensor.empty() : tensor<f32>\n",
    "    %zero = arith.constant 0.000000e+00 : f32\n    %e = tensor.empty() : tensor<f32>\n"
    "    %1 = linalg.fill ins(%zero : f32) outs(%e : tensor<f32>) -> tensor<f32>\n",
)

# x as bf16: rounding to it and back.
ROUND = kernel(
    """\
    %from = memref.reinterpret_cast %arg2 to offset: [0], sizes: [8], strides: [1] : memref<?xf32> to memref<8xf32, strided<[1]>>
    %to = memref.reinterpret_cast %arg3 to offset: [0], sizes: [8], strides: [1] : memref<?xbf16> to memref<8xbf16, strided<[1]>>
    %alloc = memref.alloc() : memref<8xf32>
    memref.copy %from, %alloc : memref<8xf32, strided<[1]>> to memref<8xf32>
    %0 = bufferization.to_tensor %alloc restrict writable : memref<8xf32>
    %1 = arith.truncf %0 : tensor<8xf32> to tensor<8xbf16>
    bufferization.materialize_in_destination %1 in writable %to : (tensor<8xbf16>, memref<8xbf16, strided<[1]>>) -> ()""",
    "memref<?xf32>", "memref<?xbf16>",
)  # fmt: skip

FOREVER = """\
    scf.while : () -> () {
      %true = arith.constant true
      scf.condition(%true)
    } do {
      %c0 = arith.constant 0 : index
      %v = memref.load %arg0[%c0] : memref<?xi8>
      %w = arith.addi %v, %v : i8
      memref.store %w, %arg0[%c0] : memref<?xi8>
      scf.yield
    }"""
FAR_AWAY = """\
    %far = arith.constant 1000000000000 : index
    %v = arith.constant 0 : i8
    memref.store %v, %arg0[%far] : memref<?xi8>"""


def gather(copied: str, width: int, nested: bool = False, mask: str = "") -> str:
    """A load of a (16, width) tile that became a loop of `copied` sizes a step; with `mask`, a select behind it."""
    inner = "      scf.for %arg9 = %c0 to %c8 step %c1 {\n" if nested else ""
    end = "      } {ExtractedLoadOrStore}\n" if nested else ""
    return kernel(
        f"""\
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c8 = arith.constant 8 : index
    %c16 = arith.constant 16 : index
    %alloc = memref.alloc() : memref<16x{width}xf16>
    scf.for %arg8 = %c0 to %c16 step %c1 {{
{inner}      %row = memref.reinterpret_cast %arg2 to offset: [%arg8], sizes: [{copied}], strides: [1, 1] : memref<?xf16> to memref<{copied.replace(", ", "x")}xf16, strided<[1, 1], offset: ?>>
      %into = memref.subview %alloc[%arg8, 0] [{copied}] [1, 1] : memref<16x{width}xf16> to memref<{copied.replace(", ", "x")}xf16, strided<[{width}, 1], offset: ?>>
      memref.copy %row, %into : memref<{copied.replace(", ", "x")}xf16, strided<[1, 1], offset: ?>> to memref<{copied.replace(", ", "x")}xf16, strided<[{width}, 1], offset: ?>>
{end}    }} {{ExtractedLoadOrStore, hivm.parallel_loop}}
    %tile = bufferization.to_tensor %alloc restrict writable : memref<16x{width}xf16>
{mask}""",
        "memref<?xf16>", "memref<?xf16>",
    )  # fmt: skip


# A load of a (16, 8) tile element by element, which a mask selects from afterwards.
ELEMENTS = kernel(
    """\
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c8 = arith.constant 8 : index
    %c16 = arith.constant 16 : index
    %0 = tensor.empty() : tensor<16x8xf16>
    %1 = scf.for %arg8 = %c0 to %c16 step %c1 iter_args(%arg9 = %0) -> (tensor<16x8xf16>) {
      %2 = scf.for %arg10 = %c0 to %c8 step %c1 iter_args(%arg11 = %arg9) -> (tensor<16x8xf16>) {
        %one = memref.reinterpret_cast %arg2 to offset: [%arg10], sizes: [1], strides: [1] : memref<?xf16> to memref<1xf16, strided<[1], offset: ?>>
        %3 = memref.load %one[%c0] : memref<1xf16, strided<[1], offset: ?>>
        %inserted = tensor.insert %3 into %arg11[%arg8, %arg10] : tensor<16x8xf16>
        scf.yield {DiscreteMemAccess} %inserted : tensor<16x8xf16>
      } {ExtractedLoadOrStore}
      scf.yield {DiscreteMemAccess} %2 : tensor<16x8xf16>
    } {ExtractedLoadOrStore}
    %mask = tensor.empty() : tensor<16x8xi1>
    %zero = tensor.empty() : tensor<16x8xf16>
    %4 = arith.select %mask, %1, %zero : tensor<16x8xi1>, tensor<16x8xf16>""",
    "memref<?xf16>",
)  # fmt: skip

LOAD = """\
    %from = memref.reinterpret_cast {argument} to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
    %alloc = memref.alloc() : memref<64xf32>
{copy}
    %old = bufferization.to_tensor %alloc restrict writable : memref<64xf32>
"""
WHOLE = "    memref.copy %from, %alloc : memref<64xf32, strided<[1]>> to memref<64xf32>"
BOUNDED = """\
    %n = arith.index_cast %arg4 : i32 to index
    %some = memref.subview %from[0] [%n] [1] : memref<64xf32, strided<[1]>> to memref<?xf32, strided<[1]>>
    %into = memref.subview %alloc[0] [%n] [1] : memref<64xf32> to memref<?xf32, strided<[1]>>
    memref.copy %some, %into : memref<?xf32, strided<[1]>> to memref<?xf32, strided<[1]>>"""
SELECT = """\
    %mask = tensor.empty() : tensor<64xi1>
    %new = tensor.empty() : tensor<64xf32>
    %picked = arith.select %mask, {values} : tensor<64xi1>, tensor<64xf32>
    %to = memref.reinterpret_cast %arg3 to offset: [0], sizes: [64], strides: [1] : memref<?xf32> to memref<64xf32, strided<[1]>>
    bufferization.materialize_in_destination %picked in writable %to : (tensor<64xf32>, memref<64xf32, strided<[1]>>) -> ()"""


def masked(argument: str, copy: str, values: str) -> str:
    """A load of 64 elements of an argument, a select, and a store to %arg3."""
    return kernel(LOAD.format(argument=argument, copy=copy) + SELECT.format(values=values), "memref<?xf32>", "memref<?xf32>", "i32")  # fmt: skip


def tiles(count: int, loop: bool) -> str:
    """`count` tiles of 64 x 64 fp32 that are all read at the end, the first ones inside a loop where `loop` says so."""
    made = "\n".join(f"    %{i} = math.exp %seed : tensor<64x64xf32>" for i in range(count))
    sums, last = [], "%0"
    for i in range(1, count):
        sums.append(f"      %s{i} = arith.addf {last}, %{i} : tensor<64x64xf32>")
        last = f"%s{i}"
    body = "\n".join(sums)
    if loop:
        body = f"    scf.for %arg8 = %c0 to %c1 step %c1 {{\n{body}\n    }}"
    head = "    %c0 = arith.constant 0 : index\n    %c1 = arith.constant 1 : index\n    %seed = tensor.empty() : tensor<64x64xf32>\n"  # fmt: skip
    return kernel(head + made + "\n" + body, "memref<?xf32>")
