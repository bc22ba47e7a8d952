"""What models ask for beyond a padded causal mask: windows, caps, sinks, holes, masks of one's own, both directions,
position biases, packed rows. Each against `eager`, and each shown to matter."""

import pytest
import torch
from tiny_models import (
    BATCH,
    CACHES,
    LENGTH,
    PADDINGS,
    PLANTED,
    SIZES,
    TOLERANCE,
    WINDOW,
    build,
    difference,
    in_chunks,
    padding,
    plant,
    positions,
    tokens,
    transformers,
    using,
)
from transformers import masking_utils as hf

import portattn
from portattn.integrations import transformers_mask

pytestmark = pytest.mark.transformers

PLANTS = {
    "no window": {"window": None}, "a window one too wide": {"window": (WINDOW, None)},
    "a window one too narrow": {"window": (WINDOW - 2, None)}, "no cap": {"softcap": None}, "no sinks": {"sinks": None},
}  # fmt: skip


@pytest.mark.parametrize(("family", "error"), [
    *[("Mistral", error) for error in PLANTS if "window" in error], ("Gemma2", "no window"), ("Gemma2", "no cap"),
    ("Gemma3", "no window"), ("GptOss", "no window"), ("GptOss", "no sinks"),
])  # fmt: skip
@torch.no_grad()
def test_planted_errors_show(models, family, error, monkeypatch):
    """In a dense forward, and in decoding over a cache that drops nothing."""
    model, ids, mask = models[family], tokens(), padding("left")
    eager = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    called = plant(monkeypatch, **PLANTS[error])
    with using(model, "portattn"):
        dense = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
        assert {name for name, _ in called} == {"attention"}
        cache = CACHES["caching all"](model)
        first = model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions(mask)[:, :-1])
        monkeypatch.undo()
        in_chunks(model, ids[:, :-1], mask[:, :-1], cache, (LENGTH - 1,))
        called = plant(monkeypatch, **PLANTS[error])
        last = model(ids[:, -1:], attention_mask=mask, position_ids=positions(mask)[:, -1:], past_key_values=cache)
        assert {name for name, _ in called} == {"decode_attention"}
    assert difference(dense, eager, mask) > PLANTED
    assert difference(first.logits, eager[:, :-1], mask[:, :-1]) > PLANTED
    assert difference(last.logits, eager[:, -1:], None) > PLANTED


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_an_indexers_selection(cache):
    """DeepSeek V3.2's layers name the keys of each query. `eager` over its caches is not equal to a dense forward."""
    ids, mask = tokens(), padding("left")
    model, wider = build("DeepseekV32"), build("DeepseekV32", index_topk=LENGTH)
    for sizes in ((LENGTH,), (LENGTH - 4, 3, 1)):
        eager, everything = (in_chunks(one, ids, mask, CACHES[cache](one), sizes) for one in (model, wider))
        with using(model, "portattn"):
            ours = in_chunks(model, ids, mask, CACHES[cache](model), sizes)
        assert difference(ours, eager, mask) < TOLERANCE
        assert difference(everything, eager, mask) > PLANTED


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["Mistral", "GptOss"])
@torch.no_grad()
def test_a_window_in_a_left_padded_batch_is_each_sequence_s_own(models, family, cache):
    """A padded row is worth what it is worth alone: seen from outside, without `eager` as the judge."""
    model, mask, chunks = models[family], padding("left"), (6, 3, 1, 1)
    with using(model, "portattn"):
        batch = in_chunks(model, tokens(), mask, CACHES[cache](model), chunks)
        alone = in_chunks(model, tokens()[:1, 4:], None, CACHES[cache](model), (2, 3, 1, 1))
    assert difference(batch[:1, 4:], alone, None) < TOLERANCE


