"""Step: one kernel launch of a variant as data. StepLauncher: a launcher that describes its launches as Steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Buffers: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"


@dataclass(slots=True)
class Step:
    kernel: Any  # a `@triton.jit` or `@gluon.jit` function
    grid: tuple[int, ...]  # up to three numbers of programs
    arguments: Mapping[str, Any]  # every argument by name: tensors, descriptors, numbers, None, tl.constexpr
    options: Mapping[str, Any]  # compiler options: num_warps, num_stages, maxnreg, launch_pdl, …
    # argument -> name of its tensor, for tensors that change from call to call
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> list[Any]:
        return [self.arguments[name] for name in self.kernel.arg_names]


def launch_steps(steps: Sequence[Step]) -> None:
    """Launch through Triton, which compiles missing kernels."""
    for step in steps:
        step.kernel[step.grid](*step.values, **step.options)


class StepLauncher:
    """A launcher (`Variant.launcher`) that describes its launches by Steps. Calling it launches through Triton.

    `driver_launch.DriverLauncher` launches later calls and calls `steps` once: `steps` may depend only on the tensors'
    shapes, strides and types, and the roles must name every tensor and descriptor of a Step.

    Args:
        buffers: shapes and dtypes, by name, of tensors that pass between the kernels; allocated for each call
        each: functions, by name, that return one more tensor for a launch (a counter, say), kept as long as the launch
    """

    def __init__(self, buffers: Buffers | None = None, each: Mapping[str, Callable[[], torch.Tensor]] | None = None):
        self.buffers, self.each = buffers or {}, each or {}

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        """Return a call's launches. `tensors` has the Call's tensors by name, out, lse, and the tensors of `fresh`."""
        raise NotImplementedError

    def fresh(self, q: torch.Tensor, given: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """Return the missing buffers and the tensors of `each`."""
        buffers = {
            name: q.new_empty(shape, dtype=dtype)
            for name, (shape, dtype) in self.buffers.items()
            if (given or {}).get(name) is None
        }
        return {**buffers, **{name: give() for name, give in self.each.items()}}

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        launch_steps(self.steps({**tensors, **self.fresh(tensors["q"], tensors)}))
