"""A batch and its shards, built once a step: tensors keep their addresses, so that CUDA graphs stay valid."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from portattn.errors import ArgumentError
from portattn.integrations.engine_warmup import Engine, compile_calls, contract, needs_warmup
from portattn.integrations.vllm import NAME, caches

log = logging.getLogger("vllm.portattn")


class LayerGroupShards:
    """Sharing of one layer group's caches among ranks (decode context parallelism); world == 1 without it.

    Each rank attends its cache with the query heads of all, and vLLM's collectives merge by the LSE; attention among a
    step's new tokens, present on every rank, is merged in."""

    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
        self.world, self.rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        # Of its own, and kept: a captured graph reads it at this address.
        most = vllm_config.scheduler_config.max_num_seqs if self.world > 1 else 0
        self._lens = torch.zeros(most, dtype=torch.int32, device=device)

    def context_lens(self, common: Any) -> torch.Tensor | None:
        """Return (requests,) int32, keys of each request's past in this rank's cache; None for unshared caches."""
        if self.world == 1:
            return None
        if isinstance(common.causal, torch.Tensor):
            limit = "must be a bool with decode context parallelism"
            raise ArgumentError(NAME, "causal", "a tensor", limit)
        count = common.seq_lens.shape[0]
        if count > self._lens.shape[0]:  # more than the scheduler's limit: only where no scheduler is
            self._lens = self._lens.new_zeros(count)
        rows = common.query_start_loc[1 : count + 1] - common.query_start_loc[:count]
        lens = get_dcp_local_seq_lens(common.seq_lens - rows, self.world, self.rank, self.interleave)
        return self._lens[:count].copy_(lens)


def no_request_has_a_past(common: Any) -> bool:
    """Return whether a batch has beginnings of prompts alone, as the host knows it; all ranks find the same."""
    bound = common.seq_lens_cpu_upper_bound
    if bound is None:
        return False
    count = bound.shape[0]
    rows = common.query_start_loc_cpu[1 : count + 1] - common.query_start_loc_cpu[:count]
    return bool((bound <= rows).all())


def combine() -> Callable[..., Any]:
    """Return vLLM's configured merge of the ranks' results; its kernels are imported only if ranks share."""
    from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

    config = get_current_vllm_config_or_none()
    by_all_to_all = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    return dcp_a2a_lse_reduce if by_all_to_all else cp_lse_ag_out_rs


def refuse_features(backend: str, beside: str, **given: Any) -> None:
    """Raise ArgumentError for the first given feature, which a backend does not have beside another."""
    for name, value in given.items():
        if value:
            raise ArgumentError(backend, name, value, f"is not supported with {beside}")


def reasons(use_dcp: bool = False, head_size: int = 1, **asked: Any) -> list[str]:
    """Return why a configuration cannot have decode context parallelism; empty if it can or vLLM does not ask."""
    if not use_dcp:
        return []
    names = {
        "has_sliding_window": "sliding windows", "use_non_causal": "attention in both directions",
        "use_mm_prefix": "partial multimodal token full attention",
    }  # fmt: skip
    found = [f"{what} with DCP not supported" for name, what in names.items() if asked.get(name)]
    if asked.get("attn_type") == AttentionType.ENCODER_DECODER:  # an encoder's keys are no past of the decoder's rows
        found.append("cross attention with DCP not supported")
    if head_size & (head_size - 1):  # vLLM's kernels that merge ranks have tiles of a head
        found.append(f"head size {head_size} with DCP not supported: no power of 2")
    return found


CLAMP = "mm_prefix_clamp_sliding_window"  # of a configuration, a model's class and a layer
Ranges = Mapping[int, Sequence[tuple[int, int]]]  # request -> first and last position of each range


@dataclass
class Cut:
    """One sequence of a split batch."""

    request: int
    first: int  # rows of its request before its first row
    behind: int  # rows of its request behind its last row
    both: bool  # its rows are a range's, and attend in both directions


