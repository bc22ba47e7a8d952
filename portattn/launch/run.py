"""Runs the core kernels, on a device or under Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from portattn.errors import PortattnError
from portattn.kernels.score_program import with_functions
from portattn.launch import cudadriver
from portattn.launch.kernelcall import KernelCall
from portattn.planning.backend import Variant
from portattn.planning.data_files import backend_options
from portattn.schema.call import TENSORS, Call
from portattn.schema.lowering import FUSED
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.worker.client import compile_environment

_turn = threading.RLock()
_in_one_order = False  # whether interpreted products are sums in ascending order; read and written under the lock


def interpreter_lock() -> threading.RLock:
    """Return the lock of interpreted launches, which patch `triton.language` and share one builder."""
    return _turn


def mend_bf16() -> None:
    """Patch bfloat16 in Triton's interpreter: `tl.dot`, arithmetic, and casts from and to float32.

    Triton 3.2 to 3.9 holds bfloat16 as uint16 there and computes with the bit patterns as integers, without an error:
    quirk cpu-0002 (InterpreterBuilder.create_dot, binary_op). Widening to float32 first is exact. Its casts (cast_impl)
    truncate where GPUs round to nearest even, and widen subnormals wrongly."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "_portattn_originals"):
        return
    dot, cast, binary, unary = builder.create_dot, builder.cast_impl, builder.binary_op, builder.unary_op
    fused = builder.create_fma

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
        # A NaN stays NaN, even if its only mantissa bits are cut off.
        rounded = np.where(is_nan, (bits >> 16) | 0x40, upper).astype(np.uint16)
        return interpreter.TensorHandle(rounded.reshape(np.shape(source.data)), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = widened(a), widened(b)
        if not _in_one_order or left.data.dtype.kind != "f" or right.data.dtype.kind != "f":
            return dot(self, left, right, d, *rest)
        # NumPy's BLAS adds in an order that depends on a row's place in the tile.
        terms = left.data.astype(d.data.dtype)[..., None] * right.data.astype(d.data.dtype)[..., None, :, :]
        return interpreter.TensorHandle(np.add.reduce(terms, axis=-2) + d.data, d.dtype.scalar)

    def rounded(compute: Any) -> Any:
        """Return an operation that computes on bfloat16 in float32; the result of a comparison is no number."""

        def operation(self: Any, *operands: Any) -> Any:
            if operands[0].data.dtype != np.uint16 or operands[0].dtype.scalar != tl.bfloat16:
                return compute(self, *operands)
            made = compute(self, *(widened(one) if hasattr(one, "data") else one for one in operands))
            return made if made.data.dtype == bool else cast_impl(self, made, tl.bfloat16)

        return operation

    builder._portattn_originals = (dot, cast, binary, unary, fused)
    builder.cast_impl, builder.create_dot, builder.create_fma = cast_impl, create_dot, rounded(fused)
    builder.binary_op, builder.unary_op = rounded(binary), rounded(unary)


def _forked() -> None:
    global _turn
    _turn = threading.RLock()  # a thread that held it is the parent's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


# Functions of portattn/kernels/ that are launched.
KERNELS = (
    "dense_forward", "backward_keys", "backward_rows", "backward_bias", "decode_split", "sparse_split", "combine",
    "write_cache", "merge_rows", "pause", "store_parts", "warps_apart", "index_scores", "topk_rows",
    "block_forward", "backward_block_keys", "backward_block_sum", "backward_block_rows",
)  # fmt: skip
NOT_TO_INTERPRET = "Triton was imported for compiling, so its interpreter is not available in this process"
INTERPRET_HINT = "start Python with TRITON_INTERPRET=1"
Launches = tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]


def kernel_calls(plan: Plan, call: Call, cores: int) -> Launches:
    """Return a core plan's launches for this call and the outputs that they fill; nothing is launched."""
    if (call.scale < 0.0) != plan.problem.negative_scale:
        raise ValueError(f"scale is {call.scale}, but the problem has negative_scale = {plan.problem.negative_scale}")
    if plan.problem.dropout and call.dropout_seed is None:
        raise ValueError("the problem has dropout, and the call no seed")
    found: Launches = ROWS[plan.problem.op].load("launches")(plan, call, cores)
    if not backend_options().get(plan.target.partition(":")[0], FUSED).keys() >= FUSED.keys():
        for launch in found[0]:
            launch.fusible = False
    return found


def load_kernels(module: str, interpreted: bool) -> ModuleType:
    """Import a kernel module for the device or for the interpreter.

    Triton decides between the two at its own import, once a process. Raises PortattnError if it has decided for the
    other."""
    with _importing_to_interpret() if interpreted and may_interpret() else contextlib.nullcontext():
        loaded = importlib.import_module(module)
    from triton.runtime.interpreter import InterpretedFunction

    kernel = next(getattr(loaded, name) for name in KERNELS if hasattr(loaded, name))
    is_interpreted = isinstance(kernel, InterpretedFunction)
    if is_interpreted and not interpreted:
        raise PortattnError(
            "TRITON_INTERPRET=1 is set, so kernels cannot run on a device: unset it, and restart Python"
        )
    if interpreted and not is_interpreted:
        raise PortattnError(f"{NOT_TO_INTERPRET}: {INTERPRET_HINT}")
    if interpreted:
        mend_bf16()
    return loaded


