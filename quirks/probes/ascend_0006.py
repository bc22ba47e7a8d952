"""triton-ascend reads a K tile through a transposed block pointer wrongly, silently.

A (D, S) view of (S, D) keys, with `order=(0, 1)` and a boundary check along the keys, gives zeros or wrong bounds. An
(S, D) view and `tl.trans` are exact.

Expected: keys 64 to 79 of 80 in the tile's first half, then zeros. The lowered code is executed on the CPU.
"""

import random

import triton
import triton.language as tl
from harness import Bench, BugFound, main

KEYS, FIRST, BLOCK, WIDTH = 80, 64, 32, 16


@triton.jit
def transposed_view(k, out, keys, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    view = tl.make_block_ptr(k, (WIDTH, keys), (1, WIDTH), (0, first), (WIDTH, BLOCK), (0, 1))
    tile = tl.load(view, boundary_check=(1,), padding_option="zero")
    tl.store(out + tl.arange(0, WIDTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], tile)


@triton.jit
def rows(k, out, keys, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    view = tl.make_block_ptr(k, (keys, WIDTH), (WIDTH, 1), (first, 0), (BLOCK, WIDTH), (1, 0))
    tile = tl.trans(tl.load(view, boundary_check=(0,), padding_option="zero"))
    tl.store(out + tl.arange(0, WIDTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], tile)


@triton.jit
def pointers(k, out, keys, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    key, d = first + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    tile = tl.load(k + key[:, None] * WIDTH + d[None, :], mask=key[:, None] < keys, other=0.0)
    tl.store(out + d[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], tl.trans(tile))


def probe(arm: str, bench: Bench) -> None:
    kernel = {"control": pointers, "off": transposed_view, "on": rows}[arm]
    types = {"k": "*fp32", "out": "*fp32", "keys": "i32", "first": "i32"}
    code = bench.compile(kernel, types, {"BLOCK": BLOCK, "WIDTH": WIDTH})
    draw = random.Random(0)
    k = [float(draw.randint(1, 9)) for _ in range(KEYS * WIDTH)]
    blank = [7.5] * (BLOCK * WIDTH)
    arguments = {"k": ("fp32", k), "out": ("fp32", blank), "keys": KEYS, "first": FIRST}
    seen = bench.execute(code, arguments, ["out"])["out"]
    wanted = [k[(FIRST + n) * WIDTH + d] if FIRST + n < KEYS else 0.0 for d in range(WIDTH) for n in range(BLOCK)]
    wrong = [place for place, (one, two) in enumerate(zip(seen, wanted, strict=True)) if one != two]
    if wrong:
        d, n = divmod(wrong[0], BLOCK)
        raise BugFound(
            f"{len(wrong)} of {len(wanted)} wrong; k[{n}, {d}] is {seen[wrong[0]]}, and not {wanted[wrong[0]]}"
        )


if __name__ == "__main__":
    main(probe, "ascend:ascend910b2", __doc__)
