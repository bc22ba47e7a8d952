"""Tensor descriptors that Triton cannot compile.

gather: Triton compiles a gather by a descriptor for Hopper to cp.async.bulk.tensor with tile::gather4, which is
Blackwell's, and ptxas refuses it. Older chips get a loop of loads. `control` and `on` gather by pointers.

built_in_loop: the pipeliner of Triton 3.4 to 3.8 cannot predicate the making of a descriptor, as for each page,
in a loop with a product. `control` makes it before the loop, `on` has one stage.

read_in_loop: that of Triton 3.7 cannot predicate a descriptor's load for gfx1250. `control` and `on` have one stage.

Expected: machine code.
"""

import triton
import triton.language as tl
from harness import Bench, Missing, main


@triton.jit
def by_descriptor(x, tokens, out, n, N: tl.constexpr, D: tl.constexpr):
    rows = tl.make_tensor_descriptor(x, [n, D], [D, 1], [1, D]).gather(tl.load(tokens + tl.arange(0, N)), 0)
    tl.store(out + tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :], rows)


@triton.jit
def by_pointers(x, tokens, out, n, N: tl.constexpr, D: tl.constexpr):
    rows = tl.load(x + tl.load(tokens + tl.arange(0, N))[:, None] * D + tl.arange(0, D)[None, :])
    tl.store(out + tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :], rows)


def gather(arm: str, bench: Bench) -> None:
    kernel = by_descriptor if arm == "off" else by_pointers
    types = {"x": "*fp16", "tokens": "*i32", "out": "*fp16", "n": "i32"}
    bench.compile(kernel, types, {"N": 32, "D": 64})


@triton.jit
def scores(q, k, out, n, INSIDE: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    m, d = tl.arange(0, N), tl.arange(0, D)
    queries = tl.load(q + m[:, None] * D + d[None, :])
    total = tl.zeros((N, N), tl.float32)
    keys = tl.make_tensor_descriptor(k, [n, D], [D, 1], [N, D])
    for start in range(0, n, N):
        if INSIDE:
            page = tl.make_tensor_descriptor(k + start * D, [n - start, D], [D, 1], [N, D])
            total += tl.dot(queries, tl.trans(page.load([0, 0])))
        else:
            total += tl.dot(queries, tl.trans(keys.load([start, 0])))
    tl.store(out + m[:, None] * N + m[None, :], total)


def _scores(bench: Bench, inside: bool, stages: int) -> None:
    if bench.version < ((3, 6) if bench.target[1] == "gfx1250" else (3, 4)):
        raise Missing("needs a Triton that has descriptors and knows the chip")
    types = {"q": "*bf16", "k": "*bf16", "out": "*fp32", "n": "i32"}
    bench.compile(scores, types, {"INSIDE": inside, "N": 64, "D": 64}, options={"num_stages": stages})


def built_in_loop(arm: str, bench: Bench) -> None:
    _scores(bench, arm != "control", 1 if arm == "on" else 3)


def read_in_loop(arm: str, bench: Bench) -> None:
    _scores(bench, False, 2 if arm == "off" else 1)


if __name__ == "__main__":
    main(gather, "cuda:sm_90", __doc__)
