"""triton-ascend's adapter fails at a masked load of page ids whose places come from a division, `token // PAGE`.

Releases with a backends/huawei layout said `cannot div 0!`. 3.2.0 with their passes (`--passes old`) aborts in
BlockPtrAnalysis.cpp, divBlock: `lBlock.isScalar() && rBlock.isScalar()`; with its own it compiles the kernel.

Expected: linalg.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def page_ids(tokens, table, out, count, N: tl.constexpr, PAGE: tl.constexpr):
    place = tl.arange(0, N)
    token = tl.load(tokens + place, mask=place < count, other=0)
    page = tl.load(table + token // PAGE, mask=place < count, other=0)
    tl.store(out + place, page * PAGE + token % PAGE, mask=place < count)


@triton.jit
def contiguous(tokens, table, out, count, N: tl.constexpr, PAGE: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(tokens + place, mask=place < count, other=0), mask=place < count)


def probe(arm: str, bench: Bench) -> None:
    if arm == "on":
        return  # the work-around is another path: no kernel is compiled
    kernel = contiguous if arm == "control" else page_ids
    types = {"tokens": "*i32", "table": "*i32", "out": "*i32", "count": "i32"}
    bench.compile(kernel, types, {"N": 16, "PAGE": 16})


if __name__ == "__main__":
    main(probe, "ascend:ascend910b2", __doc__)
