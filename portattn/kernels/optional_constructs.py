"""Constructs that not every Triton has: block pointers, tensor descriptors, programmatic dependent launch.

Triton 3.2 resolves every name of a jit function, dead branches included: so each construct sits in a function of its
own. Where a toolchain lacks it, a function chosen at import fails to compile with a plain reason.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

# Block pointers: Triton 3.9 no longer has them.


@triton.jit
def load_block_rows(base, rows, stride_row, stride_col,
                    COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
                    BOUNDED: tl.constexpr):  # fmt: skip
    """Load the first BLOCK_ROWS rows of a (rows, COLS) matrix; elements outside read as 0 when BOUNDED."""
    block = tl.make_block_ptr(base, (rows, COLS), (stride_row, stride_col), (0, 0), (BLOCK_ROWS, BLOCK_COLS), (1, 0))
    if BOUNDED and COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0, 1), padding_option="zero")
    elif BOUNDED:
        tile = tl.load(block, boundary_check=(0,), padding_option="zero")
    elif COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(1,), padding_option="zero")
    else:
        tile = tl.load(block)
    return tile


@triton.jit
def load_block_columns(base, rows, stride_row, stride_col,
                       COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BOUNDED: tl.constexpr,
                       BLOCK_ORDER: tl.constexpr):  # fmt: skip
    """Load the same tile as its transpose (BLOCK_COLS, BLOCK_ROWS), in either order of its dimensions."""
    if BLOCK_ORDER == "column":
        block = tl.make_block_ptr(
            base, (COLS, rows), (stride_col, stride_row), (0, 0), (BLOCK_COLS, BLOCK_ROWS), (0, 1)
        )
    else:
        block = tl.make_block_ptr(
            base, (COLS, rows), (stride_col, stride_row), (0, 0), (BLOCK_COLS, BLOCK_ROWS), (1, 0)
        )
    if BOUNDED and COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0, 1), padding_option="zero")
    elif BOUNDED:
        tile = tl.load(block, boundary_check=(1,), padding_option="zero")
    elif COLS != BLOCK_COLS:
        tile = tl.load(block, boundary_check=(0,), padding_option="zero")
    else:
        tile = tl.load(block)
    return tile


# Tensor descriptors (TMA on sm_90 and later, ordinary loads elsewhere): Triton before 3.4 has none.

if hasattr(tl, "make_tensor_descriptor"):

    @triton.jit
    def describe_rows(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
        """Return the descriptor of a (rows, COLS) matrix with contiguous rows. Tiles past its edge read as 0."""
        return tl.make_tensor_descriptor(
            base,
            shape=[tl.maximum(rows, 1), COLS],  # none is defined for 0 rows; no tile of such a matrix is read
            strides=[stride_row, 1],
            block_shape=[BLOCK_ROWS, BLOCK_COLS],
        )

    @triton.jit
    def describe_numbers(base, count, BLOCK: tl.constexpr):
        """Return the descriptor of `count` numbers from an aligned pointer on. Tiles past their end read as 0."""
        return tl.make_tensor_descriptor(base, shape=[tl.maximum(count, 1)], strides=[1], block_shape=[BLOCK])

else:

    @triton.jit
    def describe_rows(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
        """Fail to compile: the toolchain has no descriptors."""
        tl.static_assert(False, "this Triton has no tensor descriptors: load must be pointer or block_ptr")
        return base

    @triton.jit
    def describe_numbers(base, count, BLOCK: tl.constexpr):
        """Fail to compile: the toolchain has no descriptors."""
        tl.static_assert(False, "this Triton has no tensor descriptors: load must be pointer or block_ptr")
        return base


# Programmatic dependent launch (NVIDIA, sm_90 and later): a kernel may begin while the one before still runs, waits
# for its end, and lets the next one begin. Triton before 3.4 and other vendors' compilers have no such launch.

if gdc_wait is not None:

    @triton.jit
    def wait_for_kernel_before():
        """Wait for the end of the kernel before: what it has written is visible afterwards."""
        gdc_wait()

    @triton.jit
    def let_next_kernel_begin():
        """Let the next kernel, if its launch is dependent, begin when all programs have come here. It still waits for
        this kernel's end (wait_for_kernel_before)."""
        gdc_launch_dependents()

else:

    @triton.jit
    def wait_for_kernel_before():
        """Fail to compile: the toolchain has no dependent launches."""
        tl.static_assert(False, "this Triton has no programmatic dependent launch: launch_pdl must not be set")

    @triton.jit
    def let_next_kernel_begin():
        """Fail to compile: the toolchain has no dependent launches."""
        tl.static_assert(False, "this Triton has no programmatic dependent launch: launch_pdl must not be set")
