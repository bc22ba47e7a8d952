"""PTX of Triton's that NVIDIA's assembler refuses, or assembles wrongly.

modifier: a load with a cache modifier and an eviction policy, as for keys that are read once, becomes PTX that ptxas
refuses: … ld.global.cg.L1::evict_first …: a modifier of the cache and an eviction priority exclude each other.
Expected: a message of Triton's own. `control` and `on` have the modifier alone.

packed_add: LLVM of Triton 3.8 computes small integers in packed 16 bits, with an add.s16x2 of 1 for each of two groups
of registers. For Hopper ptxas 12.9.86 adds 0 to the second group.
Expected: no packed sum with 0. `control` and `on` take a remainder by a power of two, for which nothing is packed.
"""

import re

import triton
import triton.language as tl
from harness import Bench, BugFound, Missing, main

PACKED_SUM_WITH_0 = re.compile(r"\bVIADD\.16x2 \w+, \w+, 0x0 ;")


@triton.jit
def read_once(keys, out, N: tl.constexpr, POLICY: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.load(keys + offsets, cache_modifier=".cg", eviction_policy=POLICY))


def modifier(arm: str, bench: Bench) -> None:
    bench.compile(
        read_once, {"keys": "*fp16", "out": "*fp16"}, {"N": 1024, "POLICY": "evict_first" if arm == "off" else ""}
    )


@triton.jit
def numbers(out, M: tl.constexpr, N: tl.constexpr, MODULUS: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    place = m * N + tl.arange(0, N)[None, :]
    tl.store(out + place, tl.where(m % 2 == 1, (place * 9 + 1) % MODULUS, place), mask=place % 2 == 0)


def packed_add(arm: str, bench: Bench) -> None:
    modulus = 1000 if arm == "off" else 1024
    constants = {"M": 32, "N": 8, "MODULUS": modulus}
    code = bench.compile(numbers, {"out": "*i32"}, constants, options={"num_warps": 1}).texts.get("sass", "")
    if not code:
        raise Missing("needs nvdisasm, which reads the machine code")
    if found := PACKED_SUM_WITH_0.search(code):
        raise BugFound(f"a packed sum with 0 for one with 1: {found.group()}")


if __name__ == "__main__":
    main(modifier, "cuda:sm_80", __doc__)
