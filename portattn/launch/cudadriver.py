"""Memory laid out once with everything that cuLaunchKernelEx reads; a launch then writes addresses and sizes.

Layouts follow CUDA's cuda.h (CUlaunchConfig, CUlaunchAttribute); the tests compare them with that header.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portattn.config import current
from portattn.launch.triton_compat import TENSOR_MAP, TENSOR_MAP_BYTES, Parameter

KIND = "cuda"  # Triton's and portattn's name of this backend
Refused = tuple[int, int]  # the driver's error, and the place of the kernel that it refused
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has made no device current yet
_POINTER = 8
_ALIGNMENT = 128
# gridDim, blockDim, sharedMemBytes; padding; hStream, attrs; numAttrs and padding
_CONFIG = struct.Struct("7I4xQQI4x")
_STREAM_OFFSET = 32
_AXIS = 4  # bytes of each of gridDim's numbers
# id and padding; a union of 64 bytes, of which the attributes used here read one int
_ATTRIBUTE = struct.Struct("I4xI60x")
_COOPERATIVE, _SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, …_PROGRAMMATIC_STREAM_SERIALIZATION
_FORMATS = {
    "i1": "b", "i8": "b", "u1": "B", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp64": "d",
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # Triton's utilities have it loaded already


@functools.lru_cache(maxsize=1)
def launch_function() -> Callable[..., int]:
    """Return cuLaunchKernelEx(config, function, parameters, None), which returns an error or 0 and releases the GIL."""
    return _library().cuLaunchKernelEx


@functools.lru_cache(maxsize=1)
def encode_function() -> int:
    found = ctypes.cast(_library().cuTensorMapEncodeTiled, ctypes.c_void_p).value
    assert found is not None
    return found


# What native.c makes and launches graphs by, in its order.
_GRAPHS = (
    "cuThreadExchangeStreamCaptureMode", "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamBeginCapture_v2",
    "cuStreamEndCapture", "cuGraphGetNodes", "cuGraphKernelNodeGetParams_v2", "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch", "cuStreamIsCapturing", "cuGraphExecDestroy", "cuGraphDestroy",
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def graph_functions() -> tuple[int, ...]:
    """Return addresses of the driver's graph functions; empty before CUDA 12. The last is 0 before CUDA 12.4."""
    try:
        library = _library()
        found = [getattr(library, name) for name in _GRAPHS]
    except (AttributeError, OSError):
        return ()
    found.append(getattr(library, "cuStreamGetGreenCtx", None))
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0 for function in found)


def launch_again(
    refused: Refused, block: Block, stream: int, addresses: Sequence[int], sizes: Sequence[int] = ()
) -> None:
    """Repeat a refused launch if this thread had no CUDA context yet, else raise RuntimeError."""
    error, kernel = refused
    if error == INVALID_CONTEXT:
        error = _take_device()
        if not error:
            again = block.launch(stream, addresses, sizes, kernel)
            error = again[0] if again else 0
    if error:
        refuse(error)


def make_current() -> None:
    """Make the device's context current in this thread if it has none; raise RuntimeError if the driver refuses.

    Triton checks at every launch, but not before it encodes tensor maps, which a backward thread may do first."""
    context = ctypes.c_void_p()
    error = _library().cuCtxGetCurrent(ctypes.byref(context))
    if not error and not context.value:
        error = _take_device()
    if error:
        raise RuntimeError(f"CUDA's driver gave a thread no context: {error_text(error)}")


def _take_device() -> int:
    import torch

    context = ctypes.c_void_p()
    error = _library().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    return error or _library().cuCtxSetCurrent(context)


def refuse(error: int) -> None:
    raise RuntimeError(f"CUDA's driver refused a launch: {error_text(error)}")


def error_text(error: int) -> str:
    text = ctypes.c_char_p()
    _library().cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


@dataclass(slots=True, frozen=True)
class Kernel:
    function: int
    grid: tuple[Any, Any, Any]  # programs per axis; ("size", i): a launch's i-th size
    threads: int
    shared: int  # bytes of shared memory
    dependent: bool  # may start before the previous kernel has ended (programmatic dependent launch)
    cooperative: bool
    parameters: tuple[Parameter, ...]  # in the kernel's order
    values: tuple[Any, ...]  # numbers, ("role" | "map" | "size", i) or None, a null pointer


@dataclass(slots=True, frozen=True)
class Map:
    role: int  # place of the tensor's address
    sizes: tuple[int, ...]  # places of its sizes and strides among a launch's sizes
    of_key: Mapping[tuple[int, ...], bytes]  # returns the map for (address, sizes and strides)
    encoding: tuple[Any, ...] | None = None  # native.c's arguments for it; None if only `of_key` can make it


