"""When SGLang makes the backend: unsupported features are refused by name, and the calls to come are compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend
from sglang.srt.model_executor.cuda_graph_config import Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec

from portattn.errors import ArgumentError
from portattn.integrations.engine_warmup import (
    Engine,
    RowLayout,
    compile_calls,
    contract,
    needs_warmup,
    projection_layouts,
)
from portattn.planning.planner import check_settings
from portattn.planning.registry import detect_target
from portattn.schema.problem_limits import MAX_HEAD_DIM
from portattn.schema.tensors import TensorSpec

log = logging.getLogger("sglang.portattn")
WHO = "portattn.integrations.sglang"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
MAX_DRAFT = 64  # bits of the word that says what a drafted token attends: portattn.tree_mask
ELSEWHERE = "is not supported: use --attention-backend triton"


def refuse(name: str, value: object, why: str = ELSEWHERE) -> NoReturn:
    raise ArgumentError(WHO, name, value, why)


def check(runner: Any) -> None:
    """Refuse an unsupported setting, chip, pool or layer by name and value."""
    _check_device(torch.device(runner.device))
    _check_settings()
    _check_runner(runner)
    for pool in pools_of(runner.token_to_kv_pool):
        _check_pool(pool, runner)
    if runner.kv_index_translator is not None and runner.kv_index_translator.is_translating:
        refuse("kv_index_translator.is_translating", True, "--enable-unified-memory is not supported")
    model = getattr(runner, "model", None)
    for name, layer in [] if model is None else model.named_modules():
        if isinstance(layer, RadixAttention):
            _check_layer(name, layer, runner)


def pools_of(pool: Any) -> list[Any]:
    """Return the pools whose buffers are read: one, or the two of a model with sliding windows."""
    return [pool.full_kv_pool, pool.swa_kv_pool] if isinstance(pool, SWAKVPool) else [pool]


def _check_device(device: torch.device) -> None:
    """Check the chip and portattn's settings, whose errors would otherwise come with the first call."""
    target, unknown = detect_target(device.type, device.index)
    if unknown or target.arch.refused:
        refuse("device", str(device), f"kernels do not run on it: {unknown or target.arch.refused}")
    check_settings(WHO, target)


def _check_settings() -> None:
    parallel = get_parallel()
    for name in ("attn_dcp_size", "attn_cp_size"):
        if getattr(parallel, name) > 1:
            refuse(name, getattr(parallel, name), "must be 1: context parallelism is not supported")
    settings = get_exec()
    if settings.dllm.dllm_algorithm is not None:
        refuse("--dllm-algorithm", settings.dllm.dllm_algorithm)
    if settings.overlap.enable_two_batch_overlap:
        refuse("--enable-two-batch-overlap", True, "is not supported")
    if check_cuda_graph_backend(Phase.PREFILL, GraphBackend.FULL):
        refuse("CUDA graphs of prefill", GraphBackend.FULL, "must be breakable or disabled")
    drafted = get_spec().speculative_num_draft_tokens
    if drafted is not None and drafted > MAX_DRAFT:
        refuse("--speculative-num-draft-tokens", drafted, f"must be at most {MAX_DRAFT}")


def _check_runner(runner: Any) -> None:
    config = runner.model_config
    if runner.dtype not in DTYPES:
        refuse("dtype", runner.dtype, "must be float16, bfloat16 or float32")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None:
        refuse("attention_chunk_size", chunk, "chunked local attention is not supported: use --attention-backend fa3")
    if getattr(runner, "prefill_aware_swa", False):
        refuse("prefill_aware_swa", True, "is not supported: use --attention-backend fa3")
    windowed = runner.sliding_window_size is not None and runner.sliding_window_size > -1
    if config.is_encoder_decoder and windowed:
        refuse("sliding_window_size", runner.sliding_window_size, "must be None in an encoder-decoder model")
    if config.is_encoder_decoder and runner.page_size > 1:
        refuse("--page-size", runner.page_size, "must be 1 for an encoder-decoder model: its rows are not page-aligned")
    if runner.use_mla_backend and windowed:
        refuse("sliding_window_size", runner.sliding_window_size, "must be None in a model with latent attention")


def _check_pool(pool: Any, runner: Any) -> None:
    wanted = MLATokenToKVPool if runner.use_mla_backend else MHATokenToKVPool
    if type(pool) is not wanted:  # subclasses store something else: FP4, scales, an indexer's keys
        refuse("token_to_kv_pool", type(pool).__name__, f"must be {wanted.__name__}, or SWAKVPool of two of them")
    if not runner.use_mla_backend:
        if pool.kv_cache_layout not in ("nhd", "hnd"):
            refuse("kv_cache_layout", pool.kv_cache_layout, "must be nhd or hnd")
        if pool.is_quantized_kv_cache:
            # Of nvfp4 SGLang makes scales that lie as we read them only for a backend that its own table of FP4 names.
            limit = "must be auto, bf16 or one of float8: SGLang has FP4 caches for backends of its own alone"
            refuse("--kv-cache-dtype", type(pool.quant_method).__name__, limit)
        _check_width("head_dim of the pool", pool.head_dim)
        _check_width("v_head_dim of the pool", pool.v_head_dim)
    else:
        _check_width("kv_lora_rank + qk_rope_head_dim of the pool", pool.kv_lora_rank + pool.qk_rope_head_dim)
    if pool.page_size != runner.page_size:
        refuse("page_size", pool.page_size, f"of the pool must be the runner's, {runner.page_size}")
    if pool.dtype != runner.dtype and (pool.dtype not in FLOAT8 or runner.dtype is torch.float32):
        refuse("kv_cache_dtype", pool.dtype, f"must be the model's, {runner.dtype}, or float8 with 16-bit queries")


