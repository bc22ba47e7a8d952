"""AMD's back end of Triton 3.8 computes too narrow a range for an integer that nested loops carry.

Its analysis walks a loop of known bounds as often as it turns, but left an outer loop while the inner one's values
still grew (`nested_loops`), and kept the smallest count of turns while bounds widened (`widening`: 1, 4 and 16). A
comparison that is "always" false in such a range is folded, and its branch is gone.
See also https://github.com/triton-lang/triton/pull/11312

Expected: a count of 21, and the branch for more than 5, in a model of the chip. A wrong count is any_0004.py's bug.
`control` counts in one loop; `on` has an outer bound that is unknown at compile time.
"""

import triton
import triton.language as tl
from harness import Bench, BugFound, main

MANY = 2  # stored by the branch
LIMIT = tl.constexpr(5)


@triton.jit
def single(out, turns, KNOWN: tl.constexpr):
    count = 0
    for _ in range(21):
        count += 1
    if count > LIMIT:
        tl.store(out, 2)
    else:
        tl.store(out, 1)
    tl.store(out + 1, count)


@triton.jit
def nested_loops(out, turns, KNOWN: tl.constexpr):
    count = 0
    for _ in range(3 if KNOWN else turns):
        for _ in range(7):
            count += 1
    if count > LIMIT:
        tl.store(out, 2)
    else:
        tl.store(out, 1)
    tl.store(out + 1, count)


@triton.jit
def widening(out, turns, KNOWN: tl.constexpr):
    count = 0
    inner = 1
    for _ in range(3 if KNOWN else turns):
        for _ in range(inner):
            count += 1
        inner = inner * 4
    if count > LIMIT:
        tl.store(out, 2)
    else:
        tl.store(out, 1)
    tl.store(out + 1, count)


def probe(arm: str, bench: Bench) -> None:
    wrong = []
    for kernel in (single,) if arm == "control" else (nested_loops, widening):
        code = bench.compile(kernel, {"out": "*i32", "turns": "i32"}, {"KNOWN": arm == "off"}, options={"num_warps": 1})
        branch, count = bench.execute(code, {"out": ("i32", [0, 0]), "turns": 3}, ["out"])["out"]
        if (branch == MANY) != (count > LIMIT.value):
            wrong.append(f"{kernel.fn.__name__}: counted {count}, and took the branch for at most {LIMIT.value}")
    if wrong:
        raise BugFound("; ".join(wrong))


if __name__ == "__main__":
    main(probe, "rocm:gfx942", __doc__)
