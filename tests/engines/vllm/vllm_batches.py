"""Batches for vLLM's own classes: a real layer, its cache in a real layout, real metadata; and attention in float64.
Requests are (rows of queries, keys in all). A cache is NaN wherever no token was written, in keys and values; tables
lead nowhere past a request's own blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout

from portattn.integrations.vllm import metadata
from portattn.integrations.vllm.backend import PortattnBackend
from portattn.testing.tolerance import budget, largest

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 32, 16
ON_GPU = torch.cuda.is_available()
DEVICE, KERNELS = (torch.device("cuda"), "triton") if ON_GPU else (torch.device("cpu"), "interpreter")
if ON_GPU:
    torch.set_default_device(DEVICE)  # of the tensors that tests make
    metadata.needs_warmup = lambda device: False  # each test's layer would compile the kernels of all batches
load_general_plugins()  # as vLLM's processes do, by portattn's entry point
_names = (f"layer.{number}" for number in itertools.count())

MIXED = [(1, 20), (40, 40), (1, 1), (7, 50), (5, 5)]  # decode, prefill, decode, chunked prefill, prefill
DECODE = [(1, 33), (1, 16), (1, 1), (1, 64)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Layer:
    """One attention layer of a model, as vLLM makes it, with its builder and an empty cache."""

    backend: Any = PortattnBackend
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: str = "auto"
    layout: str = "LBNHC"
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    window: int | None = None
    blocks: int = 40
    arguments: dict[str, Any] = field(default_factory=dict)  # further ones of Attention

    def __post_init__(self) -> None:
        self.name = next(_names)
        cache = CacheConfig(cache_dtype=self.cache_dtype, block_size=BLOCK)
        self.config = self.configured(VllmConfig(cache_config=cache))
        self.config.compilation_config.cudagraph_capture_sizes = [1, 8]  # TRITON_ATTN asks for some on a GPU
        with set_current_vllm_config(self.config), default_dtype(self.dtype):
            self.layer = Attention(
                self.heads, self.dim, self.dim**-0.5, self.kv_heads, cache_config=cache, prefix=self.name,
                attn_backend=self.backend, per_layer_sliding_window=self.window, **self.arguments,
            )  # fmt: skip
            if self.cache_dtype == "auto":  # the model's dtype, and there is no model
                self.layer.kv_cache_torch_dtype = self.dtype
            spec = self.layer.get_kv_cache_spec(self.config) if self.keeps_keys else None
            self.spec = None if spec is None else self.backend.customize_spec(spec)
            make = self.backend.get_builder_cls()
            # Encoders have none of their own; the runner gives their builder one like this.
            nothing = FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=self.kv_heads, head_size=self.dim, dtype=self.dtype
            )
            self.builder = make(self.spec or nothing, [self.name], self.config, DEVICE)
        if self.spec is not None:
            self.layer.kv_cache = self.empty_cache()

    def configured(self, config: VllmConfig) -> VllmConfig:
        return config

    @property
    def keeps_keys(self) -> bool:
        return self.arguments.get("attn_type", "decoder") == "decoder"

    def empty_cache(self) -> torch.Tensor:
        """The second of two layers' caches in one buffer of NaN, in the order that vLLM's layout says."""
        layout, layers = KVCacheLayout[self.layout], 2
        strides = compute_layout_strides(self.spec, self.blocks, layers, layout)
        content = self.spec.state_content_size_bytes
        raw = torch.zeros(layers * self.blocks * self.spec.page_size_bytes, dtype=torch.int8)
        shape = (layers, self.blocks, self.spec.num_heads, self.spec.block_size, content)
        cache = torch.as_strided(raw, shape, strides)[1].view(self.spec.dtype)
        return cache.fill_(math.nan) if cache.dtype.is_floating_point else cache.fill_(0x7F)

    def run(self, batch: Batch, causal: Any = True, write: bool = True, metadata: Any = None) -> torch.Tensor:
        """The layer's forward by its custom ops, (tokens, Hq, Dv). The batch's past is written to the cache first."""
        if write and self.spec is not None:
            slots = torch.cat([batch.slots_of(b, 0, keys - rows) for b, (rows, keys) in enumerate(batch.requests)])
            past = [x[: keys - rows] for (rows, keys), x in zip(batch.requests, batch.k, strict=True)]
            past_v = [x[: keys - rows] for (rows, keys), x in zip(batch.requests, batch.v, strict=True)]
            self.layer.impl.do_kv_cache_update(
                self.layer, torch.cat(past), torch.cat(past_v), self.layer.kv_cache, slots
            )
        if metadata is None:
            metadata = self.builder.build(0, batch.common(causal))
        new_k, new_v = ([x[keys - rows :] for (rows, keys), x in zip(batch.requests, each, strict=True)]
                        for each in (batch.k, batch.v))  # fmt: skip
        context = set_forward_context(
            {self.name: metadata}, self.config, slot_mapping={self.name: batch.common(causal).slot_mapping}
        )
        with torch.inference_mode(), context:
            out = self.layer(*(torch.cat(x).flatten(1) for x in (batch.q, new_k, new_v)))
        return out.unflatten(-1, (self.heads, -1))


@dataclass
class Batch:
    """Queries of the new tokens, keys and values of all tokens of each request."""

    requests: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.bfloat16
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    blocks: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(self.seed)

        def tensor(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, self.dim, generator=generator).to(self.dtype)

        self.q = [tensor(rows, self.heads) for rows, _ in self.requests]
        self.k = [tensor(keys, self.kv_heads) for _, keys in self.requests]
        self.v = [tensor(keys, self.kv_heads) for _, keys in self.requests]
        counts = [-(-keys // BLOCK) for _, keys in self.requests]
        free = iter(torch.randperm(self.blocks, generator=generator).tolist())
        self.table = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32)  # no block: must not be read
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([next(free) for _ in range(count)])

    def slots_of(self, request: int, begin: int, end: int) -> torch.Tensor:
        places = torch.arange(begin, end)
        return self.table[request, places // BLOCK].long() * BLOCK + places % BLOCK

    def common(self, causal: Any = True) -> CommonAttentionMetadata:
        rows = torch.tensor([0, *(rows for rows, _ in self.requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        keys = torch.tensor([keys for _, keys in self.requests], dtype=torch.int32)
        slots = [self.slots_of(b, keys - rows, keys) for b, (rows, keys) in enumerate(self.requests)]
        return CommonAttentionMetadata(
            query_start_loc=rows, query_start_loc_cpu=rows.clone().cpu(), seq_lens=keys, num_reqs=len(self.requests),
            num_actual_tokens=int(rows[-1]), max_query_len=max(rows for rows, _ in self.requests),
            max_seq_len=max(keys for _, keys in self.requests), block_table_tensor=self.table,
            slot_mapping=torch.cat(slots), causal=causal,
        )  # fmt: skip


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, *, causal: bool = True,
    window: tuple[int, int] | None = None, softcap: float = 0.0, slopes: Sequence[float] | None = None,
    sinks: torch.Tensor | None = None, ranges: Sequence[tuple[int, int]] = (), clamped: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One request's attention in a dtype, by definition: q (Sq, Hq, D), k and v (Sk, Hk, D); the last query is last.

    ranges   positions [first, last] whose tokens also attend to one another; clamped: as far back as the window alone
    """
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=dtype)[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= (distance > window[0]) | (distance < -window[1])
    at = torch.arange(k.shape[1])
    for first, last in ranges:
        among = (at >= first) & (at <= last)
        shown = among[k.shape[1] - q.shape[1] :, None] & among
        hidden &= ~(shown & (distance <= window[0]) if clamped and window is not None else shown)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1)


def check(out: torch.Tensor, batch: Batch, **features: Any) -> None:
    """The budget of each request: 2 · |the same in the batch's dtype − float64|, and rounding."""
    begin = 0
    causal, ranges = features.pop("causal", True), features.pop("ranges", {})
    for b, (rows, _) in enumerate(batch.requests):
        each = {**features, "causal": causal[b] if isinstance(causal, list) else causal, "ranges": ranges.get(b, ())}
        ours, begin = out[begin : begin + rows].double(), begin + rows
        exact = attend(batch.q[b], batch.k[b], batch.v[b], torch.float64, **each)
        same = attend(batch.q[b], batch.k[b], batch.v[b], batch.dtype, **each)
        assert ours.shape == exact.shape
        assert largest(ours - exact) <= budget(batch.dtype, exact, same), (b, largest(ours - exact))
    assert begin == sum(rows for rows, _ in batch.requests)
