"""The Hopper forward of int8 queries and keys on such a chip: its numbers, and what it must not see."""

from __future__ import annotations

import dataclasses
from typing import Any

import gluon_forward_cases as wide
import msgspec
import pytest
import torch
from kernel_cases import with_lengths
from quantised_calls import check_calls
from support import CPU, Device, random_call
from variantchip import assert_variant_right, device_for

from portattn import Problem
from portattn.backends.cuda.hopper_forward.whole_variant import WholeLauncher, WholeVariant
from portattn.launch.variant import launch_tensors, run_variant
from portattn.schema.call import Call
from portattn.testing.tolerance import judge, nan_filled_memory

VARIANT = WholeVariant()
WHOLE: dict[str, Any] = {"kv_format": "int8", "kv_scales": "token"}
BASE = msgspec.structs.replace(wide.BASE, **WHOLE)
PACKED = msgspec.structs.replace(wide.PACKED, **WHOLE)


def problem(base: Problem = BASE, **fields: Any) -> Problem:
    return msgspec.structs.replace(base, **fields)


SIZES = {name: fields for name, fields in wide.SIZES.items() if not fields.get("softcap")}
FEW_TILES = {name: fields for name, fields in wide.FEW_TILES.items() if not fields.get("softcap")}


def packed_call(p: Problem, keys: tuple[int, ...], queries: tuple[int, ...], device: str) -> Call:
    """Of these lengths. What a random call does not use has scales that are no scales: some of it is used here."""
    call = with_lengths(random_call(p, 7, device=device), keys, queries)
    for name in ("q_scale", "k_scale"):
        scale = getattr(call, name)
        setattr(call, name, torch.where((scale > 0) & (scale < 1), scale, 0.02))
    return call


@pytest.fixture
def chip(device: Device) -> Device:
    """A device that the kernel is for."""
    return device_for(VARIANT, BASE, device)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", wide.CAUSAL)
@pytest.mark.parametrize("name", SIZES)
def test_numbers(chip: Device, name: str, causal: str, head_dim: int) -> None:
    for dtype in ("fp16", "bf16"):
        p = problem(**{"causal": causal, "head_dim": head_dim, "head_dim_v": head_dim, "dtype": dtype} | SIZES[name])
        assert_variant_right(VARIANT, random_call(p, 1, device=chip.name))


@pytest.mark.parametrize("window", wide.WINDOWS, ids=str)
def test_windows(chip: Device, window: tuple[int, int]) -> None:
    left, right = window
    for sizes in ({}, {"seq_q": 500, "seq_k": 260}, {"seqlens_q": True, "seqlens_k": True}):
        p = problem(window_left=left, window_right=right, **sizes)
        assert_variant_right(VARIANT, random_call(p, 3, device=chip.name))


@pytest.mark.parametrize("widths", [(16, 16), (48, 48), (80, 112), (96, 72)], ids=str)
def test_heads_between_the_kernel_s_widths(chip: Device, widths: tuple[int, int]) -> None:
    for causal in wide.CAUSAL:
        p = problem(head_dim=widths[0], head_dim_v=widths[1], causal=causal)
        assert_variant_right(VARIANT, random_call(p, 5, device=chip.name))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", wide.ROWS)
def test_packed(chip: Device, name: str, head_dim: int) -> None:
    queries, keys = zip(*wide.ROWS[name], strict=True)
    for fields in ({}, {"sinks": True, "causal": "bottom_right"}, {"window_left": 30}):
        p = problem(
            PACKED, batch=len(queries), seq_q=max(1, *queries), seq_k=max(1, *keys), total_q=sum(queries) + 3,
            total_k=sum(keys) + 3, head_dim=head_dim, head_dim_v=head_dim, **fields,
        )  # fmt: skip
        assert_variant_right(VARIANT, packed_call(p, keys, queries, chip.name))


@pytest.mark.parametrize("name", FEW_TILES)
def test_keys_of_few_tiles_are_split(chip: Device, name: str) -> None:
    fields = {"batch": 1, "heads_q": 2, "heads_k": 1} | FEW_TILES[name]
    assert_variant_right(VARIANT, random_call(problem(causal="bottom_right", **fields), 1, device=chip.name))


