"""Keys, values and scales inside vLLM's cache tensors, and the capabilities that both backends share.

A cache is (blocks, Hk, block, content), of any strides; content is [K | V], or with token scales [K | float32 | V |
float32]; rows of int4 are rotated, two numbers a byte. An nvfp4 cache is (blocks, 2 Hk, block, D / 2 + D / 16), a
block's bytes [K | its scales | V | its scales], as in vLLM's FlashInfer from 0.32 on, except on sm_100, whose value
scales have another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from portattn.api import ops
from portattn.errors import ArgumentError
from portattn.integrations.vllm import NAME
from portattn.planning.planner import wrong_settings
from portattn.planning.registry import parse_target
from portattn.schema.problem_limits import FORMATS, MAX_HEAD_DIM

# cache_dtype of vLLM -> how its numbers are read; None where they are of the dtype that the tensor has.
PLAIN = ("auto", "float16", "bfloat16")
FLOAT8 = {"fp8": None, "fp8_e4m3": None, "fp8_e5m2": torch.float8_e5m2}  # None: the platform's e4m3
INT4 = "int4_per_token_head"
TOKEN_SCALES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": None, INT4: torch.uint8}
SCALE_BYTES = 4  # a float32
BLOCK_SCALES = ("nvfp4",)  # two e2m1 numbers a byte, and an e4m3 scale for each 16 of a row
NV_BLOCK = FORMATS["nvfp4"].block


@dataclass
class Views:
    """One cache tensor as portattn takes it: pages (P, Hk, page, D), of 4 bits D / 2 bytes, and scales, if any."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None
    rotated: bool = False


def stored_dtype(cache_dtype: str) -> torch.dtype | None:
    """Return the dtype of a quantized cache's numbers on this platform; None for a cache in 16 or 32 bits."""
    if cache_dtype in PLAIN:
        return None
    return (FLOAT8 | TOKEN_SCALES)[cache_dtype] or current_platform.fp8_dtype()


def per_byte(cache_dtype: str) -> int:
    return FORMATS["int4"].per_byte if cache_dtype == INT4 else 1


def rotate(rows: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Return rows (…, D) in the basis of vLLM's int4 caches, longer by the root of gain(D); or the inverse."""
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    turned: torch.Tensor = single_rht(rows.float(), inverse)
    return (turned / gain(rows.shape[-1]) if inverse else turned).to(rows.dtype)


def gain(width: int) -> int:
    """Return the factor by which a product of two rotated rows is too large: the largest power of 2 in `width`."""
    return width & -width


def views(cache: torch.Tensor, cache_dtype: str, head_size: int) -> Views:
    """Split a layer's cache tensor without a copy, or raise ArgumentError if the dtype and head size do not fit it."""
    if cache_dtype in BLOCK_SCALES:
        return _views_of_blocks(cache, cache_dtype, head_size)
    width = SCALE_BYTES if cache_dtype in TOKEN_SCALES else 0
    head_size //= per_byte(cache_dtype)
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
    return Views(k, v, k_scale, v_scale, rotated=cache_dtype == INT4)


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
    return head_size // 2 + head_size // NV_BLOCK


def with_scales(spec: Any) -> Any:
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
    numbers = spec.head_size + spec.head_size_v
    content = numbers // per_byte(spec.kv_quant_mode.name.lower()) + 2 * SCALE_BYTES
    return replace(spec, state_content_bytes=content)


def layout_asked_for() -> str | None:
    """Return the layout that VLLM_KV_CACHE_LAYOUT names, which vLLM takes or refuses; None for its own choice."""
    return envs.VLLM_KV_CACHE_LAYOUT


def wrong_layout(cache_dtype: str, name: str | None) -> str | None:
    """Return the layouts that a cache of the dtype needs, unless the named layout is one of them (None)."""
    layout = KVCacheLayout.__members__.get(name or "")  # no member: NHD and HND, which are LBNHC and LBHNC
    if cache_dtype not in BLOCK_SCALES or layout is None or layout.is_block_compact:
        return None
    fit = ", ".join(one.name for one in KVCacheLayout if one.is_block_compact)
    return f"a layout that keeps a block's heads together (VLLM_KV_CACHE_LAYOUT: {fit})"


def refuse_layout(spec: Any, vllm_config: Any) -> None:
    """Raise ArgumentError for an unsupported layout of vLLM's cache, with the supported ones, before it is made."""
    if not spec.kv_quant_mode.is_nvfp4:
        return
    layout = vllm_config.cache_config.kv_cache_layout
    needed = wrong_layout("nvfp4", layout)
    if needed is not None:
        raise ArgumentError(NAME, "cache_config.kv_cache_layout", layout, f"must be {needed}, for nvfp4")


def write(key: torch.Tensor, value: torch.Tensor, to: Views, slots: torch.Tensor, layer: Any) -> None:
    """Write new tokens to their slots; tokens with slot -1, or without a slot, are padding."""
    key, value = key[: slots.shape[0]], value[: slots.shape[0]]
    if to.rotated:
        key, value = rotate(key), rotate(value)
    k_scale, v_scale = scales(to, layer)
    ops.write_pages(
        key, value, to.k, to.v, slots, k_scale=k_scale, v_scale=v_scale,
        k_block_scale=to.k_block_scale, v_block_scale=to.v_block_scale, page_layout="hpd",
    )  # fmt: skip


def scales(of: Views, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if of.k.dtype.itemsize > 1:
        return None, None
    if of.k_scale is not None:
        return of.k_scale, of.v_scale
    return layer._k_scale, layer._v_scale


BLOCK = 16  # tokens: kernels read pages of any size, but none smaller was tried with vLLM


class Capabilities(AttentionBackend):
    """The answers; a backend lists it before vLLM's own base class, so that these come first."""

    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % BLOCK == 0

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: vLLM asks for adaptive verification, whose graphs mix requests of different numbers of rows."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether kernels run on the chip, by its file; other vendors' numbers are no CUDA capabilities."""
        if capability is None or not current_platform.is_cuda():
            return True
        try:
            target = parse_target(f"cuda:sm_{capability.major}{capability.minor}")
        except ArgumentError:  # a chip that portattn has no file of
            return False
        return not target.arch.refused

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **more: Any
    ) -> str | None:
        cache = kv_cache_dtype or "auto"
        if cache in ("float16", "bfloat16") and getattr(torch, cache) != dtype:
            return f"a {cache} cache needs queries of {cache}, and they are {dtype}"
        if cache not in PLAIN and dtype == torch.float32:
            return f"a {cache} cache needs queries of float16 or bfloat16, and they are {dtype}"
        words = SCALE_BYTES * per_byte(cache)
        if cache in TOKEN_SCALES and head_size % words:
            return f"a {cache} cache needs a head size that is a multiple of {words}, not {head_size}"
        if cache in BLOCK_SCALES and head_size % NV_BLOCK:
            return f"a {cache} cache needs a head size that is a multiple of {NV_BLOCK}, not {head_size}"
        asked = layout_asked_for()
        needed = wrong_layout(cache, asked)
        if needed is not None:
            return f"a {cache} cache needs {needed}, not {asked}"
        return None

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        """Return a wrong setting, and vLLM's own list of reasons."""
        wrong = wrong_settings("portattn.integrations.vllm")
        return [*filter(None, [wrong]), *super().validate_configuration(*arguments, **named)]
