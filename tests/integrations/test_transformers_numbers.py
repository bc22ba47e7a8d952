"""transformers models with portattn give what they give with `eager`: logits and greedy tokens, with every cache.

`validate="always"` reads masks back, as is done on a CPU; "never" takes the way that decoding on an accelerator takes.
"""

from typing import Any

import pytest
import torch
from tiny_models import (
    BATCH,
    CACHES,
    FAMILIES,
    LENGTH,
    PADDINGS,
    PLANTED,
    TOLERANCE,
    WINDOW,
    build,
    difference,
    in_chunks,
    padding,
    positions,
    tokens,
    using,
)

import portattn
from portattn.api import ops
from portattn.integrations import transformers_mask
from portattn.integrations.transformers import register

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("validate", ["always", "never"])
@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_of_a_dense_forward(models, family, name, validate):
    model, ids, mask = models[family], tokens(), padding(name)
    arguments = {"attention_mask": mask, "position_ids": positions(mask), "use_cache": False}
    eager = model(ids, **arguments).logits
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = model(ids, **arguments).logits
    assert difference(ours, eager, mask) < TOLERANCE
    plan = portattn.last_plan()
    assert plan.problem.op == "attention"
    # Read back, a mask of ones is no padding at all, and the plain causal kernels may run.
    assert plan.problem.padded == (name != "none" and (name != "ones" or validate == "never"))


@pytest.mark.parametrize("plant", [
    {"leftpad_k": None, "leftpad_q": None}, {"causal": False}, {"scale": 1.0}, {"seqlens_k": None}
], ids=lambda plant: next(iter(plant)))  # fmt: skip
@torch.no_grad()
def test_planted_errors_show_in_a_dense_forward(models, plant, monkeypatch):
    model, ids, mask = models["Llama"], tokens(), padding("both")
    eager, real = model(ids, attention_mask=mask).logits, ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: real(*args, **{**kwargs, **plant}))
    with using(model, "portattn"):
        try:
            ours = model(ids, attention_mask=mask).logits
        except portattn.ArgumentError:  # lengths that no longer fit are refused by the op itself
            assert "leftpad_k" in plant or "seqlens_k" in plant
        else:
            assert difference(ours, eager, mask) > PLANTED


@torch.no_grad()
def test_lengths_are_computed_once_a_forward(models, monkeypatch):
    seen, real = [], transformers_mask._runs
    monkeypatch.setattr(transformers_mask, "_runs", lambda mask: seen.append(mask.shape) or real(mask))
    model = models["Llama"]
    assert model.config.num_hidden_layers == 2
    with using(model, "portattn"):
        model(tokens(), attention_mask=padding("left"))
    assert seen == [(BATCH, LENGTH)]


@torch.no_grad()
def test_bfloat16_keeps_its_dtype():
    model, mask = build("Llama").to(torch.bfloat16), padding("left")
    eager = model(tokens(), attention_mask=mask).logits
    with using(model, "portattn"):
        ours = model(tokens(), attention_mask=mask).logits
    assert ours.dtype == torch.bfloat16
    exact = build("Llama")(tokens(), attention_mask=mask).logits
    # The budget of every op: no further from exact arithmetic than twice torch's own distance in this dtype.
    assert difference(ours.float(), exact, mask) <= 2 * difference(eager.float(), exact, mask)


