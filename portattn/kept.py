"""One kept call: its plan, and its launches with places for another call's tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portattn.backends.base import Variant
from portattn.call import TENSORS
from portattn.config import Settings
from portattn.launch import KernelCall, cudadriver, load_kernels, native
from portattn.launch.devices import contiguous, runtime
from portattn.launch.direct import SCRATCH, Direct, Step
from portattn.launch.kernelcall import TORCH_DTYPE
from portattn.launch.run import DescriptorMemory, descriptor_memory, fresh_memory
from portattn.launch.steps import Buffers, StepLauncher
from portattn.launch.triton_runtime import Unsupported
from portattn.planned import Plan
from portattn.problem import Problem

_MEMORY_ALIGNMENT = 256  # bytes: of each buffer in the memory that a call allocates for all of them
# Whether calls are launched directly where they can be, and by native.c; what is kept already stays as it is.
DIRECT = NATIVE = True
Launch = Callable[[Mapping[str, Any]], None]


class Kept:
    """A kept call.

    plan, settings  as it ran
    given           names of the tensors that a call brings, in order
    direct          what launches it; None where Triton's own way does
    """

    __slots__ = (
        "_descriptors", "_device", "_dtype", "_each", "_index", "_launch", "_lse_shape", "_lse_strides", "_memory",
        "_offsets", "_out_shape", "_out_strides", "_places", "_runtime", "direct", "given", "plan", "settings",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, settings: Settings, given: Sequence[str], device: torch.device, launch: Launch,
        buffers: Buffers, descriptors: bool = False, steps: Sequence[Step] = (),
        each: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """Keep a call.

        launch   launches by Triton's own way, given tensors by name: those of `given` (None where absent), out, lse and
                 the buffers
        buffers  shapes and types of what passes between the kernels, by name
        descriptors  kernels build descriptors for themselves, in memory that they must be given
        steps    what `launch` launches, to be launched directly where that can be done. Their roles: names of `given`,
                 "out", "lse", those of `buffers` and those of `each`
        each     functions that give a tensor for one launch, by name
        """
        self.plan, self.settings, self.given = plan, settings, tuple(given)
        self._device, self._index, self._runtime = device, device.index, runtime(device.type)
        self._out_shape, lse_shape = results(plan.problem)
        self._lse_shape = lse_shape if plan.problem.return_lse else None
        self._out_strides, self._lse_strides = contiguous(self._out_shape), contiguous(lse_shape)
        self._dtype = TORCH_DTYPE[plan.problem.dtype]
        self._launch, self._descriptors, self._each = launch, descriptors, tuple((each or {}).values())
        self.direct: Direct | None = None
        if steps and DIRECT:
            found = functools.partial(native.load, settings.cache_dir) if NATIVE else None
            lse = ["lse"] if self._lse_shape is not None else []
            scratch = [SCRATCH] if descriptors else []
            with contextlib.suppress(Unsupported):
                self.direct = Direct(steps, [*given, "out", *lse, *buffers, *scratch, *(each or {})], found)
        self._lay_out(buffers, 0 if self.direct is None else self.direct.scratch)

    def _lay_out(self, buffers: Buffers, scratch: int) -> None:
        """One piece of memory for all buffers, and for what descriptors are built in."""
        self._places, offsets, size = {}, [], 0
        for name, (shape, dtype) in buffers.items():
            self._places[name] = (size, shape, dtype)
            offsets.append(size)
            size += -(-math.prod(shape) * dtype.itemsize // _MEMORY_ALIGNMENT) * _MEMORY_ALIGNMENT
        self._offsets = (*offsets, size) if self._descriptors else tuple(offsets)
        self._memory = size + scratch

    def memory(self) -> torch.Tensor | None:
        """Fresh memory for what passes between the kernels; None where nothing does. On the current device."""
        return self._runtime.empty((self._memory,), (1,), torch.uint8) if self._memory else None

    def buffers(self, memory: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The buffers that lie in such memory."""
        found = {}
        for name, (offset, shape, dtype) in self._places.items():
            assert memory is not None
            found[name] = memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return found

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: list[int],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
        descriptors: DescriptorMemory | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run with these tensors, in the order of `given` and in the caller's own layout: (out in it, LSE or None).

        addresses    of the tensors; the list is added to
        out, lse, memory   where results and partial results go; allocated where they are None
        descriptors  what Triton builds descriptors in, where it launches; fresh each time when None
        """
        at, index = self._runtime, self._index
        if index != at.current():
            with getattr(torch, self._device.type).device(index):
                return self(tensors, addresses, out, lse, memory, descriptors)
        if out is None:
            out = at.empty(self._out_shape, self._out_strides, self._dtype)
        if lse is None and self._lse_shape is not None:
            lse = at.empty(self._lse_shape, self._lse_strides, torch.float32)
        if memory is None and self._memory:
            memory = at.empty((self._memory,), (1,), torch.uint8)
        direct = self.direct
        if direct is None:
            self._by_name(tensors, out, lse, memory, descriptors)
            return out, lse
        addresses.append(out.data_ptr())
        if lse is not None:
            addresses.append(lse.data_ptr())
        if self._offsets:
            base = 0 if memory is None else memory.data_ptr()
            for offset in self._offsets:
                addresses.append(base + offset)
        if self._each:
            own = [give() for give in self._each]
            addresses += [tensor.data_ptr() for tensor in own]
        if self._descriptors and direct.asks_triton():
            with descriptor_memory(descriptors or fresh_memory(self._device)):
                direct(at.stream(index), addresses)
        else:
            direct(at.stream(index), addresses)
        return out, lse

    def hit(self, noted: Any, **match: Any) -> Any:
        """native.c's way to do all of a call at once, from the comparison on: see its Hit; None where there is none.

        noted  the context variable that a run sets to the plan
        match  the comparison's parts, by the Hit's names
        """
        direct, at = self.direct, self._runtime
        if direct is None or direct.native is None:
            return None
        lse = (self._lse_shape, self._lse_strides, torch.float32) if self._lse_shape is not None else ()
        try:
            return direct.native.Hit(
                index=self._index, current=at.current, stream=at.stream, empty=at.empty, hooked=direct.hooked,
                out=(self._out_shape, self._out_strides, self._dtype), lse=lse,
                memory=((self._memory,), (1,), torch.uint8) if self._memory else (), offsets=self._offsets,
                each=self._each, launches=direct.block().launch, noted=noted, plan=self.plan,
                refused=cudadriver.refuse, **match,
            )  # fmt: skip
        except (TypeError, ValueError):  # more tensors than it has room for
            return None

    def _by_name(
        self,
        tensors: Sequence[torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
        memory: torch.Tensor | None,
        descriptors: DescriptorMemory | None,
    ) -> None:
        """Launch by Triton's own way."""
        named: dict[str, Any] = {**dict(zip(self.given, tensors, strict=True)), "out": out, "lse": lse}
        named |= self.buffers(memory)
        if not self._descriptors:
            self._launch(named)
            return
        with descriptor_memory(descriptors or fresh_memory(self._device)):
            self._launch(named)