def _check_width(name: str, width: int) -> None:
    if not 1 <= width <= MAX_HEAD_DIM:
        refuse(name, width, f"must be in 1..{MAX_HEAD_DIM}")


def _check_layer(name: str, layer: Any, runner: Any) -> None:
    for feature, expected in (
        ("logit_capping_method", "tanh"),
        ("pos_encoding_mode", "NONE"),
        ("xai_temperature_len", -1),
    ):
        if getattr(layer, feature) != expected:
            refuse(f"{feature} of {name}", getattr(layer, feature), f"must be {expected!r}")
    if layer.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        refuse(f"attn_type of {name}", layer.attn_type.value)
    _check_width(f"qk_head_dim of {name}", layer.qk_head_dim)
    _check_width(f"v_head_dim of {name}", layer.v_head_dim)
    if layer.tp_q_head_num % layer.tp_k_head_num:
        refuse(f"tp_q_head_num of {name}", layer.tp_q_head_num, f"must be a multiple of {layer.tp_k_head_num}")
    if runner.use_mla_backend and layer.is_cross_attention:
        refuse(f"is_cross_attention of {name}", True, "must be False in a model with latent attention")


def compile_layers(backend: Any, runner: Any) -> None:
    """Compile the calls of all layers, by one warm-up. Sinks are arguments of a forward, and are not known before."""
    device = torch.device(runner.device)
    if not needs_warmup(device) or getattr(runner, "model", None) is None:
        return

    def specs() -> list[dict[str, Any]]:
        engine = engine_of(backend, runner, device)
        layers = [layer for layer in runner.model.modules() if isinstance(layer, RadixAttention)]
        return [spec for layer in layers for spec in layer_specs(backend, layer, engine)]

    with torch.no_grad(), contract(backend.invariant):
        compile_calls(specs, device, log, get_parallel().tp_size)


def engine_of(backend: Any, runner: Any, device: torch.device) -> Engine:
    schedule, graphs = get_schedule(), get_exec().graph.cuda_graph_config
    requests = max(runner.req_to_token_pool.size, (graphs.decode.max_bs if graphs is not None else 0) or 0)
    chunk = max(schedule.chunked_prefill_size or 0, 0) * 5 // 4  # how far dynamic chunks can grow
    # Without chunks the first prompt may be longer than a batch's limit. Requests that decode may be mixed in.
    longest = chunk or runner.model_config.context_len
    tokens = max(longest, schedule.max_prefill_tokens or 0) + requests
    columns = [backend.pools.columns]
    return Engine(requests, tokens, tokens, runner.model_config.context_len, columns, runner.dtype, device)


def layer_specs(backend: Any, layer: Any, engine: Engine) -> Iterator[dict[str, Any]]:
    """Yield specs of `portattn.warmup` for every call that a layer can make."""
    shared, latent = backend.arguments(layer), hasattr(backend, "rank")
    heads, width, width_v = layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim
    parts = projection_layouts(heads, layer.tp_k_head_num, width, width_v)
    if layer.attn_type is AttentionType.ENCODER_ONLY or (latent and width_v != backend.rank):
        yield from (shared | engine.self_attention(*rows) for rows in parts)
        if latent:
            return
    float8 = backend.float8(layer) is not None
    scales = {"k_scale": layer.k_scale, "v_scale": layer.k_scale if latent else layer.v_scale} if float8 else {}
    queries: list[dict[str, RowLayout]]
    if latent and width > backend.rank:
        rank, rope = backend.rank, width - backend.rank
        shared |= {"op": "mla_attention", "kv_pages": backend.pools.latent_pages(layer.layer_id)}
        shared |= {"kv_scale": layer.k_scale} if float8 else {}
        queries = [
            {"q_nope": RowLayout(heads, rank), "q_rope": RowLayout(heads, rope)},
            {"q_nope": RowLayout(heads, rank, 0, width), "q_rope": RowLayout(heads, rope, 0, width, rank)},
        ]
    else:
        both = backend.pools.latent_pages(layer.layer_id).unsqueeze(2) if latent else None
        k, v, order = (both, both, "phd") if latent else backend.pools.pages(layer.layer_id)
        shared |= {"op": "paged_attention", "k_pages": k, "v_pages": v, "page_layout": order, **scales}
        queries = [{"q": RowLayout(heads, width)}, {"q": parts[1][0]}]
    steps = get_spec().speculative_num_steps
    drafted = {backend.drafted, steps and steps + 1} if backend.drafted else set()
    for rows in queries:
        yield shared | engine.packed(rows)
        if backend.drafted:  # the host need not know rows of a draft's extension
            yield shared | engine.packed(rows, longest=False)
        for each in {1, *filter(None, drafted)}:
            yield shared | engine.uniform(rows, each)
            if each > 1:
                yield shared | engine.uniform(rows, each) | {"tree_mask": TensorSpec(("B", each), None, torch.int64)}
