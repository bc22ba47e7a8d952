"""The attention backend of models with keys and values of each head."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from portattn.api import ops
from portattn.integrations.sglang.capabilities import FLOAT8, refuse
from portattn.integrations.sglang.metadata import Batches, Metadata
from portattn.integrations.sglang.pools import Pools

# Algorithms whose worker builds its trees in the buffer that a backend lends it, in the layout that comes with it.
LENDING = ("EAGLE", "EAGLE3")


class Backend(AttentionBackend):
    """Extend, decode and verification over SGLang's pools, through `portattn.paged_attention`.

    runner  the ModelRunner, accepted by `capabilities.check`
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.max_context_len = runner.model_config.context_len
        self.is_draft_runner = runner.is_draft_worker
        self.drafted: int | None = get_spec().speculative_num_draft_tokens
        self.pools = Pools(runner)
        self.batches = Batches(self.pools, self.device, self.drafted, runner.model_config.is_encoder_decoder)
        self.forward_metadata: Metadata | None = None
        self._verify_mask: VerifyMask | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """What the layers of an eager forward share."""
        self._check_batch(forward_batch)
        self.forward_metadata = self.batches.eager(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers that captured graphs read, of the largest batch."""
        self.batches.allocate(max_bs, max_num_tokens)
        lends = get_spec().speculative_algorithm in LENDING and not self.is_draft_runner
        if lends and self.drafted:
            mode = TreeMaskMode.QLEN_ONLY
            size = tree_mask_numel(mode, max_bs, self.drafted, self.max_context_len)
            buffer = torch.zeros(size, dtype=torch.bool, device=self.device)
            self._verify_mask = VerifyMask(buffer=buffer, mode=mode, max_bs=max_bs)
            self.batches.mode = mode

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the graphs' buffers, before a capture and before each replay."""
        self._check_batch(forward_batch)
        # A replay reads what its capture read: the buffers' addresses. Python's object matters at capture alone.
        self.forward_metadata = self.batches.captured(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: all metadata is in the buffers before the graph runs."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the sequences that pad a graph's batch, as SGLang's other backends have it."""
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The buffer in which the draft worker builds its trees, n × n bools a sequence."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: trees are read when the verification's metadata is made, which is after the draft."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        """New tokens of each sequence, over all its tokens: q (T, Hq·D), k (T, Hk, D), v (T, Hk, Dv) → (T, Hq·Dv)."""
        sinks = self._sinks(given, q)
        if layer.attn_type is AttentionType.ENCODER_ONLY and not save_kv_cache and k is not None:
            return self._dense(q, k, v, layer, sinks)
        if save_kv_cache:
            self._save(k, v, layer, forward_batch)
        return self._attend(q, layer, sinks)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        """One new token of each sequence, over all its tokens: q (B, Hq·D) → (B, Hq·Dv)."""
        sinks = self._sinks(given, q)
        if save_kv_cache:
            self._save(k, v, layer, forward_batch)
        return self._attend(q, layer, sinks)

    def _check_batch(self, batch: Any) -> None:
        """Refuse a batch that the settings did not tell of."""
        mode, spec = batch.forward_mode, batch.spec_info
        if mode.is_decode() and spec is not None:
            refuse(
                "forward_mode", "DECODE of a draft", "is not supported: --speculative-draft-attention-backend triton"
            )
        if mode.is_dllm_extend():
            refuse("forward_mode", mode.name)
        for name in ("cross_attention_custom_mask", "multi_item_delimiter_indices"):
            if getattr(batch, name) is not None:
                refuse(
                    name, type(getattr(batch, name)).__name__, "must be None: --attention-backend flashinfer takes it"
                )
        if spec is not None and getattr(spec, "ragged_verify_layout", None) is not None:
            refuse("spec_info.ragged_verify_layout", spec.ragged_verify_layout, "must be None")

    def _sinks(self, given: dict[str, Any], q: torch.Tensor) -> torch.Tensor | None:
        """The sinks among the arguments of a layer's own call; every other one is refused by its name."""
        sinks = given.pop("sinks", None)
        for name, value in given.items():
            if value is not None and value is not False:
                refuse(name, type(value).__name__)
        if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
            sinks = sinks.float()
        return sinks

    def _save(self, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, batch: Any) -> None:
        """Store new keys and values, by the pool's own writer."""
        if k is None or v is None:
            return
        slots = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        loc = KVWriteLoc(slots, self._metadata.window_slots)
        if layer.k_scale is None or self._float8(layer) is None:
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        else:  # the pool divides its arguments in place
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k.clone(), v.clone(), layer.k_scale, layer.v_scale)

    def _float8(self, layer: Any) -> torch.dtype | None:
        dtype: torch.dtype = self.token_to_kv_pool.dtype
        return dtype if dtype in FLOAT8 else None

    @property
    def _metadata(self) -> Metadata:
        assert self.forward_metadata is not None, "init_forward_metadata comes before a forward"
        return self.forward_metadata

    def _attend(self, q: torch.Tensor, layer: Any, sinks: torch.Tensor | None) -> torch.Tensor:
        made = self._metadata
        keys, values, page_layout = self.pools.pages(layer.layer_id)
        table, lengths = made.table, made.lengths
        if layer.is_cross_attention:
            if made.cross_table is None or made.cross_lengths is None:
                refuse("encoder_lens", None, "must be given to a layer of cross-attention")
            table, lengths = made.cross_table, made.cross_lengths
        elif self.pools.in_window_pool(layer.layer_id):
            assert made.window_table is not None
            table = made.window_table
        named = self._layer(layer)
        if self._float8(layer) is not None:
            named |= {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if made.queries == 0:
            named |= {"cu_seqlens_q": made.cu_seqlens_q, "max_seqlen_q": made.max_seqlen_q}
        else:
            q = q.view(-1, made.queries, *q.shape[1:])
            named |= {"layout": "bshd", "tree_mask": made.tree}
        out: Any = ops.paged_attention(
            q, keys, values, table, lengths, sinks=sinks, page_layout=page_layout, **named
        )  # fmt: skip
        rows: torch.Tensor = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return rows

    def _dense(self, q: Any, k: Any, v: Any, layer: Any, sinks: torch.Tensor | None) -> torch.Tensor:
        """A whole sequence at once, of which nothing is stored."""
        made = self._metadata
        if made.cu_seqlens_q is None:
            refuse("save_kv_cache", False, "must be True but where whole sequences are encoded")
        cu, most = made.cu_seqlens_q, made.max_seqlen_q
        most = q.shape[0] if most is None else most
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        out: Any = ops.varlen_attention(q, k, v, cu, cu, most, most, sinks=sinks, **self._layer(layer))
        rows: torch.Tensor = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return rows

    def _layer(self, layer: Any) -> dict[str, Any]:
        """What a layer's own settings are called here."""
        causal = not layer.is_cross_attention and layer.attn_type is AttentionType.DECODER
        left = layer.sliding_window_size
        # SGLang's window does not count the query's own key, like ours. An encoder's layer looks as far ahead.
        windowed = left is not None and left > -1 and not layer.is_cross_attention
        return {
            "scale": layer.scaling,
            "causal": causal,
            "window": (left, 0 if causal else left) if windowed else None,
            "softcap": layer.logit_cap or None,
        }
