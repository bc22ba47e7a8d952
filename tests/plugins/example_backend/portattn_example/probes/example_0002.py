"""The compiler loses an addition that it joins with the load before it.

Expected: twice the values. The code runs in the model of the chip. `on` does not ask for joined instructions; `control`
asks for them, and adds nothing."""

import triton
import triton.language as tl

from portattn.worker.probe_harness import Bench, BugFound

BLOCK = 64


@triton.jit
def copied(x, out, ADD: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    value = tl.load(x + place)
    if ADD:
        value = value + value
    tl.store(out + place, value)


def probe(arm: str, bench: Bench) -> None:
    add = arm != "control"
    code = bench.compile(
        copied, {"x": "*fp32", "out": "*fp32"}, {"ADD": add, "BLOCK": BLOCK}, options={"fuse": arm != "on"}
    )
    given = [float(place) for place in range(BLOCK)]
    out = bench.execute(code, {"x": ("fp32", given), "out": ("fp32", [-1.0] * BLOCK)}, ["out"])["out"]
    wanted = [value + value if add else value for value in given]
    if out != wanted:
        raise BugFound(f"the second value is {out[1]}, and not {wanted[1]}")
