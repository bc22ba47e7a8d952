"""A wait of some microseconds on one multiprocessor."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rounds"])
def pause(memory, value, rounds):
    """Compute `rounds` products, each of which needs the one before: some 8 cycles each on an H100 (12,000 in 51 µs).

    memory  any float tensor: nothing is read or written, which the compiler does not know
    value   0.0: so that it stays below 2
    """
    found = value
    for _ in range(rounds):
        found = found * 0.5 + 1.0
    tl.store(memory, found.to(memory.dtype.element_ty), mask=found > 3.0)
