"""SGLang's attention backends: for models with keys and values of each head, and with multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

from portattn.api import ops
from portattn.api.masks import tree_mask
from portattn.integrations.engine_warmup import contract
from portattn.integrations.sglang.capabilities import FLOAT8, refuse


class Pools:
    def __init__(self, runner: Any) -> None:
        self.page_size: int = runner.page_size
        self.kv = runner.token_to_kv_pool
        self.req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.context: int = self.req_to_token.shape[1]
        self.has_window_pool = isinstance(self.kv, SWAKVPool) and self.kv.swa_layer_nums > 0

    @property
    def columns(self) -> int:
        """Columns of every page table: tables of several widths would be as many shape classes to warm up."""
        return -(-self.context // self.page_size)

    def in_window_pool(self, layer_id: int) -> bool:
        return self.has_window_pool and bool(self.kv.layers_mapping[layer_id][1])

    def fill_table(self, out: torch.Tensor, requests: torch.Tensor, start: torch.Tensor | None = None) -> None:
        """Write the requests' page ids to `out` (B, columns) int32, none beyond a request's row.

        `start` (B,), for pages of one token, skips tokens: an encoder-decoder request has its encoder's tokens first.
        """
        if start is None:
            firsts = self.req_to_token[:, :: self.page_size][:, : out.shape[1]]
            if out.is_contiguous():
                torch.index_select(firsts, 0, requests, out=out)
            else:  # the first columns of a table
                out.copy_(firsts.index_select(0, requests))
        else:
            columns = start.long()[:, None] + torch.arange(out.shape[1], device=out.device)
            out.copy_(self.req_to_token[requests.long()[:, None], columns.clamp_(max=self.context - 1)])
        if self.page_size > 1:
            out.div_(self.page_size, rounding_mode="floor")

    def fill_window_table(self, out: torch.Tensor, table: torch.Tensor) -> None:
        """Write the window pool's counterparts of `table`'s pages to `out`; 0 for a dropped page: no query sees it."""
        slots = self.kv.translate_loc_from_full_to_swa(table.long() * self.page_size)
        out.copy_(slots.div(self.page_size, rounding_mode="floor").clamp_(min=0))

    def pages(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Return keys and values of a layer, (P, page, Hk, D) and (P, page, Hk, Dv) or heads first, and page_layout."""
        keys, values = self.kv.get_kv_buffer(layer_id)
        if keys.ndim == 4:
            return keys, values, "hpd"
        return self._in_pages(keys), self._in_pages(values), "phd"

    def latent_pages(self, layer_id: int) -> torch.Tensor:
        return self._in_pages(self.kv.get_key_buffer(layer_id).squeeze(1))

    def _in_pages(self, slots: torch.Tensor) -> torch.Tensor:
        # A pool's size need not be a multiple of its pages'; no page of its allocator begins in the rest.
        whole = slots.shape[0] // self.page_size
        return slots[: whole * self.page_size].unflatten(0, (whole, self.page_size))


def words_of(mask: torch.Tensor, lengths: torch.Tensor, drafted: int, full: bool) -> torch.Tensor:
    """Return the tree_mask words (B, n) int64 of `portattn.paged_attention` for SGLang's flat bool or uint8 mask.

    Nothing waits for the device: a CUDA graph can hold it. `lengths` (B,) are keys before the `drafted` tokens, whose
    columns `full` masks have too; padding sequences beyond the mask get any words."""
    count = lengths.shape[0]
    number = torch.arange(drafted, device=mask.device)
    before = lengths.long() if full else torch.zeros_like(lengths, dtype=torch.int64)
    row = before + drafted  # bools of one token's row
    first = (row * drafted).cumsum(0) - row * drafted  # where a sequence's rows begin
    place = first[:, None, None] + row[:, None, None] * number[:, None] + before[:, None, None] + number
    if mask.numel() == 0:
        return chain(count, drafted, mask.device)
    tree = mask[place.clamp_(max=mask.numel() - 1)].bool()
    return tree_mask(tree)


def chain(count: int, drafted: int, device: torch.device | str) -> torch.Tensor:
    """Return the words of drafted tokens that each attend all before it: (count, drafted) int64."""
    rows = torch.ones(drafted, drafted, dtype=torch.bool, device=device).tril()
    return tree_mask(rows).expand(count, drafted).contiguous()


