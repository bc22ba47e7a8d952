"""Models that cannot use portattn are refused when they are loaded, by name and reason; and what register() wraps in
transformers for that is put back."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import portattn

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

import transformers  # noqa: E402
from tiny_models import SIZES, VOCABULARY, build, tokens  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.generation.continuous_batching import ContinuousBatchingManager  # noqa: E402

from portattn.integrations.transformers import Registration, register  # noqa: E402
from portattn.integrations.transformers_hooks import goes_through_interface  # noqa: E402

HEADS = {"vocab_size": VOCABULARY, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "Bloom": {**HEADS, "n_layer": 1, "n_head": 4},
    "Mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 1, "n_heads": 4},
    "Falcon": {**HEADS, "num_hidden_layers": 1, "num_attention_heads": 4},
}


@pytest.mark.parametrize("family", OTHERS)
def test_models_that_compute_attention_themselves_are_refused_at_loading(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**OTHERS[family])
    name = f"{family}ForCausalLM"
    with pytest.raises(portattn.ArgumentError, match=f"is 'portattn', but {name} computes attention itself: .*'eager'"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="portattn")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_attn_implementation("portattn")  # transformers warns, and leaves the model as it is
    assert model.config._attn_implementation == "eager"
    assert torch.isfinite(model(tokens()).logits).all()


# What somebody could write. Classes are judged by the source of their module.
UNKNOWN = """
import torch, transformers
from torch import nn

class {attention}:
    pass

class Unknown(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig
    {declared}
"""


@pytest.mark.parametrize(
    ("attention", "declared", "refused"),
    [
        ("OwnAttention(nn.Module)", "", True),
        ("OwnAttention(torch.nn.Module)", "", True),
        ("OwnAttn(torch.nn.Module)", "", True),
        ("OwnAttention(transformers.models.llama.modeling_llama.LlamaAttention)", "", False),
        ("OwnAttention(nn.Module)", "_supports_attention_backend = True", False),
        ("Mixer(nn.Module)", "", False),  # a model without attention, for all that can be seen
    ],
)
def test_a_model_that_nobody_knows(
    attention: str, declared: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "modeling_unknown.py"
    path.write_text(UNKNOWN.format(attention=attention, declared=declared))
    spec = importlib.util.spec_from_file_location("modeling_unknown", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "modeling_unknown", module)
    spec.loader.exec_module(module)
    linecache.checkcache(str(path))
    config = transformers.LlamaConfig(**SIZES, attn_implementation="portattn")
    if refused:
        with pytest.raises(portattn.ArgumentError, match="Unknown computes attention itself: modeling_unknown does"):
            module.Unknown(config)
    else:
        assert module.Unknown(config).config._attn_implementation == "portattn"


def test_a_part_of_a_model_is_refused_by_its_own_name() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    images = transformers.ViTConfig(image_size=16, patch_size=4, **sizes)
    text = transformers.TrOCRConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48
    )

    def make(implementation: Any) -> Any:
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, text)
        config._attn_implementation = implementation
        return transformers.VisionEncoderDecoderModel(config)

    with pytest.raises(portattn.ArgumentError, match="'portattn', but TrOCRForCausalLM computes attention itself"):
        make("portattn")
    model = make({"encoder": "portattn", "decoder": "eager"})
    assert model.encoder.config._attn_implementation == "portattn"
    assert model.decoder.config._attn_implementation == "eager"


def test_who_goes_through_the_interface() -> None:
    """The classes that the tests use, and models of models, which have no attention of their own."""
    for family in ("Llama", "Mistral", "Gemma2", "Gemma3", "GptOss", "Llama4"):
        assert goes_through_interface(getattr(transformers, f"{family}ForCausalLM"))
    for name in ("BertModel", "ViTModel", "T5Model", "ModernBertModel", "LlavaForConditionalGeneration"):
        assert goes_through_interface(getattr(transformers, name))
    for name in ("BloomModel", "MptModel", "FalconModel", "GPTJModel", "XLNetModel"):
        assert not goes_through_interface(getattr(transformers, name))


def wrapped() -> list[Any]:
    return [PreTrainedModel.get_correct_attn_implementation, ContinuousBatchingManager.switch_to_cb_friendly_attn]


def test_methods_are_wrapped_while_a_name_is_registered(registration: Registration) -> None:
    ours = wrapped()
    second = register("portattn_reference", backend="reference")
    assert wrapped() == ours
    registration.remove()
    assert wrapped() == ours
    second.remove()
    theirs = wrapped()
    assert all(mine.__wrapped__ is method for mine, method in zip(ours, theirs, strict=True))
    build("Llama")
    register()
    assert [method.__wrapped__ for method in wrapped()] == theirs


def test_a_method_that_somebody_else_has_wrapped_since_stays(
    registration: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = PreTrainedModel.get_correct_attn_implementation

    def somebody(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    theirs = ours.__wrapped__
    PreTrainedModel.get_correct_attn_implementation = somebody
    try:
        registration.remove()
        assert PreTrainedModel.get_correct_attn_implementation is somebody
        build("Llama")  # no name is registered: ours lets everything pass
    finally:
        PreTrainedModel.get_correct_attn_implementation = theirs
