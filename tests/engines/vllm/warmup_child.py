"""Run by test_vllm_warmup.py, with fakedriver's library: vLLM's layers on CPU tensors that count as an H100's, their
warm-up, and then random batches. Prints as JSON the calls that were planned, and the kernels compiled, after it."""

# ruff: noqa: E402 - the driver comes before Triton

from __future__ import annotations

import json
import random
import sys
from typing import Any

from fuzz.recorded import Recorder

recorder = Recorder()
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_batches import BLOCK, Layer

import portattn
from portattn.api import dispatch, monitor, warmup
from portattn.integrations import engine_warmup
from portattn.integrations.vllm import backend, metadata, register

register()
metadata.needs_warmup = lambda device: True
warmup.synchronize = lambda device: None  # type: ignore[assignment]
SEQUENCES, TOKENS, LENGTH = 48, 1024, 2048
reports: list[Any] = []
metadata.compile_calls = lambda *given: reports.append(engine_warmup.compile_calls(*given))
planned: list[str] = []
run = dispatch.run
dispatch.run = lambda *given: planned.append(str(given[0].problem)) or run(*given)  # type: ignore[func-returns-value]


class Limited(Layer):
    """A layer of an engine with limits."""

    def configured(self, config: Any) -> Any:
        scheduler = config.scheduler_config
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len = SEQUENCES, TOKENS, LENGTH
        return config


def engines(r: random.Random, invariant: bool) -> dict[str, Any]:
    """Random settings of an engine's layer."""
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


def batch(layer: Limited, r: random.Random, buffers: Buffers) -> None:
    """Run a random batch through the layer's builder, its write and its forward."""
    rows = rows_of(r)
    count, total = len(rows), sum(rows)
    buffers.starts[1 : count + 1] = torch.tensor(rows, dtype=torch.int32).cumsum(0)
    common = CommonAttentionMetadata(
        query_start_loc=buffers.starts[: count + 1], query_start_loc_cpu=buffers.starts[: count + 1].clone(),
        seq_lens=buffers.lengths[:count], num_reqs=count, num_actual_tokens=total, max_query_len=max(rows),
        max_seq_len=LENGTH, block_table_tensor=buffers.table[:count], slot_mapping=buffers.slots[:total], causal=True,
    )  # fmt: skip
    made = layer.builder.build(0, common)
    with torch.inference_mode():
        sizes = [layer.heads, layer.kv_heads, layer.kv_heads]
        one = torch.zeros(total, sum(sizes) * layer.dim, dtype=layer.dtype)
        q, k, v = (part.view(total, -1, layer.dim) for part in one.split([n * layer.dim for n in sizes], 1))
        q, k, v = (part.contiguous() if r.random() < 0.5 else part for part in (q, k, v))
        out = torch.empty(total, layer.heads, layer.dim, dtype=layer.dtype)
        impl = layer.layer.impl
        impl.do_kv_cache_update(layer.layer, k, v, layer.layer.kv_cache, buffers.slots[:total])
        impl.forward(layer.layer, q, k, v, layer.layer.kv_cache, made, out)
    recorder.fake.library.fake_clear()  # its memory has an end


def seen(seed: int, batches: int) -> dict[str, Any]:
    r = random.Random(seed)
    invariant = r.random() < 0.25
    backend.envs.VLLM_BATCH_INVARIANT = invariant
    settings = engines(r, invariant)
    layer = Limited(blocks=64, **settings)
    reports.clear()
    layer.layer.bind_kv_cache(layer.layer.kv_cache)
    (report,) = reports
    buffers = Buffers(-(-LENGTH // BLOCK // 8) * 8)
    planned.clear()
    wrong = []
    for _ in range(batches):
        state, before = r.getstate(), len(planned)
        with monitor.counting() as compiled:
            batch(layer, r, buffers)
        again = random.Random()
        again.setstate(state)
        if compiled or len(planned) > before:
            rows = rows_of(again)
            wrong.append([sorted(compiled), planned[before:], [len(rows), sum(rows), max(rows)]])
    return {
        "settings": str(settings | {"invariant": invariant}), "classes": len(report.specs), "wrong": wrong,
        "failed": [one.failed for one in report.failed], "seconds": report.seconds,
    }  # fmt: skip


with portattn.settings(isolate="never", canary="never", validate="never"):
    found = [seen(int(seed), int(sys.argv[2])) for seed in sys.argv[1].split(",")]
print(json.dumps({"engines": found}))
