"""Random caches of narrow numbers, with the scales that they are stored under."""

from __future__ import annotations

import torch

from portattn.schema.problem import Problem
from portattn.schema.problem_limits import DS_GROUP, DS_MLA, NV_BLOCK, NVFP4
from portattn.schema.tensors import INT4, KV_DTYPE, KV_STORED

SPREAD = 2.0  # scales differ by factors up to this from the one that fills the format's range
_LARGEST = {"int8": 127.0}


def stored(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator, block: int = 1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys or values (batch, Hk, rows, D) in the problem's format, as a Call has them, and their scales.

    block   so many tokens of the first head share a scale where each token has one: as `quantize` makes them, which
            some kernels have a way of their own for

    unused  (batch, Hk, rows) bool: no attended key lies there. What is NaN in `values` there is NaN in the format where
            it has one; of integers, and of a scale for each token, the scale is NaN, infinite, negative or 0 instead

    Scales are (B, Hk), or (batch, Hk, rows) for each token; None where there are none, and the numbers are the values.
    """
    if p.kv_format == DS_MLA:
        return _latent_rows(p, values, unused, generator), None
    if p.kv_format == INT4:
        return _pairs(p, values, unused, generator)
    kind, dtype = p.kv_format, KV_DTYPE[p.kv_format]
    largest = _LARGEST.get(kind) or torch.finfo(dtype).max
    if p.kv_scales == "none":
        scale, by_row = None, torch.ones(())
    else:
        shape = (p.batch, p.heads_k) if p.kv_scales == "head" else values.shape[:3]
        if p.op == "mla_attention" and p.kv_scales == "head":
            shape = (1, 1)  # all latent rows have one
        filling = float(values.nan_to_num(0.0).abs().max()) / largest if values.numel() else 1.0
        scale = max(filling, 1e-6) * (1.0 + (SPREAD - 1.0) * torch.rand(shape, generator=generator))
        if p.kv_scales == "token" and block > 1:
            scale[:, :1] = scale[:, :1, ::block].repeat_interleave(block, dim=2)[..., : scale.shape[2]]
        by_row = scale[..., None]
        if p.kv_scales == "head":  # a page's tokens may be any sequence's: all numbers are stored under one scale
            by_row = scale.max().expand(1, 1, 1, 1) if scale.numel() else torch.ones(())
    numbers = (values.float() / by_row).clamp(-largest, largest)
    if kind == "int8":
        numbers = numbers.round().nan_to_num(0.0)
    if p.kv_scales == "token":
        assert scale is not None
        scale = _wild(scale, unused, generator)
    if p.op == "mla_attention" and scale is not None and p.kv_scales == "head":
        scale = scale.expand(p.batch, 1)
    return numbers.to(dtype).view(KV_STORED), scale


def in_blocks(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """As `stored`, in nvfp4: beside bytes and scales the bytes of the blocks' scales (batch, Hk, rows, D / 16).

    A row without an attended key has scales that are NaN, negative or 448, and any numbers.
    """
    assert p.kv_format == NVFP4
    scale, by_row = None, torch.ones(())
    if p.kv_scales == "head":
        scale = 0.01 + torch.rand((p.batch, p.heads_k), generator=generator)
        by_row = scale.max() if scale.numel() else by_row  # a page's tokens may be any sequence's
    blocks = (values.nan_to_num(0.0).float() / by_row).unflatten(-1, (-1, NV_BLOCK))
    factors = (blocks.abs().amax(-1) / 6.0).to(torch.float8_e4m3fn)
    numbers = blocks / factors.float().clamp(min=2.0**-9)[..., None]
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (numbers.flatten(-2).abs()[..., None] - levels).abs().argmin(-1)
    codes = torch.where(values.nan_to_num(0.0) < 0, codes + 8, codes)
    wild = torch.tensor([0x7F, 0xFF, 0xC8, 0x7E], dtype=torch.uint8)
    drawn = wild[torch.randint(len(wild), factors.shape, generator=generator)]
    bytes_ = torch.where(unused[..., None], drawn, factors.view(torch.uint8)).view(KV_STORED)
    codes = torch.where(unused[..., None], torch.randint(16, codes.shape, generator=generator), codes)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(KV_STORED), scale, bytes_


def _pairs(
    p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (…, D) as bytes of two int4 numbers each, and their scales, under which the largest values are too large.

    A token's scale holds the number that stands for 0, any of the sixteen; so some rows have numbers of one sign.
    """
    filling = float(values.nan_to_num(0.0).abs().max()) / 15.0 if values.numel() else 1.0
    shape = (p.batch, p.heads_k) if p.kv_scales == "head" else values.shape[:3]
    scale = max(filling, 1e-6) * (1.0 + (SPREAD - 1.0) * torch.rand(shape, generator=generator))
    zero = torch.full((1, 1, 1), 8)
    by_row = scale.max().expand(1, 1, 1) if p.kv_scales == "head" and scale.numel() else scale
    if p.kv_scales == "token":
        middle = torch.rand(shape, generator=generator) < 0.7  # most have room on both sides of 0
        any_ = torch.randint(16, shape, generator=generator)
        zero = torch.where(middle, 6 + any_ % 4, any_)
        scale = ((scale.view(torch.int32) & ~15) | zero.int()).view(torch.float32)
    elif not scale.numel():
        by_row = torch.ones(1, 1, 1)
    numbers = (values.float() / by_row[..., None]).round() + zero[..., None]
    codes = numbers.clamp(0, 15).nan_to_num(15.0).to(torch.int32)
    stored = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(KV_STORED)
    return stored, _wild(scale, unused, generator) if p.kv_scales == "token" else scale


def _wild(scale: torch.Tensor, unused: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The scales, but where they are unused what no scale may be."""
    wild = torch.tensor([float("nan"), float("inf"), -1.0, 0.0, -float("inf")])
    return torch.where(unused, wild[torch.randint(len(wild), scale.shape, generator=generator)], scale)


def _latent_rows(p: Problem, values: torch.Tensor, unused: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Latent rows (P, 1, page, D) as the bytes of fp8_ds_mla rows.

    Each group has a scale of its own, a power of two: with such scales kernels' rows are exact in bfloat16, as the
    budget of an LSE asks (docs/low-precision.md).
    """
    numbers = values[..., : p.head_dim_v].float().unflatten(-1, (-1, DS_GROUP))
    largest = torch.finfo(torch.float8_e4m3fn).max
    spread = torch.randint(2, numbers.shape[:-1], generator=generator)
    scale = torch.exp2((numbers.nan_to_num(0.0).abs().amax(dim=-1) / largest).clamp(min=1e-6).log2().ceil() + spread)
    codes = (numbers / scale[..., None]).clamp(-largest, largest).to(torch.float8_e4m3fn).flatten(-2)
    scale = _wild(scale, unused[..., None].expand_as(scale), generator)
    rotary = values[..., p.head_dim_v :].to(torch.bfloat16).contiguous()
    parts = (codes.view(KV_STORED), scale.contiguous().view(KV_STORED), rotary.view(KV_STORED))
    return torch.cat(parts, dim=-1)
