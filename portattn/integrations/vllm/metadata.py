"""What a batch looks like: built once a step, read by the forward of every layer.

The tensors are the model runner's own, which it fills anew for each step at the same addresses, so what a CUDA graph
captured stays right. Nothing here reads a device's tensor on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from portattn.errors import ArgumentError
from portattn.integrations.vllm import NAME, caches, shards

CLAMP = "mm_prefix_clamp_sliding_window"  # of a configuration, a model's class and a layer
Ranges = Mapping[int, Sequence[tuple[int, int]]]  # request -> first and last position of each range


@dataclass
class Cut:
    """One sequence of a batch that was taken apart.

    first, behind  rows of its request before its first row, and behind its last one
    both           its rows are a range's, and attend in both directions
    """

    request: int
    first: int
    behind: int
    both: bool


@dataclass
class Segments:
    """A batch that was taken apart: what vLLM says of requests, for each sequence. On the batch's device.

    requests  (sequences,) int64: the request of each
    first, behind  (sequences,) int32, and both (sequences,) bool: of Cut
    longest   tokens of the longest range up to the last of its rows here: as far back as a row of it sees
    """

    requests: torch.Tensor
    first: torch.Tensor
    behind: torch.Tensor
    both: torch.Tensor
    longest: int

    def starts(self, query_start_loc: torch.Tensor) -> torch.Tensor:
        """(sequences + 1,) int32: their rows. The device alone may know requests' boundaries."""
        begin = query_start_loc.index_select(0, self.requests) + self.first
        return torch.cat((begin, query_start_loc[-1:]))

    def lengths(self, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sequences,) int32 each: keys of the causal sequences, and of the others; 0 elsewhere."""
        keys = seq_lens.index_select(0, self.requests) - self.behind
        causal = keys.masked_fill(self.both, 0)
        return causal, keys - causal


def cuts(ranges: Ranges, starts: Sequence[int], keys: Sequence[int]) -> tuple[list[Cut], int]:
    """Take a batch apart.

    ranges  of requests, by positions
    starts  (requests + 1) first rows of the requests
    keys    (requests) keys of each, its new rows included; exact where a range has rows

    Returns the sequences in the order of rows, every request in at least one, and as `longest` 0 where no range has a
    row here.

    Raises ArgumentError for ranges of one request that overlap.
    """
    made: list[Cut] = []
    longest = 0
    for request, begin in enumerate(starts[:-1]):
        rows = starts[request + 1] - begin
        past, at = keys[request] - rows, 0
        previous = -1
        for first, last in sorted(ranges.get(request) or ()):
            if first >= last:  # of one token, or vLLM's padding
                continue
            if first <= previous:
                limit = f"must not overlap, and another one of request {request} ends at {previous}"
                raise ArgumentError(NAME, "mm_req_doc_ranges", (first, last), limit)
            previous = last
            low, high = max(first - past, 0), min(last - past, rows - 1)  # rows of this batch
            if low > high:
                continue
            if low > at:
                made.append(Cut(request, at, rows - low, False))
            made.append(Cut(request, low, rows - high - 1, True))
            longest, at = max(longest, past + high - first + 1), high + 1
        if at < rows or not at:
            made.append(Cut(request, at, 0, False))
    return made, longest


def segments(common: Any) -> Segments | None:
    """A batch's sequences, of vLLM's CommonAttentionMetadata; None where no row is in a range with another row.

    Raises ArgumentError for ranges that overlap, and where lengths are not known on the host or the batch is not
    causal.
    """
    ranges: Ranges | None = getattr(common, "mm_req_doc_ranges", None)
    # A single row is the last one, and sees all keys up to itself as it is.
    if not ranges or common.max_query_len <= 1 or not any(ranges.values()):
        return None
    if common.seq_lens_cpu_upper_bound is None:
        limit = "must be given with mm_req_doc_ranges: positions are compared on the host"
        raise ArgumentError(NAME, "seq_lens_cpu_upper_bound", None, limit)
    made, longest = cuts(ranges, common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist())
    if not longest:
        return None
    if common.causal is not True:
        limit = "must be True where rows are in a range of multimodal tokens"
        raise ArgumentError(NAME, "causal", common.causal, limit)
    device = common.query_start_loc.device
    numbers = async_tensor_h2d(
        [[cut.first for cut in made], [cut.behind for cut in made], [cut.request for cut in made],
         [cut.both for cut in made]], dtype=torch.int32, device=device,
    )  # fmt: skip
    return Segments(numbers[2].long(), numbers[0], numbers[1], numbers[3].bool(), longest)


def refuse_short_windows(names: Iterable[str], layers: Mapping[str, Any], model: Any) -> None:
    """Refuse layers whose window may be shorter than a range that it does not clamp.

    vLLM gives no range longer than the model's window, so that a layer with this window shows a row all of its range.
    With a shorter one the row's keys would begin with the range, not with the window. But vLLM keeps longer ranges
    where the configuration or the model's class says that windows clamp them; of the class, its layers tell.

    names   the layers in question
    layers  all of the model's, by name

    Raises ArgumentError with the layer's name.
    """
    if model is None or not getattr(model, "is_mm_prefix_lm", False):
        return
    kept = any(getattr(one, CLAMP, False) for one in (model.hf_text_config, *layers.values()))
    most = None if kept else model.get_sliding_window()
    for name in names:
        layer = layers.get(name)  # None: layers that are not vLLM's own class
        window = getattr(layer, "sliding_window", None)
        if window is None or getattr(layer, CLAMP, False):
            continue
        if most is None or window < most:
            whole = "ranges of multimodal tokens of any length" if most is None else f"the model's window, {most}"
            limit = f"must be no shorter than {whole}, or {CLAMP} must be True"
            raise ArgumentError(NAME, f"sliding_window of {name}", window, limit)


@dataclass
class PortattnMetadata(AttentionMetadata):
    """One batch.

    single           every request has one query row at most, so row b is request b's
    causal           of all requests; None where requests differ
    causal_lens, other_lens  (requests,) int32, where they differ: seq_lens of the causal requests, and of the others;
                     0 elsewhere
    segments         how ranges of multimodal tokens take the batch apart; None where no row is in one
    mm_prefix_range  the batch that was taken apart: sequences instead of requests, with causality of each. Models whose
                     layers differ clear the field of this name for those that have no ranges
    longest_range    tokens of a range that a row sees, in a batch that was taken apart; else 0
    context_lens     (requests,) int32: keys of the past in this rank's cache, where ranks share a request's keys
    has_past         whether a request may have a past: alike on all ranks
    """

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    single: bool
    causal: bool | None = True
    per_request: torch.Tensor | None = None
    causal_lens: torch.Tensor | None = None
    other_lens: torch.Tensor | None = None
    segments: Segments | None = None
    mm_prefix_range: PortattnMetadata | None = None
    longest_range: int = 0
    context_lens: torch.Tensor | None = None
    has_past: bool = True

    def but(self, **fields: Any) -> PortattnMetadata:
        """A copy with other fields. vLLM derives classes of fast prefill, whose __init__ dataclasses.replace misses."""
        made = copy(self)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def take_apart(self) -> None:
        """Make mm_prefix_range of segments, and of requests as they are now."""
        if self.segments is None:
            return
        causal_lens, other_lens = self.segments.lengths(self.seq_lens)
        self.mm_prefix_range = self.but(
            query_start_loc=self.segments.starts(self.query_start_loc),
            block_table=self.block_table.index_select(0, self.segments.requests),
            num_reqs=causal_lens.shape[0],
            causal=None,
            causal_lens=causal_lens,
            other_lens=other_lens,
            segments=None,
            longest_range=self.segments.longest,
        )

    def split_by_causality(self) -> None:
        """Fill causal_lens and other_lens from seq_lens as they are now, by the device alone."""
        if self.per_request is not None:
            assert self.causal_lens is not None
            assert self.other_lens is not None
            torch.mul(self.seq_lens, self.per_request != 0, out=self.causal_lens)
            torch.sub(self.seq_lens, self.causal_lens, out=self.other_lens)


class PortattnMetadataBuilder(AttentionMetadataBuilder[PortattnMetadata]):
    """Graphs are captured for batches whose requests have equally many rows: decode, and speculative verification."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        caches.refuse_layout(kv_cache_spec, vllm_config)
        # Of their own, and kept: a captured graph reads them at these addresses.
        most = vllm_config.scheduler_config.max_num_seqs
        self._split = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._shards = shards.LayerGroupShards(kv_cache_spec, vllm_config, device)
        # Whether there is a past is decided on the host, which does not see what a drafter advances.
        self.supports_draft_decode_metadata_update = self._shards.world == 1
        layers = vllm_config.compilation_config.static_forward_context
        refuse_short_windows(layer_names, layers, vllm_config.model_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A graph of several rows a request could be replayed for a part of a prompt that has ranges."""
        if vllm_config.model_config is not None and vllm_config.model_config.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PortattnMetadata:
        """The batch as forward takes it. `common_prefix_len` and `fast_build` change nothing."""
        common = common_attn_metadata
        each = isinstance(common.causal, torch.Tensor)
        made = PortattnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            single=common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs,
            causal=None if each else bool(common.causal),
        )
        if each:
            count = common.seq_lens.shape[0]
            if count > self._split.shape[1]:  # more than the scheduler's limit: only where no scheduler is
                self._split = self._split.new_zeros(2, count)
            made.per_request = common.causal
            made.causal_lens, made.other_lens = self._split[0, :count], self._split[1, :count]
            made.split_by_causality()
        made.context_lens = self._shards.context_lens(common)
        made.has_past = made.context_lens is None or not shards.no_request_has_a_past(common)
        made.segments = segments(common)
        if made.segments is not None and made.context_lens is not None:
            limit = "must be None with decode context parallelism"
            raise ArgumentError(NAME, "mm_req_doc_ranges", common.mm_req_doc_ranges, limit)
        made.take_apart()
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PortattnMetadata:
        """The batch as a graph holds it: whether its requests have a past is not known yet."""
        made = self.build(0, common_attn_metadata)
        made.has_past = True
        return made

    def update_block_table(
        self, metadata: PortattnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PortattnMetadata:
        """The same batch over another group's blocks."""
        made = metadata.but(block_table=blk_table, slot_mapping=slot_mapping, mm_prefix_range=None)
        made.take_apart()
        return made

    def update_draft_decode_metadata(self, metadata: PortattnMetadata) -> None:
        """Follow lengths that a drafter has advanced on the device. A graph can hold this."""
        metadata.split_by_causality()
