"""Gradients and dropout of transformers models with portattn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import portattn

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

from tiny_models import (  # noqa: E402
    CACHES,
    FAMILIES,
    LENGTH,
    PLANTED,
    TOLERANCE,
    build,
    difference,
    in_chunks,
    padding,
    positions,
    tokens,
    using,
)


@pytest.mark.parametrize("name", ["ones", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(models: dict[str, Any], family: str, name: str) -> None:
    model, ids, mask = models[family], tokens(), padding(name)
    # The token after left padding is predicted by a padding row, which means nothing in either implementation.
    predicted = mask.bool() & mask.roll(1, dims=1).bool()
    labels = ids.masked_fill(~predicted, -100)

    def gradients() -> dict[str, torch.Tensor]:
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
def test_a_checkpointed_model_has_the_same_gradients(models: dict[str, Any], name: str) -> None:
    """Plain rows run on a CPU by SDPA, padded and packed ones by the reference: each computes its forward again."""
    model, ids = models["Llama"], tokens()
    given: dict[str, Any] = {"input_ids": ids}
    if name == "left":
        given["attention_mask"] = padding("left")
    if name == "packed":
        places = torch.cat([torch.arange(LENGTH)] * ids.shape[0])
        given = {"input_ids": ids.reshape(1, -1), "position_ids": places[None]}

    def gradients() -> dict[str, torch.Tensor]:
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
def test_a_decoding_step_that_is_differentiated(models: dict[str, Any], chunks: tuple[int, ...]) -> None:
    """By attention: decode_attention has no gradient, and serves the same step where none is asked for."""
    model, ids, mask = models["Llama"], tokens(), None

    def gradient() -> torch.Tensor:
        model.zero_grad()
        in_chunks(model, ids, mask, CACHES["dynamic"](model), chunks)[:, -1].sin().sum().backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    eager = gradient()
    with using(model, "portattn"):
        ours = gradient()
        asked = portattn.last_plan().problem
        with torch.no_grad():
            in_chunks(model, ids, mask, CACHES["dynamic"](model), chunks)
    model.zero_grad()
    assert (asked.op, asked.seq_q, asked.needs_grad) == ("attention", chunks[-1], True)
    assert portattn.last_plan().problem.op == "decode_attention"
    scale = eager.abs().max().item()
    assert scale > 1e-4
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_on_a_gpu_runs_kernels_forward_and_backward(dropout: float) -> None:
    """The plan for the very problem that a training step asks for, on a GPU."""
    with using(build("Llama", attention_dropout=dropout).train(), "portattn") as model:
        model(tokens(), attention_mask=padding("left"))
    h100 = portattn.target("cuda:sm_90", toolchain="triton==3.6.0")
    plan = portattn.plan(portattn.last_plan().problem, h100)
    assert plan.problem.needs_grad
    assert plan.problem.dropout == (dropout > 0.0)
    assert (plan.path, plan.fell_back) == ("triton", False)
    assert "gradients by triton" in plan.notes


def test_dropout_is_applied_in_training_only() -> None:
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


def test_gradients_of_position_biases(t5: Any) -> None:
    """T5's relative biases are weights."""

    def gradients() -> torch.Tensor:
        t5.zero_grad()
        t5(input_ids=tokens(), attention_mask=padding("right"), labels=tokens(7)).loss.backward()
        return t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.clone()

    eager = gradients()
    with using(t5, "portattn"):
        ours = gradients()
    scale = eager.abs().max().item()
    assert scale > 1e-4
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4 * scale)
