"""Triton before 3.8 takes an integer for dead that an outer loop carries and an inner loop has as its bound.

    inner = 1
    for _ in range(turns):
        for _ in range(inner):
            …
        inner = inner * 4

The pass that removes layout conversions prunes arguments of loops that nothing uses, and does not count a nested loop's
bounds as a use: `inner` stays 1 for ever. https://github.com/triton-lang/triton/pull/9036

Expected: 1 + 4 + 16 turns of the inner loop in three of the outer. For AMD's chips the machine code runs in a model;
for others the multiplication is looked for in Triton's GPU dialect.

`control` has one loop; `on` writes the inner loop with `while`, whose condition is a use.
"""

import triton
import triton.language as tl
from harness import Bench, Seen, main

TURNS, WANTED = 3, 21


@triton.jit
def carried(out, turns):
    count = 0
    inner = 1
    for _i in range(turns):
        for _j in range(inner):
            count += 1
        inner = inner * 4
    tl.store(out, count)


@triton.jit
def by_while(out, turns):
    count = 0
    inner = 1
    for _i in range(turns):
        j = 0
        while j < inner:
            count += 1
            j += 1
        inner = inner * 4
    tl.store(out, count)


@triton.jit
def single(out, turns):
    count = 0
    inner = 1
    for _i in range(turns):
        count += inner
        inner = inner * 4
    tl.store(out, count)


def probe(arm: str, bench: Bench) -> None:
    kernel = {"control": single, "off": carried, "on": by_while}[arm]
    code = bench.compile(kernel, {"out": "*i32", "turns": "i32"}, options={"num_warps": 1})
    if bench.target[0] != "hip":
        if not code.count("ttgir", "arith.muli"):
            raise Seen("the bound's multiplication is gone from the GPU dialect")
    else:
        (count,) = bench.execute(code, {"out": ("i32", [0]), "turns": TURNS}, ["out"])["out"]
        if count != WANTED:
            raise Seen(f"the inner loop turned {count} times, and not {WANTED}")


if __name__ == "__main__":
    main(probe, "rocm:gfx942", __doc__)
