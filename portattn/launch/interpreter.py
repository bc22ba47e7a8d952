"""Triton's interpreter, mended where it computes something else than a GPU would."""

from __future__ import annotations

from typing import Any


def mend_bf16() -> None:
    """Let `tl.dot` multiply and `-x` negate bfloat16 under the interpreter; call it once kernels are interpreted.

    Triton 3.2 to 3.9 holds bfloat16 as uint16 there and computes with the bit patterns as integers: wrong numbers, and
    no error: quirk cpu-0002 (triton/runtime/interpreter.py, InterpreterBuilder.create_dot and binary_op). Widening to
    float32 first is exact. Patches the class once a process; other dtypes go through Triton's own functions.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "_portattn_originals"):
        return
    dot, subtract = builder.create_dot, builder.create_fsub

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        # A bfloat16 is the upper half of the float32 of the same value.
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), d, *rest)

    def create_fsub(self: Any, left: Any, right: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return subtract(self, left, right)
        return self.create_fp_trunc(subtract(self, widened(left), widened(right)), tl.bfloat16)

    builder._portattn_originals = (dot, subtract)
    builder.create_dot, builder.create_fsub = create_dot, create_fsub
