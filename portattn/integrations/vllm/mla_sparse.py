"""Sparse latent attention (DSA): attention over the tokens that an indexer chose, and an indexer for vLLM's layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import _custom_ops, envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from portattn.api import ops
from portattn.errors import ArgumentError
from portattn.integrations.engine_warmup import Engine, RowLayout
from portattn.integrations.vllm import SPARSE_NAME
from portattn.integrations.vllm.caches import Capabilities
from portattn.integrations.vllm.metadata import StartUp, refuse_features
from portattn.schema.tensors import TensorSpec

DS_CACHE, DS_HEAD = "fp8_ds_mla", 576
# A request's most new tokens that count as decoding. vLLM attends more of them to all keys, while a list holds these.
DECODE_ROWS = 128
DCP_SIZE, PCP_SIZE = "decode_context_parallel_size", "prefill_context_parallel_size"
EVEN = 16  # rows of a block of logits are a multiple of it: blocks begin at addresses that kernels are compiled for
# The operation of portattn's indexer in graphs, and its keys' scales: powers of two.
OPERATION, SCALE_FORMAT = "vllm::portattn_sparse_attn_indexer", "ue8m0"


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
        if kv_cache_dtype == DS_CACHE and (found := current_platform.fp8_dtype()) != torch.float8_e4m3fn:
            return f"a {DS_CACHE} cache needs rows of torch.float8_e4m3fn, and this platform writes {found}"
        return super().supports_combination(head_size, dtype, kv_cache_dtype, *others, **more)


@dataclass
class IndexerRows:
    """Consecutive rows of one request, or of several whose lists hold all their keys; then `table` is None."""

    first: int
    end: int
    table: torch.Tensor | None = None  # (1, pages)
    length: torch.Tensor | None = None  # (1,) int32
    ends: torch.Tensor | None = None  # (1, rows) int32


@dataclass
class PortattnIndexerMetadata(AttentionMetadata):
    """One batch: decoding requests of equally many rows, then spans."""

    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    ends: torch.Tensor  # (tokens,) int32: keys that each row sees
    num_decodes: int
    decode_rows: int  # of each decoding request
    spans: list[IndexerRows]


class PortattnIndexerMetadataBuilder(AttentionMetadataBuilder[PortattnIndexerMetadata]):
    """Build the indexer's metadata without DeepGEMM, which vLLM's builder calls where it is installed."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.decode_rows = 1 + vllm_config.num_speculative_tokens
        layers = vllm_config.compilation_config.static_forward_context
        self.topk = min(layers[name].impl.topk for name in layer_names)
        # The tensor is kept: a captured graph reads it at this address.
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self._ends = torch.zeros(most, dtype=torch.int32, device=device)
        self._counted = torch.arange(1, most + 1, dtype=torch.int32, device=device)
        StartUp(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PortattnIndexerMetadata:
        """Build the batch; `common_prefix_len` and `fast_build` change nothing."""
        common, starts = common_attn_metadata, common_attn_metadata.query_start_loc_cpu.tolist()
        decodes, _, tokens, _ = split_decodes_and_prefills(common, self.decode_rows, require_uniform=True)
        rows = tokens // decodes if decodes else 1
        if rows * decodes != tokens:  # requests without rows, in a batch that no graph was captured for
            decodes = 0
        ends, count = self._ends[: common.num_actual_tokens], starts[-1]
        begins, stops = common.query_start_loc[:-1], common.query_start_loc[1:]
        before = torch.repeat_interleave(common.seq_lens - stops, stops - begins, output_size=count)
        torch.add(before, self._counted[:count], out=ends[:count])
        ends[count:] = 0
        spans: list[IndexerRows] = []
        bound = common.seq_lens_cpu_upper_bound
        keys = [common.max_seq_len] * len(starts) if bound is None else bound.tolist()
        for request in range(decodes, common.num_reqs):
            span, short = IndexerRows(starts[request], starts[request + 1]), keys[request] <= self.topk
            if short and spans and spans[-1].table is None:
                spans[-1].end = span.end
            elif span.first < span.end:
                spans.append(span)
            # Copies: parts of the batch's tensors would lie at any address, for which kernels compile anew.
            if not short:
                one, pages = slice(request, request + 1), -(-keys[request] // self.kv_cache_spec.block_size)
                span.table, span.length = common.block_table_tensor[one, :pages].clone(), common.seq_lens[one].clone()
                span.ends = ends[None, span.first : span.end].clone()
        return PortattnIndexerMetadata(
            common.slot_mapping, common.seq_lens, common.block_table_tensor, ends, decodes, rows, spans
        )


class PortattnIndexerBackend(DeepseekV32IndexerBackend):
    @staticmethod
    def get_builder_cls() -> Any:
        return PortattnIndexerMetadataBuilder

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


def key_pages(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 pages (P, page, D) and scales (P, page) of a cache (P, page, D + 4) of bytes.

    A page holds all its numbers, and then all its scales."""
    whole, page = kv_cache.flatten(1), kv_cache.shape[1]
    numbers, scales = whole[:, : page * head_dim], whole[:, page * head_dim :]
    return numbers.view(torch.float8_e4m3fn).unflatten(1, (page, head_dim)), scales.view(torch.float32)


def _up_to(most: int) -> list[int]:
    return sorted({size for size in (1, 8, 15, 16, 17, 64, 1000) if size < most} | {most})


@dataclass
class IndexerCalls:
    """One indexer's calls: the `impl` of its cache for StartUp."""

    heads: int
    topk: int
    head_dim: int
    decode_rows: int
    start_up: StartUp | None = None
    has_cache: bool = True

    def choose(
        self, q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, table: torch.Tensor,
        lens: torch.Tensor, ends: torch.Tensor, chosen: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write chosen (B, n, topk): of q (B, n, H, D), the tokens with the largest logits among ends (B, n) ones.

        As many rows at a time as VLLM_SPARSE_INDEXER_MAX_LOGITS_MB has room for."""
        pages, scales = key_pages(cache, self.head_dim)
        count, n = q.shape[:2]
        rows = max(1, (envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 18) // (table.shape[1] * cache.shape[1]))
        rows, each = (size - size % EVEN if size > EVEN else size for size in (rows, max(1, rows // n)))
        for b in range(0, count, each):
            for i in range(0, n, rows):
                requests, last = slice(b, b + each), min(i + rows, n)
                logits = ops.indexer_logits(
                    q[requests, i:last], pages, weights[requests, i:last], k_scale=scales, page_table=table[requests],
                    seqlens_k=lens[requests] - (n - last) if last < n else lens[requests],
                )  # fmt: skip
                part = slice(i, last)
                ops.topk_indices(logits, self.topk, row_ends=ends[requests, part], out=chosen[requests, part])

    def specs(self, cache: Any, engine: Engine) -> list[dict[str, Any]]:
        """Return specs of `portattn.warmup` for every call that this layer can make."""
        pages, scales = key_pages(cache.kv_cache, self.head_dim)
        fp8, fp32, int32, page = torch.float8_e4m3fn, torch.float32, torch.int32, pages.shape[1]
        most, made = max(engine.columns), []
        for batch, n, sizes in (
            ("B", self.decode_rows, {"B": range(1, engine.sequences + 1), "C": engine.columns}),
            # Few sizes: each is a class of its own, and kernels differ by few rows or many and by C's divisors.
            (1, "M", {"M": _up_to(engine.tokens), "C": _up_to(most)}),
        ):
            kept = batch == "B"
            logits = {
                "op": "indexer_logits", "q": TensorSpec((batch, n, self.heads, self.head_dim), None, fp8), "k": pages,
                "weights": TensorSpec((batch, n, self.heads), None, fp32), "k_scale": scales, "sizes": sizes,
                "page_table": TensorSpec((batch, "C"), None, int32, kept=kept),
                "seqlens_k": TensorSpec((batch,), None, int32, kept=kept),
            }  # fmt: skip
            wide = {name: range(page, most * page + 1, page) if name == "C" else of for name, of in sizes.items()}
            rows = {
                "op": "topk_indices", "logits": TensorSpec((batch, n, "C"), None, fp32), "k": self.topk, "sizes": wide,
                "row_ends": TensorSpec((batch, n), None, int32, kept=kept),
                "out": TensorSpec((batch, n, self.topk), None, int32, kept=True),
            }  # fmt: skip
            made += [logits, rows]
        return made


def portattn_sparse_attn_indexer(
    q: torch.Tensor,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    topk_indices_buffer: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Store k (T, D) in the layer's cache, and write each row's tokens to topk_indices_buffer (rows, topk)."""
    write_lists(q, k, weights, topk_indices_buffer, _resolve_layer_name(layer_name))


@eager_break_during_capture  # hides the types of a function from torch, which makes an operation's schema of them
def write_lists(
    q: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor, topk_indices_buffer: torch.Tensor, name: str
) -> None:
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):  # the profiling run, which measures memory
        torch.empty(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20, dtype=torch.uint8, device=q.device)
        return
    batch, layer = context.attn_metadata[name], context.no_compile_layers[name]
    calls, cache = layer.impl, layer.kv_cache
    if calls.start_up is not None:
        calls.start_up.compile()
    if k is not None:
        slots = batch.slot_mapping
        _custom_ops.indexer_k_quant_and_cache(k[: slots.shape[0]], cache, slots, calls.head_dim, SCALE_FORMAT)
    topk_indices_buffer[batch.ends.shape[0] : q.shape[0]] = -1
    if batch.num_decodes:
        count, rows = batch.num_decodes, batch.decode_rows
        parts = (
            each[: count * rows].unflatten(0, (count, rows)) for each in (q, weights, batch.ends, topk_indices_buffer)
        )
        queries, factors, ends, chosen = parts
        calls.choose(queries, factors, cache, batch.block_table[:count], batch.seq_lens[:count], ends, chosen)
    for span in batch.spans:
        rows = slice(span.first, span.end)
        if span.table is None:
            places = torch.arange(calls.topk, dtype=torch.int32, device=q.device)
            topk_indices_buffer[rows] = torch.where(places < batch.ends[rows, None], places, -1)
            continue
        one = (each[None, rows] for each in (q, weights, topk_indices_buffer))
        queries, factors, chosen = one
        calls.choose(queries, factors, cache, span.table, span.length, span.ends, chosen)


class PortattnSparseAttnIndexer(SparseAttnIndexer):
    """An indexer's operation in place of vLLM's `sparse_attn_indexer`, on each platform the same."""

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str | None,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: torch.Tensor,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        compress_ratio: int = 1,
        candidate_blocks: torch.Tensor | None = None,
        **candidates: Any,
    ) -> None:
        CustomOp.__init__(self)  # vLLM's own constructor asks for DeepGEMM
        config = get_current_vllm_config()
        if (found := current_platform.fp8_dtype()) != torch.float8_e4m3fn:
            limit = "must be torch.float8_e4m3fn for portattn's indexer"
            raise ArgumentError(SPARSE_NAME, "the platform's fp8_dtype", found, limit)
        if current_platform.is_cuda() and not current_platform.has_device_capability(89):
            limit = "must be at least 8.9, from which on vLLM's kernel can narrow the indexer's queries to e4m3"
            found = current_platform.get_device_capability()
            raise ArgumentError(SPARSE_NAME, "the compute capability", found, limit)
        parallel = config.parallel_config
        sizes = {name: getattr(parallel, name) for name in (DCP_SIZE, PCP_SIZE)} | {"compress_ratio": compress_ratio}
        refuse_features(
            SPARSE_NAME, "portattn's indexer", use_fp4_cache=use_fp4_cache,
            candidate_blocks=candidate_blocks is not None, **{name: size for name, size in sizes.items() if size != 1},
        )  # fmt: skip
        if (quant_block_size, scale_fmt) != (head_dim, SCALE_FORMAT):
            limit = f"must be {head_dim}, a scale a token, with scale_fmt={SCALE_FORMAT!r}"
            raise ArgumentError(SPARSE_NAME, "quant_block_size", quant_block_size, limit)
        self.k_cache, self.topk_tokens, self.topk_indices_buffer = k_cache, topk_tokens, topk_indices_buffer
        self.skip_k_cache_insert = skip_k_cache_insert
        heads = config.model_config.hf_text_config.index_n_heads
        k_cache.impl = IndexerCalls(heads, topk_tokens, head_dim, 1 + config.num_speculative_tokens)
        k_cache.get_attn_backend = lambda: PortattnIndexerBackend
        split_at = config.compilation_config.splitting_ops
        if split_at and OPERATION not in split_at:  # as vLLM's own: it reads a batch's metadata
            split_at.append(OPERATION)

    def forward_native(
        self, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """Write each row's tokens to the buffer of lists, and return it."""
        torch.ops.vllm.portattn_sparse_attn_indexer(
            q_quant, None if self.skip_k_cache_insert else k, weights, self.topk_indices_buffer,
            _encode_layer_name(self.k_cache.prefix),
        )  # fmt: skip
        return self.topk_indices_buffer

    forward_cuda = forward_hip = forward_xpu = forward_cpu = forward_native

    @property
    def topk_backend(self) -> Any:
        """Raise ArgumentError: vLLM's fused models ask for it, and portattn's indexer is for the generic ones."""
        limit = "must be portattn's for the drafter too: DeepseekV32MTPModel in --model-class-overrides"
        raise ArgumentError(SPARSE_NAME, "the model's class", "vLLM's fused one", limit)


@functools.cache
def register_indexer() -> None:
    """Register portattn's indexer with vLLM as the operation of every layer that is made from now on."""
    direct_register_custom_op(
        "portattn_sparse_attn_indexer",
        portattn_sparse_attn_indexer,
        ["topk_indices_buffer"],
        fake_impl=lambda *_: None,
    )
    SparseAttnIndexer.register_oot(PortattnSparseAttnIndexer)
