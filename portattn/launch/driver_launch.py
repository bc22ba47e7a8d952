"""Direct launches: kernels launched repeatedly with other addresses and sizes.

Triton's own way (`kernel[grid](…)`) inspects every argument of every call: tens of microseconds for 86 arguments. A
DriverLauncher looks the compiled kernel up once; a launch writes addresses and sizes into prepared memory and calls the
driver, in one microsecond plus the driver's time::

    steps = [
        Step(kernel=forward, grid=(132, 1, 1), options={"num_warps": 4, "maxnreg": 168},
             arguments={"q_desc": q_descriptor, "k_desc": k_descriptor, "lengths": seqlens, "scale": 0.1, …},  # all
             roles={"q_desc": "q", "k_desc": "k", "lengths": "seqlens_k"}),
    ]
    launch_steps(steps)                       # the first time: Triton compiles, and launches
    direct = DriverLauncher(steps, ("q", "k", "seqlens_k"))
    direct(stream, (q.data_ptr(), k.data_ptr(), seqlens.data_ptr()))    # from then on

`roles` name the tensors whose addresses change from call to call; everything else is taken from the steps: grid,
numbers, and of a host-side TensorDescriptor its shape, strides, block and padding. Tensor maps are made once for each
address and its sizes and cached (`MAPS` of them a descriptor), so a call builds no descriptor. Where a kernel needs a
second one's partial results, they are a role as well: allocate them before the call, and give the address. `addresses`
come in the order of the names given to `DriverLauncher`; 0 stands for a tensor that is absent.

Sizes that change from call to call come from a second list of steps, the same ones made of Sizes
(schema/symbolic_int.py): what is a Size in them is taken from the `sizes` of a launch, in the order of `ProgramOutputs`
that DriverLauncher adds them to.

Scratch memory (kernels that build descriptors for themselves) is a role too: give `direct.scratch` bytes as SCRATCH.

DriverLaunchers are safe on several streams and threads and in CUDA graphs: a launch has a block of parameters for
itself while it runs, and the driver copies it. They belong to the device that was current when they were made: make it
current.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portattn.launch import cudadriver, triton_compat
from portattn.launch.triton_compat import TENSOR_MAP, TENSOR_MAP_BYTES, UnsupportedLaunch
from portattn.schema.lowering import Step
from portattn.schema.symbolic_int import ProgramOutputs, Size, most, plain_sizes

MAPS = 64  # tensor maps kept for a descriptor: 128 bytes each, made in 1 µs
WARP = 32
SCRATCH = "scratch"
_OBJECT_BYTES = 2 * TENSOR_MAP_BYTES  # of Triton's PyCUtensorMap: Python's head, filled up to 128 bytes, then the map


class DriverLauncher:
    """Launches of some steps, to be run with other addresses.

    Args:
        steps: as launched, or launchable: their tensors show types and alignments
        names: roles, in the order of a call's addresses; a role that no kernel takes is skipped
        native: returns native.c's module, or None and the reason; None to launch from Python
        sized, outputs: the same steps made of Sizes, and the ProgramOutputs that collect a launch's numbers

    Attributes:
        way: launched by "native" (native.c), "driver" (ctypes), or "compiled" (Triton's launcher of the compiled
            kernel)
        reason: why `way` is not "native"; empty if native was not asked for
        scratch: bytes of the role SCRATCH, for kernels that build descriptors; a Size if it changes from call to call

    Raises:
        UnsupportedLaunch: an unknown Triton, or a kernel that cannot be cached.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        names: Sequence[str],
        native: Callable[[], tuple[Any, str]] | None = None,
        sized: Sequence[Step] | None = None,
        outputs: ProgramOutputs | None = None,
    ) -> None:
        places = {name: index for index, name in enumerate(names)}
        self._outputs = ProgramOutputs() if outputs is None else outputs
        pairs = [pair for pair in zip(steps, sized or steps, strict=True) if 0 not in pair[1].grid]
        self._kernels = [_Kernel(step, other, places, self._outputs) for step, other in pairs]
        self.hooked = triton_compat.hook_watch()
        self.way, self.reason, self.scratch = "driver", "", 0
        self.native: Any = None
        self._maps: list[_Maps] = []
        self._pool: list[cudadriver.Block] = []
        self._names = len(names)
        try:
            self._described = [
                self._describe(kernel, other, places.get(SCRATCH))
                for kernel, (_, other) in zip(self._kernels, pairs, strict=True)
            ]
        except UnsupportedLaunch as error:
            self.way, self.reason = "compiled", str(error)
            return
        self._constants = () if outputs is not None else tuple(plain_sizes(self._outputs.values))
        if native is not None:
            self.native, self.reason = native()
        try:
            self._pool.append(self.block())
        except ValueError as error:  # more than native.c has room for
            self.native, self.reason = None, str(error)
            self._pool.append(self.block())
        self.way = "driver" if self.native is None else "native"

    def __call__(self, stream: int, addresses: Sequence[int], sizes: Sequence[int] | None = None) -> None:
        """Launch on a stream (the driver's handle). `sizes` are the numbers of `outputs`; None for the steps' own."""
        given = self._constants if sizes is None else sizes
        if self.way == "compiled" or self.hooked():
            for kernel in self._kernels:
                kernel.run(stream, addresses, given)
            return
        try:
            block = self._pool.pop()
        except IndexError:  # other threads are launching with all there are
            block = self.block()
        refused = block.launch(stream, addresses, given)
        if refused is not None:
            cudadriver.launch_again(refused, block, stream, addresses, given)
        self._pool.append(block)

    def asks_triton(self) -> bool:
        """Return whether a call goes through Triton's launcher, which asks Triton's allocator for scratch memory."""
        return self.way == "compiled" or self.hooked()

    def block(self) -> cudadriver.Block:
        found = [
            cudadriver.Map(one.role, one.places, one, one.encoding(self.native) if self.native else None)
            for one in self._maps
        ]
        return cudadriver.Block(self._described, self._names, found, self.native)

    def _describe(self, kernel: _Kernel, step: Step, scratch: int | None) -> cudadriver.Kernel:
        compiled = kernel.compiled
        if compiled.metadata.target.backend != cudadriver.KIND:
            raise UnsupportedLaunch(f"its device is {compiled.metadata.target.backend}")
        about = compiled.metadata
        warps, blocks, shared = compiled.packed_metadata[:3]
        if blocks != 1:
            raise UnsupportedLaunch("it launches clusters of programs")
        if getattr(about, "profile_scratch_size", 0):
            raise UnsupportedLaunch("it is instrumented for profiling")
        needed = getattr(about, "global_scratch_size", 0) * math.prod(step.grid)  # of Sizes a Size
        if needed and scratch is None:
            raise UnsupportedLaunch("it needs scratch memory, and no role gives it any")
        self.scratch = most(self.scratch, needed)
        added = iter([("role", scratch) if needed else None, None])
        parameters, described = triton_compat.all_parameters(compiled), 0
        values: list[Any] = []
        for parameter in parameters:
            name = parameter.argument
            role, value = kernel.roles.get(name), step.arguments.get(name)
            if parameter.type == TENSOR_MAP:
                if role is None:
                    raise UnsupportedLaunch(f"descriptor {name} has no role")
                made = triton_compat.tensor_map(compiled, described, value)
                described += 1
                values.append(("map", len(self._maps)))
                self._maps.append(_Maps(role, made, self._outputs))
            elif parameter.part:
                values.append(self._size(getattr(value, parameter.part)[parameter.axis]))
            elif not name:
                values.append(next(added))
            elif role is not None:
                values.append(("role", role))
            elif hasattr(value, "data_ptr"):
                raise UnsupportedLaunch(f"tensor {name} has no role")
            else:
                values.append(self._size(value))
        grid = triton_compat.three(step.grid)
        return cudadriver.Kernel(
            function=compiled.function, grid=(self._size(grid[0]), self._size(grid[1]), self._size(grid[2])),
            threads=warps * WARP, shared=shared,
            dependent=bool(getattr(about, "launch_pdl", False)),
            cooperative=bool(getattr(about, "launch_cooperative_grid", False)),
            parameters=tuple(parameters), values=tuple(values),
        )  # fmt: skip

    def _size(self, value: Any) -> Any:
        return ("size", self._outputs.of(value)) if isinstance(value, Size) else value