def may_interpret() -> bool:
    """Return whether Triton is not imported yet, or was imported for the interpreter."""
    if "triton" not in sys.modules:
        return True
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction

    return any(isinstance(value, InterpretedFunction) for value in vars(standard).values())


@contextlib.contextmanager
def _importing_to_interpret() -> Iterator[None]:
    """Set TRITON_INTERPRET=1 while modules with kernels are imported; child processes must not inherit it."""
    with compile_environment({"TRITON_INTERPRET": "1"}):
        import triton.language  # noqa: F401 - its own jit functions decide now

        with contextlib.suppress(ImportError):  # Triton before 3.4 has none
            importlib.import_module("triton.experimental.gluon")  # the first launch would import it, and too late

        yield


class DescriptorMemory:
    """Triton's allocator of descriptor memory; launches that never overlap reuse `held`, others get fresh memory."""

    def __init__(self, device: torch.device, held: dict[int, torch.Tensor] | None = None) -> None:
        self.device, self.held = device, held

    def __call__(self, size: int, alignment: int, stream: int | None) -> torch.Tensor:
        if self.held is not None and size in self.held:
            return self.held[size]
        memory = torch.empty(size, dtype=torch.int8, device=self.device)
        if self.held is not None:
            self.held[size] = memory
        return memory


@functools.lru_cache(maxsize=64)
def fresh_memory(device: torch.device) -> DescriptorMemory:
    return DescriptorMemory(device)


_allocator_lock = threading.RLock()


@contextlib.contextmanager
def descriptor_memory(memory: DescriptorMemory) -> Iterator[None]:
    """Give Triton `memory` for descriptors that kernels build, unless the user has set an allocator."""
    import triton
    from triton.runtime import _allocation

    installed = _allocation._allocator
    ours = hasattr(installed, "get")  # a ContextVar; before Triton 3.5 all threads have one allocator
    with contextlib.nullcontext() if ours else _allocator_lock:
        current = installed.get() if ours else _allocation._allocator
        if not isinstance(current, (_allocation.NullAllocator, DescriptorMemory)):
            yield
            return
        triton.set_allocator(memory)
        try:
            yield
        finally:
            triton.set_allocator(current)


def run_core(plan: Plan, call: Call, cores: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a core plan: (out (B,Hq,Sq,Dv), LSE (B,Hq,Sq) or None). Errors of compiler and device pass through."""
    launches, out, lse = kernel_calls(plan, call, cores)
    launch_all(launches, plan, call.q)
    return out, lse


def launch_all(launches: list[KernelCall], plan: Plan, q: torch.Tensor) -> None:
    """Launch in order on q's device. The kernels are compiled already, so the compile environment plays no part."""
    if not has_rows(plan):
        return
    interpreted = plan.path == "interpreter"
    one_order = plan.problem.invariant or plan.problem.num_splits > 0
    with device_guard(q), _interpreting(one_order) if interpreted else contextlib.nullcontext():
        for launch in launches:
            kernel = getattr(load_kernels(launch.module, interpreted), launch.function)
            scratch = launch.constexprs.get("LOAD") == "descriptor" and not interpreted
            with descriptor_memory(fresh_memory(q.device)) if scratch else contextlib.nullcontext():
                constants = with_functions(launch.constexprs)
                kernel[launch.grid](**launch.arguments, **constants, **({} if interpreted else launch.options()))


@contextlib.contextmanager
def _interpreting(in_one_order: bool) -> Iterator[None]:
    global _in_one_order
    with interpreter_lock():
        before, _in_one_order = _in_one_order, in_one_order
        try:
            yield
        finally:
            _in_one_order = before


def has_rows(plan: Plan) -> bool:
    """Return whether a launch has rows. Packed rows are written even if no sequence has them."""
    batch, rows = plan.problem.query_rows
    return batch > 0 and rows > 0


@contextlib.contextmanager
def device_guard(tensor: torch.Tensor) -> Iterator[None]:
    """Make the tensor's device current, where Triton launches; raise RuntimeError without a CUDA context."""
    if tensor.device.type == "cpu":
        yield
        return
    with getattr(torch, tensor.device.type).device(tensor.device):
        if tensor.device.type == "cuda" and torch.version.hip is None:
            cudadriver.make_current()
        yield


def run_variant(
    variant: Variant, call: Call
) -> tuple[Callable[[Mapping[str, torch.Tensor | None]], None], torch.Tensor, torch.Tensor | None]:
    """Run a call by a variant: (launcher for calls like it, out, LSE)."""
    launch, tensors = variant.launcher(call), launch_tensors(call)
    with device_guard(call.q):
        launch(tensors)
    return launch, tensors["out"], tensors["lse"]


def launch_tensors(call: Call) -> dict[str, Any]:
    """Return a variant's tensors by name: the call's, and memory for out and LSE."""
    lse = call.new_lse() if call.problem.return_lse else None
    return {name: getattr(call, name) for name in TENSORS} | {"out": call.new_out(), "lse": lse}
