"""AMD's back end of Triton 3.6 and 3.7 miscompiles a loop that carries a scalar and stores scalars.

The stored counts are garbage, and from four waves on addresses come from registers that nothing wrote, which is a fault
on a chip. Triton's test: https://github.com/triton-lang/triton/pull/11793

Expected: exact counts, starts and places in a model of the chip, with one wave and with four. `on` takes the guard off
the loop by `tl.assume(tokens > 0)`; `control` is the loop unrolled, with masks.
"""

import random

import triton
import triton.language as tl
from harness import Bench, BugFound, main

TOKENS, PLACES, PAGE, PAGES, OWNERS = 6, 64, 32, 20, 3
BLANK = -7
GUARDED, ASSUMED, UNROLLED = 0, 1, 2


@triton.jit
def token(
    chosen, alive, owner, table, counts, starts, packed, page, t, total, on,
    PLACES: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, PLACES)
    key = tl.load(chosen + t * PLACES + place, mask=on & (place < PLACES), other=-1)
    count = tl.sum((key >= 0).to(tl.int32), axis=0)
    count = tl.where(tl.load(alive + t, mask=on, other=0) != 0, count, 0)
    tl.store(counts + t, count, mask=on)
    known = on & (place < count) & (key >= 0)
    row = tl.load(owner + t, mask=on, other=0)
    number = tl.load(table + row * PAGES + key // page, mask=known, other=0)
    slot = tl.where(known, number * page + key % page, -1)
    tl.store(packed + total + place, slot, mask=on & (place < count))
    total += count
    tl.store(starts + t + 1, total, mask=on)
    return total


@triton.jit
def pack(
    chosen, alive, owner, table, counts, starts, packed, tokens, page,
    PLACES: tl.constexpr, PAGES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, PLACES)
    total = tl.zeros((), dtype=tl.int32)
    tl.store(starts, 0)
    if FORM == 2:
        for t in tl.static_range(8):
            total = token(
                chosen, alive, owner, table, counts, starts, packed, page, t, total, t < tokens, PLACES, PAGES
            )
    else:
        if FORM == 1:
            tl.assume(tokens > 0)
        for t in range(0, tokens):
            key = tl.load(chosen + t * PLACES + place)
            live = tl.load(alive + t)
            count = tl.sum((key >= 0).to(tl.int32), axis=0)
            count = tl.where(live != 0, count, 0)
            tl.store(counts + t, count)
            row = tl.load(owner + t)
            fits = place < count
            known = fits & (key >= 0)
            number = tl.load(table + row * PAGES + key // page, mask=known, other=0)
            slot = tl.where(known, number * page + key % page, -1)
            tl.store(packed + total + place, slot, mask=fits)
            total = total + count
            tl.store(starts + t + 1, total)


def inputs() -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return tensors by name, and the expected values of the outputs among them."""
    draw = random.Random(0)
    given: dict[str, list[int]] = {"chosen": [], "alive": [], "owner": [], "table": []}
    wanted: dict[str, list[int]] = {"counts": [], "starts": [0], "packed": []}
    given["table"] = [draw.randint(0, 999) for _ in range(OWNERS * PAGES)]
    for t in range(TOKENS):
        keys = [draw.randint(0, PAGE * PAGES - 1) for _ in range(draw.randint(1, PLACES))]
        given["chosen"] += keys + [-1] * (PLACES - len(keys))
        given["alive"].append(0 if t == 3 else 1)
        given["owner"].append(draw.randint(0, OWNERS - 1))
        kept = keys if given["alive"][t] else []
        first = given["owner"][t] * PAGES
        wanted["packed"] += [given["table"][first + key // PAGE] * PAGE + key % PAGE for key in kept]
        wanted["counts"].append(len(kept))
        wanted["starts"].append(len(wanted["packed"]))
    wanted["packed"] += [BLANK] * (TOKENS * PLACES - len(wanted["packed"]))
    return given, wanted


def probe(arm: str, bench: Bench) -> None:
    given, wanted = inputs()
    types = dict.fromkeys((*given, *wanted), "*i32") | {"tokens": "i32", "page": "i32"}
    constants = {"PLACES": PLACES, "PAGES": PAGES, "FORM": {"off": GUARDED, "on": ASSUMED, "control": UNROLLED}[arm]}
    divisible = [name for name in types if name != "tokens"]
    for waves in (1, 4):
        code = bench.compile(pack, types, constants, divisible, options={"num_warps": waves})
        blank = {name: ("i32", [BLANK] * len(values)) for name, values in wanted.items()}
        tensors = {name: ("i32", values) for name, values in given.items()} | blank
        seen = bench.execute(code, tensors | {"tokens": TOKENS, "page": PAGE}, list(wanted))
        wrong = [name for name, values in wanted.items() if seen[name] != values]
        if wrong:
            told = f"the counts are {seen['counts']}, and not {wanted['counts']}"
            raise BugFound(f"{waves} waves: {', '.join(wrong)} wrong; {told}")


if __name__ == "__main__":
    main(probe, "rocm:gfx1100", __doc__)
