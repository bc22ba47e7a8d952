"""Triton 3.2 aborts on a matrix product for Blackwell: its matrix instructions know no compute capability 10 or 12.

    AccelerateMatmul.cpp: … Assertion `false && "computeCapability not supported"' failed.

Expected: mma.sync or tcgen05 code, as from 3.3.1 on. `control` compiles for sm_90; `on` takes another path.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def product(a, b, out, N: tl.constexpr):
    rows = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + rows, tl.dot(tl.load(a + rows), tl.load(b + rows)))


def probe(arm: str, bench: Bench) -> None:
    if arm == "on":
        return  # the work-around is another path: no kernel is compiled
    where = bench.at("cuda:sm_90") if arm == "control" else bench
    where.compile(product, {"a": "*bf16", "b": "*bf16", "out": "*fp32"}, {"N": 64})


if __name__ == "__main__":
    main(probe, "cuda:sm_100", __doc__)
