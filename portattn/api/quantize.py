"""quantize: queries, keys and values as the narrow numbers and scales that attention and varlen_attention take."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch

from portattn.config import current
from portattn.errors import ArgumentError
from portattn.launch.run import device_guard
from portattn.planning.kernel_specs import ceil_div
from portattn.schema.lowering import FUSED
from portattn.schema.problem_limits import SAGE_BLOCK
from portattn.schema.tensors import KV_DTYPE
from portattn.validate.checks import (
    Number,
    check_dense,
    check_equal,
    check_flag,
    check_like,
    check_number,
    check_tensor,
)
from portattn.validate.dense import AXES, PACKED_AXES, beginnings, check_layout
from portattn.validate.quantized import SIXTEEN_BITS
from portattn.validate.values import cu_seqlens as check_order
from portattn.validate.values import reads

OP = "quantize"
SAGE = "sage"
METHODS = ("e4m3", "e5m2", "e4m3fnuz", SAGE)
SCALES = ("head", "tensor")
BLOCK = SAGE_BLOCK
INT8_LARGEST = 127.0  # symmetric: -128 is never made
# Blocks and widths that the kernel takes (kernels/quantize.py); of others torch makes the same numbers.
BLOCKS, WIDEST = (16, 32, 64, 128), 256


@dataclass(frozen=True)
class Quantized:
    """The result of `quantize`.

    Attributes:
        q, k, v: in the layout of the originals; v is the original where method is "sage"
        q_scale, k_scale, v_scale: float32 factors of the numbers; v_scale is None where method is "sage"
        lse_shift: float32, shaped as the LSE: the loss of each query's scores by smoothing, before the factor `scale`;
            None without smoothing
        layout: "bshd" if q, k and v have this layout, else None

    Examples:
        >>> import torch, portattn
        >>> q, k, v = torch.randn(3, 1, 2, 50, 64, dtype=torch.bfloat16).unbind()
        >>> narrow = portattn.quantize(q, k, v)
        >>> portattn.attention(**narrow.arguments(), causal=True).dtype
        torch.bfloat16
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None
    lse_shift: torch.Tensor | None = None
    layout: str | None = None

    def arguments(self, **others: Any) -> dict[str, Any]:
        """Return q, k, v, scales and a layout of "bshd" as arguments of attention and varlen_attention, and `others`.

        Raises:
            ArgumentError: `others` has another layout, and where it has a softcap or sinks and the keys were smoothed:
                they would see the scores without the smoothed part.

        Examples:
            >>> narrow = portattn.quantize(*torch.randn(3, 1, 2, 8, 16).half().unbind(), "sage", smooth_k=False)
            >>> portattn.attention(**narrow.arguments(softcap=20.0)).shape
            torch.Size([1, 2, 8, 16])
        """
        if self.lse_shift is not None:
            for name, given in others.items():
                if name in ("softcap", "sinks") and given is not None:
                    why = "must not be given with smoothed keys: quantize(…, smooth_k=False) leaves them as they are"
                    shown = tuple(given.shape) if isinstance(given, torch.Tensor) else given
                    raise ArgumentError("arguments", name, shown, why)
        if self.layout is not None and others.get("layout", self.layout) != self.layout:
            raise ArgumentError("arguments", "layout", others["layout"], f"must be {self.layout!r}, as of quantize")
        names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "layout")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None} | others

    def corrected(self, lse: torch.Tensor, scale: Number | None = None) -> torch.Tensor:
        """Return the LSE over the keys as they were before smoothing: lse + scale·q·k̄.

        Args:
            scale: the factor on the scores that attention was called with; None for 1/√D

        Raises:
            ArgumentError: The shape is not the LSE's, or scale is no finite number.
        """
        if self.lse_shift is None:
            return lse
        if not isinstance(lse, torch.Tensor) or lse.shape != self.lse_shift.shape:
            given = tuple(lse.shape) if isinstance(lse, torch.Tensor) else type(lse).__name__
            raise ArgumentError("corrected", "lse", given, f"must be a tensor of shape {tuple(self.lse_shift.shape)}")
        factor = check_number("corrected", "scale", self.q.shape[-1] ** -0.5 if scale is None else scale)
        return lse + factor * self.lse_shift


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    method: str = "e4m3",
    *,
    scales: str = "head",
    block: int = BLOCK,
    smooth_k: bool = True,
    layout: str = "bhsd",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> Quantized:
    """Quantise queries, keys and values, for attention, or packed for varlen_attention.

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv) in `layout`; with cu_seqlens packed, (Tq, Hq, D), (Tk,
            Hk, D), (Tk, Hk, Dv). float16, bfloat16 or float32, all alike; with "sage" of 16 bits. Scales count all
            rows, padding too: they must be finite
        method: "e4m3", "e5m2" or "e4m3fnuz": number = x / s rounded to float8, s = max|x| / largest(format), and one s
            for q, one for k, one for v (Shah et al., "FlashAttention-3", 2024, section 3.3; 448, 57344 and 240 are the
            formats' largest numbers). "sage": number = round(x / s) as int8, s = max|x| / 127 over a block of tokens,
            of q, and of k less its mean k̄ over each sequence's tokens; v stays as it is (Zhang et al.,
            "SageAttention", 2024, section 4). A term common to all scores of a row cancels in softmax, so results need
            no correction; the LSE does, by scale·q·k̄ (`Quantized.corrected`)
        scales: of float8: "head", a scale for each sequence and key/value head (its query heads together), or "tensor"
        block: of "sage": tokens in a row that share a scale, from 1 on; a block of packed rows may span two sequences
        smooth_k: of "sage": subtract k̄. Not with `softcap` or `sinks`: there the common term does not cancel
        layout: "bhsd" or "bshd", of tensors that are not packed
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, as of varlen_attention; both or none

    Returns:
        A Quantized: `arguments()` are the keyword arguments of the operation. Nothing is read back but on a CPU, and no
        gradient goes through it.

    Raises:
        ArgumentError: For a wrong argument, on a CPU also for NaN or infinity in q, k or v.

    Examples:
        >>> import torch, portattn
        >>> q, k, v = torch.randn(3, 1, 2, 50, 64, dtype=torch.float16).unbind()
        >>> narrow = portattn.quantize(q, k, v, method="sage")
        >>> out, lse = portattn.attention(**narrow.arguments(), return_lse=True)
        >>> exact, exact_lse = portattn.attention(q, k, v, return_lse=True)
        >>> torch.allclose(out, exact, atol=2e-2), torch.allclose(narrow.corrected(lse), exact_lse, atol=2e-2)
        (True, True)
    """
    if method not in METHODS:
        raise ArgumentError(OP, "method", method, f"must be one of {', '.join(METHODS)}")
    if scales not in SCALES:
        raise ArgumentError(OP, "scales", scales, f"must be one of {', '.join(SCALES)}")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ArgumentError(OP, "block", block, "must be an integer ≥ 1")
    check_flag(OP, "smooth_k", smooth_k)
    check_layout(OP, layout)
    packed = _check_tensors(q, k, v, method, layout, cu_seqlens_q, cu_seqlens_k)
    with torch.no_grad():
        rows_first, begin = packed or layout == "bshd", (cu_seqlens_q, cu_seqlens_k)
        if method == SAGE:
            made = _sage(q, k, v, block, smooth_k, rows_first, begin)
        else:
            made = _float8(q, k, v, method, scales, rows_first, begin)
    return replace(made, layout="bshd" if layout == "bshd" and not packed else None)