@pytest.mark.parametrize("validate", ["always", "never"])
@pytest.mark.parametrize("name", ["none", "left"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_chunked_prefill_and_decode(models, family, cache, name, validate):
    model, ids, mask = models[family], tokens(), padding(name)
    eager = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = in_chunks(model, ids, mask, CACHES[cache](model), (5, 4, 1, 1))
    assert difference(ours, eager, mask) < TOLERANCE
    problem = portattn.last_plan().problem
    assert problem.op == "decode_attention"
    if family == "Mistral":  # whose last layer has a window
        assert problem.seq_k == (LENGTH if cache == "caching all" else WINDOW)
        assert problem.window == (cache == "caching all")
        return
    # A static cache hands over all its rows. Where nothing is read back, lengths on the device say what is in use.
    device_lengths = validate == "never" and (cache == "static" or name == "left")
    assert problem.seqlens_k == (device_lengths or name == "left")
    assert problem.seq_k == (LENGTH + 6 if cache == "static" and validate == "never" else LENGTH)


@torch.no_grad()
def test_a_planted_alignment_error_shows_in_chunked_prefill(models, monkeypatch):
    model, ids, mask = models["Llama"], tokens(), padding("left")
    eager = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    real = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: real(*args, **{**kwargs, "causal": "top_left"}))
    with using(model, "portattn"):
        ours = in_chunks(model, ids, mask, CACHES["dynamic"](model), (5, 6))
    assert difference(ours[:, :5], eager[:, :5], mask[:, :5]) < TOLERANCE  # there both alignments are one
    assert difference(ours, eager, mask) > PLANTED


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@torch.no_grad()
def test_a_few_queries_over_a_longer_cache_are_decoding(models, family, cache):
    model, ids = models[family], tokens()
    eager = model(ids).logits
    with using(model, "portattn"):
        ours = in_chunks(model, ids, padding("ones"), CACHES[cache](model), (7, 4))
    assert difference(ours, eager, None) < TOLERANCE
    problem = portattn.last_plan().problem
    assert (problem.op, problem.seq_q, problem.causal) == ("decode_attention", 4, "bottom_right")


STATIC, CHUNKS = {"cache_implementation": "static"}, {"prefill_chunk_size": 4}
GREEDY = [
    *[(f, o, "left", v) for f in FAMILIES for o, v in (({}, "always"), (STATIC, "never"))],
    ("Llama", {}, "ones", "never"),
    ("Gemma2", {}, "left", "never"),
    ("Qwen3", STATIC, "ones", "always"),
    ("Llama", CHUNKS, "left", "always"),  # generate() compiles a chunk's forward, which takes seconds
]


@pytest.mark.parametrize(("family", "options", "name", "validate"), GREEDY)
@torch.no_grad()
def test_greedy_tokens(models, family, options, name, validate):
    model, mask = models[family], padding(name)
    ids = tokens().masked_fill(mask == 0, 0)
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **options}
    eager = model.generate(ids, **arguments)
    with using(model, "portattn"), portattn.settings(validate=validate):
        ours = model.generate(ids, **arguments)
    assert ours.shape == (BATCH, LENGTH + 8)
    assert torch.equal(ours, eager)
    assert len(set(eager[:, LENGTH:].flatten().tolist())) > 6  # not one token over and over
    assert portattn.last_plan().problem.op == "decode_attention"


@torch.no_grad()
def test_left_padding_changes_no_tokens(models):
    """A padded row continues as it does alone: seen from outside, without `eager` as the judge."""
    model, mask = models["Llama"], padding("left")
    ids = tokens().masked_fill(mask == 0, 0)
    with using(model, "portattn"):
        batch = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        alone = model.generate(ids[:1, 4:], max_new_tokens=8, do_sample=False)
    assert torch.equal(batch[0, LENGTH:], alone[0, LENGTH - 4 :])


@torch.no_grad()
def test_a_compiled_model_steps_around_the_call():
    model, mask = build("Llama", num_hidden_layers=1), padding("left")
    eager = model(tokens(), attention_mask=mask, use_cache=False).logits
    with using(model, "portattn"):
        compiled = torch.compile(model.forward, backend="eager")
        ours = compiled(tokens(), attention_mask=mask, use_cache=False).logits
    torch.compiler.reset()
    assert difference(ours, eager, mask) < TOLERANCE


@pytest.mark.interpreter
@torch.no_grad()
def test_the_kernels_themselves(models):
    """Under Triton's interpreter: left padding, a chunk, and a decoding step over a static cache."""
    pytest.importorskip("triton", reason="the triton package is not installed")
    model, ids, mask = models["Llama"], tokens(), padding("left")
    eager = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    handle = register("portattn_kernels", backend="interpreter")
    try:
        with using(model, "portattn_kernels"), portattn.settings(validate="never"):
            ours = in_chunks(model, ids, mask, CACHES["static"](model), (6, 4, 1))
    finally:
        handle.remove()
    assert portattn.last_plan().path == "interpreter"
    assert difference(ours, eager, mask) < TOLERANCE


