"""What a path whose probabilities are e4m3 is judged by: more than another, and not anything."""

from __future__ import annotations

import pytest
import torch

from portattn import Problem
from portattn.schema.call import Call
from portattn.testing.dense_view import dense_view
from portattn.testing.random_calls import random_call
from portattn.testing.tolerance import judge

P = Problem(
    batch=2, heads_q=4, heads_k=2, seq_q=70, seq_k=400, head_dim=64, dtype="bf16", kv_format="e4m3", kv_scales="head",
    return_lse=True,
)  # fmt: skip


@pytest.fixture
def call() -> Call:
    return random_call(P, 0)


def narrow(call: Call, order: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """By definition, probabilities e4m3; with an order the values are those of other keys."""
    view = dense_view(call)
    scores = view.products(view.q.double(), view.k.double()) * call.scale
    numbers = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = (numbers * 256).float().to(torch.float8_e4m3fn).double() / 256
    v = view.v.double() if order is None else view.v.double()[:, :, order]
    out = view.mixed(rounded / numbers.sum(-1, keepdim=True), v)
    return out.to(call.dtype), torch.logsumexp(scores, dim=-1).float()


def test_its_own_rounding_is_allowed_and_no_path_of_16_bits_may_have_it(call: Call) -> None:
    out, lse = narrow(call)
    facts = judge(call, out, lse, probabilities="e4m3")
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
    assert facts["lse_error"] <= facts["lse_budget"]
    strict = judge(call, out, lse)
    assert strict["error"] > strict["budget"]
    assert strict["lse_budget"] < facts["lse_budget"]


def test_two_keys_in_each_others_places_are_seen(call: Call) -> None:
    order = torch.arange(P.seq_k).view(-1, 16)
    order[:, [2, 8]] = order[:, [8, 2]]  # as a wrong order of 16 keys would have it
    facts = judge(call, *narrow(call, order.flatten()), probabilities="e4m3")
    assert facts["error"] > facts["budget"]


def test_a_sum_that_is_too_small_is_seen(call: Call) -> None:
    out, lse = narrow(call)
    facts = judge(call, out, lse - 0.1, probabilities="e4m3")
    assert facts["lse_error"] > facts["lse_budget"]
