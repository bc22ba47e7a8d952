"""Triton's automatic warp specialisation aborts on attention's loop for Hopper with 4 warps.

    LLVM ERROR: unsupported load type for producer commit

Expected: it compiles, as for Blackwell. `control` and `on` do not ask for warp specialisation.
Other faults of the same option: https://github.com/triton-lang/triton/issues/8260
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def attend(q, k, v, out, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SPECIALISED: tl.constexpr):
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    keys = tl.arange(0, N)
    rows = tl.load(q + m[:, None] * D + d[None, :])
    acc = tl.zeros((M, D), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for i in tl.range(0, n, N, warp_specialize=SPECIALISED):
        scores = tl.dot(rows, tl.load(k + (i + keys)[None, :] * D + d[:, None]))
        new = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        scale = tl.exp2(top - new)
        total = total * scale + tl.sum(p, 1)
        acc = tl.dot(p.to(rows.dtype), tl.load(v + (i + keys)[:, None] * D + d[None, :]), acc * scale[:, None])
        top = new
    tl.store(out + m[:, None] * D + d[None, :], (acc / total[:, None]).to(rows.dtype))


def probe(arm: str, bench: Bench) -> None:
    tensors = dict.fromkeys(("q", "k", "v", "out"), "*fp16")
    sizes = {"M": 64, "N": 64, "D": 64, "SPECIALISED": arm == "off"}
    bench.compile(attend, {**tensors, "n": "i32"}, sizes, options={"num_warps": 4, "num_stages": 2})


if __name__ == "__main__":
    main(probe, "cuda:sm_90", __doc__)