class Block:
    """Parameters and configurations of consecutive kernels, for one thread at a time."""

    __slots__ = (
        "_configs", "_launches", "_maps", "_memory", "_seen", "_sizes", "_start", "_stream", "_write", "_writes",
        "launch", "maps",
    )  # fmt: skip

    def __init__(self, kernels: Sequence[Kernel], roles: int, maps: Sequence[Map], native: Any = None) -> None:
        """Lay the kernels out; native.c's module launches them if given. Raise ValueError on too many kernels."""
        self.maps = maps
        size = _size(kernels, roles, len(maps))
        owner = ctypes.create_string_buffer(size + _ALIGNMENT)
        self._memory = memoryview(owner).cast("B")  # keeps it
        base = ctypes.addressof(owner)
        self._start = offset = -base % _ALIGNMENT

        def take(count: int, alignment: int) -> int:
            nonlocal offset
            place = offset + -(base + offset) % alignment
            offset = place + count
            return place

        roles_at = take(roles * _POINTER, _POINTER)
        assert roles_at == self._start
        self._maps = [take(TENSOR_MAP_BYTES, _ALIGNMENT) for _ in maps]
        self._seen: list[tuple[int, ...] | None] = [None] * len(maps)
        # (place, bytes, which size) of everything that a launch's sizes are written to
        self._writes: list[tuple[int, int, int]] = []
        self._sizes: Sequence[int] | None = None
        self._write = struct.Struct(f"{roles}Q").pack_into
        self._stream = 0
        self._configs: list[int] = []
        self._launches: list[tuple[Any, ...]] = []
        found: list[tuple[int, int, int, int]] = []
        for kernel in kernels:
            pointers = []
            for parameter, value in zip(kernel.parameters, kernel.values, strict=True):
                if isinstance(value, tuple) and value[0] != "size":
                    kind, index = value
                    place = self._maps[index] if kind == "map" else roles_at + index * _POINTER
                else:
                    size = parameter.size
                    place = take(size, size)
                    if isinstance(value, tuple):
                        self._writes.append((place, size, value[1]))
                        value = 0
                    data = _packed(parameter.type, value)
                    self._memory[place : place + len(data)] = data
                pointers.append(base + place)
            parameters_at = take(len(pointers) * _POINTER, _POINTER)
            struct.pack_into(f"{len(pointers)}Q", self._memory, parameters_at, *pointers)
            wanted = [(_SERIALIZATION, kernel.dependent), (_COOPERATIVE, kernel.cooperative)]
            attributes = [identity for identity, given in wanted if given]
            attributes_at = take(len(wanted) * _ATTRIBUTE.size, _POINTER)
            for index, identity in enumerate(attributes):
                _ATTRIBUTE.pack_into(self._memory, attributes_at + index * _ATTRIBUTE.size, identity, 1)
            config = take(_CONFIG.size, _POINTER)
            for axis, size in enumerate(kernel.grid):
                if isinstance(size, tuple):
                    self._writes.append((config + axis * _AXIS, _AXIS, size[1]))
            grid = [0 if isinstance(size, tuple) else size for size in kernel.grid]
            _CONFIG.pack_into(
                self._memory, config, *grid, kernel.threads, 1, 1, kernel.shared, 0, base + attributes_at,
                len(attributes),
            )  # fmt: skip
            self._configs.append(config)
            found.append((base + config, kernel.function, base + parameters_at, base + config + _STREAM_OFFSET))
            self._launches.append((*map(ctypes.c_void_p, found[-1][:3]), None))
        self.launch: Callable[..., Refused | None] = self._launch
        if native is not None:
            function = ctypes.cast(launch_function(), ctypes.c_void_p).value  # type: ignore[arg-type]
            native.graph_functions(graph_functions())
            described = tuple(
                (base + place, one.role, one.sizes, one.of_key, one.encoding)
                for place, one in zip(self._maps, maps, strict=True)
            )
            writes = tuple((base + place, count, size) for place, count, size in self._writes)
            self.launch = native.Launches(
                self._memory, function, base + roles_at, roles, tuple(found), described, writes,
                current().graphs != "never",
            )  # fmt: skip

    def _launch(
        self, stream: int, addresses: Sequence[int], sizes: Sequence[int] = (), first: int = 0
    ) -> Refused | None:
        self._write(self._memory, self._start, *addresses)
        if self._sizes is not sizes:
            for place, count, size in self._writes:
                self._memory[place : place + count] = (sizes[size] & ((1 << 8 * count) - 1)).to_bytes(count, "little")
            self._sizes = sizes
        if self._stream != stream:
            for config in self._configs:
                struct.pack_into("Q", self._memory, config + _STREAM_OFFSET, stream)
            self._stream = stream
        for index, one in enumerate(self.maps):
            key = (addresses[one.role], *[sizes[size] for size in one.sizes])
            if self._seen[index] != key:
                place = self._maps[index]
                self._memory[place : place + TENSOR_MAP_BYTES] = one.of_key[key]
                self._seen[index] = key
        launch = launch_function()
        for kernel in range(first, len(self._launches)):
            error = launch(*self._launches[kernel])
            if error:
                return error, kernel
        return None


def _packed(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        return struct.pack("Q", value or 0)
    if kind in ("fp32", "f32"):
        return bytes(ctypes.c_float(value))  # as C casts: too large a number becomes inf; struct raises
    return struct.pack(_FORMATS[kind], value)


def _size(kernels: Sequence[Kernel], roles: int, maps: int) -> int:
    """Return the most bytes that a block takes, every item padded to its alignment."""
    size = roles * _POINTER + (maps + 1) * _ALIGNMENT
    for kernel in kernels:
        values = sum(2 * p.size for p in kernel.parameters if p.type != TENSOR_MAP)
        size += values + (len(kernel.parameters) + 1) * _POINTER + 3 * _ATTRIBUTE.size + 2 * _CONFIG.size
    return size
