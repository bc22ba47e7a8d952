"""What no row attends can hold anything, in its key and its value apart, and so can what is given for rows of padding.

Whether a value counts is decided over a tile's rows. Every problem here has tiles with rows that are not real: behind a
sequence's end, padding at the left, or what a group of heads leaves of a decode's tile.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import OPS, SPLITTING, check, problem, run
from support import TILE, Device, assert_right, random_call

from portattn.planning.kernel_specs import CORES
from portattn.schema.call import Call
from portattn.schema.lowering import CHOICES, Launch, Lowering
from portattn.schema.problem import Problem

NAN, INF = float("nan"), float("inf")
# Name -> fields, and a seed at which a bias or mask is of each row and hides keys from all, or is the same for all.
FEATURES: dict[str, tuple[dict[str, Any], int]] = {
    "lengths": ({}, 4),
    "causal": ({"causal": "bottom_right"}, 4),
    "top-left": ({"causal": "top_left"}, 4),
    "window": ({"window_left": 3, "window_right": 2}, 4),
    "causal window": ({"causal": "bottom_right", "window_left": 3}, 4),
    "bias": ({"bias": True}, 5),
    "bias by key": ({"bias": True}, 2),
    "mask": ({"mask": True}, 4),
    "mask by key": ({"mask": True}, 1),
    "causal bias": ({"causal": "top_left", "bias": True}, 5),
    "weights": ({"log_weights": True}, 4),
    "magicpig": ({"magicpig": True}, 4),
}
PACKED = ("varlen", "ragged", "mla ragged")


def features_of(name: str) -> list[str]:
    if "sparse" in name:
        return ["lengths", "weights", "magicpig"]
    given = [f for f in FEATURES if f not in ("weights", "magicpig")]
    return [f for f in given if not FEATURES[f][0].keys() & {"bias", "mask"}] if name in PACKED else given


def lowerings_of(name: str) -> list[dict[str, str]]:
    """Every value but the default of every choice that the op's kernel reads, each alone."""
    default = Lowering()
    return [
        {choice: value}
        for choice in CORES[problem(name).op].choices
        if choice != "dot_precision"
        for value in CHOICES[choice]
        if value != getattr(default, choice)
    ]


def limits(p: Problem, lowering: dict[str, str]) -> dict[str, str]:
    """Choices that the problem leaves no freedom in."""
    launch = Launch(block_m=TILE, block_n=TILE)
    return {choice: value for choice, value, _ in CORES[p.op].limits(p, Lowering(**lowering), launch)}


def suited(name: str, lowering: dict[str, str]) -> dict[str, Any]:
    """Fields of a problem that a lowering is for."""
    if lowering.get("pipeline") == "single":
        return {"seq_k": 13, "total_k": None if problem(name).total_k is None else 30}
    if lowering.get("load") == "descriptor" and problem(name).page_size:
        return {"page_layout": "phd", "pages_in_line": True, "page_size": 16, "seq_k": 48}
    return {}


CASES = [(name, feature) for name in OPS for feature in features_of(name)]
# The features under which rows that are not real would see what no other row does.
SHARP = {True: ("window", "top-left"), False: ("bias", "bias by key", "causal window")}
LOWERED = [
    (name, feature, lowering)
    for name in OPS
    for lowering in lowerings_of(name)
    for feature in (("lengths",) if "sparse" in name else SHARP[name in PACKED])
    if not limits(problem(name, **suited(name, lowering)), lowering).keys() & lowering.keys()
]


def poisoned_call(device: Device, p: Problem, seed: int, poison: str, value: float) -> Call:
    """A call with `value` in the values (v) that nothing attends, or in such keys (k) and in the queries of padding."""
    call = random_call(p, seed, device=device.name, extremes=True, poison=poison)  # type: ignore[arg-type]
    for name in ("q", "q_rope", "k", "v"):
        if value == INF and getattr(call, name) is not None and (name != "v" or p.op != "mla_attention"):
            getattr(call, name).nan_to_num_(nan=INF)
    return call


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize(("name", "feature"), CASES)
def test_poison_stays_where_no_row_attends(device: Device, name: str, feature: str, poison: str) -> None:
    fields, seed = FEATURES[feature]
    call = poisoned_call(device, problem(name, **fields), seed, poison, NAN)
    # MagicPIG's correction is the logarithm of a probability that may be near 1: some digits of a float32 are lost.
    extra = 1e-6 if feature == "magicpig" else 0.0
    check(device, call, splits=2 if name in SPLITTING and feature != "lengths" else 1, extra=extra)


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("name", OPS)
def test_infinity_stays_where_no_row_attends(device: Device, name: str, poison: str) -> None:
    fields, seed = FEATURES["weights" if "sparse" in name else "causal window" if name in PACKED else "bias"]
    check(device, poisoned_call(device, problem(name, **fields), seed, poison, INF))


@pytest.mark.parametrize(("name", "feature", "lowering"), LOWERED, ids=str)
def test_poison_stays_under_every_lowering(device: Device, name: str, feature: str, lowering: dict[str, str]) -> None:
    fields, seed = FEATURES[feature]
    p = problem(name, **(fields | suited(name, lowering)))
    if lowering.get("reads") == "inside" and device.path != "interpreter":
        pytest.skip("tiles as wide as a head of no power of two: for compilers that take them, which are Ascend's")
    check(device, poisoned_call(device, p, seed, "v", NAN), **(lowering | limits(p, lowering)))


def test_a_filler_row_gives_no_weight_to_a_masked_value(device: Device) -> None:
    """One query of two heads in a tile of 16 rows; the last key is masked for both, and its value is NaN."""
    p = problem("decode", batch=1, heads_q=2, heads_k=1, seq_q=1, seq_k=4, seqlens_k=False, leftpad_k=False, bias=True)
    call = random_call(p, 2, device=device.name)
    for name in ("q", "k", "v"):
        getattr(call, name).fill_(1.0)
    call.bias = torch.tensor([0.0, 0.0, 0.0, -INF], device=device.name).expand(1, 2, 1, 4)
    call.v[:, :, 3] = NAN
    out, lse = run(device, call)
    assert torch.equal(out, torch.ones_like(out))
    assert_right(call, out, lse)


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("mask_value", CHOICES["mask_value"])
@pytest.mark.parametrize("name", ["dense", "padded", "decode", "paged", "mla"])
def test_a_bias_can_hold_anything_where_nothing_is_attended(
    device: Device, name: str, mask_value: str, poison: str
) -> None:
    """NaN where the mask is False, behind the lengths, and in all of the rows of padding."""
    from portattn.testing.dense_view import allowed_keys

    p = problem(name, bias=True, mask=True, causal="bottom_right")
    call = poisoned_call(device, p, 4, poison, NAN)
    shown = allowed_keys(call)[:, None].to(device.name) & call.mask
    call.bias = call.bias.masked_fill(~shown, NAN)
    assert bool(call.bias.isnan().any())
    check(device, call, mask_value=mask_value)
