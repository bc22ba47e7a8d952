"""A shape class of the launch cache: its plan, and launches that take another call's tensors and sizes."""

from __future__ import annotations

import contextlib
import functools
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portattn.config import Settings
from portattn.kernels.score_program import with_functions
from portattn.launch import KernelCall, load_kernels, native
from portattn.launch.driver_launch import SCRATCH, DriverLauncher
from portattn.launch.native import dtype_codes
from portattn.launch.run import DescriptorMemory, descriptor_memory, fresh_memory
from portattn.launch.torch_compat import contiguous, runtime
from portattn.launch.triton_compat import UnsupportedLaunch
from portattn.schema.call import TENSORS
from portattn.schema.lowering import Buffers, Step
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import ProgramOutputs, Size, Trace, TraceProgram, pin_sizes, plain_sizes
from portattn.schema.tensors import KV_STORED, TORCH_DTYPE

_STORED = frozenset({"q", "k", "v", "k_block_scale", "v_block_scale"})  # tensors that a caller may have in float8
_MEMORY_ALIGNMENT = 256  # bytes: of each buffer in the memory that a call allocates for all of them
# Whether calls are launched directly if possible, and by native.c; existing cache entries stay as they are.
DIRECT = NATIVE = True
Launch = Callable[[Mapping[str, Any]], None]
Planner = Callable[[bytes], Plan]


class ShapeClass:
    """A call's launches made of symbolic sizes; `why` says why sizes cannot change, empty if they can."""

    __slots__ = ("buffers", "problem", "steps", "trace", "why")

    def __init__(self, trace: Trace, problem: Problem, steps: Sequence[Step], buffers: Buffers, why: str = "") -> None:
        self.trace, self.problem, self.steps, self.buffers, self.why = trace, problem, list(steps), buffers, why


def exact_shape_class(
    inputs: Sequence[int], problem: Problem, steps: Sequence[Step], buffers: Buffers, why: str
) -> ShapeClass:
    trace = Trace()
    pin_sizes([trace.input(value) for value in inputs])
    return ShapeClass(trace, problem, steps, buffers, why)


