"""torch.autocast, as in scaled_dot_product_attention: queries, keys and values are cast to its dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portattn.schema.ops import DIFFERENTIABLE, ROWS
from portattn.schema.tensors import KV_FORMAT

# Tensors that must have q's dtype. All others may be float32 and stay so: they are added in float32.
_AS_Q = frozenset({"q", "k", "v", "q_rope"})
_NAMES = {op: tuple(row.tensors) for op, row in ROWS.items()}
_WIDE = (torch.float32, torch.float64)
_KEPT = dict.fromkeys(DIFFERENTIABLE, _WIDE) | dict.fromkeys(_AS_Q, (torch.float64,))


def _narrow(op: str, name: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes of quantised tensors, which stay: float8 counts as floating-point too."""
    return tuple(KV_FORMAT) if f"{name}_scale" in _NAMES[op] else ()


# By operation: the places of the tensors that may be cast, and the dtypes that each may keep.
_PLACES = {
    op: tuple((place, (*_KEPT[name], *_narrow(op, name))) for place, name in enumerate(names) if name in _KEPT)
    for op, names in _NAMES.items()
    if not ROWS[op].writes  # a cache that is cast is another one
}


# Types of devices with an autocast: torch raises for any other (meta), and dynamo cannot trace torch's own test for
# them. A maker's package names one more, `npu` say: torch's key PrivateUse1.
_HAVING = frozenset({"cpu", "cuda", "xpu", "hpu", "mps", "mtia", "maia", "xla", "ipu"})


def is_on(q: Any) -> bool:
    if not isinstance(q, torch.Tensor):
        return False
    device_type = q.device.type
    if device_type not in _HAVING and device_type != torch._C._get_privateuse1_backend_name():
        return False
    return torch.is_autocast_enabled(device_type)


def cast(op: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return a Request's tensors, cast if autocast is on. Traced by dynamo: plain Python alone."""
    return cast_now(op, tensors) if is_on(tensors[0]) else tensors


def cast_now(op: str, tensors: Sequence[Any]) -> Sequence[Any]:
    """Like `cast`, if autocast is on."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    found = list(tensors)
    for place, kept in _PLACES.get(op, ()):
        tensor = found[place]
        if isinstance(tensor, torch.Tensor) and tensor.dtype != dtype and tensor.dtype not in kept:
            found[place] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    if ROWS[op].latent:  # latent rows are key and value: one tensor stays one
        keys, values = _NAMES[op].index("k"), _NAMES[op].index("v")
        found[values] = found[keys]
    return found


class off:  # noqa: N801  # a context manager, in a tenth of the time that torch.autocast takes
    """A block without autocast for a type of devices that has it on."""

    __slots__ = ("_device_type",)

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self._device_type, True)
