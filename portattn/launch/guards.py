"""Whether tensors are like others in everything but their data and sizes: torch's own guards, which torch.compile uses.

They are for tensors that have sizes: at a strided nested one they end the process (torch 2.13). Who asks them has read
sizes before.

One call into C++ compares types, dispatch keys (device, views that negate, modes of autograd, autocast, tracing and
transforms), element types, device indices, `requires_grad` and the number of axes of all of them: 0.1 µs a tensor,
where reading the same in Python takes 0.7 µs. They are torch's private interface, so they are tried out once before
they are believed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What says of as many values, whether they are tensors like these ones, of any sizes and strides."""
    make = _made if _usable() else _plain
    return _with_grad_mode(tensors, make(tensors))


def in_mode() -> bool:
    """Whether a mode of torch's sees every operator: fake tensors, tracers, counters. The guards do not look at it, and
    what is launched directly is no operator."""
    return bool(mode_depth())


# A torch that has no such function has no such modes that could be asked about.
mode_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def _made(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    any_size: Any = [[None] * t.ndim for t in tensors]
    check: Callable[..., bool] = TensorGuards(
        *tensors, dynamic_dims_sizes=any_size, dynamic_dims_strides=any_size
    ).check
    return check


def _plain(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    known = [_facts(t) for t in tensors]
    modes = _modes()

    def check(*values: Any) -> bool:
        return (
            _modes() == modes
            and not _transformed()
            and all(isinstance(value, torch.Tensor) for value in values)
            and [_facts(value) for value in values] == known
        )

    return check


def _modes() -> tuple[bool, bool]:
    return torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()


def _transformed() -> bool:
    """Whether a transform of functorch's, or a tracer, has the tensors."""
    interpreter = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)()
    return interpreter is not None or torch._C._get_tracing_state() is not None


def _facts(t: torch.Tensor) -> tuple[Any, ...]:
    return (type(t), t.dtype, t.device, t.ndim, t.requires_grad, t.is_neg(), t.layout, t.is_nested)


def _with_grad_mode(tensors: Sequence[torch.Tensor], check: Callable[..., bool]) -> Callable[..., bool]:
    """The guards see `requires_grad`, and not whether gradients are being recorded."""
    if not any(t.requires_grad for t in tensors):
        return check
    recording = torch.is_grad_enabled()
    return lambda *values: torch.is_grad_enabled() == recording and check(*values)


@functools.lru_cache(maxsize=1)
def _usable() -> bool:
    """Whether torch's guards are there and tell apart what they must."""
    try:
        with torch.device("cpu"):  # whatever the caller's default is: the answer is the process's
            x = torch.zeros(2, 4, 6, dtype=torch.float32)
            asking = torch.zeros(2, 4, 6, dtype=torch.float32, requires_grad=True)
            alike = [torch.ones(3, 1, 7, dtype=torch.float32), x[:, :, :4], x.transpose(0, 1)]
            others: list[Any] = [
                x[0], x.half(), x.to("meta"), x.view(2, 4, 3, 2),
                torch.nn.Parameter(x, requires_grad=False), asking, torch._neg_view(x), x.to_sparse(), None,
            ]  # fmt: skip
        check = _made([x, x])
        return all(check(x, one) is True for one in alike) and not any(check(x, other) for other in others)
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError):
        return False
