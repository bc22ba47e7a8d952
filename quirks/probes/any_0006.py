"""Triton 3.2 counts a mask's true elements in one bit: it sums values of type i1, which wrap around at 2.

Expected: a sum in 32 bits. `control` and `on` convert the mask before they sum it.
"""

import re

import triton
import triton.language as tl
from harness import Bench, BugFound, main


@triton.jit
def count(tokens, out, N: tl.constexpr, WIDE: tl.constexpr):
    chosen = tl.load(tokens + tl.arange(0, N)) >= 0
    if WIDE:  # noqa: SIM108 - a jit function is read as it is written
        number = tl.sum(chosen.to(tl.int32), axis=0)
    else:
        number = tl.sum(chosen, axis=0)
    tl.store(out, number.to(tl.int32))


def probe(arm: str, bench: Bench) -> None:
    code = bench.compile(count, {"tokens": "*i32", "out": "*i32"}, {"N": 128, "WIDE": arm != "off"})
    if re.search(r"arith\.addi [^:\n]*: i1\b", code.texts["ttir"]):
        raise BugFound("the mask's elements are added in one bit")


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
