"""Triton 3.3 refuses `a, b = None, None` in a branch or a loop of a jit function.

    AttributeError("'NoneType' object has no attribute 'type'")

Expected: it compiles like two assignments, as by 3.2 and 3.4.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def at_once(out, count, N: tl.constexpr):
    for start in range(0, count, N):
        bias, mask = None, None
        value = tl.arange(0, N) + start
        if bias is not None:
            value += bias
        if mask is not None:
            value *= mask
        tl.store(out + start + tl.arange(0, N), value)


@triton.jit
def one_by_one(out, count, N: tl.constexpr):
    for start in range(0, count, N):
        bias = None
        mask = None
        value = tl.arange(0, N) + start
        if bias is not None:
            value += bias
        if mask is not None:
            value *= mask
        tl.store(out + start + tl.arange(0, N), value)


def probe(arm: str, bench: Bench) -> None:
    kernel = at_once if arm == "off" else one_by_one
    bench.compile(kernel, {"out": "*i32", "count": "i32"}, {"N": 64})


if __name__ == "__main__":
    main(probe, "cuda:sm_90", __doc__)
