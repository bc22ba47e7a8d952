"""Dropout in the forward kernel: it drops what portattn.dropout_mask says, and its LSE knows none of it."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import CAUSAL, check, problem
from support import Device, random_call


@pytest.mark.parametrize("name", ["dense", "padded", "varlen"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("pipeline", ["plain", "rotated"])
def test_what_the_mask_drops_is_dropped(device: Device, name: str, causal: str, pipeline: str) -> None:
    check(device, random_call(problem(name, causal=causal, dropout=True), 1, device=device.name), pipeline=pipeline)


@pytest.mark.parametrize(
    "fields", [{"mask": True}, {"bias": True, "softcap": True}, {"window_left": 5, "sinks": True}, {"dtype": "bf16"}],
    ids=str,
)  # fmt: skip
def test_beside_other_features(device: Device, fields: dict[str, Any]) -> None:
    check(device, random_call(problem("dense", dropout=True, heads_q=4, heads_k=2, **fields), 2, device=device.name))


def test_a_single_tile(device: Device) -> None:
    call = random_call(problem("dense", dropout=True, seq_k=11), 3, device=device.name)
    check(device, call, pipeline="single")


@pytest.mark.parametrize("drops", ["scores", "halves"])
@pytest.mark.parametrize("name", ["dense", "varlen"])
def test_other_lowerings_give_the_same_numbers(device: Device, name: str, drops: str) -> None:
    check(device, random_call(problem(name, dropout=True, causal="bottom_right"), 4, device=device.name), drops=drops)
