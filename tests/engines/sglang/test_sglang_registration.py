"""How SGLang finds the backend, and what it refuses when SGLang asks for it."""

import types
from typing import Any

import pytest
import torch
from served import Served, forward
from sglang.srt import plugins
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, DETERMINISTIC_ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from portattn import config
from portattn.errors import ArgumentError, PortattnError, SettingError
from portattn.integrations import SGLANG, differences, sglang
from portattn.integrations.sglang import capabilities
from portattn.planning.registry import detect_target, parse_target


@pytest.mark.engine_feature("registration by entry point")
def test_sglang_finds_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's own loader, after the name was taken out of its registry and of its choices."""
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.delitem(ATTENTION_BACKENDS, "portattn")
    ATTENTION_BACKEND_CHOICES.remove("portattn")
    plugins.load_plugins()
    assert ATTENTION_BACKEND_CHOICES.count("portattn") == 1
    assert "portattn" in ATTENTION_BACKENDS
    assert "portattn" in DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    sglang.activate()
    assert ATTENTION_BACKEND_CHOICES.count("portattn") == 1
    assert isinstance(Served([4]).backend, AttentionBackend)


@pytest.mark.engine_feature("SGLang with another interface, 0.5.19 and earlier", refused=True)
def test_other_interfaces_are_refused(monkeypatch: pytest.MonkeyPatch, refusal: Any) -> None:
    assert list(differences(SGLANG)) == []
    monkeypatch.setattr(sglang.metadata, "version", lambda name: "0.6.0")
    monkeypatch.delattr(ForwardMode, "is_dllm_extend")
    with refusal(PortattnError, match=r"SGLang 0\.6\.0: ForwardMode has no 'is_dllm_extend'; portattn was tested with"):
        _ = Served([4]).backend


def _runner(served: Served, **changed: Any) -> Any:
    return types.SimpleNamespace(**{**vars(served.runner), **changed})


def _config(served: Served, **changed: Any) -> Any:
    return types.SimpleNamespace(**{**vars(served.runner.model_config), **changed})


REFUSED: dict[str, Any] = {
    "chunked local attention (Llama 4)": (lambda s: _runner(s, model_config=_config(s, attention_chunk_size=8192)),
        "attention_chunk_size is 8192"),
    "pools of a class of their own (FP4, MXFP8, DSA)": (lambda s: _runner(s, token_to_kv_pool=types.SimpleNamespace()),
        "token_to_kv_pool is 'SimpleNamespace'"),
    "models of float64": (lambda s: _runner(s, dtype=torch.float64), "dtype is torch.float64"),
    "caches of another dtype than the model's": (lambda s: _runner(s, dtype=torch.bfloat16),
        "kv_cache_dtype is torch.float32"),
    "encoder-decoder models with pages": (
        lambda s: _runner(s, model_config=_config(s, is_encoder_decoder=True), page_size=16), "--page-size is 16",
    ),
    "encoder-decoder models with windows": (
        lambda s: _runner(s, model_config=_config(s, is_encoder_decoder=True), sliding_window_size=9),
        "sliding_window_size is 9",
    ),
    "latent attention with windows": (lambda s: _runner(s, use_mla_backend=True, sliding_window_size=9),
                                      "sliding_window_size is 9"),
    "unified memory": (lambda s: _runner(s, kv_index_translator=types.SimpleNamespace(is_translating=True)),
                       "is_translating is True"),
    "windows that begin at the prompt": (lambda s: _runner(s, prefill_aware_swa=True), "prefill_aware_swa is True"),
}  # fmt: skip


@pytest.mark.parametrize(
    "feature", [pytest.param(n, marks=pytest.mark.engine_feature(n, refused=True)) for n in REFUSED]
)
def test_models_and_pools_are_refused_by_name(feature: str, refusal: Any) -> None:
    make, match = REFUSED[feature]
    runner = make(Served([4]))
    with refusal(ArgumentError, match=match):
        ATTENTION_BACKENDS["portattn"](runner)


@pytest.mark.engine_feature("pools of a class of their own (FP4, MXFP8, DSA)", refused=True)
def test_subclasses_of_pools_are_refused(refusal: Any) -> None:
    class Other(MLATokenToKVPool):
        pass

    served = Served([4], latent=True)
    served.pool.__class__ = Other
    with refusal(ArgumentError, match="token_to_kv_pool is 'Other', but must be MLATokenToKVPool"):
        _ = served.backend


LAYERS: dict[str, Any] = {
    "ALiBi and rotations inside attention (pos_encoding_mode)": ({"pos_encoding_mode": "ALIBI"},
        "pos_encoding_mode of l"),
    "caps other than tanh": ({"logit_capping_method": "sigmoid"}, "logit_capping_method of l is 'sigmoid'"),
    "bidirectional decoders": ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attn_type of l is 'decoder_bid"),
    "temperatures by position (Grok)": ({"xai_temperature_len": 1024}, "xai_temperature_len of l is 1024"),
}  # fmt: skip


@pytest.mark.parametrize(
    "feature", [pytest.param(n, marks=pytest.mark.engine_feature(n, refused=True)) for n in LAYERS]
)
def test_layers_are_refused_before_the_first_token(feature: str, refusal: Any) -> None:
    """The model is there when the backend is made: all its layers are looked at."""
    served, (options, match) = Served([4]), LAYERS[feature]
    later = options.pop("xai_temperature_len", None)
    model = torch.nn.Module()
    model.l = served.layer(**options)
    if later is not None:
        model.l.xai_temperature_len = later
    served.runner.model = model
    with refusal(ArgumentError, match=match):
        _ = served.backend