@dataclass
class Segments:
    """The sequences of a split batch, on the batch's device."""

    requests: torch.Tensor  # (sequences,) int64: the request of each
    first: torch.Tensor  # (sequences,) int32, as in Cut
    behind: torch.Tensor  # (sequences,) int32
    both: torch.Tensor  # (sequences,) bool
    longest: int  # tokens of the longest range up to the last of its rows here: as far back as a row of it sees

    def starts(self, query_start_loc: torch.Tensor) -> torch.Tensor:
        begin = query_start_loc.index_select(0, self.requests) + self.first
        return torch.cat((begin, query_start_loc[-1:]))

    def lengths(self, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sequences,) int32 each: keys of the causal sequences, and of the others; 0 elsewhere."""
        keys = seq_lens.index_select(0, self.requests) - self.behind
        causal = keys.masked_fill(self.both, 0)
        return causal, keys - causal


def cuts(ranges: Ranges, starts: Sequence[int], keys: Sequence[int]) -> tuple[list[Cut], int]:
    """Split a batch at ranges of multimodal tokens; return its sequences in the order of rows, and the longest."""
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
    """Return a batch's sequences from vLLM's CommonAttentionMetadata; None if no row shares a range with another."""
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
    """Raise ArgumentError for layers whose window may be shorter than a range that it does not clamp.

    vLLM gives no range longer than the model's window, but keeps longer ones if windows clamp them, as the
    configuration or a layer says. A shorter window of a layer would begin with the range."""
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
    """One batch."""

    num_actual_tokens: int
    num_reqs: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    single: bool  # every request has one query row at most, so row b is request b's
    causal: bool | None = True  # of all requests; None if they differ
    per_request: torch.Tensor | None = None
    causal_lens: torch.Tensor | None = None  # (requests,) int32 if they differ: seq_lens of causal ones, else 0
    other_lens: torch.Tensor | None = None  # the same of the others
    segments: Segments | None = None  # split of the batch by ranges of multimodal tokens, if any
    # The split batch. vLLM clears the field of this name for layers without ranges, if layers differ.
    mm_prefix_range: PortattnMetadata | None = None
    longest_range: int = 0  # tokens of a range that a row sees, in a split batch
    context_lens: torch.Tensor | None = None  # (requests,) int32: keys of the past in this rank's cache
    has_past: bool = True  # whether a request may have a past: the same on all ranks

    def but(self, **fields: Any) -> PortattnMetadata:
        """Return a copy with other fields; dataclasses.replace misses the __init__ of vLLM's fast-prefill classes."""
        made = copy(self)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def take_apart(self) -> None:
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
        if self.per_request is not None:
            assert self.causal_lens is not None
            assert self.other_lens is not None
            torch.mul(self.seq_lens, self.per_request != 0, out=self.causal_lens)
            torch.sub(self.seq_lens, self.causal_lens, out=self.other_lens)


ALIGNED_TOKENS = 128  # of a block table's row, by which vLLM 0.33 rounds its width up


