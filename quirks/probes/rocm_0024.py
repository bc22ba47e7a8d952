"""AMD's back end of Triton 3.8 computes too narrow a range for an integer that nested loops carry.

The analysis walks a loop of known bounds as often as it turns. It left an outer loop after that loop's own turns while
the inner one's values still grew (`nested`), and kept the smallest count of turns that it ever found, while bounds
widen as it goes on (`widening`: the inner loop turns 1, 4 and 16 times). A comparison that is "always" false in such a
range is folded, and the branch behind it is gone.
https://github.com/triton-lang/triton/pull/11313, and before it https://github.com/triton-lang/triton/pull/11312

Expected: a count of 21, and the branch for more than 5. The machine code runs in a model of the chip. Where the count
itself is wrong, before 3.8, it is another bug (any_0004.py).

`control` counts in one loop; `on` has an outer bound that is not known when the kernel is compiled.
"""

import triton
import triton.language as tl
from harness import Bench, Seen, main

MANY = 2  # what the branch stores
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
def nested(out, turns, KNOWN: tl.constexpr):
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
    for kernel in (single,) if arm == "control" else (nested, widening):
        code = bench.compile(kernel, {"out": "*i32", "turns": "i32"}, {"KNOWN": arm == "off"}, options={"num_warps": 1})
        branch, count = bench.execute(code, {"out": ("i32", [0, 0]), "turns": 3}, ["out"])["out"]
        if (branch == MANY) != (count > LIMIT.value):
            wrong.append(f"{kernel.fn.__name__}: counted {count}, and took the branch for at most {LIMIT.value}")
    if wrong:
        raise Seen("; ".join(wrong))


if __name__ == "__main__":
    main(probe, "rocm:gfx942", __doc__)
