"""Step: one kernel launch of a variant as data. StepLauncher: a variant's launches as Steps, which can then be kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Buffers: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"


@dataclass(slots=True)
class Step:
    """One kernel launch.

    kernel     a `@triton.jit` or `@gluon.jit` function
    grid       up to three numbers of programs
    arguments  every argument of the kernel by name: tensors, descriptors, numbers, None, tl.constexpr
    options    compiler options: num_warps, num_stages, maxnreg, launch_pdl, …
    roles      argument -> the name of the tensor that it is of, in those that change from call to call
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> list[Any]:
        """The arguments in the kernel's order."""
        return [self.arguments[name] for name in self.kernel.arg_names]


def launch_steps(steps: Sequence[Step]) -> None:
    """Launch by Triton's own way, which compiles what is not compiled yet."""
    for step in steps:
        step.kernel[step.grid](*step.values, **step.options)


class StepLauncher:
    """A launcher (`Variant.launcher`) whose launches can be described by Steps.

    Calling it launches through Triton. Later calls are launched by `driver_launch.Direct`, which calls `steps` once:
    `steps` may depend only on the tensors' shapes, strides and types, and a Step's roles name every tensor and
    descriptor that it takes, by the names in `tensors`.

    buffers  shapes and types of tensors that pass between the kernels, by name; allocated for each call
    each     functions that return a further tensor for one launch (a counter, say), by name; its memory stays as long
             as that launch may run
    """

    def __init__(self, buffers: Buffers | None = None, each: Mapping[str, Callable[[], torch.Tensor]] | None = None):
        self.buffers, self.each = buffers or {}, each or {}

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        """The launches for a call: `tensors` has the Call's by name, out, lse, and what `fresh` gives."""
        raise NotImplementedError

    def fresh(self, q: torch.Tensor, given: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """What a call needs beside its own tensors, and beside the buffers that are given."""
        buffers = {
            name: q.new_empty(shape, dtype=dtype)
            for name, (shape, dtype) in self.buffers.items()
            if (given or {}).get(name) is None
        }
        return {**buffers, **{name: give() for name, give in self.each.items()}}

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        launch_steps(self.steps({**tensors, **self.fresh(tensors["q"], tensors)}))
