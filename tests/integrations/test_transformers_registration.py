"""Registering, removing, importing, and the guide."""

import importlib.util
import linecache
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from places import DOCS
from tiny_models import LENGTH, SIZES, VOCABULARY, build, padding, tokens, transformers, using
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

import portattn
from portattn.integrations.transformers import goes_through_interface, register

pytestmark = pytest.mark.transformers


def test_register_twice_is_once(registration):
    assert register() is registration
    assert register("portattn", backend=None) is registration
    with pytest.raises(portattn.ArgumentError, match="'portattn' is registered with None: remove"):
        register(backend="reference")
    with pytest.raises(portattn.ArgumentError,
            match="backend is 'tritton', but must be one of auto, vendor, reference"):  # fmt: skip
        register("portattn_misspelt", backend="tritton")


def test_remove(models, registration):
    with using(models["Llama"], "portattn") as model:
        registration.remove()
        for interface in (AttentionInterface, AttentionMaskInterface):
            assert "portattn" not in interface._global_mapping
        with pytest.raises(KeyError, match="portattn"):
            model(tokens())
        assert repr(registration) == "Registration(name='portattn', backend=None, removed)"
        fresh = register()
        registration.remove()  # an old handle does not take away a new registration
        assert AttentionInterface()["portattn"] is not None
        fresh.remove()


def test_remove_leaves_what_somebody_else_has_put_there(registration):
    AttentionInterface.register("portattn", print)
    registration.remove()
    try:
        assert AttentionInterface._global_mapping["portattn"] is print
        assert "portattn" not in AttentionMaskInterface._global_mapping
        with pytest.raises(portattn.ArgumentError, match="'portattn', but is taken"):
            register()
    finally:
        del AttentionInterface._global_mapping["portattn"]


@pytest.mark.parametrize("name", ["my_flash", "sdpa", "flex_attention", "eager", "a/b", "paged|portattn", "", None])
def test_names_that_transformers_reads_otherwise_are_refused(name):
    with pytest.raises(portattn.ArgumentError, match="name is "):
        register(name)


@torch.no_grad()
def test_a_backend_is_handed_to_every_call(models):
    handle, taken = register("portattn_reference", backend="reference"), []
    try:
        with using(models["Llama"], "portattn_reference") as model:
            for length in (LENGTH, 1):
                model(tokens(length))
                taken.append((portattn.last_plan().problem.op, portattn.last_plan().requested))
    finally:
        handle.remove()
    assert taken == [("attention", "reference"), ("decode_attention", "reference")]


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def test_importing_registers_nothing_and_refuses_an_old_transformers():
    out = run_python("import importlib, transformers\n" "import portattn.integrations.transformers as integration\n"
        "interfaces = transformers.AttentionInterface(), transformers.AttentionMaskInterface()\n"
        "print([name for interface in interfaces for name in interface if 'portattn' in name])\n"
        "transformers.__version__ = '5.99.0'\n" "importlib.reload(integration)\n"
        "transformers.masking_utils.sdpa_mask = lambda batch_size, kv_length, **named: None\n"
        "transformers.__version__ = '6.0.1'\n" "importlib.reload(integration)")  # fmt: skip
    assert "[]" in out.splitlines()
    assert out.count("UserWarning: portattn was tested with transformers 5.4 to 5.23, and this is 5.99.0: its") == 1
    assert "ImportError: transformers 6.0.1: sdpa_mask has no parameter 'q_length'; sdpa_" in out.splitlines()[-1]


def test_importing_without_transformers_says_so():
    out = run_python("import sys; sys.modules['transformers'] = None\n" "import portattn.integrations\n"
        "import portattn.integrations.transformers")  # fmt: skip
    assert "ImportError: portattn.integrations.transformers needs transformers, which is not installed" in out
    assert "pip install -e '.[transformers]' in the checkout" in out


