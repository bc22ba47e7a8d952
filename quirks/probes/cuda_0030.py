"""Triton 3.3 to 3.7 makes operands too deep for a product if one of them is widened from bytes of two numbers.

Both operands have a kWidth of 8, of which an instruction's four threads make a depth of 32: sums of a product 16 deep
are wrong, as on an H100 with Triton 3.6.0.

Expected: four kWidths are at most the product's depth, by Triton's GPU dialect. `control` and `on` are 32 deep.
"""

import re

import triton
import triton.language as tl
from harness import Bench, BugFound, main

OPERANDS = re.compile(r"tt\.dot .*: tensor<\d+x(?P<depth>\d+)xbf16, [^>]*kWidth = (?P<width>\d+)")


@triton.jit
def product(q, k, out, ROWS: tl.constexpr, DEPTH: tl.constexpr, KEYS: tl.constexpr):
    m, n = tl.arange(0, ROWS), tl.arange(0, KEYS)
    d, pair = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 2)
    queries = tl.load(q + m[:, None] * DEPTH + d[None, :])
    pairs = tl.load(k + n[:, None] * (DEPTH // 2) + pair[None, :]).to(tl.int32)
    numbers = tl.interleave(pairs & 15, (pairs >> 4) & 15).to(tl.float32).to(tl.bfloat16)
    scores = tl.dot(queries, tl.trans(numbers))
    tl.store(out + m[:, None] * KEYS + n[None, :], scores)


def probe(arm: str, bench: Bench) -> None:
    types = {"q": "*bf16", "k": "*u8", "out": "*fp32"}
    code = bench.compile(product, types, {"ROWS": 16, "DEPTH": 16 if arm == "off" else 32, "KEYS": 64})
    found = [(int(one["depth"]), int(one["width"])) for one in OPERANDS.finditer(code.texts["ttgir"])]
    if not found:
        raise BugFound("no product was found in the GPU dialect")
    for depth, width in found:
        if 4 * width > depth:
            raise BugFound(f"operands of 4 x {width} for a product {depth} deep")


if __name__ == "__main__":
    main(probe, "cuda:sm_90", __doc__)
