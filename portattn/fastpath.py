"""The second call: everything that the first call of its kind decided, looked up by everything that decided it.

A hit does no validation of shapes, no planning and no argument building: outputs are allocated, and kept launches
get their tensors. Only core paths on accelerators are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from portattn.backends.base import Variant
from portattn.call import TENSORS
from portattn.config import Settings
from portattn.launch import KernelCall, load_kernels
from portattn.launch.kernelcall import POINTER_ALIGNMENT
from portattn.launch.run import DescriptorMemory, descriptor_memory, fresh_memory
from portattn.planned import Plan
from portattn.problem import Problem
from portattn.validate import wants_gradients

MAX_KEPT = 8192  # distinct call sites kept; past that all are forgotten and kept anew


def key_of(op: str, tensors: Mapping[str, torch.Tensor | None], values: Mapping[str, Hashable]) -> Hashable:
    """What decides a call's plan and its kernels' specialisation. `values` are the call's other arguments."""
    given = tensors.values()
    return (
        op,
        *[
            # Alignment of each pointer is part of a kernel's specialisation and of what loads it may use.
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % POINTER_ALIGNMENT)
            for t in given
        ],
        wants_gradients(*given),
        tuple(values.values()),
        tuple(map(type, values.values())),  # 1 == True == 1.0, and validation tells them apart
    )


class Kept:
    """One kept call: its plan, and its launches with places for this call's tensors.

    In a kernel's arguments an input goes by its own name; any other tensor is an output, or a buffer between kernels.
    The caller's own tensors take the places of the views that validation made of them: a kernel gets their address.
    """

    __slots__ = (
        "_buffers",
        "_index",
        "_launches",
        "_lse_shape",
        "_module",
        "_out_shape",
        "_scratch",
        "plan",
        "settings",
    )

    def __init__(
        self, plan: Plan, settings: Settings, launches: list[KernelCall], out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        self.plan, self.settings = plan, settings
        self._out_shape, lse_shape = results(plan.problem)
        self._lse_shape = None if lse is None else lse_shape
        self._index = out.device.index
        self._module = getattr(torch, out.device.type)  # torch.cuda, torch.npu, …
        self._scratch = any(launch.constexprs.get("LOAD") == "descriptor" for launch in launches)
        self._buffers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._launches: list[tuple[Callable[..., Any], list[Any], list[tuple[int, str]], dict[str, Any]]] = []
        names = {id(out): "out", id(lse): "lse"}
        for launch in launches:
            kernel = getattr(load_kernels(launch.module, interpreted=False), launch.function)
            values = {**launch.arguments, **launch.constexprs}
            template = [values[name] for name in kernel.arg_names]
            places = []
            for index, (argument, value) in enumerate(zip(kernel.arg_names, template, strict=True)):
                if not isinstance(value, torch.Tensor):
                    continue
                name = argument if argument in TENSORS else names.setdefault(id(value), f"buffer {len(names)}")
                if name.startswith("buffer"):
                    self._buffers[name] = (tuple(value.shape), value.dtype)
                places.append((index, name))
                template[index] = None
            self._launches.append((kernel[launch.grid], template, places, launch.options()))

    def buffers(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fresh tensors for what passes between the kernels."""
        return {name: like.new_empty(shape, dtype=dtype) for name, (shape, dtype) in self._buffers.items()}

    def __call__(
        self,
        inputs: Mapping[str, torch.Tensor | None],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        memory: DescriptorMemory | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run with these tensors, in the caller's own layout: (out in that layout, LSE or None).

        out, lse, buffers  where results and partial results go; allocated where they are None
        memory  what descriptors are built in; fresh each time when None
        """
        q = inputs["q"]
        assert q is not None
        if self._index != self._module.current_device():
            with self._module.device(self._index):
                return self(inputs, out, lse, buffers, memory)
        if out is None:
            out = q.new_empty(self._out_shape)
        if lse is None and self._lse_shape is not None:
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        tensors: dict[str, Any] = {
            **inputs,
            **(self.buffers(q) if buffers is None else buffers),
            "out": out,
            "lse": lse,
        }
        if self._scratch:
            with descriptor_memory(memory or fresh_memory(q.device)):
                self._launch(tensors)
        else:
            self._launch(tensors)
        return out, lse

    def _launch(self, tensors: Mapping[str, Any]) -> None:
        for run, template, places, options in self._launches:
            arguments = template.copy()
            for index, name in places:
                arguments[index] = tensors[name]
            run(*arguments, **options)


class KeptVariant:
    """One kept call of a variant: as Kept, but its launcher allocates what passes between its kernels."""

    __slots__ = ("_index", "_launch", "_lse_shape", "_module", "_out_shape", "_variant", "plan", "settings")

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        variant: Variant,
        launch: Callable[[Mapping[str, Any]], None],
        device: torch.device,
    ) -> None:
        self.plan, self.settings = plan, settings
        self._variant, self._launch = variant, launch
        self._out_shape, self._lse_shape = results(plan.problem)
        self._index, self._module = device.index, getattr(torch, device.type)

    def __call__(self, inputs: Mapping[str, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run with these tensors, in the caller's own layout: (out in that layout, LSE or None)."""
        if self._index != self._module.current_device():
            with self._module.device(self._index):
                return self(inputs)
        q, p = inputs["q"], self.plan.problem
        assert q is not None
        out = q.new_empty(self._out_shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32) if p.return_lse else None
        seen = out.transpose(1, 2) if p.layout == "bshd" else out
        self._launch(self._variant.views(p, inputs) | {"out": seen, "lse": lse})
        return out, lse


def results(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out, in the caller's layout, and of the LSE."""
    p = problem
    if p.total_q is not None:
        return (p.total_q, p.heads_q, p.head_dim_v), (p.heads_q, p.total_q)
    lse = (p.batch, p.heads_q, p.seq_q)
    return (*lse, p.head_dim_v) if p.layout == "bhsd" else (p.batch, p.seq_q, p.heads_q, p.head_dim_v), lse


_kept: dict[tuple[Hashable, Settings], Kept | KeptVariant] = {}


def find(key: Hashable, settings: Settings) -> Kept | KeptVariant | None:
    """The kept call for a key under these settings; None when there is none."""
    try:
        return _kept.get((key, settings))
    except TypeError:
        return None  # an unhashable argument: validation will name it


def keep(key: Hashable, kept: Kept | KeptVariant) -> None:
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    _kept[key, kept.settings] = kept


def forget() -> None:
    """Forget every kept call: verdicts or data have changed."""
    _kept.clear()
