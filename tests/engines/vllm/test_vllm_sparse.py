"""vLLM's sparse MLA layer over given lists, and its DSA decoder layer with portattn's indexer, against float64."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from test_vllm_latent import BLOCKS, HEADS, NOPE, RANK, ROPE, VALUE, Latent
from test_vllm_selection import reasons
from transformers import DeepseekV3Config
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models import deepseek_v2
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla import index_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_batches import BLOCK, DEVICE, Batch, default_dtype

import portattn
import portattn.integrations.vllm
from portattn.errors import ArgumentError, PortattnError
from portattn.integrations import VLLM_SPARSE, differences
from portattn.integrations.engine_warmup import Engine
from portattn.reference.blocks import latent_rows
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
    monkeypatch.setattr(type(current_platform), "fp8_dtype", classmethod(lambda cls: torch.float8_e4m3fnuz))
    (reason,) = reasons(**asked, kv_cache_dtype="fp8_ds_mla")
    assert "needs rows of torch.float8_e4m3fn, and this platform writes torch.float8_e4m3fnuz" in reason
    with pytest.raises(ArgumentError, match=r"the platform's fp8_dtype is torch.float8_e4m3fnuz, but must be"):
        Decoder(torch.zeros(4, 4, dtype=torch.int32))
    monkeypatch.setattr(vllm, "__version__", "0.32.1")
    with pytest.raises(PortattnError, match=r"vLLM 0\.32\.1 is not supported: it is older than 0\.33"):
        AttentionBackendEnum["PORTATTN_MLA_SPARSE"].get_class()


QUERY, HIDDEN, KEY = 128, 256, 128


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as e4m3, and the scale of each, a power of two."""
    scale = torch.exp2(torch.ceil(torch.log2(x.float().abs().amax(-1, keepdim=True) / 448)))
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def write_keys(k: Any, kv_cache: Any, slot_mapping: Any, quant_block_size: int, kv_cache_dtype: str) -> None:
    """vLLM's own operation is CUDA's: a page's numbers, and behind them its scales."""
    for numbers, scale, slot in zip(*quantised(k), slot_mapping.tolist(), strict=True):
        page, place = kv_cache[slot // BLOCK].flatten(), slot % BLOCK
        page[KEY * place :][:KEY] = numbers.view(torch.uint8)
        page[KEY * BLOCK + 4 * place :][:4] = scale.view(torch.uint8)


class Decoder(Latent):
    """vLLM's decoder layer with random weights, the caches of attention and of the indexer, and both builders."""

    def __init__(self, lists: torch.Tensor, cache_dtype: str = "auto", speculative: int = 0) -> None:
        super().__init__(backend=PortattnSparseMLABackend, topk=lists, cache_dtype=cache_dtype, speculative=speculative)
        model, packed = self.config.model_config, cache_dtype == "fp8_ds_mla"
        hf = DeepseekV3Config(
            hidden_size=HIDDEN, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
            q_lora_rank=QUERY, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE,
            num_hidden_layers=1, first_k_dense_replace=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            index_topk=TOPK, index_n_heads=4, index_head_dim=KEY, max_position_embeddings=512,
        )  # fmt: skip
        model.hf_config = model.hf_text_config = hf
        model.use_mla, model.quantization, model.word_embeddings_untied_by_checkpoint = True, None, False
        self.config.attention_config.sparse_mla_prefill_workspace_factor = 2
        with set_current_vllm_config(self.config), default_dtype(self.dtype):
            self.layer = deepseek_v2.DeepseekV2DecoderLayer(self.config, "layers.0", hf, lists)
            torch.manual_seed(5)
            for weight in self.layer.requires_grad_(False).parameters():
                weight.normal_(std=weight.shape[-1] ** -0.5) if weight.ndim > 1 else weight.fill_(1)
            process_weights_after_loading(self.layer, model, DEVICE)
            self.index, self.attention = self.layer.self_attn.indexer, self.layer.self_attn.mla_attn.mla_attn
            self.projection, self.builders = self.layer.self_attn.kv_b_proj, {}
            self.attention.impl.record_logical_topk_ready = lambda: None
            self.attention.impl.do_kv_cache_update = self.write_rows
            width, dtype = (656, torch.uint8) if packed else (RANK + ROPE, self.dtype)
            self.attention.bind_kv_cache(
                torch.full((BLOCKS, 1, BLOCK, width), 0xFF if packed else torch.nan, dtype=dtype)
            )
            self.index.k_cache.bind_kv_cache(torch.full((BLOCKS, 1, BLOCK, KEY + 4), 0x7F, dtype=torch.uint8))
            for one in (self.attention, self.index.k_cache):
                backend, name = one.get_attn_backend(), getattr(one, "layer_name", None) or one.prefix
                spec = backend.customize_spec(one.get_kv_cache_spec(self.config))
                self.builders[name] = backend.get_builder_cls()(spec, [name], self.config, DEVICE)
        self.scored: list[Any] = []  # queries, keys and weights of each batch
        self.attended: list[Any] = []  # queries, latent rows, rotary rows and the result
        self.index.indexer_op.register_forward_pre_hook(lambda _, given: self.scored.append(given[1:]))
        self.attention.register_forward_hook(lambda _, given, out: self.attended.append((*given, out)))

    @staticmethod
    def write_rows(rows: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *_: Any) -> None:
        """vLLM's own operation is CUDA's."""
        new = torch.cat([rows, rope.flatten(1)], -1)[: slots.numel()]
        cache.flatten(0, 1)[slots.flatten()] = pack(new) if cache.dtype == torch.uint8 else new

    def run_layer(self, batch: Batch, x: list[torch.Tensor]) -> None:
        common = batch.common()
        common = common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone().cpu())
        built = {name: builder.build(0, common) for name, builder in self.builders.items()}
        rows = torch.cat([x[b][keys - new : keys] for b, (new, keys) in enumerate(batch.requests)])
        places = torch.cat([torch.arange(keys - new, keys) for new, keys in batch.requests])
        context = set_forward_context(built, self.config, slot_mapping=dict.fromkeys(built, common.slot_mapping))
        with set_current_vllm_config(self.config), context, torch.compiler.set_stance("force_eager"):
            self.layer(places, rows, None)


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    assert portattn.integrations.vllm.DeepseekV32ForCausalLM is deepseek_v2.DeepseekV3ForCausalLM
    monkeypatch.setattr(mla_attention, "get_attn_backend", lambda *_, **__: PortattnSparseMLABackend)
    monkeypatch.setattr(_custom_ops, "indexer_k_quant_and_cache", write_keys)
    for name in ("_create_side_stream", "_create_event"):
        monkeypatch.setattr(index_group, name, lambda *_: None)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/meeting", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