@torch.no_grad()
def test_what_a_window_s_cache_has_dropped_needs_no_window(models):
    model = models["Mistral"]
    with using(model, "portattn"):
        in_chunks(model, tokens(), None, CACHES["dynamic"](model), (LENGTH - 1, 1))
    problem = portattn.last_plan().problem
    assert (problem.seq_k, problem.window, problem.padded) == (WINDOW, False, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_sinks_of_another_dtype(dtype):
    """The model's own dtype goes through as it is; another is converted."""
    model = build("GptOss")
    for layer in model.model.layers:
        layer.self_attn.sinks.data = layer.self_attn.sinks.to(torch.bfloat16)
    model = model.to(dtype)
    eager = model(tokens()).logits  # of the same dtype: rounding may choose other experts
    with using(model, "portattn"):
        ours = model(tokens()).logits
    assert difference(ours.float(), eager.float(), None) < (TOLERANCE if dtype == torch.float32 else 1.0)


@pytest.mark.parametrize("name", ["none", "left", "both"])
@torch.no_grad()
def test_chunked_attention(name, monkeypatch):
    model, ids, mask = build("Llama4"), tokens(), padding(name)
    arguments = {"attention_mask": mask, "position_ids": positions(mask)}
    eager = model(ids, **arguments).logits
    with using(model, "portattn"):
        assert difference(model(ids, **arguments).logits, eager, mask) < TOLERANCE
        if name != "both":
            pieces = in_chunks(model, ids, mask, CACHES["dynamic"](model), (5, 4, 1, 1))
            assert difference(pieces, eager, mask) < TOLERANCE
        plant(monkeypatch, chunk=None)
        assert difference(model(ids, **arguments).logits, eager, mask) > PLANTED


def holes():
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5] = 0
    mask[2, [0, 3, 4, 9]] = 0
    return mask


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss"])
@torch.no_grad()
def test_a_mask_with_holes(models, family, monkeypatch):
    model, mask = models[family], holes()
    eager = model(tokens(), attention_mask=mask).logits
    with using(model, "portattn"):
        ours, plan = model(tokens(), attention_mask=mask).logits, portattn.last_plan()
        plant(monkeypatch, mask=None)
        planted = model(tokens(), attention_mask=mask).logits
    assert difference(ours, eager, mask) < TOLERANCE
    assert (plan.problem.mask, plan.problem.causal, plan.problem.padded) == (True, "bottom_right", False)
    assert difference(planted, eager, mask) > PLANTED


@pytest.fixture
def as_on_an_accelerator(monkeypatch):
    """A prompt's mask is read back, those of the decoding steps are not."""
    monkeypatch.setattr(transformers_mask, "reads_back", lambda device, queries: queries > 1)
    monkeypatch.setattr(transformers_mask, "_with_holes", set())


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("name", ["right", "holes", "left"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
@torch.no_grad()
def test_decoding_after_a_prompt_with_holes(models, family, cache, name):
    model, prompt = models[family], holes() if name == "holes" else padding(name)
    mask = torch.cat([prompt, torch.ones(BATCH, 3, dtype=torch.long)], dim=1)

    def logits():
        return in_chunks(model, tokens(LENGTH + 3), mask, CACHES[cache](model), (LENGTH, 1, 1, 1))

    eager = logits()
    with using(model, "portattn"):
        assert difference(logits(), eager, mask) < TOLERANCE
    assert portattn.last_plan().problem.mask == (name != "left")


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@torch.no_grad()
def test_generating_from_a_prompt_with_holes(models, options):
    model, arguments = models["Gemma2"], {"attention_mask": holes(), "max_new_tokens": 6, "do_sample": False, **options}
    eager = model.generate(tokens(), **arguments)
    with using(model, "portattn"):
        assert torch.equal(model.generate(tokens(), **arguments), eager)
    assert portattn.last_plan().problem.mask


def own_mask():
    """Causal, but for a prefix that sees itself, and with some keys taken out."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = ((j <= i) | (j < 4)) & (j != 6) | (i == j)
    return seen.expand(BATCH, 1, LENGTH, LENGTH)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("kind", ["bool", "added", "added, a head each"])
@torch.no_grad()
def test_a_mask_of_one_s_own(models, family, kind):
    """It is the whole mask, as for eager and sdpa: a layer's window is not put on top."""
    model, seen = models[family], own_mask()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    if kind == "added, a head each":
        added = added + torch.randn(1, 4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    eager = model(tokens(), attention_mask=added).logits  # which would add a bool mask as ones and zeros
    plain = model(tokens()).logits
    with using(model, "portattn"):
        ours = model(tokens(), attention_mask=seen if kind == "bool" else added).logits
        problem, cache = portattn.last_plan().problem, CACHES["caching all"](model)
        model(tokens()[:, :-1], attention_mask=added[..., :-1, :-1], past_key_values=cache)
        step = model(tokens()[:, -1:], attention_mask=added[..., -1:, :], past_key_values=cache).logits
    assert difference(ours, eager, None) < TOLERANCE
    assert difference(step, eager[:, -1:], None) < TOLERANCE
    assert difference(ours, plain, None) > PLANTED
    assert (problem.mask, problem.bias) == (kind == "bool", kind != "bool")


OVERLAYS = {
    "a prefix": {"or_mask_function": lambda b, h, q, kv: kv < 3},
    "without some keys": {"and_mask_function": lambda b, h, q, kv: (kv != 3) | (q == 3)},
    "both": {"or_mask_function": lambda b, h, q, kv: kv < 3, "and_mask_function": lambda b, h, q, kv: q != kv + 2},
    "image blocks": {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1]]).expand(BATCH, -1)},
}