SETTINGS: dict[str, Any] = {
    "context parallelism": (lambda: get_parallel().override(attn_dcp_size=2), "attn_dcp_size is 2"),
    "CUDA graphs of whole prefills": (
        lambda: get_exec().graph.override(cuda_graph_config=CudaGraphConfig(prefill=PhaseConfig(backend="full"))),
        "CUDA graphs of prefill is",
    ),
    "more than 64 drafted tokens": (lambda: get_spec().override(speculative_num_draft_tokens=65),
        "--speculative-num-draft-tokens is 65, but must be at most 64"),
}  # fmt: skip


@pytest.mark.parametrize(
    "feature", [pytest.param(n, marks=pytest.mark.engine_feature(n, refused=True)) for n in SETTINGS]
)
def test_settings_of_the_server_are_refused(feature: str, refusal: Any) -> None:
    served, (override, match) = Served([4]), SETTINGS[feature]
    with override(), refusal(ArgumentError, match=match):
        _ = served.backend


@pytest.mark.engine_feature("arguments of a layer's own call: score_mod, rel_bias, an LSE", refused=True)
@pytest.mark.parametrize("name", ["score_mod", "rel_bias", "return_lse", "topk_indices"])
def test_other_arguments_are_refused(name: str, refusal: Any) -> None:
    served = Served([4])
    batch, backend = served.batch(ForwardMode.DECODE, [1], [3], [1]), served.backend
    qkv = served.new_tokens(batch, [3], [1])
    backend.init_forward_metadata(batch)
    with refusal(ArgumentError, match=f"{name} is "):
        forward(backend, served.layer(), qkv, batch, **{name: True})
    assert torch.isnan(served.pool.get_key_buffer(0)).all()  # nothing was written


@pytest.mark.engine_feature("decode steps of a draft model", refused=True)
def test_decode_steps_of_a_draft_are_refused(refusal: Any) -> None:
    served = Served([4])
    batch = served.batch(ForwardMode.DECODE, [1], [3], [1], spec_info=types.SimpleNamespace(ragged_verify_layout=None))
    with refusal(ArgumentError, match="--speculative-draft-attention-backend triton"):
        served.backend.init_forward_metadata(batch)


# Widths, settings and chips that no call could take: refused when SGLang asks, not in the first forward.
feature = pytest.mark.engine_feature


@feature("heads wider than 576", refused=True)
@pytest.mark.parametrize(("widths", "text"), [({"dim": 640}, "head_dim"), ({"dim": 64, "dim_v": 700}, "v_head_dim")])
@pytest.mark.parametrize("part", ["pool", "layer"])
def test_wide_heads(part: str, widths: dict[str, int], text: str, refusal: Any) -> None:
    served = Served([4], **widths)
    if part == "layer":  # of a model whose pool is narrower
        layer, served = served.layer(), Served([4])
        served.runner.model = torch.nn.Sequential(layer)
        text = {"head_dim": "qk_head_dim of 0", "v_head_dim": "v_head_dim of 0"}[text]
    else:
        text = f"{text} of the pool"
    wide = max(widths.values())
    with refusal(ArgumentError, match=rf": {text} is {wide}, but must be in 1\.\.576"):
        _ = served.backend


def test_the_widest_heads_are_taken() -> None:
    served = Served([4], dim=576)
    served.runner.model = torch.nn.Sequential(served.layer())
    assert served.backend is not None


@feature("latent rows wider than 576", refused=True)
def test_wide_latent_rows(refusal: Any) -> None:
    served = Served([4], latent=True)
    served.pool.kv_lora_rank = 576
    with refusal(ArgumentError, match=r"kv_lora_rank \+ qk_rope_head_dim of the pool is 592"):
        _ = served.backend


@feature("FP4 caches: nvfp4, fp4_mx_block16", refused=True)
@pytest.mark.parametrize(
    ("name", "method"), [("nvfp4", "NVFP4KVCacheMethod"), ("fp4_mx_block16", "FP4MXBlock16KVCacheMethod")]
)
def test_fp4_caches(name: str, method: str, refusal: Any) -> None:
    """SGLang's own table of who reads such caches has no backend from outside: its pool makes no scales for one."""
    served = Served([4])
    served.pool.quant_method = get_kv_cache_quant_method(name, num_layers=1, device="cpu", page_size=1)
    for phase in ("prefill", "decode"):
        assert served.pool.quant_method.resolve_attention_access(phase, "portattn") is None
    with refusal(ArgumentError, match=f"--kv-cache-dtype is '{method}', but must be auto, bf16 or one of float8"):
        _ = served.backend


@feature("wrong settings of portattn's own (PORTATTN_BACKEND=tritton)", refused=True)
@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("PORTATTN_BACKEND", "tritton", ArgumentError), ("PORTATTN_FALLBACK", "maybe", SettingError),
        ("PORTATTN_QUIRKS", "-none", Exception),
    ],
)  # fmt: skip
def test_wrong_settings(
    variable: str, value: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, refusal: Any
) -> None:
    served = Served([4])
    monkeypatch.setenv(variable, value)
    config.environment_settings.cache_clear()
    with refusal(kind, match=value.lstrip("-")):
        _ = served.backend


@feature("chips that kernels do not run on", refused=True)
def test_an_old_chip(monkeypatch: pytest.MonkeyPatch, refusal: Any) -> None:
    served = Served([4])
    monkeypatch.setattr(capabilities, "detect_target", lambda *device: (parse_target("cuda:sm_75"), ""))
    with refusal(ArgumentError, match="device is 'cpu', but kernels do not run on it: Triton uses no tensor cores"):
        _ = served.backend


def test_a_chip_of_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    served, (target, _) = Served([4]), detect_target("cpu", None)
    monkeypatch.setattr(capabilities, "detect_target", lambda *device: (target, "no backend knows it"))
    with pytest.raises(ArgumentError, match="no backend knows it"):
        _ = served.backend
