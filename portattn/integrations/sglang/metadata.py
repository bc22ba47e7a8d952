"""What all layers of one forward share: page tables, lengths, trees. Made new for an eager forward; for CUDA graphs,
views of buffers that keep their addresses and are filled again before each replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

from portattn.integrations.sglang.capabilities import refuse
from portattn.integrations.sglang.pools import Pools
from portattn.integrations.sglang.trees import chain, words_of


@dataclass
class Metadata:
    """One forward's. B sequences; C columns of a page table.

    queries        of each sequence; 0 where they are packed
    table          (B, C) int32
    lengths        (B,) int32: keys of each sequence, its new ones included
    window_table   (B, C) int32: the same pages in the pool of sliding windows, where there is one
    window_slots   (T,) int64: where that pool stores the new tokens
    cross_table, cross_lengths  of an encoder-decoder model's encoder
    cu_seqlens_q   (B + 1,) int32, and max_seqlen_q, of packed queries
    tree           (B, queries) int64: portattn's tree_mask
    """

    queries: int
    table: torch.Tensor
    lengths: torch.Tensor
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None
    cross_table: torch.Tensor | None = None
    cross_lengths: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    tree: torch.Tensor | None = None


class Batches:
    """Makes the Metadata of SGLang's ForwardBatch."""

    def __init__(self, pools: Pools, device: Any, drafted: int | None, encoder: bool) -> None:
        self.pools, self.device, self.drafted, self.encoder = pools, device, drafted, encoder
        self._static: dict[str, torch.Tensor] = {}
        self._without_tree: set[tuple[int, int]] = set()  # batches and queries of graphs whose kernels read no tree

    def queries_of(self, batch: Any, in_graph: bool) -> int:
        """Queries of each sequence, 0 where they are packed."""
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
        """New tensors, no wider than the batch's longest sequence where SGLang knows it on the host."""
        queries = self.queries_of(batch, in_graph=False)
        count, known = batch.req_pool_indices.shape[0], batch.seq_lens_cpu
        longest = self.pools.context
        if known is not None and known.numel():
            longest = int(known.max()) + (queries if batch.forward_mode.is_target_verify() else 0)
        tokens = batch.out_cache_loc.shape[0] if batch.out_cache_loc is not None else 0
        made = self._empty(count, self.pools.columns(longest), tokens, queries, self._has_tree(batch))
        if batch.encoder_lens is not None:
            rows = {"dtype": torch.int32, "device": self.device}
            made.cross_table = torch.empty(count, self.pools.columns(self._longest_encoder(batch)), **rows)
            made.cross_lengths = torch.empty(count, **rows)
        self.fill(made, batch)
        if queries == 0:
            made.cu_seqlens_q = torch.zeros(count + 1, dtype=torch.int32, device=self.device)
            made.cu_seqlens_q[1:] = torch.cumsum(batch.extend_seq_lens, 0)
            lengths = batch.extend_seq_lens_cpu
            made.max_seqlen_q = max(lengths, default=0) if lengths is not None else None
        return made

    def allocate(self, most_sequences: int, most_tokens: int) -> None:
        """The buffers of CUDA graphs, for batches of up to so many sequences and tokens."""
        columns, whole = self.pools.columns(self.pools.context), {"dtype": torch.int32, "device": self.device}
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
        """Views of the buffers for a batch of this size, filled: before a capture, and before each replay of it."""
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

    def fill(self, made: Metadata, batch: Any) -> None:
        """Write a batch into `made`. Nothing waits for the device."""
        requests, encoder = batch.req_pool_indices, batch.encoder_lens
        self.pools.fill_table(made.table, requests, encoder)
        made.lengths.copy_(batch.seq_lens)
        if made.window_table is not None and made.window_slots is not None:
            self.pools.fill_window_table(made.window_table, made.table)
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

    def _longest_encoder(self, batch: Any) -> int:
        known = batch.encoder_lens_cpu
        return max(known, default=0) if known is not None else self.pools.context

    def _empty(self, count: int, columns: int, tokens: int, queries: int, tree: bool) -> Metadata:
        whole = {"dtype": torch.int32, "device": self.device}
        long = {"dtype": torch.int64, "device": self.device}
        made = Metadata(queries, torch.empty(count, columns, **whole), torch.empty(count, **whole))
        if self.pools.has_window_pool:
            made.window_table, made.window_slots = torch.empty_like(made.table), torch.empty(tokens, **long)
        if tree:
            made.tree = torch.empty(count, queries, **long)
        return made
