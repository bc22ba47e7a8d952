"""Triton 3.2 aborts on a batch of float32 products that are not rounded to tf32.

The lowering to multiply-adds, without tensor cores, reads past the end of its operands in three dimensions.

Expected: a compiled kernel. `control` takes one product, `on` the batch in tf32.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def single(q, k, out, H: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    m, n, d = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, D)
    scores = tl.dot(tl.load(q + m * D + d[None, :]), tl.load(k + n * D + d[:, None]), input_precision=PRECISION)
    tl.store(out + m * N + n, scores)


@triton.jit
def batch(q, k, out, H: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    h, d = tl.arange(0, H)[:, None, None], tl.arange(0, D)
    m, n = tl.arange(0, M)[None, :, None], tl.arange(0, N)[None, None, :]
    queries = tl.load(q + (h * M + m) * D + d[None, None, :])
    keys = tl.load(k + (h * N + n) * D + d[None, :, None])
    tl.store(out + (h * M + m) * N + n, tl.dot(queries, keys, input_precision=PRECISION))


def probe(arm: str, bench: Bench) -> None:
    kernel = single if arm == "control" else batch
    constants = {"H": 4, "M": 16, "N": 16, "D": 16, "PRECISION": "tf32" if arm == "on" else "ieee"}
    bench.compile(kernel, {"q": "*fp32", "k": "*fp32", "out": "*fp32"}, constants)


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