def engine_of(config: Any, spec: Any, device: torch.device) -> Engine:
    """Return the limits of a layer group's batches."""
    scheduler, model = config.scheduler_config, config.model_config
    length = getattr(scheduler if model is None else model, "max_model_len", scheduler.max_num_batched_tokens)
    most = length  # of a table's row: in an encoder-decoder model every group's has room for the encoder's tokens
    if getattr(model, "is_encoder_decoder", False):
        most = max(length, scheduler.max_num_encoder_input_tokens)
    blocks = -(-most // spec.block_size)
    if hasattr(spec, "max_num_blocks_per_req"):
        blocks = spec.max_num_blocks_per_req(config, most)
    step = ALIGNED_TOKENS // math.gcd(ALIGNED_TOKENS, spec.block_size)
    tokens = max(scheduler.max_num_batched_tokens, *(config.compilation_config.cudagraph_capture_sizes or [0]))
    return Engine(
        sequences=scheduler.max_num_seqs,
        tokens=tokens,
        new=tokens,
        rows=length,
        columns=sorted({blocks, -(-blocks // step) * step}),
        dtype=torch.get_default_dtype() if model is None else model.dtype,
        device=device,
        non_causal=bool(getattr(getattr(config, "attention_config", None), "use_non_causal", False)),
        ranges=model is not None and bool(getattr(model, "is_mm_prefix_lm", False)),
    )


class StartUp:
    """One layer group's calls, to be compiled with the calls of the other groups that wait."""

    _waiting: ClassVar[list[StartUp]] = []  # of the process

    def __init__(
        self, kv_cache_spec: Any, names: Iterable[str], config: Any, device: torch.device, rows: int | None = None
    ) -> None:
        """Let layers' calls wait for their caches. rows: most of one sequence, if fewer than its prompt has."""
        known = config.compilation_config.static_forward_context
        layers = [known[name] for name in names if hasattr(known.get(name), "impl")]
        self.layers = [layer for layer in layers if getattr(layer.impl, "start_up", self) is None]
        if not needs_warmup(device) or not self.layers:  # without layers, another builder of the group waits
            return
        try:
            self.config, self.engine = config, engine_of(config, kv_cache_spec, device)
        except AttributeError as error:  # of a release with other settings
            log.warning("portattn: nothing is compiled before the first request: %s", error)
            return
        if rows is not None:
            self.engine.rows, self.engine.tokens = rows, min(self.engine.tokens, self.engine.sequences * rows)
        self._waiting.append(self)
        for layer in self.layers:
            layer.impl.start_up = self
            bind = getattr(layer, "bind_kv_cache", None)  # without it, a dummy batch is the first to come
            if bind is not None:
                layer.bind_kv_cache = functools.partial(self._bind, layer, bind)
        if not any(layer.impl.has_cache for layer in self.layers):  # nothing is bound, and vLLM runs no dummy batch
            self.compile()

    def specs(self) -> list[dict[str, Any]]:
        return [spec for layer in self.layers for spec in layer.impl.specs(layer, self.engine)]

    def _bind(self, layer: Any, bind: Any, kv_cache: torch.Tensor) -> None:
        bind(kv_cache)
        del layer.bind_kv_cache
        self.compile()

    @property
    def is_bound(self) -> bool:
        return all(layer.kv_cache.numel() or not layer.impl.has_cache for layer in self.layers)

    def compile(self) -> None:
        """Compile the calls of all the engine's groups that wait, by one warm-up, if their caches are bound."""
        groups = [group for group in self._waiting if group.config is self.config]
        if not all(group.is_bound for group in groups):
            return
        for group in groups:
            self._waiting.remove(group)
            for layer in group.layers:
                layer.impl.start_up = None
        with torch.inference_mode(), contract(envs.VLLM_BATCH_INVARIANT):
            compile_calls(
                lambda: [spec for group in groups for spec in group.specs()],
                self.engine.device, log, self.config.parallel_config.local_world_size,
            )  # fmt: skip


class PortattnMetadataBuilder(AttentionMetadataBuilder[PortattnMetadata]):
    """Build metadata; graphs are captured for requests with equally many rows: decode, and speculative verification."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        caches.refuse_layout(kv_cache_spec, vllm_config)
        # Of their own, and kept: a captured graph reads them at these addresses.
        most = vllm_config.scheduler_config.max_num_seqs
        self._split = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._shards = LayerGroupShards(kv_cache_spec, vllm_config, device)
        # Whether there is a past is decided on the host, which does not see what a drafter advances.
        self.supports_draft_decode_metadata_update = self._shards.world == 1
        layers = vllm_config.compilation_config.static_forward_context
        refuse_short_windows(layer_names, layers, vllm_config.model_config)
        StartUp(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return single-token graphs for prefix-LM models: graphs of more rows could replay prompts with ranges."""
        if vllm_config.model_config is not None and vllm_config.model_config.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PortattnMetadata:
        """Build the batch for forward; `common_prefix_len` and `fast_build` change nothing."""
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
        made.has_past = made.context_lens is None or not no_request_has_a_past(common)
        made.segments = segments(common)
        if made.segments is not None and made.context_lens is not None:
            limit = "must be None with decode context parallelism"
            raise ArgumentError(NAME, "mm_req_doc_ranges", common.mm_req_doc_ranges, limit)
        made.take_apart()
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PortattnMetadata:
        """Build the batch for a graph, which cannot know whether its requests have a past."""
        made = self.build(0, common_attn_metadata)
        made.has_past = True
        return made

    def update_block_table(
        self, metadata: PortattnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PortattnMetadata:
        made = metadata.but(block_table=blk_table, slot_mapping=slot_mapping, mm_prefix_range=None)
        made.take_apart()
        return made

    def update_draft_decode_metadata(self, metadata: PortattnMetadata) -> None:
        """Follow lengths that a drafter has advanced on the device; a graph can hold this."""
        metadata.split_by_causality()