@pytest.mark.parametrize("name", ["none", "left"])
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@torch.no_grad()
def test_overlays(models, family, overlay, name):
    model, ids, mask = models[family], tokens(), padding(name)
    if overlay == "image blocks" and not hasattr(hf, "blockwise_overlay"):
        pytest.skip("this transformers knows no blocks")
    create = hf.create_causal_mask if family == "Llama" else hf.create_sliding_window_causal_mask

    def logits(**overlays):
        embeddings = torch.empty(BATCH, LENGTH, 32)
        made = create(
            config=model.config, inputs_embeds=embeddings, attention_mask=mask, past_key_values=None, **overlays
        )
        return model(ids, attention_mask=made, position_ids=positions(mask)).logits

    eager = logits(**OVERLAYS[overlay])
    with using(model, "portattn"):
        assert difference(logits(**OVERLAYS[overlay]), eager, mask) < TOLERANCE
        assert difference(logits(), eager, mask) > PLANTED


ENCODER = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
ENCODERS = {
    "Bert": {},
    # Keys up to 2 before and after, in the second layer.
    "ModernBert": {"local_attention": 4, "layer_types": ["full_attention", "sliding_attention"]},
}


def encoder(family):
    config = getattr(transformers, f"{family}Config")(**ENCODER, **ENCODERS[family], attn_implementation="eager")
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForMaskedLM")(config).eval()


@pytest.mark.parametrize("validate", ["always", "never"])
@pytest.mark.parametrize("name", [*PADDINGS, "holes"])
@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_encoders(family, name, validate, monkeypatch):
    # Of this test's own models: a configuration that is gone may have had the address that one of these has now.
    monkeypatch.setattr(transformers_mask, "_with_holes", set())
    model, ids, mask = encoder(family), tokens(), holes() if name == "holes" else padding(name)
    eager = model(ids, attention_mask=mask).logits
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = model(ids, attention_mask=mask).logits
    problem = portattn.last_plan().problem
    if name == "holes" and validate == "never":
        assert ours[1:].isnan().all()
        ours, eager, mask = ours[:1], eager[:1], mask[:1]
    assert difference(ours, eager, mask) < TOLERANCE
    if family == "Bert" and name not in ("an empty row", "holes"):
        assert difference(ours, eager, None) < TOLERANCE  # padding rows see the valid keys too
    assert problem.causal == "none"
    assert (problem.window_left, problem.window_right) == ((2, 2) if family == "ModernBert" else (-1, -1))


@torch.no_grad()
def test_planted_errors_show_in_encoders(monkeypatch):
    for family, error in (("ModernBert", {"window": None}), ("ModernBert", {"window": (2, 1)}), ("Bert", {})):
        model, mask = encoder(family), padding("right")
        eager = model(tokens(), attention_mask=mask).logits
        plant(monkeypatch, **(error or {"seqlens_k": None}))
        with using(model, "portattn"):
            assert difference(model(tokens(), attention_mask=mask).logits, eager, mask) > PLANTED
        monkeypatch.undo()


