"""The second call: everything that the first call of its kind decided, looked up by everything that decided it.

A hit does no validation of shapes, no planning and no argument building: outputs are allocated, and kept launches
get their tensors. Only core paths on accelerators are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from portattn.config import Settings
from portattn.launch import KernelCall, load_kernels
from portattn.launch.kernelcall import POINTER_ALIGNMENT
from portattn.launch.run import provide_descriptor_memory
from portattn.planned import Plan
from portattn.validate import wants_gradients

MAX_KEPT = 8192  # distinct call sites kept; past that all are forgotten and kept anew

Optional = torch.Tensor | None
# Inputs, by the names that they have in every kernel's arguments.
INPUTS = ("q", "k", "v", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")


def key_of(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: tuple[Optional, ...],
    values: tuple[Hashable, ...],
) -> Hashable:
    """What decides a call's plan and its kernels' specialisation. `values` are the call's other arguments."""
    return (
        op,
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        wants_gradients(q, k, v),
        # Alignment of each pointer is part of a kernel's specialisation and of what loads it may use.
        q.data_ptr() % POINTER_ALIGNMENT,
        k.data_ptr() % POINTER_ALIGNMENT,
        v.data_ptr() % POINTER_ALIGNMENT,
        *[
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % POINTER_ALIGNMENT)
            for t in optional
        ],
        values,
        tuple(map(type, values)),  # 1 == True == 1.0, and validation tells them apart
    )


class Kept:
    """One kept call: its plan, and its launches with places for this call's tensors.

    In a kernel's arguments an input goes by its own name; any other tensor is an output, or a buffer between kernels.
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
        p = plan.problem
        heads_first = (p.batch, p.heads_q, p.seq_q, p.head_dim_v)
        self._out_shape = heads_first if p.layout == "bhsd" else (p.batch, p.seq_q, p.heads_q, p.head_dim_v)
        self._lse_shape = None if lse is None else heads_first[:3]
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
                name = argument if argument in INPUTS else names.setdefault(id(value), f"buffer {len(names)}")
                if name.startswith("buffer"):
                    self._buffers[name] = (tuple(value.shape), value.dtype)
                places.append((index, name))
                template[index] = None
            self._launches.append((kernel[launch.grid], template, places, launch.options()))

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: tuple[Optional, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run with these tensors, in the caller's own layout: (out in that layout, LSE or None)."""
        if self._index != self._module.current_device():
            with self._module.device(self._index):
                return self(q, k, v, optional)
        tensors: dict[str, Any] = dict(zip(INPUTS, (q, k, v, *optional), strict=True))
        out = tensors["out"] = q.new_empty(self._out_shape)
        lse = tensors["lse"] = None if self._lse_shape is None else q.new_empty(self._lse_shape, dtype=torch.float32)
        for name, (shape, dtype) in self._buffers.items():
            tensors[name] = q.new_empty(shape, dtype=dtype)
        if self._scratch:
            provide_descriptor_memory(q.device)
        for run, template, places, options in self._launches:
            arguments = template.copy()
            for index, name in places:
                arguments[index] = tensors[name]
            run(*arguments, **options)
        return out, lse


_kept: dict[tuple[Hashable, Settings], Kept] = {}


def find(key: Hashable, settings: Settings) -> Kept | None:
    """The kept call for a key under these settings; None when there is none."""
    try:
        return _kept.get((key, settings))
    except TypeError:
        return None  # an unhashable argument: validation will name it


def keep(key: Hashable, kept: Kept) -> None:
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    _kept[key, kept.settings] = kept


def forget() -> None:
    """Forget every kept call: verdicts or data have changed."""
    _kept.clear()