def _check_tensors(q: Any, k: Any, v: Any, method: str, layout: str, cu_seqlens_q: Any, cu_seqlens_k: Any) -> bool:
    """Return whether the tensors are packed. Raises ArgumentError."""
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    axes = PACKED_AXES if packed else AXES[layout]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(OP, name, tensor)
        check_tensor(OP, name, tensor, axes)
        check_like(OP, name, tensor, "q", q)
        if method == SAGE and tensor.dtype not in SIXTEEN_BITS:
            limit = f"must be {' or '.join(map(str, SIXTEEN_BITS))} with method 'sage'"
            raise ArgumentError(OP, f"{name}.dtype", tensor.dtype, limit)
        # Values cannot be read while a graph is made.
        if not torch.compiler.is_compiling() and reads(current(), tensor) and not tensor.isfinite().all():
            raise ArgumentError(OP, name, "NaN or infinity", "must be finite in all rows, those of padding too")
    heads = axes.index("heads")
    check_equal(OP, "k's head_dim", k.shape[-1], "q's", q.shape[-1])
    for axis, name in enumerate(axes[:-1]):
        check_equal(OP, f"v's {name}", v.shape[axis], "k's", k.shape[axis])
    if not packed:
        check_equal(OP, "k's batch", k.shape[0], "q's", q.shape[0])
    if not k.shape[heads] or q.shape[heads] % k.shape[heads]:
        limit = f"must be a multiple of k's, {k.shape[heads]}"
        raise ArgumentError(OP, "q's heads", q.shape[heads], limit)
    if packed:
        batch = beginnings(OP, "cu_seqlens_q", cu_seqlens_q, q.device)
        check_equal(
            OP, "cu_seqlens_k's size", beginnings(OP, "cu_seqlens_k", cu_seqlens_k, q.device) + 1, "cu_seqlens_q's",
            batch + 1,
        )  # fmt: skip
        if not torch.compiler.is_compiling() and reads(current(), q):
            for side, ends, rows in (("q", cu_seqlens_q, q.shape[0]), ("k", cu_seqlens_k, k.shape[0])):
                check_order(OP, side, ends, rows, rows)
    return packed


