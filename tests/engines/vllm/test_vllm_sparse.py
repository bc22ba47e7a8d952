"""vLLM's sparse MLA layer: portattn attends the tokens of the indexer's lists, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from test_vllm_latent import BLOCKS, HEADS, RANK, ROPE, Latent, inputs
from test_vllm_selection import reasons
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.v1.attention.backends.mla import index_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_batches import BLOCK, DEVICE, ON_GPU, Batch

import portattn
from portattn.errors import ArgumentError, PortattnError
from portattn.integrations import VLLM_SPARSE, differences
from portattn.integrations.engine_warmup import Engine
from portattn.testing.tolerance import budget, largest

if Version(vllm.__version__) < Version("0.33"):
    pytest.skip("vLLM shares the classes of its sparse backends from 0.33 on", allow_module_level=True)

from portattn.integrations.vllm.mla_sparse import PortattnSparseMLABackend, PortattnSparseMLAImpl

works = pytest.mark.engine_feature
TOPK = 128  # vLLM turns as many tokens at a time into slots


def pack(rows: torch.Tensor) -> torch.Tensor:
    """Rows (N, R + E) bfloat16 as DeepSeek stores them: R e4m3 numbers, a float32 scale for each 128, E bfloat16."""
    groups = rows[:, :RANK].float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    numbers = (groups / scale).to(torch.float8_e4m3fn).flatten(1)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (numbers, scale[..., 0], rows[:, RANK:])], -1)


def unpacked(stored: torch.Tensor) -> torch.Tensor:
    numbers, scale, rope = stored.split([RANK, RANK // 32, 2 * ROPE], -1)
    groups = numbers.contiguous().view(torch.float8_e4m3fn).double().unflatten(-1, (-1, 128))
    whole = groups * scale.contiguous().view(torch.float32).double()[..., None]
    return torch.cat([whole.flatten(1), rope.contiguous().view(torch.bfloat16).double()], -1)


def layer_of(monkeypatch: pytest.MonkeyPatch, topk: torch.Tensor, cache_dtype: str = "auto") -> Latent:
    monkeypatch.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1)
    if not ON_GPU:
        monkeypatch.setattr(index_group, "_create_side_stream", lambda device: None)
        monkeypatch.setattr(index_group, "_create_event", lambda: None)
    made = Latent(backend=PortattnSparseMLABackend, topk=topk, cache_dtype=cache_dtype)
    packed = cache_dtype == "fp8_ds_mla"
    if packed:
        made.layer.bind_kv_cache(torch.full((BLOCKS, 1, BLOCK, 656), 0xFF, dtype=torch.uint8))

    def write_rows(
        rows: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: Any, **__: Any
    ) -> None:  # vLLM's own operation is CUDA's
        new = torch.cat([rows, rope.flatten(1)], -1)[: slots.numel()]
        cache.flatten(0, 1)[slots.flatten()] = pack(new) if packed else new

    made.layer.impl.do_kv_cache_update = write_rows
    return made


def lists(batch: Batch) -> torch.Tensor:
    """Random tokens of each row's past, some of them holes, and -1 behind them: (tokens, TOPK) int32."""
    generator = torch.Generator(DEVICE).manual_seed(11)
    rows = []
    for new, keys in batch.requests:
        for end in range(keys - new + 1, keys + 1):
            chosen = torch.randperm(end, generator=generator, device=DEVICE)[:29]
            row = torch.full((TOPK,), -1, dtype=torch.int32)
            row[: len(chosen)] = torch.where(torch.rand(len(chosen), generator=generator) < 0.1, -1, chosen.int())
            rows.append(row)
    return torch.stack(rows)


def check(
    layer: Latent, batch: Batch, out: torch.Tensor, q: torch.Tensor, latent: list[torch.Tensor], chosen: torch.Tensor
) -> None:
    begin = 0
    for b, (new, _) in enumerate(batch.requests):
        for row in range(begin, begin + new):
            seen = latent[b][chosen[row][chosen[row] >= 0].long()]
            exact, same = (layer.expected(q[row : row + 1], seen, t) for t in (torch.float64, torch.bfloat16))
            assert largest(out[row : row + 1].double() - exact) <= 2 * budget(torch.bfloat16, exact, same), (b, row)
        begin += new


@works("sparse latent attention (DSA): decode, verification and long prompts")
@pytest.mark.parametrize("requests", [[(1, 20), (1, 70), (1, 1)], [(1, 50), (4, 33), (40, 90), (7, 7)]])
def test_lists_of_tokens(requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(requests)
    chosen = lists(batch)
    layer = layer_of(monkeypatch, chosen)
    q, latent = inputs(batch, torch.bfloat16)
    out, _ = layer.run(batch, q, latent)
    assert portattn.last_plan().problem.tokens == TOPK
    check(layer, batch, out, q, latent, chosen)


@works("sparse latent attention (DSA): fp8_ds_mla caches")
def test_rows_of_656_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([(1, 50), (4, 33)])
    chosen = lists(batch)
    layer = layer_of(monkeypatch, chosen, "fp8_ds_mla")
    q, latent = inputs(batch, torch.bfloat16)
    out, _ = layer.run(batch, q, latent)
    assert portattn.last_plan().problem.kv_format == "fp8_ds_mla"
    check(layer, batch, out, q, [unpacked(pack(rows)) for rows in latent], chosen)


def test_the_start_describes_a_layers_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(monkeypatch, torch.zeros(8, TOPK, dtype=torch.int32))
    engine = Engine(4, 8, 8, 64, [4], torch.bfloat16, DEVICE)
    report = portattn.warmup(layer.layer.impl.specs(layer.layer, engine), device=DEVICE)
    portattn.monitor(False)
    assert len(report.specs) >= 2
    assert report.failed == ()


@pytest.mark.parametrize(("name", "value"), [("alibi_slopes", [0.5]), ("sliding_window", 7), ("logits_soft_cap", 2.0)])
def test_what_latent_attention_lacks_is_refused(name: str, value: Any) -> None:
    arguments = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap")) | {name: value}
    with pytest.raises(ArgumentError, match=f"{name} is .*, but is not supported with latent attention"):
        PortattnSparseMLAImpl(HEADS, RANK + ROPE, 1.0, 1, kv_cache_dtype="auto", **arguments)


@works("sparse latent attention (DSA): decode, verification and long prompts")
def test_releases_and_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(differences(VLLM_SPARSE)) == []
    asked = {"one": PortattnSparseMLABackend, "head_size": 576, "use_mla": True, "use_sparse": True}
    assert reasons(**asked) == reasons(**asked, kv_cache_dtype="fp8_ds_mla") == []
    assert reasons(**asked, kv_cache_dtype="fp8") == ["kv_cache_dtype not supported"]
    assert reasons(**asked | {"use_sparse": False}) == ["non-sparse not supported"]
    assert reasons(**asked, use_pcp=True) == ["PCP not supported"]
    assert reasons(**asked, use_dcp=True) == ["DCP not supported"]
    assert reasons(**asked, use_non_causal=True) == ["non-causal attention not supported"]
    assert reasons(**asked | {"head_size": 512}, kv_cache_dtype="fp8_ds_mla") == [
        "a fp8_ds_mla cache needs a head size of 576, not 512"
    ]
    monkeypatch.setattr(vllm, "__version__", "0.32.1")
    with pytest.raises(PortattnError, match=r"vLLM 0\.32\.1 is not supported: it is older than 0\.33"):
        AttentionBackendEnum["PORTATTN_MLA_SPARSE"].get_class()
