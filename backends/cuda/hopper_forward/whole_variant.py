"""The Hopper forward of int8 queries and keys, with a scale for each token, as a path of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from portattn.backends.cuda.hopper_forward.variant import ForwardVariant, Launcher
from portattn.schema.steps import Step

if TYPE_CHECKING:
    from portattn.schema.call import Call


class WholeLauncher(Launcher):
    """A launch with scales."""

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        forward, *merging = super().steps(tensors)
        roles, arguments = dict(forward.roles), dict(forward.arguments)
        for name in ("q_scale", "k_scale"):
            strides = tensors[name].stride()
            b, h, s = (0, strides[1], strides[0]) if self.problem.packed else strides
            roles[name] = name
            arguments |= {name: tensors[name], f"{name}_b": b, f"{name}_h": h, f"{name}_s": s}
        return [Step(forward.kernel, forward.grid, arguments, forward.options, roles), *merging]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"INT8": True}
