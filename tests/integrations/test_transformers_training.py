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


def test_training_on_a_gpu_says_that_it_falls_back(models: dict[str, Any]) -> None:
    """The plan for the very problem that a training step asks for, on a GPU: not the core kernel, and why."""
    with using(models["Llama"].train(), "portattn") as model:
        model(tokens(), attention_mask=padding("left"))
    models["Llama"].eval()
    h100 = portattn.target("cuda:sm_90", toolchain="triton==3.6.0")
    plan = portattn.plan(portattn.last_plan().problem, h100)
    assert plan.fell_back
    assert plan.rejected[0].path == "triton"
    assert "grad" in plan.rejected[0].reason


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
