"""Triton before 3.9 reads a loop's running row sum as the value that it had before the loop.

The pass OptimizeThreadLocality moves the reduction of a loaded tile out of the loop. It asks whether the sum has other
users, but not whether the variable that the loop carries has: a read in the loop gets its first value.

Expected: turn i stores the sum of the turns before it, in a model of AMD's chips; for CUDA the probe reads the loop's
stores. `control` and `on` add the tiles first and reduce the sum of tiles.
"""

import re

import triton
import triton.language as tl
from harness import Bench, BugFound, Code, main

ROWS, COLUMNS, TURNS = 16, 64, 3


@triton.jit
def running(tiles, before, total, turns, M: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    kept = tl.zeros((M, N), tl.float32)
    row_sum = tl.zeros((M,), tl.float32)
    for i in range(0, turns):
        tile = tl.load(tiles + i * M * N + m[:, None] * N + n[None, :])
        if WHOLE:
            tl.store(before + i * M + m, tl.sum(kept, 1))
            kept += tile
        else:
            tl.store(before + i * M + m, row_sum)
            row_sum += tl.sum(tile, 1)
    if WHOLE:
        row_sum = tl.sum(kept, 1)
    tl.store(total + m, row_sum)


def stores_constant(code: Code) -> bool:
    """Return whether the loop stores a constant tensor."""
    text = code.texts["ttgir"]
    loop = text[text.index("scf.for") : text.index("scf.yield")]
    return bool(re.search(r"tt\.store %\w+, %cst", loop))


def probe(arm: str, bench: Bench) -> None:
    types = {"tiles": "*fp32", "before": "*fp32", "total": "*fp32", "turns": "i32"}
    code = bench.compile(running, types, {"M": ROWS, "N": COLUMNS, "WHOLE": arm != "off"})
    if "amdgcn" not in code.texts:
        if stores_constant(code):
            raise BugFound("the loop stores a constant, and not the sum so far")
        return
    # Row m holds m + 1 throughout, so that a sum names its row and its turn.
    tiles = [float(m + 1) for _ in range(TURNS) for m in range(ROWS) for _ in range(COLUMNS)]
    tensors = {
        "tiles": ("fp32", tiles),
        "before": ("fp32", [-1.0] * ROWS * TURNS),
        "total": ("fp32", [-1.0] * ROWS),
    }
    seen = bench.execute(code, tensors | {"turns": TURNS}, ["before", "total"])
    wanted = [float(turn * COLUMNS * (m + 1)) for turn in range(TURNS) for m in range(ROWS)]
    if seen["total"] != [float(TURNS * COLUMNS * (m + 1)) for m in range(ROWS)]:
        raise BugFound(f"the total is {seen['total'][0]}, and not {TURNS * COLUMNS}")
    if seen["before"] != wanted:
        raise BugFound(f"turn by turn the first row's sum is {seen['before'][::ROWS]}, and not {wanted[::ROWS]}")


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
