"""Triton's interpreter, mended where it computes something else than a GPU would, and one thread at a time."""

from __future__ import annotations

import os
import threading
from typing import Any

_turn = threading.RLock()


def interpreter_lock() -> threading.RLock:
    """Return the lock that a thread holds while it interprets a kernel.

    Triton's interpreter replaces functions of `triton.language` for the time of a launch, and keeps the program's
    place in the grid in one builder: two threads at a time end each other's launch.
    """
    return _turn


def mend_bf16() -> None:
    """Let `tl.dot` multiply, `-x` negate, and bfloat16 be cast from and to float32 under the interpreter; call it once
    kernels are interpreted.

    Triton 3.2 to 3.9 holds bfloat16 as uint16 there and computes with the bit patterns as integers: wrong numbers, and
    no error: quirk cpu-0002 (triton/runtime/interpreter.py, InterpreterBuilder.create_dot and binary_op). Widening to
    float32 first is exact. It cuts the lower half of a float32 off where GPUs round to the nearest, ties to even
    (InterpreterBuilder.cast_impl), and makes other numbers of those below the normal ones when it widens. `-x` is 0 - x
    up to 3.7 (create_fsub), and an operation of its own from 3.8 on (create_fneg), which negates the uint16. Patches
    the class once a process; other dtypes go through Triton's own functions.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "_portattn_originals"):
        return
    dot, subtract, cast = builder.create_dot, builder.create_fsub, builder.cast_impl
    negate: Any = getattr(builder, "create_fneg", None)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        # A bfloat16 is the upper half of the float32 of the same value.
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return widened(source)
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32)
        is_nan = np.isnan(source.data)
        upper = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A NaN stays one, whatever bits are cut off.
        rounded = np.where(is_nan, (bits >> 16) | 0x40, upper).astype(np.uint16)
        return interpreter.TensorHandle(rounded.reshape(np.shape(source.data)), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), d, *rest)

    def create_fsub(self: Any, left: Any, right: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return subtract(self, left, right)
        return self.create_fp_trunc(subtract(self, widened(left), widened(right)), tl.bfloat16)

    def create_fneg(self: Any, operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return negate(self, operand)
        return interpreter.TensorHandle(operand.data ^ np.uint16(0x8000), tl.bfloat16)  # the sign is a bit, of NaN too

    builder._portattn_originals = (dot, subtract, cast, negate)
    builder.cast_impl = cast_impl
    builder.create_dot, builder.create_fsub = create_dot, create_fsub
    if negate is not None:
        builder.create_fneg = create_fneg


def _forked() -> None:
    global _turn
    _turn = threading.RLock()  # a thread that held it is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
