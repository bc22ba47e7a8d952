"""One launch of a lowered kernel: a call for each program, one after another. Child process only."""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from portattn.backends.ascend.linalg import build
from portattn.backends.ascend.linalg.buffers import Stray, guarded, load_runtime
from portattn.backends.ascend.linalg.text import OWN_BUFFERS, Argument, kernel_of
from portattn.backends.ascend.linalg.tools import LinalgError, need

# Types of a pointer's elements, as the text spells them.
ELEMENT_OF = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i8", torch.int8: "i8",
}  # fmt: skip
NUMBER_OF = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
WORKSPACE = 1 << 16  # bytes for the lock and the workspace that the adapter adds; kernels without atomics use neither
# Arguments that a kernel may write, by the names that all core kernels have for them.
OUTPUTS = ("out", "lse", "delta", "grad_q", "grad_k", "grad_v", "grad_bias", "grad_slopes")


class Launched(msgspec.Struct, frozen=True):
    """What a launch did beside its results."""

    strays: tuple[Stray, ...]
    wrote_inputs: tuple[str, ...]


class Programs:
    """Kernels made executable in this process; each text once."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[ctypes.CDLL, Any]] = {}

    def launch(
        self, text: str, grid: tuple[int, ...], arguments: dict[str, Any], outputs: tuple[str, ...] = OUTPUTS
    ) -> Launched:
        """Run every program of a launch; outputs are written into their tensors.

        arguments  run-time arguments by name in the kernel's order: contiguous or strided CPU tensors, ints, floats;
                   without those that were compiled in (None, 1)

        Raises LinalgError when the text cannot be made executable, or takes other arguments.
        """
        kernel = kernel_of(text)
        if text not in self._loaded:
            self._loaded[text] = _load(text, kernel.name)
        runtime, function = self._loaded[text]
        if len(kernel.arguments) != len(arguments):
            given = f"{len(arguments)} of {', '.join(arguments)}"
            raise LinalgError(f"{kernel.name} takes {len(kernel.arguments)} arguments, not the {given}")
        own = ctypes.create_string_buffer(WORKSPACE)
        sizes = (*grid, 1, 1)[:3]
        with guarded(runtime) as buffers:
            passed: list[Any] = [*_memref(ctypes.addressof(own), WORKSPACE) * OWN_BUFFERS]
            for (name, value), kind in zip(arguments.items(), kernel.arguments, strict=True):
                _check(kernel.name, name, value, kind)
                if isinstance(value, torch.Tensor):
                    passed += _memref(buffers.add(name, value), value.numel())
                else:
                    passed.append(NUMBER_OF[kind.kind](value))
            passed += [ctypes.c_int32(size) for size in sizes]
            for place in itertools.product(*map(range, sizes)):
                runtime.scratch_reset()
                function(*passed, *(ctypes.c_int32(i) for i in place))
            wrote = tuple(name for name in buffers.changed() if name not in outputs)
            buffers.give_back(outputs)
            return Launched(tuple(buffers.strays()), wrote)


def _load(text: str, name: str) -> tuple[ctypes.CDLL, Any]:
    """The runtime's library and a kernel's function. Their files are gone by then: the code may end this process."""
    programs = need()
    with tempfile.TemporaryDirectory(prefix="portattn-linalg-") as made:
        runtime = load_runtime(lambda: build.runtime(programs, Path(made)))
        path = build.library(text, programs, Path(made))
        try:
            return runtime, getattr(ctypes.CDLL(str(path)), name)
        except (OSError, AttributeError) as error:
            raise LinalgError(f"{name}: the compiled code cannot be loaded: {error}") from None


def _memref(address: int, elements: int) -> list[Any]:
    """A one-dimensional memref's descriptor: allocated and aligned pointer, offset, size, stride."""
    pointer = ctypes.c_void_p(address)
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(elements), ctypes.c_int64(1)]


def _check(kernel: str, name: str, value: Any, kind: Argument) -> None:
    """Raise LinalgError where a value is not what the kernel takes."""
    if isinstance(value, torch.Tensor):
        given = ELEMENT_OF.get(value.dtype, str(value.dtype))
        fits = kind.pointer and kind.kind == given
    else:
        given = "f32" if isinstance(value, float) else "i32"
        fits = not kind.pointer and (kind.kind == given or (given == "i32" and kind.kind == "i64"))
    if not fits:
        wants = f"a pointer to {kind.kind}" if kind.pointer else kind.kind
        raise LinalgError(f"{kernel}: {name} is {given}, and the lowered kernel takes {wants} there")
    if not kind.pointer and kind.kind not in NUMBER_OF:
        raise LinalgError(f"{kernel}: {name} has the type {kind.kind}, which no core kernel has")
