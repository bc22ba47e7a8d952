"""Triton before 3.8 takes an integer for dead that an outer loop carries and an inner loop has as its bound.

The pass that removes layout conversions prunes loop arguments without a use, and does not count a nested loop's bounds
as one: `inner` stays 1.

Expected: 1 + 4 + 16 inner turns in three outer ones, by a model of AMD's chips; for others the multiplication in
Triton's GPU dialect. `control` has one loop; `on` writes the inner loop with `while`, whose condition is a use.
"""

import triton
import triton.language as tl
from harness import Bench, BugFound, main

TURNS, WANTED = 3, 21


@triton.jit
def loop_carried_bound(out, turns):
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
    kernel = {"control": single, "off": loop_carried_bound, "on": by_while}[arm]
    code = bench.compile(kernel, {"out": "*i32", "turns": "i32"}, options={"num_warps": 1})
    if bench.target[0] != "hip":
        if not code.count("ttgir", "arith.muli"):
            raise BugFound("the bound's multiplication is gone from the GPU dialect")
    else:
        (count,) = bench.execute(code, {"out": ("i32", [0]), "turns": TURNS}, ["out"])["out"]
        if count != WANTED:
            raise BugFound(f"the inner loop turned {count} times, and not {WANTED}")


if __name__ == "__main__":
    main(probe, "rocm:gfx942", __doc__)
