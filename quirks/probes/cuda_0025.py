"""A load with a cache modifier and an eviction policy, as for keys that are read once, becomes PTX that ptxas refuses.

    … ld.global.cg.L1::evict_first …: a modifier of the cache and an eviction priority exclude each other

Expected: a message of Triton's own. `control` and `on` have the modifier alone.
"""

import triton
import triton.language as tl
from harness import Bench, main


@triton.jit
def read_once(keys, out, N: tl.constexpr, POLICY: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.load(keys + offsets, cache_modifier=".cg", eviction_policy=POLICY))


def probe(arm: str, bench: Bench) -> None:
    bench.compile(
        read_once, {"keys": "*fp16", "out": "*fp16"}, {"N": 1024, "POLICY": "evict_first" if arm == "off" else ""}
    )


if __name__ == "__main__":
    main(probe, "cuda:sm_80", __doc__)
