"""Sparse latent attention (DSA): portattn attends the tokens that vLLM's indexer chose, in prefill and in decode."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from portattn.api import ops
from portattn.integrations.engine_warmup import Engine, RowLayout
from portattn.integrations.vllm import SPARSE_NAME
from portattn.integrations.vllm.caches import Capabilities
from portattn.integrations.vllm.metadata import StartUp, refuse_features
from portattn.schema.tensors import TensorSpec

DS_CACHE, DS_HEAD = "fp8_ds_mla", 576
# A request's most new tokens that count as decoding. vLLM attends more of them to all keys, while a list holds these.
DECODE_ROWS = 128


class PortattnSparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(DECODE_ROWS, supports_spec_as_decode=True)
        StartUp(kv_cache_spec, layer_names, vllm_config, device)


class PortattnSparseMLAImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    """One layer's attention over lists of tokens."""

    # Each layer turns tokens into slots by itself where a batch is not one of decodes, as FLASH_ATTN_MLA_SPARSE does.
    group_conversion_decode_only: ClassVar[bool] = True
    supports_pcp: bool = False
    has_cache = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        *arguments: Any,
        **latent: Any,
    ) -> None:
        refuse_features(
            SPARSE_NAME, "latent attention", alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            *arguments, **latent,
        )  # fmt: skip
        self.supports_quant_query_input = False  # queries stay in 16 bits over a cache of 8
        self.start_up: StartUp | None = None

    def specs(self, layer: Any, engine: Engine) -> list[dict[str, Any]]:
        """Return specs of `portattn.warmup` for every call that this layer can make."""
        assert self.topk_indices_buffer is not None
        rows, _ = flat_kv_row_view(layer.kv_cache, layer.kv_cache.shape[1])
        rank, rope, nope = self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim
        shared: dict[str, Any] = {"op": "mla_attention", "kv_pages": rows[:, None], "scale": self.scale}
        shared |= {"indices": TensorSpec(("T", self.topk_indices_buffer.shape[1]), None, torch.int32)}
        shared |= {"sizes": {"T": range(1, engine.tokens + 1)}}
        q_nope = RowLayout(self.num_heads, rank).spec("T", engine.dtype)
        ropes = (RowLayout(self.num_heads, rope, 0, nope + rope, nope), RowLayout(self.num_heads, rope))
        if not rope:
            return [shared | {"q_nope": q_nope, "q_rope": None}]
        return [shared | {"q_nope": q_nope, "q_rope": each.spec("T", engine.dtype)} for each in ropes]

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend q (T, H, R) and (T, H, E), or both in one, to the rows of the cache in topk_indices (T, k).

        valid_counts (T,) counts a list's tokens, which need not be its first places."""
        if self.start_up is not None:
            self.start_up.compile()
        parts: Any = q if isinstance(q, tuple) else (q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :])
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        out: Any = ops.mla_attention(
            parts[0], parts[1] if self.qk_rope_head_dim else None, rows[:, None], indices=topk_indices, scale=self.scale
        )
        return out, None


class PortattnSparseMLABackend(Capabilities):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", DS_CACHE]
    # Latent rows are written by vLLM's own operation.
    forward_includes_kv_cache_update: ClassVar[bool] = False

    @staticmethod
    def get_name() -> str:
        return SPARSE_NAME

    @staticmethod
    def get_impl_cls() -> type[PortattnSparseMLAImpl]:
        return PortattnSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PortattnSparseMLAMetadataBuilder]:
        return PortattnSparseMLAMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with blocks whole rows apart: vLLM's slots count rows."""
        return align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return False: the indexer's own scores follow the batch."""
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **more: Any
    ) -> str | None:
        if kv_cache_dtype == DS_CACHE and head_size != DS_HEAD:
            return f"a {DS_CACHE} cache needs a head size of {DS_HEAD}, not {head_size}"
        return super().supports_combination(head_size, dtype, kv_cache_dtype, *others, **more)
