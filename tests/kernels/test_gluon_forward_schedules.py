"""Schedules of the forward of sm_90 on such a chip, whether or not the tuning data has them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from gluon_forward_cases import BASE, CAUSAL, PACKED, SIZES, VARIANT, problem
from support import Device, random_call
from variantchip import device_for

from portattn.backends.cuda.hopper_forward.variant import Schedule, choice, launcher
from portattn.schema.call import TENSORS, Call
from portattn.testing.tolerance import judge, nan_filled_memory


@pytest.fixture
def chip(device: Device) -> Device:
    """A device that the kernel is for."""
    return device_for(VARIANT, BASE, device)


def assert_schedule_right(schedule: Schedule, call: Call) -> None:
    """As assert_variant_right, of a schedule that may not be the tuning data's."""
    with nan_filled_memory():
        out, lse = call.new_out(), call.new_lse()
    launcher(call, schedule)({name: getattr(call, name) for name in TENSORS} | {"out": out, "lse": lse})
    facts = judge(call, out, lse)
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
    assert facts["lse_error"] <= facts["lse_budget"]


@pytest.mark.parametrize(
    ("head_dim", "own_out", "queries", "parts"),
    [
        (64, True, 1, 1), (64, True, 2, 2), (64, False, 1, 1), (64, False, 2, 1),
        (128, True, 1, 2), (128, True, 2, 1), (128, False, 1, 1), (128, False, 2, 1),
        (256, True, 1, 2), (256, False, 1, 1), (200, True, 1, 2), (120, True, 1, 2),
    ],
)  # fmt: skip
def test_where_the_output_is_staged(chip: Device, head_dim: int, own_out: bool, queries: int, parts: int) -> None:
    """In shared memory of its own, whole or by parts, or where the very queries were, of one or two buffers."""
    for base in (problem(**SIZES["many tiles"]), problem(PACKED, total_q=2000, total_k=2000, heads_q=40, heads_k=8)):
        p = msgspec.structs.replace(base, head_dim=head_dim, head_dim_v=head_dim, causal="bottom_right")
        chosen = choice(p)
        assert chosen is not None
        schedule = msgspec.structs.replace(
            chosen.schedule, stages=2, own_out=own_out, queries=queries, reg_q=False, parts=parts
        )
        assert_schedule_right(schedule, random_call(p, 3, device=chip.name))


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_in_registers(chip: Device, head_dim: int, causal: str, queries: int) -> None:
    """Their shared memory is the next tile's as soon as they have been read from it."""
    for base in (problem(**SIZES["many tiles"]), problem(PACKED, total_q=2000, total_k=2000, heads_q=40, heads_k=8)):
        p = msgspec.structs.replace(base, head_dim=head_dim, head_dim_v=head_dim, causal=causal)
        chosen = choice(p)
        assert chosen is not None
        assert_schedule_right(
            msgspec.structs.replace(chosen.schedule, groups=2, own_out=True, queries=queries, reg_q=True),
            random_call(p, 3, device=chip.name),
        )


LAZY: dict[str, dict[str, Any]] = {
    "many keys": {"seq_k": 1111},
    "fp16": {"seq_k": 1111, "dtype": "fp16"},
    "lengths": {"seq_k": 1111, "seqlens_q": True, "seqlens_k": True, "batch": 5},
    "window": {"seq_k": 1111, "window_left": 300},
    "cap and sinks": {"seq_k": 1111, "softcap": True, "sinks": True, "seqlens_k": True},
    "split": {"batch": 1, "heads_q": 2, "heads_k": 1, "seq_q": 100, "seq_k": 5000},
}


def grown(call: Call, growth: float) -> None:
    """Let maxima grow by so many powers of 2 from a tile of 128 keys to the next, which is before it: of some rows. Of
    others they fall, grow slowly, or stay."""
    dim, keys = call.q.shape[-1], call.k.shape[2]
    kinds = torch.tensor([8.0, -8.0, 2.0, 0.0], device=call.q.device)
    of_rows = kinds[torch.arange(call.q.shape[2], device=call.q.device) * 7 // 3 % 4]
    call.q[..., 0] = call.q[..., 0] * 0 + of_rows  # padding that is NaN stays so
    steps = growth / 128 * torch.arange(keys - 1, -1, -1, device=call.q.device)
    call.k[..., 0] = call.k[..., 0] * 0 + steps * dim**0.5 / 8 * math.log(2)


@pytest.mark.parametrize("growth", [0.0, 0.7, 3.0, 12.0])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_accumulator_is_rescaled_where_it_must_be(
    chip: Device, head_dim: int, name: str, late: bool, growth: float
) -> None:
    for causal in ("none", "bottom_right"):
        p = problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal, **LAZY[name])
        chosen = choice(p)
        assert chosen is not None
        call = random_call(p, 2, device=chip.name, extremes=True)
        if growth:
            grown(call, growth)
        assert_schedule_right(msgspec.structs.replace(chosen.schedule, lazy=True, late=late), call)