Beginnings = tuple[torch.Tensor | None, torch.Tensor | None]


def _float8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: str, scales: str, rows_first: bool, begin: Beginnings
) -> Quantized:
    dtype = KV_DTYPE[method]
    largest, heads = torch.finfo(dtype).max, k.shape[1 if begin[0] is not None or not rows_first else 2]
    found: dict[str, Any] = {}
    for name, tensor, cu in (("q", q, begin[0]), ("k", k, begin[1]), ("v", v, begin[1])):
        rows = _heads_first(tensor, rows_first)  # (B, H, S, D), or (1, H, T, D)
        owner = None if cu is None else _owners(cu, rows.shape[2])
        by_row = _amax(rows, 3)
        if scales == "tensor":
            scale = _scale(_amax(by_row.flatten(), 0), largest)
            each = scale
        else:
            by_head = _per_sequence(by_row, owner, cu)  # (B, H)
            by_head = _amax(by_head.unflatten(1, (heads, -1)), 2)
            scale = _scale(by_head, largest)
            each = scale.repeat_interleave(rows.shape[1] // heads, dim=1)
            if owner is None:
                each = each[:, :, None, None]
            else:  # rows after the last sequence belong to none
                last = max(scale.shape[0] - 1, 0)
                each = each[owner.clamp(max=last)].t()[None, :, :, None] if scale.shape[0] else each.new_ones(1)
        numbers = (rows.float() / each).clamp(-largest, largest).to(dtype)
        found |= {name: _as_given(numbers, tensor, rows_first), f"{name}_scale": scale}
    return Quantized(**found)


def _sage(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int, smooth: bool, rows_first: bool, begin: Beginnings
) -> Quantized:
    if begin[0] is None and _kernel_takes(q, k, block):
        return _sage_by_kernel(q, k, v, block, smooth, rows_first)
    return _sage_by_torch(q, k, v, block, smooth, rows_first, begin)


def _sage_by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int, smooth: bool, rows_first: bool, begin: Beginnings
) -> Quantized:
    queries, keys = _heads_first(q, rows_first).float(), _heads_first(k, rows_first).float()
    shift = None
    if smooth:
        group = queries.shape[1] // keys.shape[1]
        q_owner, k_owner = (
            None if cu is None else _owners(cu, rows.shape[2]) for cu, rows in zip(begin, (queries, keys), strict=True)
        )
        mean = _means(keys, k_owner, begin[1])  # (B, Hk, D), packed (B + 1, Hk, D): none for rows of no sequence
        of_keys = mean[:, :, None] if k_owner is None else mean[k_owner].transpose(0, 1)[None]
        of_queries = mean.repeat_interleave(group, dim=1)
        of_queries = of_queries[:, :, None] if q_owner is None else of_queries[q_owner].transpose(0, 1)[None]
        shift = (queries * of_queries).sum(3)
        shift = shift[0] if begin[0] is not None else shift
        keys = keys - of_keys
    found: dict[str, Any] = {}
    for name, given, rows in (("q", q, queries), ("k", k, keys)):
        by_row = _amax(rows, 3)
        count = rows.shape[2]
        full = torch.nn.functional.pad(by_row, (0, -count % block)).unflatten(2, (-1, block))
        scale = _scale(_amax(full, 3), INT8_LARGEST).repeat_interleave(block, dim=2)[:, :, :count]
        numbers = (rows / scale[..., None]).round().clamp(-INT8_LARGEST, INT8_LARGEST).to(torch.int8)
        scale = _as_given(scale[..., None], given, rows_first)[..., 0]
        found |= {name: _as_given(numbers, given, rows_first), f"{name}_scale": scale.contiguous()}
    return Quantized(**found, v=v, v_scale=None, lse_shift=shift)


