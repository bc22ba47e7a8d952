"""What a compiler sees of a variant's launches: Signatures of its Steps, on machines without the chip too.

The Steps are made of tensors without data, and the rest follows Triton's own specialisation (3.6), as `signature` does
for the core's launches.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from portattn.launch.kernelcall import Signature
from portattn.schema.call import TENSORS
from portattn.schema.kernel_step import Step
from portattn.schema.tensors import INT32_MAX, POINTER_ALIGNMENT, TRITON_DTYPE, TWO_GIB, spans

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.kernel_step import StepLauncher


class LaunchSource(Protocol):
    """What has launches to describe: a variant, and a variant with a schedule of one's own."""

    def described(self, call: Call) -> StepLauncher:
        """The launches of calls like this one."""
        ...


def signatures(variant: LaunchSource, call: Call) -> list[Signature]:
    """What a compiler sees of the launches of a call by a variant. Nothing is allocated, and no device is touched.

    Raises ImportError or AttributeError where this Python's Triton lacks what the variant's launches are described by.
    """
    twin, tensors = without_data(call), {name: getattr(call, name) for name in TENSORS}
    launcher = variant.described(twin)
    named = {name: getattr(twin, name) for name in TENSORS}
    named |= {"out": twin.new_out(), "lse": twin.new_lse() if call.problem.return_lse else None}
    steps = launcher.steps({**named, **launcher.fresh(twin.q)})
    return [step_signature(step, tensors) for step in steps if 0 not in step.grid]


def without_data(call: Call) -> Call:
    """The call with tensors of the same shapes, strides and types that have no memory."""

    def empty(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    tensors: dict[str, Any] = {name: empty(getattr(call, name)) for name in TENSORS}
    return dataclasses.replace(call, dry=True, **tensors)


def step_signature(step: Step, tensors: Mapping[str, torch.Tensor | None]) -> Signature:
    """The Signature of one Step. `tensors` are the call's own by role, whose alignment counts."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible, small = [], []
    fixed, general = constexprs(step.kernel), unspecialised_arguments(step.kernel)
    for name, value in zip(step.kernel.arg_names, step.values, strict=True):
        value = getattr(value, "value", value) if name in fixed else value  # tl.constexpr holds one
        if value is None or name in fixed:
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + TRITON_DTYPE[value.dtype]
            if is_aligned(tensors.get(step.roles.get(name, ""), value)):
                divisible.append(name)
            if spans(value) < TWO_GIB:
                small.append(name)
        elif hasattr(value, "block_shape"):
            types[name] = f"tensordesc<{TRITON_DTYPE[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, bool):
            types[name] = "u1"
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and name not in general:
            constants[name] = 1
        else:
            types[name] = "i32" if -INT32_MAX - 1 <= value <= INT32_MAX else "i64"
            if value % POINTER_ALIGNMENT == 0 and name not in general:
                divisible.append(name)
    return Signature(
        module=step.kernel.fn.__module__,
        function=step.kernel.fn.__name__,
        types=types,
        constants=constants,
        divisible=tuple(divisible),
        small=tuple(small),
        options=dict(step.options),
    )


def is_aligned(tensor: torch.Tensor | None) -> bool:
    """Whether Triton takes a tensor's address for a multiple of 16."""
    return tensor is None or tensor.is_meta or tensor.data_ptr() % POINTER_ALIGNMENT == 0


def constexprs(kernel: Any) -> set[str]:
    """Names of a jit function's arguments that are tl.constexpr, also of one that is interpreted here."""
    parameters = inspect.signature(kernel.fn).parameters
    return {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}


def unspecialised_arguments(kernel: Any) -> set[str]:
    """Names of a jit function's arguments that it is not specialised on."""
    named: Sequence[int | str]
    named = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    return {kernel.arg_names[name] if isinstance(name, int) else name for name in named}
