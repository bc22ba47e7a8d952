"""Tensor descriptors (TMA on sm_90+, ordinary loads elsewhere).

Triton before 3.4 has none, and 3.2 resolves every name of a jit function, dead branches included: so the construct
sits in a helper of its own, and a toolchain that lacks it gets one that fails to compile with a plain reason.
"""

import triton
import triton.language as tl

if hasattr(tl, "make_tensor_descriptor"):

    @triton.jit
    def describe_rows(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
        """Descriptor of a (rows, COLS) matrix with contiguous rows. Tiles past its edge read as 0."""
        return tl.make_tensor_descriptor(
            base,
            shape=[tl.maximum(rows, 1), COLS],  # none is defined for 0 rows; no tile of such a matrix is read
            strides=[stride_row, 1],
            block_shape=[BLOCK_ROWS, BLOCK_COLS],
        )

    @triton.jit
    def describe_numbers(base, count, BLOCK: tl.constexpr):
        """Descriptor of `count` numbers in a row, from an aligned pointer on. Tiles past their end read as 0."""
        return tl.make_tensor_descriptor(base, shape=[tl.maximum(count, 1)], strides=[1], block_shape=[BLOCK])

else:

    @triton.jit
    def describe_rows(base, rows, stride_row, COLS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
        """Stands in where the toolchain has no descriptors."""
        tl.static_assert(False, "this Triton has no tensor descriptors: load must be pointer or block_ptr")
        return base

    @triton.jit
    def describe_numbers(base, count, BLOCK: tl.constexpr):
        """Stands in where the toolchain has no descriptors."""
        tl.static_assert(False, "this Triton has no tensor descriptors: load must be pointer or block_ptr")
        return base