def _kernel_takes(q: torch.Tensor, k: torch.Tensor, block: int) -> bool:
    """Return whether the kernel makes SAGE's numbers: on NVIDIA's GPUs, which it was tried on."""
    blocks = block in BLOCKS and 0 < q.shape[-1] <= WIDEST and bool(q.numel()) and bool(k.numel())
    beside = all(t.stride(-1) == 1 and type(t) in (torch.Tensor, torch.nn.Parameter) for t in (q, k))
    return (
        q.is_cuda and torch.version.hip is None and blocks and beside and not torch.compiler.is_compiling()
        and importlib.util.find_spec("triton") is not None
    )  # fmt: skip


def _sage_by_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int, smooth: bool, rows_first: bool
) -> Quantized:
    """Like `_sage_by_torch`, for tensors that are not packed: a launch for q and a launch for k."""
    from portattn.kernels.quantize import quantise_rows

    queries, keys = _heads_first(q, rows_first), _heads_first(k, rows_first)
    mean = shift = None
    if smooth:
        mean = keys.sum(2, dtype=torch.float32) / keys.shape[2]
        shift = torch.empty(queries.shape[:3], dtype=torch.float32, device=q.device)
    found: dict[str, Any] = {}
    for name, given, rows in (("q", q, queries), ("k", k, keys)):
        numbers = torch.empty(given.shape, dtype=torch.int8, device=q.device)
        scales = torch.empty(given.shape[:-1], dtype=torch.float32, device=q.device)
        placed, each = _heads_first(numbers, rows_first), scales.transpose(1, 2) if rows_first else scales
        batch, heads, count, columns = rows.shape
        grid = (ceil_div(count, block) * batch * heads,)  # one axis: a second one would end at 65,535
        with device_guard(q):
            quantise_rows[grid](
                rows, placed, each, mean, shift if name == "q" else None, heads, heads // keys.shape[1], count,
                columns, *rows.stride()[:3], *placed.stride()[:3], *each.stride(), BLOCK=block,
                COLUMNS=max(16, 1 << (columns - 1).bit_length()), SUBTRACT=name == "k", num_warps=4, **FUSED,
            )  # fmt: skip
        found |= {name: numbers, f"{name}_scale": scales}
    return Quantized(**found, v=v, v_scale=None, lse_shift=shift)


def _heads_first(tensor: torch.Tensor, rows_first: bool) -> torch.Tensor:
    tensor = tensor.transpose(-3, -2) if rows_first else tensor
    return tensor if tensor.ndim == 4 else tensor[None]


def _as_given(values: torch.Tensor, tensor: torch.Tensor, rows_first: bool) -> torch.Tensor:
    """Return (B, H, S, …) with the axes of the caller's tensor, contiguous."""
    values = values[0] if tensor.ndim == 3 else values
    return (values.transpose(-3, -2) if rows_first else values).contiguous()


def _amax(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the largest magnitudes along an axis, float32; 0 for an axis without elements."""
    if not values.shape[axis]:
        return values.new_zeros((*values.shape[:axis], *values.shape[axis + 1 :]), dtype=torch.float32)
    return values.float().abs().amax(axis)


def _scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return a positive scale: 1 for zeros alone, and at least float32's smallest normal number."""
    return torch.where(amax > 0, (amax / largest).clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def _owners(cu_seqlens: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the sequence of each packed row; B for rows after the last sequence."""
    return torch.bucketize(torch.arange(rows, device=cu_seqlens.device), cu_seqlens[1:], right=True)


def _per_sequence(by_row: torch.Tensor, owner: torch.Tensor | None, cu: torch.Tensor | None) -> torch.Tensor:
    """Return the largest of each sequence's rows, (B, H), from (B, H, S) or packed (1, H, T)."""
    if owner is None or cu is None:
        return _amax(by_row, 2)
    found = by_row.new_zeros(cu.shape[0], by_row.shape[1])
    found.scatter_reduce_(0, owner[:, None].expand(-1, by_row.shape[1]), by_row[0].t(), "amax")
    return found[:-1]


def _means(keys: torch.Tensor, owner: torch.Tensor | None, cu: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of each sequence's keys, (B, Hk, D); packed (B + 1, Hk, D), with 0 for rows of no sequence."""
    if owner is None or cu is None:
        return keys.sum(2) / max(keys.shape[2], 1)
    sums = keys.new_zeros(cu.shape[0], keys.shape[1], keys.shape[3]).index_add_(0, owner, keys[0].transpose(0, 1))
    sums[-1] = 0.0
    count = torch.nn.functional.pad(cu.diff(), (0, 1)).clamp(min=1)
    return sums / count[:, None, None]
