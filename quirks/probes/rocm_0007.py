"""AMD's back end of Triton 3.6 and 3.7 miscompiles a loop that carries a scalar and stores scalars.

The stored counts are garbage, and from four waves on addresses come from registers that nothing wrote, which is a fault
on a chip. Triton's test: https://github.com/triton-lang/triton/pull/11793

Expected: exact counts, starts and places in a model of the chip, with one wave and with four. `on` takes the guard off
the loop by `tl.assume(tokens > 0)`; `control` is the loop unrolled, with masks.

other_value: an asynchronous copy of a masked tile into LDS leaves masked elements unwritten, with Triton 3.6 and 3.7 on
gfx950 where TRITON_HIP_USE_ASYNC_COPY=1. Expected: exact products of tiles with `other`. `control` and `on` copy by
registers. https://github.com/triton-lang/triton/pull/11256
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


@triton.jit
def product(x, y, out, rows, turns, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    left = tl.load(x + i * N + j)
    total = tl.zeros((N, N), tl.float32)
    for turn in tl.range(0, turns, num_stages=2):
        row = turn * N + i
        total = tl.dot(left, tl.load(y + row * N + j, mask=row < rows, other=1.0), total)
    tl.store(out + i * N + j, total)


def other_value(arm: str, bench: Bench) -> None:
    n, turns, rows = 32, 2, 40
    x, y = [float(3 * i % 4) for i in range(n * n)], [float(5 * i % 3) for i in range(turns * n * n)]
    types = {"x": "*bf16", "y": "*bf16", "out": "*fp32", "rows": "i32", "turns": "i32"}
    env = {"TRITON_HIP_USE_ASYNC_COPY": "1" if arm == "off" else "0"}
    code = bench.compile(product, types, {"N": n}, options={"num_warps": 1, "num_stages": 2}, env=env)
    tensors = {"x": ("bf16", x), "y": ("bf16", y), "out": ("fp32", [BLANK] * (n * n))}
    seen = bench.execute(code, tensors | {"rows": rows, "turns": turns}, ["out"])["out"]
    read = [value if place < rows * n else 1.0 for place, value in enumerate(y)]
    column = [[sum(read[(turn * n + k) * n + j] for turn in range(turns)) for k in range(n)] for j in range(n)]
    wanted = [sum(x[i * n + k] * column[j][k] for k in range(n)) for i in range(n) for j in range(n)]
    if seen != wanted:
        raise BugFound(f"a product is {seen[0]}, and not {wanted[0]}")


if __name__ == "__main__":
    main(probe, "rocm:gfx1100", __doc__)
