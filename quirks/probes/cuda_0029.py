"""Triton 3.2 aborts on gradients of V, by tiles of 64 rows and 64 keys with 8 warps (two warp groups), on Hopper.

The assertion is in LinearLayout.cpp, at the lowering of dV's operand: transposed probabilities, themselves a product.
See also https://github.com/pytorch/pytorch/issues/141603

Expected: a compiled kernel. `control` and `on` have 4 warps.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def values(q, k, do, dv, rows, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    keys = tl.load(k + n[None, :] * D + d[:, None])
    acc = tl.zeros([N, D], tl.float32)
    for i in range(0, rows, M):
        queries = tl.load(q + (i + m)[:, None] * D + d[None, :])
        p = tl.exp2(tl.dot(queries, keys)).to(tl.bfloat16)
        acc += tl.dot(tl.trans(p), tl.load(do + (i + m)[:, None] * D + d[None, :]))
    tl.store(dv + n[:, None] * D + d[None, :], acc)


def probe(arm: str, bench: Bench) -> None:
    types = {"q": "*bf16", "k": "*bf16", "do": "*bf16", "dv": "*fp32", "rows": "i32"}
    bench.compile(values, types, {"M": 64, "N": 64, "D": 64}, options={"num_warps": 8 if arm == "off" else 4})


if __name__ == "__main__":
    main(probe, "cuda:sm_90", __doc__)
