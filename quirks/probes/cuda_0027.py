"""Triton 3.3 to 3.8 aborts on a flattened loop over a for loop and a while loop.

`tl.range(..., flatten=True)` asks for a persistent program's loop over tiles to be fused with the loop over keys in it.
The pass that does so dies where a while loop, such as one over pages, stands beside a for loop that carries a value.
https://github.com/triton-lang/triton/issues/11612

Expected: a compiled kernel, flattened or not. `control` and `on` do not ask for it.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def flattened(out, tiles, keys, pages):
    for tile in tl.range(0, tiles, flatten=True):
        total = 0
        for key in tl.range(0, keys):
            total += key
        page = 0
        while page < pages:
            page += 2
        tl.store(out + tile, total + page)


@triton.jit
def plain(out, tiles, keys, pages):
    for tile in tl.range(0, tiles):
        total = 0
        for key in tl.range(0, keys):
            total += key
        page = 0
        while page < pages:
            page += 2
        tl.store(out + tile, total + page)


def probe(arm: str, bench: Bench) -> None:
    kernel = flattened if arm == "off" else plain
    bench.compile(kernel, {"out": "*i32", "tiles": "i32", "keys": "i32", "pages": "i32"})


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
