"""Run by test_vllm_warmup.py, with fakedriver's library: vLLM's layers on CPU tensors that count as an H100's, their
warm-up, and then random batches. Prints as JSON the calls that were planned, and the kernels compiled, after it."""

# ruff: noqa: E402 - the driver comes before Triton

import random
from typing import Any

from fuzz.recorded import StartedEngines

started = StartedEngines()
import torch
from test_vllm_latent import HEADS, NOPE, RANK, ROPE, Latent
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_batches import BLOCK, Layer

from portattn.integrations.vllm import backend, metadata, register

register()
started.watch(metadata)
SEQUENCES, TOKENS, LENGTH = 48, 1024, 2048


class Limited(Layer):
    """A layer of an engine with limits."""

    def configured(self, config: Any) -> Any:
        scheduler = config.scheduler_config
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len = SEQUENCES, TOKENS, LENGTH
        return config


def random_settings(r: random.Random) -> dict[str, Any]:
    kv_heads = r.choice((1, 2, 8))
    heads = kv_heads * r.choice((1, 2, 4, 5, 8))
    arguments: dict[str, Any] = {}
    if r.random() < 0.2:
        arguments["logits_soft_cap"] = 30.0
    if r.random() < 0.2:
        arguments["sinks"] = torch.zeros(heads, dtype=torch.bfloat16)
    if r.random() < 0.2:
        arguments["alibi_slopes"] = [0.5] * heads
    return {
        "heads": heads, "kv_heads": kv_heads, "dim": r.choice((64, 72, 128, 256)), "arguments": arguments,
        "cache_dtype": r.choice(("auto", "auto", "fp8", "int8_per_token_head")), "window": r.choice((None, None, 300)),
        "layout": r.choice(("LBNHC", "LBHNC")),
    }  # fmt: skip


def rows_of(r: random.Random) -> list[int]:
    """Rows of each request in a batch: decode, verification, prefill, chunked prefill, or several of them."""
    count, kind = r.choice((1, 2, r.randint(1, SEQUENCES), SEQUENCES)), r.random()
    if kind < 0.3:
        return [1] * count
    if kind < 0.5:
        return [r.randint(2, 9)] * min(count, TOKENS // 9)
    rows = [1 if r.random() < 0.5 else r.randint(1, r.choice((8, 40, TOKENS))) for _ in range(count)]
    while sum(rows) > TOKENS:
        rows[rows.index(max(rows))] = max(1, max(rows) - (sum(rows) - TOKENS))
    return rows


class Buffers:
    """An engine's buffers, made outside of inference mode, as its model runner's are."""

    def __init__(self, width: int) -> None:
        self.table = torch.zeros(SEQUENCES, width, dtype=torch.int32)
        self.starts = torch.zeros(SEQUENCES + 1, dtype=torch.int32)
        self.lengths = torch.zeros(SEQUENCES, dtype=torch.int32)
        self.slots = torch.full((TOKENS,), -1, dtype=torch.int64)

    def common(self, rows: list[int]) -> CommonAttentionMetadata:
        count, total = len(rows), sum(rows)
        self.starts[1 : count + 1] = torch.tensor(rows, dtype=torch.int32).cumsum(0)
        self.lengths[:count] = torch.tensor(rows, dtype=torch.int32)
        lengths = self.lengths[:count]
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: count + 1], query_start_loc_cpu=self.starts[: count + 1].clone(),
            seq_lens=lengths, num_reqs=count, num_actual_tokens=total, max_query_len=max(rows), max_seq_len=LENGTH,
            block_table_tensor=self.table[:count], slot_mapping=self.slots[:total], causal=True,
            seq_lens_cpu_upper_bound=lengths.clone(),
        )  # fmt: skip


def batch(layer: Limited, r: random.Random, buffers: Buffers) -> str:
    """Run a random batch through the layer's builder, its write and its forward."""
    rows = rows_of(r)
    total = sum(rows)
    made = layer.builder.build(0, buffers.common(rows))
    with torch.inference_mode():
        sizes = [layer.heads, layer.kv_heads, layer.kv_heads]
        one = torch.zeros(total, sum(sizes) * layer.dim, dtype=layer.dtype)
        q, k, v = (part.view(total, -1, layer.dim) for part in one.split([n * layer.dim for n in sizes], 1))
        q, k, v = (part.contiguous() if r.random() < 0.5 else part for part in (q, k, v))
        out = torch.empty(total, layer.heads, layer.dim, dtype=layer.dtype)
        impl = layer.layer.impl
        impl.do_kv_cache_update(layer.layer, k, v, layer.layer.kv_cache, buffers.slots[:total])
        impl.forward(layer.layer, q, k, v, layer.layer.kv_cache, made, out)
    return f"{len(rows)} requests, {total} rows, {max(rows)} of the longest"


def latent_batch(layer: Latent, r: random.Random, buffers: Buffers) -> str:
    """Run a random batch of decoding requests through the builder of a latent layer, its write and its decoding."""
    count = r.choice((1, 2, r.randint(1, SEQUENCES), SEQUENCES))
    rows = [r.randint(1, layer.builder.reorder_batch_threshold) for _ in range(count)]
    rows = [1] * count if r.random() < 0.3 else rows
    total = sum(rows)
    made = layer.builder.build(0, buffers.common(rows))
    impl, cache = layer.layer.impl, layer.layer.kv_cache
    with torch.inference_mode():
        wide = torch.zeros(total, HEADS, NOPE + ROPE, dtype=layer.dtype)
        q = torch.zeros(total, HEADS, RANK, dtype=layer.dtype), wide[..., NOPE:]
        q = torch.cat(q, -1) if r.random() < 0.5 else q
        new = torch.zeros(total, RANK + ROPE, dtype=layer.dtype).split((RANK, ROPE), -1)
        rope = new[1].unsqueeze(1) if r.random() < 0.5 else new[1].unsqueeze(1).contiguous()
        impl.do_kv_cache_update(
            new[0].contiguous(), rope, cache, buffers.slots[:total], layer.layer.kv_cache_dtype, layer.layer._k_scale
        )
        impl.forward_mqa(q, impl._pages(cache, layer.layer.kv_cache_dtype, None)[0].squeeze(2), made, layer.layer)
    return f"{count} requests, {total} rows, {max(rows)} of the longest"


def engine(seed: int, batches: int) -> dict[str, Any]:
    r = random.Random(seed)
    backend.envs.VLLM_BATCH_INVARIANT = invariant = r.random() < 0.25
    if seed % 3 == 2:
        settings: dict[str, Any] = {"cache_dtype": r.choice(("auto", "fp8")), "speculative": r.choice((0, 3))}
        layer, run_one = Latent(**settings), latent_batch
        width = -(-layer.config.model_config.max_model_len // BLOCK)
    else:
        settings, width = random_settings(r), -(-LENGTH // BLOCK)
        layer, run_one = Limited(blocks=64, **settings), batch
        layer.layer.bind_kv_cache(layer.layer.kv_cache)
    buffers = Buffers(-(-width // 8) * 8)  # as vLLM 0.33 widens its block tables
    return started.found(settings | {"invariant": invariant}, batches, lambda: run_one(layer, r, buffers))


started.print_engines(engine)
