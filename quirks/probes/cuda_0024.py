"""Triton compiles a gather by a tensor descriptor for Hopper, and ptxas refuses it.

Its instruction, cp.async.bulk.tensor with tile::gather4, exists from Blackwell on. Triton replaces it by a loop of
loads for older chips, but not for Hopper.

Expected: the loop of loads. `control` and `on` gather by pointers.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def by_descriptor(x, tokens, out, n, N: tl.constexpr, D: tl.constexpr):
    rows = tl.make_tensor_descriptor(x, [n, D], [D, 1], [1, D]).gather(tl.load(tokens + tl.arange(0, N)), 0)
    tl.store(out + tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :], rows)


@triton.jit
def by_pointers(x, tokens, out, n, N: tl.constexpr, D: tl.constexpr):
    rows = tl.load(x + tl.load(tokens + tl.arange(0, N))[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(out + tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :], rows)


def probe(arm: str, bench: Bench) -> None:
    kernel = by_descriptor if arm == "off" else by_pointers
    types = {"x": "*fp16", "tokens": "*i32", "out": "*fp16", "n": "i32"}
    bench.compile(kernel, types, {"N": 32, "D": 64})


if __name__ == "__main__":
    main(probe, "cuda:sm_90", __doc__)
