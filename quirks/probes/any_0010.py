"""Triton 3.3 to 3.8 aborts on a gather from a table of fewer rows than are looked up.

The pass OptimizeThreadLocality takes a layout in which a warp finds all in its registers from the table's shape alone,
and asserts that it does. Mended by https://github.com/triton-lang/triton/pull/10838

Expected: a compiled kernel. `control` and `on` look the rows up in memory.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def in_registers(table, places, out, ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    n, d = tl.arange(0, N)[:, None], tl.arange(0, D)[None, :]
    held = tl.load(table + tl.arange(0, ROWS)[:, None] * D + d)
    tl.store(out + n * D + d, tl.gather(held, tl.load(places + n * D + d), 0))


@triton.jit
def in_memory(table, places, out, ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    n, d = tl.arange(0, N)[:, None], tl.arange(0, D)[None, :]
    tl.store(out + n * D + d, tl.load(table + tl.load(places + n * D + d) * D + d))


def probe(arm: str, bench: Bench) -> None:
    kernel = in_registers if arm == "off" else in_memory
    types = {"table": "*i32", "places": "*i32", "out": "*i32"}
    bench.compile(kernel, types, {"ROWS": 4, "D": 4, "N": 64})


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
