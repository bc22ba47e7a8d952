"""Triton's internals that direct launches rely on; versions outside KNOWN launch through Triton.

Read in the sources of 3.2.0 to 3.9.0 (runtime/jit.py, compiler/compiler.py, backends/nvidia/driver.py):

- all: `kernel.run(*args, grid=…, warmup=True, **options)` returns a compiled kernel without launching it;
`compiled.run` takes integers as pointers. packed_metadata begins with (num_warps, num_ctas, shared).
- arguments: 3.2 omits tl.constexpr from `*arguments`; from 3.3 on all are given.
- parameters: one per argument that is neither tl.constexpr nor specialised away (None; 1 if specialised on). 3.2 lists
the omitted ones in `src.constants`, later versions sign them "constexpr".
- scratch: 3.3 and 3.4 append a pointer, 3.5 and later another for profiling. The PTX tells how many.
- compiled kernels: `kernel.device_caches[device][0]`; 3.2 `kernel.cache[device]`.
- launch hooks: class attributes of CompiledKernel in 3.2 and 3.3; `knobs.runtime` from 3.4 on, from 3.5 on as chains.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KNOWN = frozenset({(3, minor) for minor in range(2, 10)})
LAUNCHERS = ("cuda", "hip")
_BYTES = {
    "i1": 1, "i8": 1, "u1": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4, "f32": 4,
    "fp64": 8,
}  # fmt: skip
TENSOR_MAP = "nvTmaDesc"
TENSOR_MAP_BYTES = 128


class UnsupportedLaunch(Exception):
    """Reason why a launch cannot be direct; Triton launches it."""


@dataclass(slots=True, frozen=True)
class Parameter:
    """One parameter of a compiled kernel; an unknown type raises UnsupportedLaunch."""

    argument: str  # empty for Triton's own parameters
    type: str  # a pointer `*…`, `i32`, `fp32`, or `nvTmaDesc`
    part: str = ""  # of a descriptor: "shape" or "strides"; "" for itself and all else
    axis: int = 0

    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.type.startswith("*"):
            size = 8
        elif self.type == TENSOR_MAP:
            size = TENSOR_MAP_BYTES
        elif self.type in _BYTES:
            size = _BYTES[self.type]
        else:
            raise UnsupportedLaunch(f"argument {self.argument} is of type {self.type}")
        object.__setattr__(self, "size", size)


@functools.lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor).group())  # type: ignore[union-attr]


def compiled_kernel(kernel: Any, grid: tuple[int, ...], values: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the compiled kernel that `kernel[grid](*values, **options)` would launch, loaded on the current device."""
    if version() not in KNOWN:
        raise UnsupportedLaunch(f"Triton {version()} has not been checked")
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        raise UnsupportedLaunch("it is interpreted")
    compiled = kernel.run(*values, grid=grid, warmup=True, **options)
    if hasattr(compiled, "result"):  # compiled in the background, inside triton.AsyncCompileMode
        compiled = compiled.result()
    if compiled is None or not hasattr(compiled, "packed_metadata"):
        raise UnsupportedLaunch("a hook of Triton's kept the kernel from being compiled")
    if compiled.metadata.target.backend not in LAUNCHERS:
        raise UnsupportedLaunch(f"launchers of {compiled.metadata.target.backend} have not been checked")
    _ = compiled.run  # loads the binary: a later launch may be inside a CUDA graph's capture
    return compiled


def run_arguments(kernel: Any, values: Sequence[Any]) -> list[int]:
    """Return the places of the kernel's arguments that `compiled.run` takes, in order."""
    return [place for place in range(len(values)) if version() > (3, 2) or place not in kernel.constexprs]


def parameters(compiled: Any) -> list[Parameter]:
    """Return the parameters of the kernel's own arguments, in order. Raise UnsupportedLaunch on an unknown one."""
    source = compiled.src
    gone = source.constants if version() == (3, 2) else {}
    descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    found: list[Parameter] = []
    for argument, kind in source.signature.items():
        if not isinstance(kind, str):
            raise UnsupportedLaunch(f"argument {argument} is a tuple")
        if kind == "constexpr" or argument in gone:
            continue
        if not kind.startswith("tensordesc"):
            found.append(Parameter(argument, kind))
            continue
        if next(descriptors, None) is None:
            raise UnsupportedLaunch(f"argument {argument} is a descriptor that is not passed as a tensor map")
        axes = range(kind[kind.index("[") : kind.index("]")].count(",") + 1)
        found += [
            Parameter(argument, TENSOR_MAP),
            *(Parameter(argument, "i32", "shape", axis) for axis in axes),
            *(Parameter(argument, "i64", "strides", axis) for axis in axes),
        ]
    return found


