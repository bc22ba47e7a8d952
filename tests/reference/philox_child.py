"""Run by test_dropout.py, under TRITON_INTERPRET=1: words of triton.language.philox.

    philox_child.py COUNTERS.pt OUT.pt

COUNTERS.pt holds a seed (1,) int64 and counter words (4, n) int32; OUT.pt then holds the words (4, n) int64."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def words(seed_ptr, counter_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    c0 = tl.load(counter_ptr + at, mask=inside, other=0)
    c1 = tl.load(counter_ptr + n + at, mask=inside, other=0)
    c2 = tl.load(counter_ptr + 2 * n + at, mask=inside, other=0)
    c3 = tl.load(counter_ptr + 3 * n + at, mask=inside, other=0)
    r0, r1, r2, r3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3)
    tl.store(out_ptr + at, r0.to(tl.int64), mask=inside)
    tl.store(out_ptr + n + at, r1.to(tl.int64), mask=inside)
    tl.store(out_ptr + 2 * n + at, r2.to(tl.int64), mask=inside)
    tl.store(out_ptr + 3 * n + at, r3.to(tl.int64), mask=inside)


seed, counters = torch.load(sys.argv[1])
count = counters.shape[1]
out = torch.full((4, count), -1, dtype=torch.int64)
words[(1,)](seed, counters.contiguous(), out, count, BLOCK=triton.next_power_of_2(count))
torch.save(out, sys.argv[2])
