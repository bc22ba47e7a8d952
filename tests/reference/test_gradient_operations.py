"""The gradients' operations on the reference path, under the budget that their kernels have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from portattn.reference import gradients
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.random_calls import random_call
from portattn.testing.tolerance import nan_filled_memory
from portattn.testing.verdict import judge

DENSE: dict[str, Any] = {
    "op": "attention_backward", "batch": 3, "heads_q": 4, "heads_k": 2, "seq_q": 19, "seq_k": 37, "head_dim": 16,
    "dtype": "fp32",
}  # fmt: skip
PACKED = DENSE | {"op": "varlen_attention_backward", "total_q": 33, "total_k": 70}
LENGTHS = dict.fromkeys(("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"), True)


@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"causal": "bottom_right", "grad_lse": True}, {"causal": "top_left", "window_left": 5}, {"dropout": True},
     {"softcap": True, "alibi_slopes": True, "grad_slopes": True}, {"dtype": "bf16", "head_dim_v": 24}], ids=str,
)  # fmt: skip
def test_gradients(base: dict[str, Any], fields: dict[str, Any]) -> None:
    right(Problem(**(base | fields)), seed=1, extremes=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("poison", ["apart", "k", "v"])
def test_padding_masks_and_broadcast_biases(seed: int, poison: str) -> None:
    problem = Problem(**(DENSE | LENGTHS), causal="bottom_right", mask=True, bias=True, grad_bias=True)
    right(problem, seed, poison=poison)


def test_slopes_where_the_last_sequences_are_empty() -> None:
    """Their first rows would be behind the last one."""
    problem = Problem(**(PACKED | {"batch": 4, "seq_q": 2, "total_q": 2}), alibi_slopes=True, grad_slopes=True)
    calls = [right(problem, seed) for seed in range(6)]
    assert any(call.cu_seqlens_q[-2] == 2 for call in calls)


def right(problem: Problem, seed: int, **options: Any) -> Call:
    call = random_call(problem, seed, **options)
    with nan_filled_memory():
        delta, lse = gradients.run(call)
    assert lse is None
    facts = judge(call, delta, None)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"], facts
    return call


@pytest.mark.parametrize("fault", ["no LSE's gradient", "the other row", "something where nothing is attended"])
def test_a_wrong_delta_is_seen(fault: str) -> None:
    """The gradients can be right beside it, where a kernel does not write the delta that it uses."""
    call = random_call(Problem(**DENSE, causal="bottom_right", grad_lse=True), 1)
    delta, _ = gradients.run(call)
    assert judge(call, delta, None)["wrong"] == 0
    if fault == "no LSE's gradient":
        delta = delta + call.grad_lse.masked_fill(torch.isneginf(call.forward_lse), 0.0)
    elif fault == "the other row":
        delta = delta.roll(1, dims=2)
    else:
        call.forward_lse[0, 0, 0] = -math.inf
        delta[0, 0, 0] = 1e-3
    facts = judge(call, delta, None)
    assert facts["error"] > facts["budget"] or facts["wrong"]