def of_calls(
    plan: Plan,
    settings: Settings,
    given: Sequence[str],
    launches: Sequence[KernelCall],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    device: torch.device,
) -> Kept:
    """Keep a core plan's launches.

    In a kernel's arguments an input goes by its own name; any other tensor is an output, or a buffer between kernels.
    The caller's own tensors take the places of the views that validation made of them: a kernel gets their address.
    """
    names, buffers, steps = {id(out): "out", id(lse): "lse"}, {}, []
    for launch in launches:
        kernel = getattr(load_kernels(launch.module, interpreted=False), launch.function)
        arguments, roles = {**launch.arguments, **launch.constexprs}, {}
        for argument, value in launch.arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            role = argument if argument in TENSORS else names.setdefault(id(value), f"buffer {len(names)}")
            roles[argument] = role
            if role.startswith("buffer"):
                buffers[role] = (tuple(value.shape), value.dtype)
        steps.append(Step(kernel, launch.grid, arguments, launch.options(), roles))
    descriptors = any(launch.constexprs.get("LOAD") == "descriptor" for launch in launches)
    return Kept(plan, settings, given, device, _Templates(steps), buffers, descriptors, steps)


def of_variant(
    plan: Plan, settings: Settings, given: Sequence[str], variant: Variant, launch: Launch, inputs: Mapping[str, Any],
    device: torch.device,
) -> Kept:  # fmt: skip
    """Keep a variant's launches: directly where its launcher is a StepLauncher, and else by calling it.

    inputs  the Call's tensors by name, "out" and "lse" among them
    """

    def by_name(named: Mapping[str, Any]) -> None:
        launch(variant.views(plan.problem, {**dict.fromkeys(TENSORS), **named}))

    if not isinstance(launch, StepLauncher):
        return Kept(plan, settings, given, device, by_name, {})
    steps = launch.steps({**inputs, **launch.fresh(inputs["q"])})
    # What `by_name` launches has its own buffers.
    return Kept(plan, settings, given, device, by_name, launch.buffers, steps=steps, each=launch.each)


class _Templates:
    """Core launches by Triton's own way: arguments in order, with places for tensors."""

    __slots__ = ("_launches",)

    def __init__(self, steps: Sequence[Step]) -> None:
        self._launches = []
        for step in steps:
            names, template = step.kernel.arg_names, step.values
            places = [(index, step.roles[name]) for index, name in enumerate(names) if name in step.roles]
            for index, _ in places:
                template[index] = None  # no tensor is held
            self._launches.append((step.kernel[step.grid], template, places, step.options))

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        for run, template, places, options in self._launches:
            arguments = template.copy()
            for index, name in places:
                arguments[index] = tensors[name]
            run(*arguments, **options)


def results(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out, in the caller's layout, and of the LSE."""
    p = problem
    if p.total_q is not None:
        return (p.total_q, p.heads_q, p.head_dim_v), (p.heads_q, p.total_q)
    lse = (p.batch, p.heads_q, p.seq_q)
    return (*lse, p.head_dim_v) if p.layout == "bhsd" else (p.batch, p.seq_q, p.heads_q, p.head_dim_v), lse