class _Kernel:
    """A step with its compiled kernel, for Triton's launcher. `sized` is the same step made of Sizes."""

    __slots__ = ("_arguments", "_changing", "_descriptors", "_grid", "_sizes", "compiled", "roles")

    def __init__(self, step: Step, sized: Step, places: Mapping[str, int], outputs: ProgramOutputs) -> None:
        values, others, names = step.values, sized.values, step.kernel.arg_names
        self._grid = outputs.all_of(triton_compat.three(sized.grid))
        self.compiled = triton_compat.compiled_kernel(step.kernel, step.grid, values, step.options)
        self.roles = {argument: places[role] for argument, role in step.roles.items() if role in places}
        taken = triton_compat.run_arguments(step.kernel, values)
        self._arguments = [values[place] for place in taken]
        self._sizes = [
            (index, outputs.of(others[place])) for index, place in enumerate(taken) if isinstance(others[place], Size)
        ]
        held = [
            (index, place, self.roles[names[place]])
            for index, place in enumerate(taken)
            if names[place] in self.roles and values[place] is not None
        ]
        self._changing = [(index, role) for index, place, role in held if not hasattr(values[place], "base")]
        self._descriptors = [
            (index, role, _moved(values[place], 0, (), ()), outputs.all_of(others[place].shape),
             outputs.all_of(others[place].strides))
            for index, place, role in held
            if hasattr(values[place], "base")
        ]  # fmt: skip
        for index, _, _ in held:
            self._arguments[index] = None  # no tensor is held

    def run(self, stream: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        if self._descriptors and self.compiled.metadata.target.backend == cudadriver.KIND:
            cudadriver.make_current()
        arguments = self._arguments.copy()
        for index, size in self._sizes:
            arguments[index] = sizes[size]
        for index, role in self._changing:
            arguments[index] = addresses[role]
        for index, role, sample, shape, strides in self._descriptors:
            arguments[index] = _moved(
                sample, addresses[role], [sizes[size] for size in shape], [sizes[size] for size in strides]
            )
        x, y, z = (sizes[size] for size in self._grid)
        triton_compat.run(self.compiled, (x, y, z), stream, arguments)


@dataclass(slots=True, frozen=True)
class _At:
    address: int

    def data_ptr(self) -> int:
        return self.address


def _moved(descriptor: Any, address: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
    found = copy.copy(descriptor)
    found.base, found.shape, found.strides = _At(address), shape, strides
    return found


class _Maps(dict[tuple[int, ...], bytes]):
    """The MAPS latest tensor maps of one descriptor, by (address, sizes and strides)."""

    def __init__(self, role: int, made: triton_compat.TensorMap, outputs: ProgramOutputs) -> None:
        super().__init__()
        self.role, self._made = role, made
        self.places = outputs.all_of((*made.shape, *made.strides))
        self._sample = tuple(plain_sizes((*made.shape, *made.strides)))

    def encoding(self, native: Any) -> tuple[Any, ...] | None:
        """Return the arguments from which native.c makes the maps; None if its result differs from Triton's."""
        how = (cudadriver.encode_function(), *self._made.encoding)
        address = 4096  # nothing is read there: any aligned one
        expected = self._bytes((address, *self._sample))  # first: it gives the thread a context if it has none
        if native.tensor_map(how, address, self._sample) != expected:
            return None
        return how

    def __missing__(self, key: tuple[int, ...]) -> bytes:
        data = self._bytes(key)
        if len(self) >= MAPS:
            oldest, *_ = list(self)  # in one step: other threads may change it meanwhile
            self.pop(oldest, None)
        self[key] = data
        return data

    def _bytes(self, key: tuple[int, ...]) -> bytes:
        axes = len(self._made.shape)
        cudadriver.make_current()
        made = self._made.fill(key[0], list(key[1 : 1 + axes]), list(key[1 + axes :]))
        if type(made).__basicsize__ != _OBJECT_BYTES:
            raise UnsupportedLaunch(f"a tensor map of Triton's takes {type(made).__basicsize__} bytes")
        return ctypes.string_at(id(made) + TENSOR_MAP_BYTES, TENSOR_MAP_BYTES)
