"""The attention backend of models with multi-head latent attention (DeepSeek's, Kimi's and others)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from portattn.api import ops
from portattn.integrations.sglang.backend import PagedBackend
from portattn.integrations.sglang.capabilities import refuse


class LatentBackend(PagedBackend):
    """Extend, decode and verification over a latent pool, through `portattn.mla_attention`.

    SGLang's layers come in two kinds. In the absorbed one all heads share a row of R + E numbers, of which the first R
    are the values. The other has keys and values of each head, computed of a prompt that has no prefix in the cache.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.rank: int = self.token_to_kv_pool.kv_lora_rank

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        """q (T, H·(R + E)), or (T, H·R) with q_rope (T, H·E) → (T, H·R); of the other kind as in Backend."""
        q_rope, k_rope = given.pop("q_rope", None), given.pop("k_rope", None)
        sinks = self._sinks(given, q)
        if layer.v_head_dim != self.rank:
            if forward_batch.attn_attend_prefix_cache or forward_batch.mha_one_shot:
                refuse("mha_one_shot", True, "keys and values of a prefix must not be expanded")
            if save_kv_cache:
                refuse("save_kv_cache", True, "must be False where keys and values of each head are given")
            return self._dense(q, k, v, layer, sinks)
        if save_kv_cache and k is not None:
            self._save_latent(k, k_rope, layer, forward_batch)
        return self._attend_latent(q, q_rope, layer, sinks)

    forward_decode = forward_extend

    def _save_latent(self, k: torch.Tensor, k_rope: torch.Tensor | None, layer: Any, batch: Any) -> None:
        if k_rope is not None:
            k = torch.cat((k.view(-1, 1, self.rank), k_rope.view(k.shape[0], 1, layer.qk_head_dim - self.rank)), dim=-1)
        if layer.k_scale is not None and self._float8(layer) is not None:
            k = k / layer.k_scale
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc), k, k[..., : self.rank])

    def _attend_latent(
        self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        made, heads = self._metadata, layer.tp_q_head_num
        named = self._layer(layer)
        rope = layer.qk_head_dim - self.rank
        if q_rope is None:
            q_nope, q_rope = q.reshape(-1, heads, layer.qk_head_dim).split((self.rank, rope), dim=-1)
        else:
            q_nope = q.reshape(-1, heads, self.rank)
            q_rope = q_rope.reshape(q_nope.shape[0], heads, rope)
        if made.queries == 0:
            named |= {"cu_seqlens_q": made.cu_seqlens_q, "max_seqlen_q": made.max_seqlen_q}
        else:
            q_nope, q_rope = (part.unflatten(0, (-1, made.queries)) for part in (q_nope, q_rope))
            named |= {"layout": "bshd", "tree_mask": made.tree}
        pages = self.pools.latent_pages(layer.layer_id)
        float8 = self._float8(layer) is not None
        out: Any
        if rope:
            if float8:
                named["kv_scale"] = layer.k_scale
            out = ops.mla_attention(q_nope, q_rope, pages, made.table, made.lengths, sinks=sinks, **named)
        else:  # nothing is rotated: all of a row is key and value
            if float8:
                named |= {"k_scale": layer.k_scale, "v_scale": layer.k_scale}
            both = pages.unsqueeze(2)
            out = ops.paged_attention(
                q_nope, both, both, made.table, made.lengths, sinks=sinks, page_layout="phd", **named
            )
        rows: torch.Tensor = out.reshape(-1, heads * self.rank)
        return rows
