"""Keys, values and scales inside vLLM's cache tensors.

A layer's cache is (blocks, Hk, block, content), of any strides: the physical orders that vLLM knows differ in them
alone. A token's content is [K | V], or with scales for each token and head [K | float32 | V | float32].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.platforms import current_platform

from portattn.api import ops
from portattn.errors import ArgumentError

# cache_dtype of vLLM -> how its numbers are read; None where they are of the dtype that the tensor has.
PLAIN = ("auto", "float16", "bfloat16")
FLOAT8 = {"fp8": None, "fp8_e4m3": None, "fp8_e5m2": torch.float8_e5m2}  # None: the platform's e4m3
TOKEN_SCALES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": None}
SCALE_BYTES = 4  # a float32


@dataclass
class Views:
    """One cache tensor as portattn takes it: pages (P, Hk, page, D) and, where tokens have scales, (P, Hk, page)."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def stored(cache_dtype: str) -> torch.dtype | None:
    """The dtype of a quantised cache's numbers on this platform; None for a cache in 16 or 32 bits."""
    if cache_dtype in PLAIN:
        return None
    return (FLOAT8 | TOKEN_SCALES)[cache_dtype] or current_platform.fp8_dtype()


def views(cache: torch.Tensor, cache_dtype: str, head_size: int) -> Views:
    """Split a layer's cache tensor. No copy is made.

    Raises ArgumentError where the tensor is not what the dtype and the head size say.
    """
    width = SCALE_BYTES if cache_dtype in TOKEN_SCALES else 0
    if cache.ndim != 4 or cache.shape[-1] <= head_size + 2 * width:
        limit = f"must be (blocks, heads, block, content) with a content of keys ({head_size}), values and scales"
        raise ArgumentError("PORTATTN", "kv_cache.shape", tuple(cache.shape), limit)
    dtype = stored(cache_dtype)
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


def with_token_scales(spec: Any) -> Any:
    """The cache's specification with room for scales behind keys and values, where its mode has them."""
    if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
        return spec
    return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * SCALE_BYTES)


def write(key: torch.Tensor, value: torch.Tensor, to: Views, slots: torch.Tensor, layer: Any) -> None:
    """Write new tokens to their slots; those with slot -1 are padding, and so are rows without a slot."""
    tokens = slots.shape[0]
    k_scale, v_scale = scales(to, layer)
    ops.write_pages(
        key[:tokens], value[:tokens], to.k, to.v, slots, k_scale=k_scale, v_scale=v_scale, page_layout="hpd"
    )


def scales(of: Views, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of a cache: those in it, the layer's, or none."""
    if of.k.dtype.itemsize > 1:
        return None, None
    if of.k_scale is not None:
        return of.k_scale, of.v_scale
    return layer._k_scale, layer._v_scale