@pytest.mark.parametrize("name", wide.UNSEEN)
def test_what_no_row_sees_may_be_anything(chip: Device, name: str) -> None:
    """Numbers, and scales."""
    fields, keys = wide.UNSEEN[name]
    call = random_call(problem(**fields), 3, device=chip.name)
    expected = run_variant(VARIANT, call)[1]
    assert call.k_scale is not None
    call.k[:, :, keys] = 127
    assert torch.equal(run_variant(VARIANT, call)[1], expected)
    call.k_scale[:, :, keys] = float("nan")
    assert torch.equal(run_variant(VARIANT, call)[1], expected)
    call.v[:, :, keys] = float("nan")
    assert torch.equal(run_variant(VARIANT, call)[1], expected)


def in_blocks(scale: torch.Tensor, block: int) -> torch.Tensor:
    """Scales that each `block` tokens share."""
    return scale[..., ::block].repeat_interleave(block, 2)[..., : scale.shape[-1]].contiguous()


@pytest.mark.parametrize("causal", wide.CAUSAL)
@pytest.mark.parametrize("block", [32, 64, 128])
def test_scales_of_blocks(chip: Device, block: int, causal: str) -> None:
    """Of 64 tokens and more a tile takes two scales, where no token's differs; some tiles here have one that does."""
    for fields in (wide.SIZES["many tiles"], {"seq_q": 300, "seq_k": 1000}):
        call = random_call(problem(causal=causal, **fields), 3, device=chip.name)
        assert call.k_scale is not None
        call.k_scale = in_blocks(call.k_scale, block)
        assert_variant_right(VARIANT, call)
        call.k_scale[0, 0, 130] *= 2
        call.k_scale[-1, -1, 127] *= 3
        assert_variant_right(VARIANT, call)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("turns", [False, True])
def test_schedules(chip: Device, turns: bool, keys: int, late: bool) -> None:
    call = random_call(problem(**wide.SIZES["many tiles"]), 3, device=chip.name)
    launcher = VARIANT.described(call)
    assert isinstance(launcher, WholeLauncher)
    with nan_filled_memory():
        tensors = launch_tensors(call)
    changed = msgspec.structs.replace(
        launcher.schedule, late=late, lazy=late, keys=keys, stages=256 // keys, turns=turns
    )
    WholeLauncher(call, changed)(tensors)
    facts = judge(call, tensors["out"], tensors["lse"])
    assert not facts["wrong"]
    assert facts["error"] <= facts["budget"]
    assert facts["lse_error"] <= facts["lse_budget"]


def test_scales_that_are_not_contiguous(chip: Device) -> None:
    call = random_call(problem(causal="bottom_right"), 3, device=chip.name)
    expected = run_variant(VARIANT, call)[1]
    assert call.q_scale is not None
    assert call.k_scale is not None
    apart = [scale.mT.contiguous().mT for scale in (call.q_scale, call.k_scale)]
    spread = dataclasses.replace(call, q_scale=apart[0], k_scale=apart[1])
    assert torch.equal(run_variant(VARIANT, spread)[1], expected)


# How far quantising alone moves the LSE, by 0.03, 0.07 and 0.17, and a third more.
SAGE_LSE = (0.04, 0.09, 0.22)


@pytest.mark.parametrize("causal", [False, True])
def test_calls_by_the_public_functions(chip: Device, causal: bool) -> None:
    """The second call is launched directly, with other scales and other memory; each takes the kernel."""
    check_calls(chip, VARIANT.name, "sage", causal, 0.99999, 0.9995, given_lse=SAGE_LSE)


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_calls_by_the_reference(causal: bool) -> None:
    """What int8 queries and keys lose is no kernel's: the limits hold where nothing else is lost."""
    check_calls(CPU, "reference", "sage", causal, 0.99999, 0.9995, given_lse=SAGE_LSE)
