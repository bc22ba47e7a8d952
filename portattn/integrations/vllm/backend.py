"""The backend of attention over full heads: what it takes, besides what both backends do (capabilities.py)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType

from portattn.integrations.vllm import NAME, caches, shards
from portattn.integrations.vllm.capabilities import Capabilities
from portattn.integrations.vllm.impl import PortattnImpl
from portattn.integrations.vllm.metadata import PortattnMetadataBuilder


class PortattnBackend(Capabilities):
    """Attention over vLLM's paged cache, and encoders' without one."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *caches.PLAIN, *caches.FLOAT8, *caches.TOKEN_SCALES, *caches.BLOCK_SCALES,
    ]  # fmt: skip

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PortattnImpl]:
        return PortattnImpl

    @staticmethod
    def get_builder_cls() -> type[PortattnMetadataBuilder]:
        return PortattnMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return caches.with_scales(spec)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, *arguments: Any, **named: Any) -> list[str]:
        """vLLM's own list of reasons, and what decode context parallelism does not go with."""
        return [*super().validate_configuration(*arguments, **named), *shards.reasons(**named)]
