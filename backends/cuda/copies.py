"""What a variant's launcher does where tensors cannot be described as they are, or the scale is 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from portattn.schema.call import Call

Launch = Callable[[Mapping[str, Any]], None]


def with_copies(launch: Launch, call: Call, described: Sequence[str], queries: Sequence[str]) -> Launch:
    """`launch` itself, which can be kept; or, where a call needs copies, what makes them before each launch.

    described  the Call's tensors that are read through descriptors: whether those take a stride of 0 is not documented
    queries    those that a scale of 0 is applied to: a row's maximum is taken before scaling, and 0·inf is NaN
    """
    if call.scale != 0.0 and not any(_broadcast(getattr(call, name)) for name in described):
        return launch
    unscaled = dict.fromkeys(queries, call.problem.q_format) if call.scale == 0.0 else {}
    return functools.partial(_launch, launch, tuple(described), unscaled)


def _launch(launch: Launch, described: Sequence[str], unscaled: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    copies = {name: t.contiguous() if _broadcast(t := tensors[name]) else t for name in described}
    launch({**tensors, **copies, **{name: _unscaled(copies[name], kind) for name, kind in unscaled.items()}})


def _unscaled(x: torch.Tensor, kind: str) -> torch.Tensor:
    """0, and NaN where a number times 0 is that. Bytes are int8, or e4m3, which has no infinity."""
    if x.is_floating_point():
        return x * 0.0
    return x * 0 if kind == "int8" else x.where((x & 127) == 127, 0)


def _broadcast(x: torch.Tensor | None) -> bool:
    return x is not None and any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
