"""Triton before 3.4 takes a mask's running sum in one bit: it adds values of type i1, which wrap around at 2.

All places of `tl.cumsum(chosen, 0) - 1` are 0 or -1: packed keys overwrite each other.
https://github.com/triton-lang/triton/issues/5897

Expected: a sum in 32 bits. `control` and `on` convert the mask before they sum it.

beside_product: Triton 3.3 to 3.6 aborts on the running sum of a column that scales a product. `control` and `on` sum a
row of numbers, and make the sums a column. Expected: a compiled kernel.
"""

import re

import triton
import triton.language as tl
from harness import Bench, BugFound, main


@triton.jit
def pack(tokens, packed, N: tl.constexpr, WIDE: tl.constexpr):
    token = tl.load(tokens + tl.arange(0, N))
    chosen = token >= 0
    if WIDE:  # noqa: SIM108 - a jit function is read as it is written
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    else:
        place = tl.cumsum(chosen, axis=0) - 1
    tl.store(packed + place, token, mask=chosen)


def probe(arm: str, bench: Bench) -> None:
    code = bench.compile(pack, {"tokens": "*i32", "packed": "*i32"}, {"N": 128, "WIDE": arm != "off"})
    if re.search(r"arith\.addi [^:\n]*: i1\b", code.texts["ttir"]):
        raise BugFound("the mask's elements are added in one bit")


@triton.jit
def decay(x, weights, out, N: tl.constexpr, D: tl.constexpr, COLUMN: tl.constexpr):
    n, d = tl.arange(0, N), tl.arange(0, D)
    rows = tl.load(x + n[:, None] * D + d[None, :])
    weight = tl.load(weights + n)
    if COLUMN:  # noqa: SIM108 - a jit function is read as it is written
        sums = tl.cumsum(weight[:, None], 0)
    else:
        sums = tl.cumsum(weight, 0)[:, None]
    tl.store(out + n[:, None] * N + n[None, :], tl.dot(rows, tl.trans(rows)) * sums)


def beside_product(arm: str, bench: Bench) -> None:
    types = {"x": "*fp32", "weights": "*fp32", "out": "*fp32"}
    bench.compile(decay, types, {"N": 64, "D": 16, "COLUMN": arm == "off"})


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
