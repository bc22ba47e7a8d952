"""Keys, values and scales inside vLLM's cache tensors.

A layer's cache is (blocks, Hk, block, content), of any strides: the physical orders that vLLM knows differ in them
alone. A token's content is [K | V], or with scales for each token and head [K | float32 | V | float32].

Of nvfp4 it is (blocks, 2 Hk, block, D / 2 + D / 16), whose blocks' bytes are [K | its scales | V | its scales]: each of
the four (Hk, block, …) or (block, Hk, …), as the strides say. FlashInfer's backend of vLLM has the same, from 0.32 on,
but on sm_100, where the scales of values are in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from portattn.api import ops
from portattn.errors import ArgumentError
from portattn.integrations.vllm import NAME
from portattn.schema.problem_limits import NV_BLOCK

# cache_dtype of vLLM -> how its numbers are read; None where they are of the dtype that the tensor has.
PLAIN = ("auto", "float16", "bfloat16")
FLOAT8 = {"fp8": None, "fp8_e4m3": None, "fp8_e5m2": torch.float8_e5m2}  # None: the platform's e4m3
TOKEN_SCALES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": None}
SCALE_BYTES = 4  # a float32
BLOCK_SCALES = ("nvfp4",)  # two e2m1 numbers a byte, and an e4m3 scale for each 16 of a row


@dataclass
class Views:
    """One cache tensor as portattn takes it: pages (P, Hk, page, D), and scales (P, Hk, page) where tokens have them.

    Of nvfp4 pages are (P, Hk, page, D / 2) bytes, with the scales (P, Hk, page, D / 16) of their blocks.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None


def stored_dtype(cache_dtype: str) -> torch.dtype | None:
    """The dtype of a quantised cache's numbers on this platform; None for a cache in 16 or 32 bits."""
    if cache_dtype in PLAIN:
        return None
    return (FLOAT8 | TOKEN_SCALES)[cache_dtype] or current_platform.fp8_dtype()


def views(cache: torch.Tensor, cache_dtype: str, head_size: int) -> Views:
    """Split a layer's cache tensor. No copy is made.

    Raises ArgumentError where the tensor is not what the dtype and the head size say.
    """
    if cache_dtype in BLOCK_SCALES:
        return _views_of_blocks(cache, cache_dtype, head_size)
    width = SCALE_BYTES if cache_dtype in TOKEN_SCALES else 0
    if cache.ndim != 4 or cache.shape[-1] <= head_size + 2 * width:
        limit = f"must be (blocks, heads, block, content) with a content of keys ({head_size}), values and scales"
        raise ArgumentError("PORTATTN", "kv_cache.shape", tuple(cache.shape), limit)
    dtype = stored_dtype(cache_dtype)
    if dtype is not None and cache.element_size() != 1:
        limit = f"must have one byte for {cache_dtype}"
        raise ArgumentError("PORTATTN", "kv_cache.dtype", cache.dtype, limit)
    k, v = cache[..., :head_size], cache[..., head_size + width : cache.shape[-1] - width]
    if dtype is not None:
        k, v = k.view(dtype), v.view(dtype)
    if not width:
        return Views(k, v)
    k_scale, v_scale = (
        cache[..., start : start + width].view(torch.float32)[..., 0] for start in (head_size, cache.shape[-1] - width)
    )
    return Views(k, v, k_scale, v_scale)


