"""Triton 3.3 to 3.8 aborts on a flattened loop over a for loop and a while loop.

`tl.range(..., flatten=True)` fuses a persistent program's loop over tiles with the loop over keys in it. Its pass dies
if a while loop, such as one over pages, stands beside a for loop that carries a value.

Expected: a compiled kernel, flattened or not. `control` and `on` do not ask for it.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def flattened_loop(out, tiles, keys, pages):
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
    kernel = flattened_loop if arm == "off" else plain
    bench.compile(kernel, {"out": "*i32", "tiles": "i32", "keys": "i32", "pages": "i32"})


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