_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([busf])(\d+)[^,\[]*?(?:\[(\d+)\])?\s*(?:,|$)")


def ptx_sizes(ptx: str) -> list[int]:
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise UnsupportedLaunch("the kernel's PTX has no entry")
    lines = [line for line in entry.group(1).splitlines() if ".param" in line]
    found = [_PARAM.search(line.split("//")[0].strip()) for line in lines]
    if not all(found):
        raise UnsupportedLaunch("a parameter in the kernel's PTX was not understood")
    return [int(match[2]) // 8 * int(match[3] or 1) for match in found if match is not None]


def all_parameters(compiled: Any) -> list[Parameter]:
    """Return a CUDA kernel's parameters, scratch pointers last; raise UnsupportedLaunch if its PTX disagrees."""
    own, sizes = parameters(compiled), ptx_sizes(compiled.asm["ptx"])
    added = len(sizes) - len(own)
    if not 0 <= added <= 2 or [p.size for p in own] + [8] * added != sizes:
        raise UnsupportedLaunch(f"the kernel has parameters of {sizes} bytes, its arguments {[p.size for p in own]}")
    return own + [Parameter("", "*i8")] * added


@dataclass(slots=True, frozen=True)
class TensorMap:
    shape: tuple[int, ...]  # in elements
    strides: tuple[int, ...]
    fill: Callable[[int, list[int], list[int]], Any]  # (address, shape, strides) -> Triton's own tensor map
    encoding: tuple[Any, ...]  # cuTensorMapEncodeTiled's other arguments


_L2_PROMOTION_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B, which Triton's driver.c takes
_NAN_FILL = 1  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA


def tensor_map(compiled: Any, place: int, descriptor: Any) -> TensorMap:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    about, utilities = compiled.metadata.tensordesc_meta[place], driver.active.utils
    if about.get("is_im2col"):
        raise UnsupportedLaunch("descriptors of im2col are not kept")
    if getattr(descriptor, "round_f32_to_tf32", False):
        raise UnsupportedLaunch("descriptors that round to tf32 are not kept")
    if about["fp4_padded"]:
        raise UnsupportedLaunch("descriptors of padded fp4 are not kept")
    make = getattr(utilities, "fill_tma_descriptor", None) or utilities.fill_tma_descriptor_tiled
    # Numbers alone: a cached call must hold no tensor, and a descriptor has one.
    swizzle, size, block = about["swizzle"], about["elem_size"], tuple(about["block_size"])
    kind, padding = TMA_DTYPE_DEVICE_TO_HOST[about["elem_type"]], int(getattr(descriptor, "padding", "zero") == "nan")
    return TensorMap(
        shape=tuple(descriptor.shape), strides=tuple(descriptor.strides),
        fill=lambda address, shape, strides: make(address, swizzle, size, kind, list(block), shape, strides, padding),
        encoding=(kind, size, swizzle, _L2_PROMOTION_128B, _NAN_FILL if padding else 0, block),
    )  # fmt: skip


def keys(kernel: Any) -> set[str]:
    """Return a JIT function's specialisations so far in this process, a text for each with its device."""
    by_device = getattr(kernel, "device_caches", None)  # from 3.3 on
    if by_device is not None:
        return {f"{device} {key}" for device, found in list(by_device.items()) for key in list(found[0])}
    by_device = getattr(kernel, "cache", None)
    if not isinstance(by_device, dict):
        return set()
    return {f"{device} {key}" for device, found in list(by_device.items()) for key in list(found)}


def _holder() -> Any:
    if version() < (3, 4):
        from triton import compiler

        return compiler.CompiledKernel
    from triton import knobs

    return knobs.runtime


def hook_watch() -> Callable[[], bool]:
    """Return a function that tells, in 0.1 µs, whether a launch hook is set."""
    runtime = _holder()
    if version() < (3, 5):
        return lambda: runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None
    chain = type(runtime.launch_enter_hook)

    def watched() -> bool:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if type(enter) is chain and type(leave) is chain:
            return bool(enter.calls or leave.calls)
        return enter is not None or leave is not None

    return watched


def three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def run(compiled: Any, grid: tuple[int, ...], stream: int, arguments: Sequence[Any]) -> None:
    """Launch a compiled kernel through Triton's launcher, with its hooks."""
    holder = _holder()
    x, y, z = three(grid)
    about = compiled.launch_metadata(grid, stream, *arguments)
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, about, holder.launch_enter_hook,
        holder.launch_exit_hook, *arguments,
    )  # fmt: skip
