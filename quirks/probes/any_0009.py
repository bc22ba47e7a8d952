"""Triton before 3.9 aborts on a loop that carries the negated sum of a loaded tile's rows.

The pass OptimizeThreadLocality takes any use of the sum for an addition to the carried value, and asserts two operands.

Expected: a compiled kernel. `control` and `on` negate after the loop.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def last(tiles, out, turns, M: tl.constexpr, N: tl.constexpr, INSIDE: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    row_sum = tl.zeros((M,), tl.float32)
    for i in range(0, turns):
        tile = tl.load(tiles + i * M * N + m[:, None] * N + n[None, :])
        if INSIDE:  # noqa: SIM108 - a jit function is read as it is written
            row_sum = -tl.sum(tile, 1)
        else:
            row_sum = tl.sum(tile, 1)
    if not INSIDE:
        row_sum = -row_sum
    tl.store(out + m, row_sum)


def probe(arm: str, bench: Bench) -> None:
    bench.compile(last, {"tiles": "*fp32", "out": "*fp32", "turns": "i32"}, {"M": 16, "N": 256, "INSIDE": arm == "off"})


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