def test_the_guide_runs(registration, capsys):
    """Every example of docs/integrations.md, in one namespace and in order, prints what the guide says it prints."""
    registration.remove()
    text = (DOCS / "integrations.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") >= 4
    namespace: dict[str, Any] = {}
    printed = ""
    for kind, block in blocks:
        if kind == "python":
            capsys.readouterr()
            exec(block, namespace)
            printed = capsys.readouterr().out
        else:
            assert " ".join(printed.split()) == " ".join(block.split())


def test_nothing_warns_on_a_plain_forward(models):
    with using(models["Llama"], "portattn") as model, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", portattn.FallbackWarning)
        model(tokens(), attention_mask=padding("left"))


# Models that cannot use portattn are refused when they are loaded, by name and reason; and what register() wraps in
# transformers for that is put back.
HEADS = {"vocab_size": VOCABULARY, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "Bloom": {**HEADS, "n_layer": 1, "n_head": 4},
    "Mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 1, "n_heads": 4},
    "Falcon": {**HEADS, "num_hidden_layers": 1, "num_attention_heads": 4},
}


@pytest.mark.parametrize("family", OTHERS)
def test_models_that_compute_attention_themselves_are_refused_at_loading(family):
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
def test_a_model_that_nobody_knows(attention, declared, refused, tmp_path, monkeypatch):
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


def test_a_part_of_a_model_is_refused_by_its_own_name():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    images = transformers.ViTConfig(image_size=16, patch_size=4, **sizes)
    text = transformers.TrOCRConfig(vocab_size=VOCABULARY, d_model=32, decoder_layers=1, decoder_attention_heads=4,
        decoder_ffn_dim=48)  # fmt: skip

    def make(implementation):
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, text)
        config._attn_implementation = implementation
        return transformers.VisionEncoderDecoderModel(config)

    with pytest.raises(portattn.ArgumentError, match="'portattn', but TrOCRForCausalLM computes attention itself"):
        make("portattn")
    model = make({"encoder": "portattn", "decoder": "eager"})
    assert model.encoder.config._attn_implementation == "portattn"
    assert model.decoder.config._attn_implementation == "eager"


def test_who_goes_through_the_interface():
    """The classes that the tests use, and models of models, which have no attention of their own."""
    for family in ("Llama", "Mistral", "Gemma2", "Gemma3", "GptOss", "Llama4"):
        assert goes_through_interface(getattr(transformers, f"{family}ForCausalLM"))
    for name in ("BertModel", "ViTModel", "T5Model", "ModernBertModel", "LlavaForConditionalGeneration"):
        assert goes_through_interface(getattr(transformers, name))
    for name in ("BloomModel", "MptModel", "FalconModel", "GPTJModel", "XLNetModel"):
        assert not goes_through_interface(getattr(transformers, name))


def wrapped():
    return [PreTrainedModel.get_correct_attn_implementation, ContinuousBatchingManager.switch_to_cb_friendly_attn]


def test_methods_are_wrapped_while_a_name_is_registered(registration):
    ours, second = wrapped(), register("portattn_reference", backend="reference")
    assert wrapped() == ours
    registration.remove()
    assert wrapped() == ours
    second.remove()
    theirs = wrapped()
    assert all(mine.__wrapped__ is method for mine, method in zip(ours, theirs, strict=True))
    build("Llama")
    register()
    assert [method.__wrapped__ for method in wrapped()] == theirs


def test_a_method_that_somebody_else_has_wrapped_since_stays(registration, monkeypatch):
    ours = PreTrainedModel.get_correct_attn_implementation

    def somebody(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    theirs = ours.__wrapped__
    PreTrainedModel.get_correct_attn_implementation = somebody
    try:
        registration.remove()
        assert PreTrainedModel.get_correct_attn_implementation is somebody
        build("Llama")  # no name is registered: ours lets everything pass
    finally:
        PreTrainedModel.get_correct_attn_implementation = theirs