@torch.no_grad()
def test_a_decoder_that_looks_both_ways():
    for family in ("Llama", "Mistral"):
        model, mask = build(family, is_causal=False), padding("both")
        eager = model(tokens(), attention_mask=mask, use_cache=False).logits
        with using(model, "portattn"):
            ours = model(tokens(), attention_mask=mask, use_cache=False).logits
        assert difference(ours, eager, mask) < TOLERANCE
        assert portattn.last_plan().problem.causal == "none"


@torch.no_grad()
def test_a_layer_that_has_no_mask_and_says_that_it_is_not_causal():
    sizes = {k: ENCODER[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.ViTConfig(image_size=8, patch_size=4, initializer_range=0.4, **sizes)
    torch.manual_seed(0)
    model = transformers.ViTModel(config).eval()
    model.set_attn_implementation("eager")
    pixels = torch.randn(2, 3, 8, 8)
    eager = model(pixels).last_hidden_state
    with using(model, "portattn"):
        assert difference(model(pixels).last_hidden_state, eager, None) < TOLERANCE


@pytest.mark.parametrize("name", ["none", "right", "left"])
@torch.no_grad()
def test_position_biases_and_cross_attention(t5, name, monkeypatch):
    mask = padding(name)
    arguments = {"input_ids": tokens(), "attention_mask": mask, "decoder_input_ids": tokens(7)}
    eager = t5(**arguments).logits
    with using(t5, "portattn"):
        assert difference(t5(**arguments).logits, eager, None) < TOLERANCE
        assert portattn.last_plan().problem.bias
        plant(monkeypatch, bias=None)
        assert difference(t5(**arguments).logits, eager, None) > PLANTED


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@torch.no_grad()
def test_generating_with_position_biases(t5, options):
    arguments = {"attention_mask": padding("right"), "max_new_tokens": 8, "do_sample": False, **options}
    eager = t5.generate(tokens(), **arguments)
    with using(t5, "portattn"):
        assert torch.equal(t5.generate(tokens(), **arguments), eager)
    assert len(set(eager.flatten().tolist())) > 4


LENGTHS = [(5, 6), (11,), (2, 1, 8)]
PACKED = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
BEGINS = torch.tensor([0, 5, 11, 22, 24, 25, 33])


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
@torch.no_grad()
def test_packed_rows(models, family, how):
    model, ids = models[family], tokens()
    given = {"position_ids": PACKED, "use_cache": how == "cu_seq_lens"}
    if how != "position_ids":
        given |= {"cu_seq_lens_q": BEGINS, "cu_seq_lens_k": BEGINS, "max_length_q": 11, "max_length_k": 11}
    with using(model, "portattn"):
        ours, problem = model(ids, **given).logits, portattn.last_plan().problem
        if how == "cu_seq_lens":
            whole = model(ids, position_ids=PACKED).logits
            assert difference(whole, ours, None) > PLANTED  # a cache hides from transformers that rows are packed
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for n in lengths:
            alone = model(ids[row : row + 1, start : start + n]).logits
            assert difference(ours[row : row + 1, start : start + n], alone, None) < TOLERANCE
            start += n
    assert (problem.op, problem.batch) == ("varlen_attention", 6)


def test_packed_rows_in_training():
    model = build("Llama").train()

    def gradients():
        model.zero_grad()
        model(tokens(), labels=tokens(), position_ids=PACKED, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    eager = gradients()
    with using(model, "portattn"):
        ours = gradients()
        assert portattn.last_plan().problem.op == "varlen_attention"
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 1e-6  # so little that nothing is dropped
        little = gradients()
        assert (portattn.last_plan().problem.op, portattn.last_plan().problem.dropout) == ("varlen_attention", True)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        torch.manual_seed(3)
        half = gradients()
        torch.manual_seed(3)
        assert torch.equal(gradients(), half)
        assert not torch.allclose(half, ours, rtol=0, atol=1e-4 * ours.abs().max().item())
    for found in (ours, little):
        torch.testing.assert_close(found, eager, rtol=0, atol=1e-4 * eager.abs().max().item())
