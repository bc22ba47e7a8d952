"""KernelCall: one kernel launch as data; Signature: what its compiler sees of it, ready to be sent elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from portattn.schema.lowering import FUSED, Launch
from portattn.schema.tensors import INT32_MAX, POINTER_ALIGNMENT, TRITON_DTYPE, TWO_GIB, spans


@dataclass(slots=True)
class KernelCall:
    """One launch: `module.function[grid](**arguments, **constexprs)` with the compiler options of `launch`.

    arguments   run-time arguments in the kernel's order: tensors (or meta tensors), ints, floats, None
    constexprs  tl.constexpr arguments by name
    unspecialised  names of integers that the kernel does not specialise on
    fusible     whether the compiler has the option `enable_fp_fusion`; where not, it decides by itself what it fuses
    """

    module: str
    function: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constexprs: dict[str, Any]
    launch: Launch
    unspecialised: frozenset[str] = field(default_factory=frozenset)
    fusible: bool = True

    def options(self) -> dict[str, Any]:
        """The compiler's, by name."""
        named = {"num_warps": self.launch.num_warps, "num_stages": self.launch.num_stages}
        found = named | FUSED | dict(self.launch.options)
        return found if self.fusible else {name: value for name, value in found.items() if name not in FUSED}


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a compiler sees of a KernelCall; plain data, so a child process can compile it.

    types       run-time argument -> Triton type (`*fp16`, `i32`, `fp32`)
    constants   tl.constexpr arguments, absent optional arguments (None), and integers equal to 1
    divisible   arguments known to be multiples of 16
    small       pointer arguments whose tensor spans less than 2 GiB (AMD's buffer instructions reach all of it)
    """

    module: str
    function: str
    types: dict[str, str]
    constants: dict[str, bool | int | float | str | None]
    divisible: tuple[str, ...]
    small: tuple[str, ...]
    options: dict[str, bool | int | str]


def signature(call: KernelCall) -> Signature:
    """The call as Triton's own run-time specialisation would see it: 1 is constant, multiples of 16 are marked."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = dict(call.constexprs)
    divisible, small = [], []
    for name, value in call.arguments.items():
        if value is None:
            constants[name] = None
        elif isinstance(value, torch.Tensor):
            types[name] = "*" + TRITON_DTYPE[value.dtype]
            if value.is_meta or value.data_ptr() % POINTER_ALIGNMENT == 0:
                divisible.append(name)
            if spans(value) < TWO_GIB:
                small.append(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1 and name not in call.unspecialised:
            constants[name] = 1
        else:
            types[name] = "i32" if -INT32_MAX - 1 <= value <= INT32_MAX else "i64"
            if value % POINTER_ALIGNMENT == 0 and name not in call.unspecialised:
                divisible.append(name)
    return Signature(
        module=call.module,
        function=call.function,
        types=types,
        constants=constants,
        divisible=tuple(divisible),
        small=tuple(small),
        options=call.options(),
    )