# Gradients and dropout of transformers models with portattn.
@pytest.mark.parametrize("name", ["ones", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(models, family, name):
    model, ids, mask = models[family], tokens(), padding(name)
    # The token after left padding is predicted by a padding row, which means nothing in either implementation.
    predicted = mask.bool() & mask.roll(1, dims=1).bool()
    labels = ids.masked_fill(~predicted, -100)

    def gradients():
        model.zero_grad()
        model(ids, attention_mask=mask, position_ids=positions(mask), labels=labels).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    eager = gradients()
    with using(model.train(), "portattn"):
        ours = gradients()
    model.eval().zero_grad()
    for parameter, gradient in ours.items():
        scale = eager[parameter].abs().max().item()
        assert scale > 1e-4, parameter  # a gradient that is zero would prove nothing
        close = (1e-3 if "router" in parameter else 1e-4) * scale  # differences of experts that nearly cancel
        torch.testing.assert_close(gradient, eager[parameter], rtol=0, atol=close, msg=parameter)
    assert portattn.last_plan().problem.needs_grad


@pytest.mark.parametrize("name", ["none", "left", "packed"])
def test_a_checkpointed_model_has_the_same_gradients(models, name):
    """Plain rows run on a CPU by SDPA, padded and packed ones by the reference: each computes its forward again."""
    model, ids = models["Llama"], tokens()
    given: dict[str, Any] = {"input_ids": ids}
    if name == "left":
        given["attention_mask"] = padding("left")
    if name == "packed":
        places = torch.cat([torch.arange(LENGTH)] * ids.shape[0])
        given = {"input_ids": ids.reshape(1, -1), "position_ids": places[None]}

    def gradients():
        model.zero_grad()
        model(**given, use_cache=False).logits.sin().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    with using(model.train(), "portattn"):
        plain = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            again = gradients()
        finally:
            model.gradient_checkpointing_disable()
    model.eval().zero_grad()
    for parameter, gradient in again.items():
        assert torch.equal(gradient, plain[parameter]), parameter
    assert plain["model.layers.0.self_attn.k_proj.weight"].abs().max() > 1e-4


@pytest.mark.parametrize("chunks", [(LENGTH - 1, 1), (LENGTH - 3, 3)], ids=["one token", "a few"])
def test_a_decoding_step_that_is_differentiated(models, chunks):
    """By attention: decode_attention has no gradient, and serves the same step where none is asked for."""
    model, ids, mask = models["Llama"], tokens(), None

    def gradient():
        model.zero_grad()
        in_chunks(model, ids, mask, CACHES["dynamic"](model), chunks)[:, -1].sin().sum().backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    eager = gradient()
    with using(model, "portattn"):
        ours, asked = gradient(), portattn.last_plan().problem
        with torch.no_grad():
            in_chunks(model, ids, mask, CACHES["dynamic"](model), chunks)
    model.zero_grad()
    assert (asked.op, asked.seq_q, asked.needs_grad) == ("attention", chunks[-1], True)
    assert portattn.last_plan().problem.op == "decode_attention"
    scale = eager.abs().max().item()
    assert scale > 1e-4
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_on_a_gpu_runs_kernels_forward_and_backward(dropout):
    """The plan for the very problem that a training step asks for, on a GPU."""
    with using(build("Llama", attention_dropout=dropout).train(), "portattn") as model:
        model(tokens(), attention_mask=padding("left"))
    h100 = portattn.target("cuda:sm_90", toolchain="triton==3.6.0")
    plan = portattn.plan(portattn.last_plan().problem, h100)
    assert plan.problem.needs_grad
    assert plan.problem.dropout == (dropout > 0.0)
    assert (plan.path, plan.fell_back) == ("triton", False)
    assert "gradients by triton" in plan.notes


def test_dropout_is_applied_in_training_only():
    model = build("Llama", attention_dropout=0.5)
    with using(model, "portattn"), torch.no_grad():
        still = model(tokens()).logits
        model.train()
        torch.manual_seed(3)
        first, second = model(tokens()).logits, model(tokens()).logits
        torch.manual_seed(3)
        again = model(tokens()).logits
        several = in_chunks(model, tokens(), None, CACHES["dynamic"](model), (LENGTH - 1, 1))
        decoding = portattn.last_plan().problem
    assert difference(still, model.eval()(tokens()).logits, None) < TOLERANCE
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert decoding.dropout  # in a decoding step too
    assert decoding.seq_q == 1
    assert difference(several[:, -1:], still[:, -1:], None) > PLANTED


def test_gradients_of_position_biases(t5):
    """T5's relative biases are weights."""

    def gradients():
        t5.zero_grad()
        t5(input_ids=tokens(), attention_mask=padding("right"), labels=tokens(7)).loss.backward()
        return t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.clone()

    eager = gradients()
    with using(t5, "portattn"):
        ours = gradients()
    scale = eager.abs().max().item()
    assert scale > 1e-4
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4 * scale)
