"""A case's keys and values in the narrower numbers of a quantised cache."""

from __future__ import annotations

import torch

from portattn.reference.stored import E2M1, of_blocks
from portattn.reference.stored import dequantize as widened_int4
from portattn.reference.writing import MIDDLE, four_bits, int4_step
from portattn.reference.writing import in_blocks as blocks_of
from portattn.schema.tensors import BLOCK_SCALES, INT4, KV_DTYPE, PACKED
from portattn.tools.bench.cases import SCALE_BYTES, Case

E4M3_LARGEST = torch.finfo(BLOCK_SCALES).max
LARGEST_INT4 = 7.0  # on both sides of 0, where 8 stands for it


def in_blocks(case: Case, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Keys or values (…, width) in nvfp4, as write_pages stores them: bytes (…, width / 2), their scale () or None, and
    the e4m3 scales of their blocks (…, width / 16). The scale lets the largest block's be e4m3's largest."""
    numbers, scale = values.float(), None
    if case.kv_scales != "none":
        scale = (values.abs().amax().float() / (E2M1[-1] * E4M3_LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)
        numbers = numbers / scale
    stored, blocks = blocks_of(numbers)
    return stored.view(PACKED), scale, blocks.view(BLOCK_SCALES)


def quantised(case: Case, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys or values (…, width) in the case's format, and their scales: (…) for each token, (), or None.

    int4 is two numbers a byte, (…, width / 2). A scale lets the largest number that goes with it fill the format's
    range. With `case.inline_scales` numbers and scales are views of the same rows, [numbers | scale]; a row's bytes
    must then be a multiple of 4. Tensors without data (the meta device) give such ones.
    """
    if case.kv_format == INT4:
        return _in_pairs(case, values.float())
    dtype = KV_DTYPE[case.kv_format]
    largest = torch.iinfo(dtype).max if dtype is torch.int8 else torch.finfo(dtype).max
    numbers = values.float()
    scale = None
    if case.kv_scales != "none":
        least = torch.finfo(torch.float32).tiny  # of a token of zeros: a scale has to be positive
        peak = values.abs().amax(-1) if case.kv_scales == "token" else values.abs().amax()
        scale = (peak.float() / largest).clamp_min(least)
        numbers = numbers.div_(scale[..., None])
    if dtype is torch.int8:
        numbers = numbers.round_()
    numbers = numbers.clamp_(-largest, largest).to(dtype)
    return _in_rows(numbers, scale) if case.inline_scales and scale is not None else (numbers, scale)


def _in_pairs(case: Case, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in int4, as write_pages stores it."""
    if case.kv_scales == "token":
        step, zero = int4_step(values)
        numbers = four_bits(values / step[..., None], zero[..., None]).view(PACKED)
        scale = (step.view(torch.int32) | zero).view(torch.float32)
    else:
        scale = (values.abs().amax() / LARGEST_INT4).clamp_min(torch.finfo(torch.float32).tiny)
        numbers = four_bits(values / scale, torch.full((), MIDDLE, device=values.device)).view(PACKED)
    return _in_rows(numbers, scale) if case.inline_scales else (numbers, scale)


def _in_rows(numbers: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as two views of rows [numbers | scale]."""
    width = numbers.shape[-1]
    rows = numbers.new_empty((*numbers.shape[:-1], width + SCALE_BYTES), dtype=torch.uint8)
    inside, beside = rows[..., :width].view(numbers.dtype), rows[..., width:].view(torch.float32)[..., 0]
    inside.copy_(numbers)
    beside.copy_(scale)
    return inside, beside


def dequantize(
    numbers: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, blocks: torch.Tensor | None = None
) -> torch.Tensor:
    """The values that stored numbers (…, width) stand for, rounded to `dtype`. scale: (…), () or None; blocks: of
    nvfp4, its blocks' scales."""
    if blocks is not None:
        values = of_blocks(numbers, blocks)
        return (values if scale is None else values.mul_(scale)).to(dtype)
    if numbers.dtype is PACKED and scale is not None:
        return widened_int4(numbers, INT4, scale, by_token=scale.ndim > 0).to(dtype)
    values = numbers.float()
    return (values if scale is None else values.mul_(scale[..., None])).to(dtype)