@dataclass
class Metadata:
    """Metadata of one forward: B sequences, C columns of a page table."""

    queries: int  # of each sequence; 0 for packed queries
    table: torch.Tensor  # (B, C) int32
    lengths: torch.Tensor  # (B,) int32: keys of each sequence, new ones included
    window_table: torch.Tensor | None = None  # (B, C) int32: the same pages in the pool of sliding windows
    window_slots: torch.Tensor | None = None  # (T,) int64: slots of the new tokens in that pool
    cross_table: torch.Tensor | None = None  # of an encoder-decoder model's encoder
    cross_lengths: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,) int32, of packed queries
    max_seqlen_q: int | None = None
    tree: torch.Tensor | None = None  # (B, queries) int64: portattn's tree_mask


class Batches:
    def __init__(self, pools: Pools, device: Any, drafted: int | None, encoder: bool) -> None:
        self.pools, self.device, self.drafted, self.encoder = pools, device, drafted, encoder
        self._static: dict[str, torch.Tensor] = {}
        self._without_tree: set[tuple[int, int]] = set()  # batches and queries of graphs whose kernels read no tree

    def queries_of(self, batch: Any, in_graph: bool) -> int:
        """Return the queries of each sequence, 0 for packed queries."""
        mode = batch.forward_mode
        if mode.is_decode_or_idle():
            return 1
        if not (mode.is_target_verify() or (mode.is_draft_extend_v2() and in_graph)):
            return 0
        told = getattr(batch.spec_info, "num_tokens_per_req", -1)
        queries = told if told > 0 else self.drafted
        return (
            refuse("num_tokens_per_req", None, "must be known of a speculative batch") if queries is None else queries
        )

    def eager(self, batch: Any) -> Metadata:
        """Return new tensors, whose tables are filled up to the longest sequence if the host knows it."""
        queries = self.queries_of(batch, in_graph=False)
        count, known, columns = batch.req_pool_indices.shape[0], batch.seq_lens_cpu, None
        if known is not None and known.numel():
            longest = int(known.max()) + (queries if batch.forward_mode.is_target_verify() else 0)
            columns = -(-longest // self.pools.page_size)
        tokens = batch.out_cache_loc.shape[0] if batch.out_cache_loc is not None else 0
        made = self._empty(count, tokens, queries, self._has_tree(batch))
        if batch.encoder_lens is not None:
            made.cross_table, made.cross_lengths = torch.empty_like(made.table), torch.empty_like(made.lengths)
        self.fill(made, batch, columns)
        if queries == 0:
            made.cu_seqlens_q = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
            made.cu_seqlens_q[1:] = torch.cumsum(batch.extend_seq_lens, 0)
            lengths = batch.extend_seq_lens_cpu
            made.max_seqlen_q = max(lengths, default=0) if lengths is not None else None
        return made

    def allocate(self, most_sequences: int, most_tokens: int) -> None:
        columns, whole = self.pools.columns, {"dtype": torch.int32, "device": self.device}
        made = {"table": torch.zeros(most_sequences, columns, **whole), "lengths": torch.zeros(most_sequences, **whole)}
        if self.pools.has_window_pool:
            made["window_table"] = torch.zeros(most_sequences, columns, **whole)
            made["window_slots"] = torch.zeros(most_tokens, dtype=torch.int64, device=self.device)
        if self.encoder:
            made["cross_table"] = torch.zeros(most_sequences, columns, **whole)
            made["cross_lengths"] = torch.zeros(most_sequences, **whole)
        if self.drafted:
            made["tree"] = chain(most_sequences, self.drafted, self.device)
        self._static = made

    def captured(self, batch: Any, in_capture: bool) -> Metadata:
        """Return filled views of the buffers for a batch of this size: before a capture, and before each replay."""
        mode = batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            refuse(
                "forward_mode", mode.name, "cannot be captured: CUDA graphs of prefill must be breakable or disabled"
            )
        queries = self.queries_of(batch, in_graph=True)
        count, tokens = batch.req_pool_indices.shape[0], batch.out_cache_loc.shape[0]
        views: dict[str, Any] = {
            name: buffer[: tokens if name == "window_slots" else count] for name, buffer in self._static.items()
        }
        tree = views.pop("tree", None)
        made = Metadata(queries, **views)
        if made.window_slots is not None:  # rows that pad a replay write to slot 0, not where an earlier one wrote
            self._static["window_slots"][tokens:].zero_()
        if tree is not None and mode.is_target_verify():
            made.tree = tree.view(-1)[: count * queries].view(count, queries)
        if in_capture and not self._has_tree(batch):
            self._without_tree.add((count, queries))
        elif in_capture:
            self._without_tree.discard((count, queries))
        elif self._has_tree(batch) and (count, queries) in self._without_tree:
            refuse("spec_info.custom_mask", tuple(batch.spec_info.custom_mask.shape), "must be None, as at the capture")
        self.fill(made, batch)  # a graph with a tree also verifies chains: its buffer holds one then
        if not self._has_tree(batch):
            made.tree = None
        return made

    def fill(self, made: Metadata, batch: Any, columns: int | None = None) -> None:
        """Write a batch into `made` without waiting for the device; of tables as many columns, None for all."""
        requests, encoder = batch.req_pool_indices, batch.encoder_lens
        table = made.table[:, :columns]
        self.pools.fill_table(table, requests, encoder)
        made.lengths.copy_(batch.seq_lens)
        if made.window_table is not None and made.window_slots is not None:
            self.pools.fill_window_table(made.window_table[:, :columns], table)
            if batch.out_cache_loc is not None:
                made.window_slots.copy_(self.pools.kv.translate_loc_from_full_to_swa(batch.out_cache_loc))
        if encoder is not None and made.cross_table is not None and made.cross_lengths is not None:
            self.pools.fill_table(made.cross_table, requests)
            made.cross_lengths.copy_(encoder)
        if batch.forward_mode.is_target_verify():
            made.lengths.add_(made.queries)
            mask = batch.spec_info.custom_mask if batch.spec_info is not None else None
            if made.tree is not None and mask is None:
                made.tree.copy_(chain(1, made.queries, self.device).expand_as(made.tree))
            elif made.tree is not None and mask is not None:
                made.tree.copy_(words_of(mask, batch.seq_lens, made.queries, self._is_full))

    # How the trees of this process are laid out; the backend says so where it lends its own buffer for them.
    mode: TreeMaskMode | None = None

    @property
    def _is_full(self) -> bool:
        mode = default_tree_mask_mode() if self.mode is None else self.mode
        return bool(mode == TreeMaskMode.FULL_MASK)

    def _has_tree(self, batch: Any) -> bool:
        verifying = batch.forward_mode.is_target_verify() and batch.spec_info is not None
        return verifying and batch.spec_info.custom_mask is not None

    def _empty(self, count: int, tokens: int, queries: int, tree: bool) -> Metadata:
        whole = {"dtype": torch.int32, "device": self.device}
        long = {"dtype": torch.int64, "device": self.device}
        made = Metadata(queries, torch.empty(count, self.pools.columns, **whole), torch.empty(count, **whole))
        if self.pools.has_window_pool:
            made.window_table, made.window_slots = torch.empty_like(made.table), torch.empty(tokens, **long)
        if tree:
            made.tree = torch.empty(count, queries, **long)
        return made


# Algorithms whose worker builds its trees in the buffer that a backend lends it, in the layout that comes with it.
LENDING = ("EAGLE", "EAGLE3")


class PagedBackend(AttentionBackend):
    """Extend, decode and verification over SGLang's pools, through `portattn.paged_attention`."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.max_context_len = runner.model_config.context_len
        self.is_draft_runner = runner.is_draft_worker
        self.invariant: bool = get_exec().deterministic.enable_deterministic_inference
        self.drafted: int | None = get_spec().speculative_num_draft_tokens
        self.pools = Pools(runner)
        self.batches = Batches(self.pools, self.device, self.drafted, runner.model_config.is_encoder_decoder)
        self.forward_metadata: Metadata | None = None
        self._verify_mask: VerifyMask | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata that the layers of an eager forward share."""
        self._check_batch(forward_batch)
        self.forward_metadata = self.batches.eager(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
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
        """Do nothing: all metadata is in the buffers before the graph runs."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of sequences that pad a graph's batch, as in SGLang's other backends."""
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Buffer in which the draft worker builds its trees, n × n bools a sequence."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: trees are read for the verification's metadata, after the draft."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        """Attend new tokens to all tokens of their sequences: q (T, Hq·D), k (T, Hk, D), v (T, Hk, Dv) → (T, Hq·Dv)."""
        sinks = self._sinks(given, q)
        if layer.attn_type is AttentionType.ENCODER_ONLY and not save_kv_cache and k is not None:
            return self._dense(q, k, v, layer, sinks)
        if save_kv_cache:
            self._save(k, v, layer, forward_batch)
        return self._attend(q, layer, sinks)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        """Attend one new token of each sequence to all its tokens: q (B, Hq·D) → (B, Hq·Dv)."""
        sinks = self._sinks(given, q)
        if save_kv_cache:
            self._save(k, v, layer, forward_batch)
        return self._attend(q, layer, sinks)

    def _check_batch(self, batch: Any) -> None:
        mode, spec = batch.forward_mode, batch.spec_info
        if mode.is_decode() and spec is not None:
            refuse(
                "forward_mode", "DECODE of a draft", "is not supported: --speculative-draft-attention-backend triton"
            )
        if mode.is_dllm_extend():
            refuse("forward_mode", mode.name)
        for name in ("cross_attention_custom_mask", "multi_item_delimiter_indices"):
            given = getattr(batch, name, None)  # the view of a batch that replays a graph has neither
            if given is not None:
                refuse(name, type(given).__name__, "must be None: --attention-backend flashinfer takes it")
        if spec is not None and getattr(spec, "ragged_verify_layout", None) is not None:
            refuse("spec_info.ragged_verify_layout", spec.ragged_verify_layout, "must be None")

    def _sinks(self, given: dict[str, Any], q: torch.Tensor) -> torch.Tensor | None:
        """Return the sinks among a layer's own arguments; refuse all others by name."""
        sinks = given.pop("sinks", None)
        for name, value in given.items():
            if value is not None and value is not False:
                refuse(name, type(value).__name__)
        if sinks is not None and sinks.dtype not in (q.dtype, torch.float32):
            sinks = sinks.float()
        return sinks

    def _save(self, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, batch: Any) -> None:
        if k is None or v is None:
            return
        slots = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        loc = KVWriteLoc(slots, self._metadata.window_slots)
        if layer.k_scale is None or self.float8(layer) is None:
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        else:  # the pool divides its arguments in place
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k.clone(), v.clone(), layer.k_scale, layer.v_scale)

    def float8(self, layer: Any) -> torch.dtype | None:
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
        named = self.arguments(layer)
        if self.float8(layer) is not None:
            named |= {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if made.queries == 0:
            named |= {"cu_seqlens_q": made.cu_seqlens_q, "max_seqlen_q": made.max_seqlen_q}
        else:
            q = q.view(-1, made.queries, *q.shape[1:])
            named |= {"layout": "bshd", "tree_mask": made.tree}
        with contract(self.invariant):
            out: Any = ops.paged_attention(
                q, keys, values, table, lengths, sinks=sinks, page_layout=page_layout, **named
            )
        rows: torch.Tensor = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return rows

    def _dense(self, q: Any, k: Any, v: Any, layer: Any, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend whole sequences without storing them."""
        made = self._metadata
        if made.cu_seqlens_q is None:
            refuse("save_kv_cache", False, "must be True but where whole sequences are encoded")
        cu, most = made.cu_seqlens_q, made.max_seqlen_q
        most = q.shape[0] if most is None else most
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        with contract(self.invariant):
            out: Any = ops.varlen_attention(q, k, v, cu, cu, most, most, sinks=sinks, **self.arguments(layer))
        rows: torch.Tensor = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return rows

    def arguments(self, layer: Any) -> dict[str, Any]:
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


class LatentBackend(PagedBackend):
    """Extend, decode and verification over a latent pool (DeepSeek, Kimi and others).

    Unabsorbed layers serve prompts without a cached prefix."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.rank: int = self.token_to_kv_pool.kv_lora_rank

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **given: Any
    ) -> torch.Tensor:
        """Attend q (T, H·(R + E)), or (T, H·R) with q_rope (T, H·E) → (T, H·R); unabsorbed layers like PagedBackend."""
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
        if layer.k_scale is not None and self.float8(layer) is not None:
            k = k / layer.k_scale
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc), k, k[..., : self.rank])

    def _attend_latent(
        self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        made, heads = self._metadata, layer.tp_q_head_num
        named = self.arguments(layer)
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
        float8 = self.float8(layer) is not None
        out: Any
        if rope:
            if float8:
                named["kv_scale"] = layer.k_scale
            with contract(self.invariant):
                out = ops.mla_attention(q_nope, q_rope, pages, made.table, made.lengths, sinks=sinks, **named)
        else:  # nothing is rotated: all of a row is key and value
            if float8:
                named |= {"k_scale": layer.k_scale, "v_scale": layer.k_scale}
            both = pages.unsqueeze(2)
            with contract(self.invariant):
                out = ops.paged_attention(
                    q_nope, both, both, made.table, made.lengths, sinks=sinks, page_layout="phd", **named
                )
        rows: torch.Tensor = out.reshape(-1, heads * self.rank)
        return rows
