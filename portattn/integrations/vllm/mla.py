"""Multi-head latent attention: portattn decodes over the latent cache; prefill stays vLLM's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from portattn.api import ops
from portattn.integrations.engine_warmup import Engine, RowLayout, contract
from portattn.integrations.vllm import MLA_NAME, caches
from portattn.integrations.vllm.caches import Capabilities
from portattn.integrations.vllm.metadata import StartUp, refuse_features

TILE_TOKENS = 64  # of the Hopper kernel, whose tiles a page holds whole
MOST_UNIFORM_ROWS = 16  # of a request, in verification: batches of so many rows each are not packed


@dataclass
class PortattnMLADecodeMetadata(MLACommonDecodeMetadata):
    """The batch's decoding requests, its first ones; max_query_len may exceed the longest one's rows."""

    query_start_loc: torch.Tensor
    max_query_len: int


class PortattnMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's builder, with rows of different numbers in one decode batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        *more: Any,
        **named: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *more, **named)
        StartUp(kv_cache_spec, layer_names, vllm_config, device, rows=self.reorder_batch_threshold)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return single-token graphs for decode context parallelism: requests of several rows are prefill there."""
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def _build_decode(self, *arguments: Any, **named: Any) -> PortattnMLADecodeMetadata:
        base = super()._build_decode(*arguments, **named)
        return PortattnMLADecodeMetadata(
            block_table=base.block_table,
            seq_lens=base.seq_lens,
            dcp_tot_seq_lens=base.dcp_tot_seq_lens,
            query_start_loc=named["query_start_loc_device"],
            max_query_len=named["max_query_len"],
        )


class PortattnMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """One layer's decoding. Its LSE is a natural logarithm over the keys in this rank's cache."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

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
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **latent,
        )  # fmt: skip
        # Prefill would not have them: it is not portattn's.
        refuse_features(
            MLA_NAME, "latent attention", alibi_slopes=alibi_slopes, sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap, attn_type=None if attn_type == AttentionType.DECODER else attn_type,
        )  # fmt: skip
        self.supports_quant_query_input = False  # queries stay in 16 bits over a cache of 8
        self.invariant = envs.VLLM_BATCH_INVARIANT
        self.start_up: StartUp | None = None

    has_cache = True

    def specs(self, layer: Any, engine: Engine) -> list[dict[str, Any]]:
        """Return specs of `portattn.warmup` for every call that this layer can make."""
        pages, scale = self._pages(layer.kv_cache, self.kv_cache_dtype, layer._k_scale)
        cache, heads, rank = pages.squeeze(2), self.num_heads * self.dcp_world_size, self.kv_lora_rank
        rope, nope = self.qk_rope_head_dim, self.qk_nope_head_dim
        shared = self._shared(cache, layer) | {"op": "mla_attention", "kv_pages": cache}
        whole = rank + rope
        queries = [
            {"q_nope": RowLayout(heads, rank), "q_rope": RowLayout(heads, rope)},
            {"q_nope": RowLayout(heads, rank), "q_rope": RowLayout(heads, rope, 0, nope + rope, nope)},
            {"q_nope": RowLayout(heads, rank, 0, whole), "q_rope": RowLayout(heads, rope, 0, whole, rank)},
        ]
        found = []
        for rows in queries:
            causal = [{"causal": not both} for both in range(1 + engine.non_causal)]
            found.append(shared | engine.uniform(rows))
            counts = range(2, min(engine.rows, MOST_UNIFORM_ROWS) + 1)
            found += [shared | engine.uniform(rows, count) | mask for count in counts for mask in causal]
            found += [shared | engine.packed(rows, single=False) | mask for mask in causal]
        written = {"k_pages": pages[..., :rank], "v_pages": pages[..., rank:], "k_scale": scale, "v_scale": scale}
        new = RowLayout(1, rope), RowLayout(1, rope, whole, 0, rank)
        return found + [written | engine.new_tokens(RowLayout(1, rank), v) for v in new]

    def _shared(self, cache: torch.Tensor, layer: Any) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "kv_scale": None if cache.dtype.itemsize > 1 else layer._k_scale,
            "return_lse": True,
        }

    def _pages(
        self, kv_cache: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a cache's rows (P, page, 1, R + E) in the dtype that they are stored in, and their scale."""
        dtype = caches.stored_dtype(kv_cache_dtype)
        return (kv_cache if dtype is None else kv_cache.view(dtype)).unsqueeze(2), None if dtype is None else k_scale

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latent rows (tokens, R) and rotary rows (tokens, 1, E), side by side, to their slots."""
        if self.start_up is not None:
            self.start_up.compile()
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        rows, scale = self._pages(kv_cache, kv_cache_dtype, k_scale)
        scale = None if skip_scale else scale
        rank = kv_c_normed.shape[-1]
        with contract(self.invariant):
            ops.write_pages(
                kv_c_normed[:tokens, None], k_pe.reshape(k_pe.shape[0], 1, -1)[:tokens], rows[..., :rank],
                rows[..., rank:], slots, k_scale=scale, v_scale=scale,
            )  # fmt: skip

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode queries (tokens, H, R) and (tokens, H, E), or both in one; return the LSE if ranks are merged."""
        batch = attn_metadata.decode
        assert isinstance(batch, PortattnMLADecodeMetadata)
        nope, rope = q if isinstance(q, tuple) else (q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :])
        cache = kv_c_and_k_pe_cache
        shared = self._shared(cache, layer)
        causal = attn_metadata.causal and batch.max_query_len > 1
        shape = batch.seq_lens.shape[0], batch.max_query_len
        uniform = nope.shape[0] == math.prod(shape) and shape[1] <= MOST_UNIFORM_ROWS
        with contract(self.invariant):
            if uniform:
                out, lse = ops.mla_attention(
                    nope.unflatten(0, shape), rope.unflatten(0, shape), cache, batch.block_table, batch.seq_lens,
                    causal=causal, layout="bshd", **shared,
                )  # fmt: skip
                return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
            out, lse = ops.mla_attention(
                nope, rope, cache, batch.block_table, batch.seq_lens, cu_seqlens_q=batch.query_start_loc,
                max_seqlen_q=batch.max_query_len, causal=causal, **shared,
            )  # fmt: skip
        return out, lse.transpose(0, 1)


class PortattnMLABackend(Capabilities, MLACommonBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[PortattnMLAImpl]:
        return PortattnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PortattnMLAMetadataBuilder]:
        return PortattnMLAMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the default if it is a multiple of 64 tokens, a tile of the Hopper kernel, and 64 otherwise."""
        return default_block_size if default_block_size % TILE_TOKENS == 0 else TILE_TOKENS

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []
