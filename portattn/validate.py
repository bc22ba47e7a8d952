"""From a caller's arguments to a Call with its Problem. Every complaint names the argument, the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from portattn.call import Call
from portattn.config import Settings
from portattn.core import next_power_of_two
from portattn.errors import ArgumentError
from portattn.launch.kernelcall import INT32_MAX, POINTER_ALIGNMENT, TORCH_DTYPE, TWO_GIB, spans
from portattn.problem import MAX_HEAD_DIM, Problem

DTYPES = {dtype: name for name, dtype in TORCH_DTYPE.items()}
AXES = {"bhsd": ("batch", "heads", "seq", "head_dim"), "bshd": ("batch", "seq", "heads", "head_dim")}
FLOAT32_MAX = torch.finfo(torch.float32).max
WIDEST_TILE = 256  # rows: inside a tile, kernels reach rows by 32-bit multiples of the row stride


def attention_call(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    names: tuple[str, str, str],
    settings: Settings,
    scale: float | None,
    causal: bool | str,
    return_lse: bool,
    layout: str,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> Call:
    """Check everything and build the Call; q, k and v become (B, H, S, D) views. Raises ArgumentError."""
    if not isinstance(layout, str) or layout not in AXES:
        raise ArgumentError(op, "layout", layout, f"must be one of {', '.join(AXES)}")
    for name, tensor in zip(names, (q, k, v), strict=True):
        _check_tensor(op, name, tensor, layout)
    q_name, k_name, v_name = names
    for name, tensor in ((k_name, k), (v_name, v)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(op, f"{name}.dtype", tensor.dtype, f"must be {q_name}'s, {q.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(op, f"{name}.device", str(tensor.device), f"must be {q_name}'s, {q.device}")
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    batch, heads_q, seq_q, head_dim = q.shape
    _check_equal(op, f"{k_name}'s batch", k.shape[0], f"{q_name}'s", batch)
    _check_equal(op, f"{v_name}'s batch", v.shape[0], f"{q_name}'s", batch)
    _check_equal(op, f"{k_name}'s head_dim", k.shape[3], f"{q_name}'s", head_dim)
    for name, width in ((q_name, head_dim), (v_name, v.shape[3])):
        if not 1 <= width <= MAX_HEAD_DIM:
            raise ArgumentError(op, f"{name}'s head_dim", width, f"must be in 1..{MAX_HEAD_DIM}")
    _check_equal(op, f"{v_name}'s heads", v.shape[1], f"{k_name}'s", k.shape[1])
    _check_equal(op, f"{v_name}'s seq", v.shape[2], f"{k_name}'s", k.shape[2])

    if not isinstance(causal, (bool, int, str)) or causal not in (True, False, "top_left", "bottom_right"):
        raise ArgumentError(op, "causal", causal, "must be True (bottom_right), False, 'bottom_right' or 'top_left'")
    alignment = causal if isinstance(causal, str) else "bottom_right" if causal else "none"
    scale = _check_number(op, "scale", head_dim**-0.5 if scale is None else scale)
    dropout_p = _check_number(op, "dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(op, "dropout_p", dropout_p, "must be in [0, 1)")
    for name, flag in (("return_lse", return_lse),):
        if not isinstance(flag, bool):
            raise ArgumentError(op, name, flag, "must be True or False")

    lengths = {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "leftpad_q": leftpad_q, "leftpad_k": leftpad_k}
    for name, length in lengths.items():
        if length is not None:
            _check_lengths(op, name, length, batch, q.device)
    if settings.validate == "always" or (settings.validate == "auto" and q.device.type == "cpu"):
        _check_length_values(op, "q", seqlens_q, leftpad_q, seq_q)
        _check_length_values(op, "k", seqlens_k, leftpad_k, k.shape[2])

    given, (q, k, v) = (q, k, v), (_reachable(q), _reachable(k), _reachable(v))
    problem = Problem(
        op=op,  # type: ignore[arg-type]
        batch=batch,
        heads_q=heads_q,
        heads_k=k.shape[1],
        seq_q=seq_q,
        seq_k=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=DTYPES[q.dtype],  # type: ignore[arg-type]
        causal=alignment,  # type: ignore[arg-type]
        seqlens_q=seqlens_q is not None,
        seqlens_k=seqlens_k is not None,
        leftpad_q=leftpad_q is not None,
        leftpad_k=leftpad_k is not None,
        return_lse=return_lse,
        layout=layout,  # type: ignore[arg-type]
        aligned=_aligned(q) and _aligned(k) and _aligned(v),
        large=max(spans(q), spans(k), spans(v)) >= TWO_GIB,
        needs_grad=wants_gradients(q, k, v),
        dropout=dropout_p > 0.0,
        negative_scale=scale < 0.0,
    )
    return Call(
        problem,
        q,
        k,
        v,
        scale,
        seqlens_q,
        seqlens_k,
        leftpad_q,
        leftpad_k,
        dropout_p,
        any(a is not b for a, b in zip((q, k, v), given, strict=True)),
    )


def _check_tensor(op: str, name: str, tensor: Any, layout: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(op, name, type(tensor).__name__, "must be a torch.Tensor")
    if tensor.ndim != 4:
        raise ArgumentError(op, f"{name}.ndim", tensor.ndim, f"must be 4: ({', '.join(AXES[layout])})")
    if tensor.dtype not in DTYPES:
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, f"must be one of {', '.join(map(str, DTYPES))}")
    if tensor.layout is not torch.strided:
        raise ArgumentError(op, f"{name}.layout", tensor.layout, "must be torch.strided")


def _check_equal(op: str, what: str, value: int, whose: str, limit: int) -> None:
    if value != limit:
        raise ArgumentError(op, what, value, f"must be {whose}, {limit}")


def _check_number(op: str, name: str, value: Any) -> float:
    # Kernels take it as a float32. The comparison is false for NaN too, and defined for an integer of any size.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= FLOAT32_MAX:
        raise ArgumentError(op, name, value, f"must be a finite number, in float32's range of ±{FLOAT32_MAX:.4g}")
    return float(value)


def _check_lengths(op: str, name: str, tensor: Any, batch: int, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(op, name, type(tensor).__name__, "must be an int32 torch.Tensor of shape (batch,)")
    if tensor.dtype != torch.int32:
        raise ArgumentError(op, f"{name}.dtype", tensor.dtype, "must be torch.int32")
    if tuple(tensor.shape) != (batch,):
        raise ArgumentError(op, f"{name}.shape", tuple(tensor.shape), f"must be (batch,), ({batch},)")
    if tensor.device != device:
        raise ArgumentError(op, f"{name}.device", str(tensor.device), f"must be q's, {device}")
    if not tensor.is_contiguous():
        raise ArgumentError(op, f"{name}.stride()", tensor.stride(), "must be contiguous")


def _check_length_values(
    op: str, side: str, length: torch.Tensor | None, pad: torch.Tensor | None, capacity: int
) -> None:
    """Read lengths back and check them. Costs a device synchronisation where the tensors are not on the CPU."""
    pads: Sequence[int] = pad.tolist() if pad is not None else ()
    for index, value in enumerate(pads):
        if not 0 <= value <= capacity:
            raise ArgumentError(op, f"leftpad_{side}[{index}]", value, f"must be in 0..{capacity}, the rows there are")
    for index, value in enumerate(length.tolist() if length is not None else ()):
        room = capacity - (pads[index] if pads else 0)
        if not 0 <= value <= room:
            less = f" less its left padding of {pads[index]}" if pads else ""
            raise ArgumentError(
                op, f"seqlens_{side}[{index}]", value, f"must be in 0..{room}, the rows there are{less}"
            )


def _aligned(tensor: torch.Tensor) -> bool:
    """Contiguous rows, and a base and outer strides that are multiples of 16 bytes."""
    size = tensor.element_size()
    # The row stride counts even for one row: a descriptor is encoded with it.
    outer = [tensor.stride(axis) for axis in range(3) if tensor.shape[axis] > 1 or axis == 2]
    return (
        (tensor.stride(3) == 1 or tensor.shape[3] == 1)
        and (tensor.is_meta or tensor.data_ptr() % POINTER_ALIGNMENT == 0)
        and all(stride * size % POINTER_ALIGNMENT == 0 for stride in outer)
    )


def _reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy where a tile spans more elements than 32-bit offsets reach."""
    columns = next_power_of_two(tensor.shape[3])
    spanned = tensor.stride(2) * WIDEST_TILE + tensor.stride(3) * columns
    return tensor.contiguous() if spanned > INT32_MAX else tensor


def wants_gradients(*tensors: torch.Tensor) -> bool:
    """Whether autograd will ask for gradients, or forward-mode differentiation is under way."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
