"""triton-ascend's adapter fails at a masked load of page ids whose places come from a division, `token // PAGE`.

Releases with a backends/huawei layout said `cannot div 0!`. 3.2.0 with their passes (`--passes old`) aborts in
BlockPtrAnalysis.cpp, divBlock: `lBlock.isScalar() && rBlock.isScalar()`; with its own it compiles the kernel.

carried_mask: 3.2.0 does not lower a mask that a loop narrows and carries. `control` and `on` make it anew in each turn.

chosen_pointer: 3.2.0 dies of a pointer that a run-time `if` selects. `control` and `on` select the loaded values.

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


@triton.jit
def narrow_mask(tokens, out, count, turns, N: tl.constexpr, CARRIED: tl.constexpr):
    place = tl.arange(0, N)
    total = tl.zeros((N,), tl.int32)
    mask = place < count
    for turn in range(0, turns):
        mask = mask & (place < count - turn) if CARRIED else place < count - turn
        total += tl.load(tokens + place, mask=mask, other=0)
    tl.store(out + place, total)


def carried_mask(arm: str, bench: Bench) -> None:
    types = {"tokens": "*i32", "out": "*i32", "count": "i32", "turns": "i32"}
    bench.compile(narrow_mask, types, {"N": 16, "CARRIED": arm == "off"})


@triton.jit
def select_pointer(tokens, table, out, count, N: tl.constexpr, POINTER: tl.constexpr):
    place = tl.arange(0, N)
    if POINTER:
        source = tokens
        if count > 3:
            source = table
        value = tl.load(source + place)
    elif count > 3:
        value = tl.load(table + place)
    else:
        value = tl.load(tokens + place)
    tl.store(out + place, value)


def chosen_pointer(arm: str, bench: Bench) -> None:
    types = {"tokens": "*i32", "table": "*i32", "out": "*i32", "count": "i32"}
    bench.compile(select_pointer, types, {"N": 16, "POINTER": arm == "off"})


if __name__ == "__main__":
    main(probe, "ascend:ascend910b2", __doc__)
