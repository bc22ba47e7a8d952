"""triton-ascend lowers the high half of a 32-bit product (tl.umulhi) to another number; tl.philox is made of it.

Expected: tl.umulhi(a, b) is a·b >> 32. `on` computes it from four products of 16-bit halves.

counted_mask: it adds truth values in one bit, as Triton 3.2 does (any_0006.py). Expected: tl.sum(mask) is a number of
elements. `control` and `on` convert the mask first.
"""

import random

import triton
import triton.language as tl
from harness import Bench, BugFound, main

COUNT = 64
FACTOR = 0xD2511F53  # the first one of Philox4x32


@triton.jit
def by_umulhi(values, out, N: tl.constexpr):
    x = tl.load(values + tl.arange(0, N)).to(tl.uint32, bitcast=True)
    factor = tl.full([N], 0xD2511F53, tl.uint32)
    tl.store(out + tl.arange(0, N), tl.umulhi(x, factor).to(tl.int32, bitcast=True))


@triton.jit
def by_halves(values, out, N: tl.constexpr):
    x = tl.load(values + tl.arange(0, N)).to(tl.uint32, bitcast=True)
    low, high = x & 0xFFFF, x >> 16
    carried = (low * 0x1F53 >> 16) + high * 0x1F53
    middle = low * 0xD251 + (carried & 0xFFFF)
    tl.store(out + tl.arange(0, N), (high * 0xD251 + (carried >> 16) + (middle >> 16)).to(tl.int32, bitcast=True))


@triton.jit
def flip_bits(values, out, N: tl.constexpr):
    x = tl.load(values + tl.arange(0, N)).to(tl.uint32, bitcast=True)
    tl.store(out + tl.arange(0, N), (x ^ 0x5A5A5A5A).to(tl.int32, bitcast=True))


def probe(arm: str, bench: Bench) -> None:
    kernel = {"control": flip_bits, "off": by_umulhi, "on": by_halves}[arm]
    code = bench.compile(kernel, {"values": "*i32", "out": "*i32"}, {"N": COUNT})
    draw = random.Random(0)
    values = [draw.getrandbits(32) - 2**31 for _ in range(COUNT)]
    seen = bench.execute(code, {"values": ("i32", values), "out": ("i32", [7] * COUNT)}, ["out"])["out"]
    plain = [value % 2**32 for value in values]
    wanted = [value ^ 0x5A5A5A5A if arm == "control" else value * FACTOR >> 32 for value in plain]
    wrong = [(a % 2**32, b) for a, b in zip(seen, wanted, strict=True) if a % 2**32 != b]
    if wrong:
        raise BugFound(f"{len(wrong)} of {COUNT} wrong: {wrong[0][0]:#x}, and not {wrong[0][1]:#x}")


@triton.jit
def count(values, out, N: tl.constexpr, WIDE: tl.constexpr):
    chosen = tl.load(values + tl.arange(0, N)) > 0
    if WIDE:  # noqa: SIM108 - a jit function is read as it is written
        number = tl.sum(chosen.to(tl.int32), 0)
    else:
        number = tl.sum(chosen, 0).to(tl.int32)
    tl.store(out + tl.arange(0, N), tl.full([N], 0, tl.int32) + number)


def counted_mask(arm: str, bench: Bench) -> None:
    code = bench.compile(count, {"values": "*i32", "out": "*i32"}, {"N": COUNT, "WIDE": arm != "off"})
    values = [place % 3 for place in range(COUNT)]
    seen = bench.execute(code, {"values": ("i32", values), "out": ("i32", [7] * COUNT)}, ["out"])["out"]
    wanted = sum(value > 0 for value in values)
    if seen != [wanted] * COUNT:
        raise BugFound(f"counted {seen[0]}, and not {wanted}")


if __name__ == "__main__":
    main(probe, "ascend:ascend910b2", __doc__)