class CachedLaunch:
    """Launches for the calls of one shape class; `program` maps a call's sizes and strides to the numbers they take."""

    __slots__ = (
        "_descriptors", "_device", "_dtype", "_each", "_index", "_launch", "_lse", "_memory", "_offsets", "_out",
        "_places", "_runtime", "direct", "given", "inputs", "plan", "planner", "program", "settings", "sizes",
        "why_fixed",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, settings: Settings, given: Sequence[str], device: torch.device, launch: Launch,
        steps: Sequence[Step], sized: ShapeClass, planner: Planner, descriptors: bool = False,
        each: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """Cache a call's launches.

        Args:
            launch: launches through Triton, given tensors by name (`given`, out, lse, the buffers) and the numbers
                under SIZES
            steps: kernel steps of `launch`; their roles are names of `given`, of buffers and of `each`, "out" and "lse"
            sized: the same steps made of symbolic sizes
            planner: returns the plan of other sizes, given as int64
            descriptors: kernels build descriptors themselves, in memory that the launch must provide
            each: functions that return a tensor for one launch, by name
        """
        self.plan, self.settings, self.given, self.planner = plan, settings, tuple(given), planner
        self._device, self._index, self._runtime = device, device.index, runtime(device.type)
        self._dtype = torch.float32 if plan.problem.backward else TORCH_DTYPE[plan.problem.dtype]
        self._launch, self._descriptors, self._each = launch, descriptors, tuple((each or {}).values())
        outputs = ProgramOutputs()
        out, lse = results(sized.problem)
        self._out = outputs.all_of((*out, *contiguous(out)))
        self._lse = outputs.all_of((*lse, *contiguous(lse))) if plan.problem.return_lse else ()
        self.direct: DriverLauncher | None = None
        if steps and DIRECT:
            found = functools.partial(native.load, settings.cache_dir) if NATIVE else None
            with_lse = ["lse"] if self._lse else []
            scratch = [SCRATCH] if descriptors else []
            names = [*given, "out", *with_lse, *sized.buffers, *scratch, *(each or {})]
            with contextlib.suppress(UnsupportedLaunch):
                self.direct = DriverLauncher(steps, names, found, sized.steps, outputs)
        self._lay_out(sized.buffers, 0 if self.direct is None else self.direct.scratch, outputs)
        if isinstance(launch, Templates):
            launch.place(sized.steps, outputs)
        self.program: TraceProgram = sized.trace.program(outputs.values)
        self.inputs, self.why_fixed = tuple(sized.trace.inputs), sized.why
        self.sizes: list[int] = plain_sizes(outputs.values)
        if not self.program.check(self.inputs, self.sizes):
            raise RuntimeError(f"{plan.problem}: its sizes give other launches than were planned")

    def _lay_out(self, buffers: Buffers, scratch: int, outputs: ProgramOutputs) -> None:
        """Place all buffers and the descriptors' memory in one allocation."""
        self._places, offsets, size = {}, [], 0
        for name, (shape, dtype) in buffers.items():
            self._places[name] = (outputs.of(size), outputs.all_of(shape), dtype)
            offsets.append(size)
            size = size + -(-math.prod(shape) * dtype.itemsize // _MEMORY_ALIGNMENT) * _MEMORY_ALIGNMENT
        self._offsets = outputs.all_of((*offsets, size) if self._descriptors else offsets)
        total = size + scratch
        self._memory = (outputs.of(total),) if isinstance(total, Size) or total else ()

    def memory(self, sizes: Sequence[int]) -> torch.Tensor | None:
        """Allocate the buffers between kernels on the current device; None without buffers."""
        count = sizes[self._memory[0]] if self._memory else 0
        return self._runtime.empty((count,), (1,), torch.uint8) if count else None

    def buffers(self, memory: torch.Tensor | None, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
        found = {}
        for name, (offset, shape, dtype) in self._places.items():
            assert memory is not None
            begin, axes = sizes[offset], [sizes[place] for place in shape]
            found[name] = memory[begin : begin + math.prod(axes) * dtype.itemsize].view(dtype).view(axes)
        return found

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: list[int],
        sizes: Sequence[int],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
        descriptors: DescriptorMemory | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run with these tensors, in the order of `given`, and allocate what is None; `addresses` is extended."""
        at, index = self._runtime, self._index
        if index != at.current():
            with getattr(torch, self._device.type).device(index):
                return self(tensors, addresses, sizes, out, lse, memory, descriptors)
        if out is None:
            out = at.empty(*self._shaped(self._out, sizes), self._dtype)
        if lse is None and self._lse:
            lse = at.empty(*self._shaped(self._lse, sizes), torch.float32)
        if memory is None:
            memory = self.memory(sizes)
        direct = self.direct
        if direct is None:
            self._by_name(tensors, sizes, out, lse, memory, descriptors)
            return out, lse
        addresses.append(out.data_ptr())
        if lse is not None and self._lse:
            addresses.append(lse.data_ptr())
        if self._offsets:
            base = 0 if memory is None else memory.data_ptr()
            for offset in self._offsets:
                addresses.append(base + sizes[offset])
        if self._each:
            own = [give() for give in self._each]
            addresses += [tensor.data_ptr() for tensor in own]
        if self._descriptors and direct.asks_triton():
            with descriptor_memory(descriptors or fresh_memory(self._device)):
                direct(at.stream(index), addresses, sizes)
        else:
            direct(at.stream(index), addresses, sizes)
        return out, lse

    @staticmethod
    def _shaped(places: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rank = len(places) // 2
        return tuple(sizes[place] for place in places[:rank]), tuple(sizes[place] for place in places[rank:])

    def native(self) -> Any:
        direct = self.direct
        if direct is None or direct.native is None:
            return None
        module = direct.native
        try:
            return module.Sized(
                inputs=self.inputs, constants=self.program.constants, code=self.program.encoded(module.OPERATIONS),
                registers=self.program.outputs, out=self._out, lse=self._lse, memory=self._memory,
                offsets=self._offsets, codes=dtype_codes(self._dtype, torch.float32), dtype=self._dtype,
                lse_dtype=torch.float32, memory_dtype=torch.uint8,
                each=self._each, launches=direct.block().launch, plan=self.plan, planner=self.planner,
            )  # fmt: skip
        except (TypeError, ValueError, OverflowError):  # more than it has room for
            return None

    def note(self, inputs: Sequence[int]) -> Any:
        """Return the plan of a call with these sizes, or (planner, sizes) from which it can be made."""
        return self.plan if tuple(inputs) == self.inputs else (self.planner, array("q", inputs).tobytes())

    def _by_name(
        self,
        tensors: Sequence[torch.Tensor],
        sizes: Sequence[int],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        memory: torch.Tensor | None,
        descriptors: DescriptorMemory | None,
    ) -> None:
        named: dict[str, Any] = {**dict(zip(self.given, tensors, strict=True)), "out": out, "lse": lse}
        named |= {**self.buffers(memory, sizes), SIZES: sizes}
        if not self._descriptors:
            self._launch(named)
            return
        with descriptor_memory(descriptors or fresh_memory(self._device)):
            self._launch(named)


SIZES = "sizes"


def core_steps(
    launches: Sequence[KernelCall], out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[list[Step], Buffers]:
    """Return a core plan's launches as Steps, and the buffers between them.

    An argument's role is an input's own name, an output or a buffer. The caller's tensors replace validation's views: a
    kernel gets their address."""
    names, buffers, steps = {id(out): "out", id(lse): "lse"}, {}, []
    for launch in launches:
        kernel = getattr(load_kernels(launch.module, interpreted=False), launch.function)
        arguments, roles = {**launch.arguments, **with_functions(pin_sizes(launch.constexprs))}, {}
        for argument, value in launch.arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            role = names.get(id(value), "")
            if argument in TENSORS and not role.startswith("buffer"):
                role = argument
            elif not role:
                role = names[id(value)] = f"buffer {len(names)}"
            roles[argument] = role
            if role.startswith("buffer"):
                buffers[role] = (tuple(value.shape), value.dtype)
        steps.append(Step(kernel, launch.grid, arguments, launch.options(), roles))
    return steps, buffers


class Templates:
    """Core launches through Triton: arguments in order, with places for tensors and sizes."""

    __slots__ = ("_launches",)

    def __init__(self, steps: Sequence[Step]) -> None:
        # [kernel, arguments, places of tensors, options, places of the grid's sizes, places of sizes, places of bytes]
        self._launches: list[list[Any]] = []
        for step in steps:
            names, template = step.kernel.arg_names, step.values
            places = [(index, step.roles[name]) for index, name in enumerate(names) if name in step.roles]
            # Of float8 tensors kernels take the bytes, under the same address.
            stored = tuple(i for i, role in places if role in _STORED and template[i].dtype is KV_STORED)
            for index, _ in places:
                template[index] = None  # no tensor is held
            self._launches.append([step.kernel, template, places, step.options, (), (), stored])

    def place(self, sized: Sequence[Step], outputs: ProgramOutputs) -> None:
        for launch, step in zip(self._launches, sized, strict=True):
            launch[4] = outputs.all_of(step.grid)
            launch[5] = tuple((i, outputs.of(v)) for i, v in enumerate(step.values) if isinstance(v, Size))

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        sizes = tensors[SIZES]
        for kernel, template, places, options, grid, sized, stored in self._launches:
            programs = tuple(sizes[size] for size in grid)
            if 0 in programs:
                continue
            arguments = template.copy()
            for index, size in sized:
                arguments[index] = sizes[size]
            for index, name in places:
                arguments[index] = tensors[name]
            for index in stored:
                arguments[index] = arguments[index].view(KV_STORED)
            kernel[programs](*arguments, **options)


def results(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of out (in the caller's layout) and LSE. For gradients, out is delta (Call.new_out)."""
    p = problem
    if p.writes:
        return (0,), ()
    if p.backward:
        return ((p.batch, p.heads_q, p.seq_q) if p.total_q is None else (p.heads_q, p.total_q)), ()
    if p.total_q is not None:
        return (p.total_q, p.heads_q, p.head_dim_v), (p.heads_q, p.total_q)
    lse = (p.batch, p.heads_q, p.seq_q)
    return (*lse, p.head_dim_v) if p.layout == "bhsd" else (p.batch, p.seq_q, p.heads_q, p.head_dim_v), lse
