"""Triton 3.2 spreads numbers that four scores share over a product's registers by way of shared memory.

Later releases compute a tensor with half the rows and keys in the product's layout, where a thread holds all four
scores. 3.2 has a layout of its own, and converts the conditions that follow from it.

Expected: no conversion of conditions in Triton's GPU dialect. `control` has no such tensor, `on` a number each score.
"""

import re

import triton
import triton.language as tl
from harness import Bench, BugFound, main

MOVED = re.compile(r"ttg?\.convert_layout .*: tensor<[\dx]+xi1,|triton_gpu\.convert_layout .*: tensor<[\dx]+xi1,")


@triton.jit
def drop_scores(q, k, v, out, threshold, N, HOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr):
    m, n, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    queries = tl.load(q + m[:, None] * D + d[None, :])
    acc = tl.full([ROWS, D], 0.0, tl.float32)
    for start in range(0, N, KEYS):
        keys = tl.load(k + (start + n)[:, None] * D + d[None, :])
        p = tl.dot(queries, tl.trans(keys))
        if HOW == "off":
            of_rows = tl.reshape(tl.arange(0, ROWS // 2), [ROWS // 16, 1, 8, 1, 1, 1])
            of_keys = tl.reshape(start // 2 + tl.arange(0, KEYS // 2), [1, 1, 1, KEYS // 16, 1, 8])
            second = tl.arange(0, 2) != 0
            numbers = of_rows * 40503 ^ of_keys * 52711
            numbers = tl.where(tl.reshape(second, [1, 2, 1, 1, 1, 1]), numbers >> 16, numbers)
            numbers = tl.where(tl.reshape(second, [1, 1, 1, 1, 2, 1]), numbers >> 8, numbers & 255)
            p = tl.where(tl.reshape(numbers >= threshold, [ROWS, KEYS]), p, 0.0)
        elif HOW == "on":
            numbers = m[:, None] * 40503 ^ (start + n)[None, :] * 52711
            p = tl.where(numbers >= threshold, p, 0.0)
        values = tl.load(v + (start + n)[:, None] * D + d[None, :])
        acc += tl.dot(p.to(values.dtype), values)
    tl.store(out + m[:, None] * D + d[None, :], acc)


def probe(arm: str, bench: Bench) -> None:
    types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*fp32", "threshold": "i32", "N": "i32"}
    code = bench.compile(drop_scores, types, {"HOW": arm, "ROWS": 64, "KEYS": 64, "D": 64})
    moved = len(MOVED.findall(code.texts["ttgir"]))
    if moved:
        raise BugFound(f"{moved} conversions of conditions between layouts")


if __name__ == "__main__":
    main(probe, "rocm:gfx942", __doc__)