LONG = [(2, 200), (2, 20), (40, 240), (150, 150)]


@pytest.mark.parametrize(
    ("requests", "cache", "speculative", "room"),  # room for logits: "0" for a row at a time
    [
        pytest.param(*given, marks=works(f"sparse latent attention (DSA): {feature}"))
        for feature, given in (
            ("decode, verification and long prompts", ([(1, 200), (1, 20), (1, 1)], "auto", 0, "1")),
            ("decode, verification and long prompts", (LONG, "auto", 1, "0")),
            ("portattn's indexer", (LONG, "auto", 1, "1")),
            ("fp8_ds_mla caches", ([(1, 150), (4, 33)], "fp8_ds_mla", 0, "1")),
        )
    ],
)  # fmt: skip
def test_a_decoder_layer_with_its_indexer(
    requests: list[tuple[int, int]], cache: str, speculative: int, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", room)
    chosen = torch.full((512, TOPK), -7, dtype=torch.int32)
    made, batch = Decoder(chosen, cache, speculative), Batch(requests)
    x = [torch.randn(keys, HIDDEN).bfloat16() for _, keys in requests]
    past = Batch([(keys - new, keys - new) for new, keys in requests])
    past.table = batch.table
    with torch.inference_mode():
        made.run_layer(past, x)
        made.run_layer(batch, x)
        problem = portattn.last_plan().problem
        assert (problem.tokens, problem.kv_format) == (TOPK, "as_q" if cache == "auto" else cache)
        (queries, _, weights), (q, *_, out) = made.scored[1], made.attended[1]
        latent, begin, before = [], 0, 0
        for b, (new, keys) in enumerate(requests):
            rows = slice(before, before + keys - new), slice(begin, begin + new)
            begin, before = begin + new, before + keys - new
            numbers, scale = quantised(torch.cat([k[part] for (_, k, _), part in zip(made.scored, rows, strict=True)]))
            scores = torch.einsum("thd,sd->ths", queries[rows[1]].double(), numbers.double() * scale).relu()
            logits = (scores * weights[rows[1], :, None]).sum(1)
            for row, ours in enumerate(chosen[rows[1]]):
                end = keys - new + row + 1
                ours = ours[ours >= 0].long()
                assert len(ours.unique()) == len(ours) == min(TOPK, end) <= end > ours.max(), (b, row)
                least = logits[row, :end].topk(len(ours)).values[-1]
                assert logits[row, ours].min() >= least - 1e-4 * abs(least), (b, row)
            stored = [
                torch.cat([c, e.flatten(1)], 1)[part] for (_, c, e, _), part in zip(made.attended, rows, strict=True)
            ]
            latent.append(torch.cat(stored) if cache == "auto" else latent_rows(pack(torch.cat(stored)), RANK))
        check(made, batch, out.unflatten(-1, (HEADS, VALUE)), q, latent, chosen)
        assert (chosen[max(begin, before) :] == -7).all()


@works("sparse latent attention (DSA): portattn's indexer")
def test_a_layer_describes_its_calls_and_its_indexer_refuses_others() -> None:
    made = Decoder(torch.zeros(8, TOPK, dtype=torch.int32))
    engine = Engine(4, 8, 8, 64, [4], torch.bfloat16, DEVICE)
    for layer, kinds in ((made.attention, 2), (made.index.k_cache, 4)):
        report = portattn.warmup(layer.impl.specs(layer, engine), device=DEVICE)
        portattn.monitor(False)
        assert len(report.specs) >= kinds
        assert report.failed == ()
    with set_current_vllm_config(made.config):
        for size, flag, name in ((KEY, {"use_fp4_cache": True}, "use_fp4_cache"), (64, {}, "quant_block_size")):
            with pytest.raises(ArgumentError, match=name):
                SparseAttnIndexer(layer, size, "ue8m0", TOPK, KEY, 512, 512, made.index.topk_indices_buffer, **flag)
