"""Triton before 3.4 refuses to add bfloat16 numbers atomically, which gradients of several programs need.

    ValueError: atomic_add does not support bf16

Expected: it compiles, like float16 and float32. `control` and `on` add float32.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def add(x, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.atomic_add(out + offsets, tl.load(x + offsets))


def probe(arm: str, bench: Bench) -> None:
    kind = "*bf16" if arm == "off" else "*fp32"
    bench.compile(add, {"x": kind, "out": kind}, {"N": 64})


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