def _views_of_blocks(cache: torch.Tensor, cache_dtype: str, head_size: int) -> Views:
    content = bytes_in_blocks(head_size)
    if cache.ndim != 4 or cache.shape[1] % 2 or cache.shape[3] != content or cache.element_size() != 1:
        limit = f"must be (blocks, 2 * heads, block, {content}) of one byte for {cache_dtype} and heads of {head_size}"
        raise ArgumentError("PORTATTN", "kv_cache.shape", tuple(cache.shape), limit)
    blocks, slots, tokens, _ = cache.shape
    heads, half = slots // 2, slots // 2 * tokens * content
    by_head = cache.stride()[1:] == (tokens * content, content, 1)
    if not by_head and cache.stride()[1:] != (content, slots * content, 1):
        limit = f"must be those of blocks without gaps, by heads or by tokens, for {cache_dtype}"
        raise ArgumentError("PORTATTN", "kv_cache.stride()", cache.stride(), limit)
    memory = cache.view(torch.uint8).as_strided((blocks, 2 * half), (cache.stride(0), 1))
    found = []
    for side in memory.split(half, 1):
        for part in side.split((heads * tokens * (head_size // 2), heads * tokens * (head_size // NV_BLOCK)), 1):
            rows = part.unflatten(1, (heads, tokens, -1) if by_head else (tokens, heads, -1))
            found.append(rows if by_head else rows.transpose(1, 2))
    k, k_scales, v, v_scales = found
    return Views(
        k, v, k_block_scale=k_scales.view(torch.float8_e4m3fn), v_block_scale=v_scales.view(torch.float8_e4m3fn)
    )


def bytes_in_blocks(head_size: int) -> int:
    """Bytes of a token's keys, or values, of one head in nvfp4, scales included."""
    return head_size // 2 + head_size // NV_BLOCK


def with_scales(spec: Any) -> Any:
    """The cache's specification with room for the scales that its mode has for each token, or for blocks of a row."""
    if spec.state_content_bytes is not None:
        return spec
    if spec.kv_quant_mode.is_nvfp4:
        if spec.head_size_v != spec.head_size:
            limit = f"must be that of keys, {spec.head_size}, with nvfp4"
            raise ArgumentError("PORTATTN", "head_size_v", spec.head_size_v, limit)
        content = bytes_in_blocks(spec.head_size)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)
    if not spec.kv_quant_mode.is_per_token_head:
        return spec
    return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * SCALE_BYTES)


def layout_asked_for() -> str | None:
    """The layout that VLLM_KV_CACHE_LAYOUT names, which vLLM then takes or refuses; None where it chooses itself."""
    return envs.VLLM_KV_CACHE_LAYOUT


def wrong_layout(cache_dtype: str, name: str | None) -> str | None:
    """The layouts that a cache of the dtype needs, where the one of this name is none of them; None where it is."""
    layout = KVCacheLayout.__members__.get(name or "")  # no member: NHD and HND, which are LBNHC and LBHNC
    if cache_dtype not in BLOCK_SCALES or layout is None or layout.is_block_compact:
        return None
    fit = ", ".join(one.name for one in KVCacheLayout if one.is_block_compact)
    return f"a layout that keeps a block's heads together (VLLM_KV_CACHE_LAYOUT: {fit})"


def refuse_layout(spec: Any, vllm_config: Any) -> None:
    """Refuse the layout that vLLM took for a cache, before the cache is made.

    Raises ArgumentError with the layout's name and those that would do.
    """
    if not spec.kv_quant_mode.is_nvfp4:
        return
    layout = vllm_config.cache_config.kv_cache_layout
    needed = wrong_layout("nvfp4", layout)
    if needed is not None:
        raise ArgumentError(NAME, "cache_config.kv_cache_layout", layout, f"must be {needed}, for nvfp4")


def write(key: torch.Tensor, value: torch.Tensor, to: Views, slots: torch.Tensor, layer: Any) -> None:
    """Write new tokens to their slots; those with slot -1 are padding, and so are rows without a slot."""
    tokens = slots.shape[0]
    k_scale, v_scale = scales(to, layer)
    ops.write_pages(
        key[:tokens], value[:tokens], to.k, to.v, slots, k_scale=k_scale, v_scale=v_scale,
        k_block_scale=to.k_block_scale, v_block_scale=to.v_block_scale, page_layout="hpd",
    )  # fmt: skip


def scales(of: Views, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of a cache: those in it, the layer's, or none."""
    if of.k.dtype.itemsize > 1:
        return None, None
    if of.k_scale is not None:
        return of.k_scale, of.v_scale
    return layer._k_scale, layer._v_scale
