"""decode_split and dense_forward with each warp at keys of its own (kernels/warp_split.py)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import with_lengths
from support import Device, assert_right, problem, random_call, run_core

from portattn import Launch, Lowering
from portattn.planning.kernel_specs import CORES

APART = {"warps": "apart"}
SMALL = {"batch": 2, "heads_q": 4, "heads_k": 2, "seq_q": 1, "head_dim": 16, "dtype": "bf16"}
DECODE = SMALL | {"op": "decode_attention", "seq_k": 150, "seqlens_k": True}
PAGES = SMALL | {"op": "paged_attention", "seq_k": 128, "seqlens_k": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "a ragged end": (DECODE | {"seqlens_k": False}, {"block_n": 64, "num_warps": 4}),
    "lengths and padding": (DECODE | {"leftpad_k": True, "dtype": "fp16"}, {"block_n": 32, "num_warps": 2}),
    "eight warps": (DECODE | {"head_dim": 40, "head_dim_v": 24}, {"block_n": 128, "num_warps": 8}),
    "one warp": (DECODE, {"block_n": 16, "num_warps": 1}),
    "more rows than a tile": (
        DECODE | {"seq_q": 9, "causal": "bottom_right", "leftpad_k": True}, {"block_n": 32, "num_warps": 2},
    ),
    "top left behind padding": (
        DECODE | {"seq_q": 3, "causal": "top_left", "leftpad_k": True}, {"block_n": 64, "num_warps": 4},
    ),
    "top left": (DECODE | {"seq_q": 3, "causal": "top_left"}, {"block_n": 64, "num_warps": 4}),
    "sinks": (DECODE | {"sinks": True}, {"block_n": 64, "num_warps": 4}),
    "a negative scale": (DECODE | {"negative_scale": True}, {"block_n": 32, "num_warps": 2}),
    "pages of a tile": (PAGES | {"page_size": 64}, {"block_n": 64, "num_warps": 4}),
    "small pages": (PAGES | {"page_size": 16, "causal": "bottom_right", "seq_q": 2}, {"block_n": 64, "num_warps": 4}),
    "pages of no tile": (PAGES | {"page_size": 24, "seq_k": 144}, {"block_n": 64, "num_warps": 4}),
    "packed queries": (PAGES | {"page_size": 8, "seq_q": 5, "total_q": 7, "causal": "bottom_right", "batch": 3},
                       {"block_n": 32, "num_warps": 2}),
    "packed queries, rows of no sequence, sinks": (
        PAGES | {"page_size": 8, "seq_q": 5, "total_q": 12, "batch": 3, "sinks": True}, {"block_n": 32, "num_warps": 2},
    ),
}  # fmt: skip

DENSE = {
    "op": "attention", "batch": 2, "heads_q": 2, "heads_k": 2, "seq_q": 40, "seq_k": 150, "head_dim": 16,
    "dtype": "fp32", "seqlens_k": True, "return_lse": True,
}  # fmt: skip
ROWS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "a ragged end": (DENSE | {"seqlens_k": False}, {"block_n": 64, "num_warps": 4}),
    "lengths and padding": (DENSE | {"leftpad_k": True}, {"block_n": 32, "num_warps": 2}),
    "eight warps": (DENSE | {"head_dim": 40, "head_dim_v": 24}, {"block_n": 128, "num_warps": 8}),
    "one warp": (DENSE | {"causal": "bottom_right"}, {"block_n": 16, "num_warps": 1}),
    "rows without keys": (
        DENSE | {"seq_q": 90, "seq_k": 20, "causal": "bottom_right"}, {"block_n": 32, "num_warps": 2},
    ),
    "top left": (DENSE | {"causal": "top_left", "leftpad_k": True}, {"block_n": 64, "num_warps": 4}),
    "sinks": (DENSE | {"sinks": True, "causal": "bottom_right"}, {"block_n": 64, "num_warps": 4}),
    "a negative scale": (DENSE | {"negative_scale": True}, {"block_n": 32, "num_warps": 2}),
    "one tile": (DENSE, {"block_n": 256, "num_warps": 8}),
    "one tile, causal, behind padding": (
        DENSE | {"causal": "bottom_right", "leftpad_k": True, "sinks": True}, {"block_n": 256, "num_warps": 8},
    ),
}  # fmt: skip


def loops(fields: dict[str, Any], launch: dict[str, int]) -> tuple[str, ...]:
    page = fields.get("page_size", 0)
    if page and page % launch["block_n"] == 0:
        return ("per_page", "flat_masked")
    few = page and launch["block_n"] in (2 * page, 4 * page)
    return ("by_page", "flat_masked") if few else ("flat_masked",)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_warps_apart_are_right(device: Device, name: str, splits: int) -> None:
    """NaN is wherever a token is not attended, in keys and values."""
    fields, launch = CASES[name]
    call = random_call(problem(**fields), seed=len(name), device=device.name, extremes=True)
    for loop in loops(fields, launch):
        out, lse = run_core(device, call, APART | {"page_loop": loop}, launch | {"splits": splits})
        assert_right(call, out, lse)


@pytest.mark.parametrize("mask_value", ["-inf", "finite"])
@pytest.mark.parametrize("exp", ["exp2", "exp"])
def test_sequences_of_no_keys_and_of_one(device: Device, exp: str, mask_value: str) -> None:
    """Then some or all of the warps attend nothing."""
    call = random_call(problem(**DECODE | {"batch": 4, "sinks": True}), 3, device=device.name)
    call = with_lengths(call, [0, 1, 16, 17])
    lowering = APART | {"exp": exp, "mask_value": mask_value}
    for splits in (1, 2):
        out, lse = run_core(device, call, lowering, {"block_n": 64, "num_warps": 4, "splits": splits})
        assert_right(call, out, lse)
    call.sinks = torch.full_like(call.sinks, float("-inf"))
    out, lse = run_core(device, call, lowering, {"block_n": 64, "num_warps": 4})
    assert_right(call, out, lse)
    assert not out[0].any()
    assert torch.isneginf(lse[0]).all()


def test_a_warps_large_scores_do_not_reach_the_others(device: Device) -> None:
    """Of one warp's keys the scores are above all others by far; of another one's they are far below."""
    call = random_call(problem(**DECODE | {"seqlens_k": False, "seq_k": 64}), 8, device=device.name)
    call.k[:, :, 16:32] *= 60.0
    call.k[:, :, 32:48] -= 50.0
    out, lse = run_core(device, call, APART, {"block_n": 64, "num_warps": 4})
    assert_right(call, out, lse)


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6"])
@pytest.mark.parametrize("name", ROWS)
def test_dense_rows_are_right(device: Device, name: str, precision: str) -> None:
    """In a loop and, where the keys fit, in one tile without it; NaN is wherever a token is not attended."""
    fields, launch = ROWS[name]
    call = random_call(problem(**fields), seed=len(name), device=device.name, extremes=True)
    for pipeline in ("plain", "single") if "one tile" in name else ("plain",):
        lowering = APART | {"dot_precision": precision, "pipeline": pipeline}
        tile = launch | {"block_m": 32}
        assert not CORES["attention"].limits(call.problem, Lowering(**lowering), Launch().changed(tile))
        assert_right(call, *run_core(device, call, lowering, tile))


@pytest.mark.parametrize("pipeline", ["plain", "single"])
@pytest.mark.parametrize("mask_value", ["-inf", "finite"])
def test_dense_sequences_of_no_keys_and_of_one(device: Device, mask_value: str, pipeline: str) -> None:
    call = with_lengths(
        random_call(problem(**DENSE | {"batch": 4, "seq_k": 64}), 3, device=device.name), [0, 1, 16, 17]
    )
    lowering = APART | {"mask_value": mask_value, "dot_precision": "bf16x6", "pipeline": pipeline}
    assert_right(call, *run_core(device, call, lowering, {"block_m": 16, "block_n": 64, "num_warps": 4}))


# What warps_apart does not take of dense problems.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "query lengths": ({"seqlens_q": True}, {}, "seqlens_q"),
    "a window": ({"window_left": 3}, {}, "window"),
    "a mask": ({"mask": True}, {}, "mask"),
    "dropout": ({"dropout": True}, {}, "dropout"),
    "groups": ({"heads_q": 4}, {}, "as many key heads"),
    "plain products": ({}, {"dot_precision": "ieee"}, "one of bf16x6, tf32x3"),
    "two parts of a head": ({"head_dim": 576, "head_dim_v": 512}, {}, "at most 512 columns"),
    "16-bit numbers": ({"dtype": "bf16"}, {}, "float32"),
    "small shares": ({}, {"num_warps": 8}, "at least 16 keys"),
    "three warps": ({}, {"num_warps": 3}, "1, 2, 4 or 8"),
    "sixteen warps": ({}, {"num_warps": 16, "block_n": 256}, "1, 2, 4 or 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_dense_rows_do_not_have_runs_joint(name: str) -> None:
    fields, choices, why = REFUSED[name]
    lowering = Lowering(warps="apart", dot_precision=choices.get("dot_precision", "bf16x6"))
    launch = Launch(block_m=16, block_n=choices.get("block_n", 64), num_warps=choices.get("num_warps", 4))
    limits = CORES["attention"].limits(problem(**DENSE | fields), lowering, launch)
    assert [limit for limit in limits if limit[:2] == ("warps", "joint") and why in limit[2]]


# What it has one way of: the choice that is asked for, and what the limits make of it.
ONE_WAY: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "more keys than a tile": ({"seq_k": 65}, {"pipeline": "single"}, ("pipeline", "plain")),
    "a rotated loop": ({"seq_k": 64}, {"pipeline": "rotated"}, ("pipeline", "plain")),
    "a masked loop": ({"seq_k": 64}, {"pipeline": "masked"}, ("pipeline", "plain")),
    "descriptors": ({"seq_k": 64}, {"load": "descriptor"}, ("load", "pointer")),
    "a persistent grid": ({"seq_k": 64}, {"grid": "persistent"}, ("grid", "tiles")),
}


@pytest.mark.parametrize("name", ONE_WAY)
def test_dense_rows_have_one_way_of(name: str) -> None:
    fields, choices, limit = ONE_WAY[name]
    launch = Launch(block_m=16, block_n=64, num_warps=4)
    plain = Lowering(warps="apart", dot_precision="bf16x6")
    assert not CORES["attention"].limits(problem(**DENSE | fields), plain, launch)
    asked = msgspec.structs.replace(plain, **choices)
    assert [found[:2] for found in CORES["attention"].limits(problem(**DENSE | fields), asked, launch)] == [limit]


def test_one_tile_of_exactly_its_keys_has_no_loop() -> None:
    lowering = Lowering(warps="apart", dot_precision="bf16x6", pipeline="single")
    assert not CORES["attention"].limits(problem(**DENSE | {"seq_k": 64}), lowering, Launch(block_n=64, num_warps=4))


def test_decodes_of_float32_run_joint() -> None:
    limits = CORES["decode_attention"].limits(
        problem(**DECODE | {"dtype": "fp32"}), Lowering(**APART), Launch(block_n=64, num_warps=4)
    )
    assert [limit[:2] for limit in limits] == [("warps", "joint")]


@pytest.mark.parametrize("share", [slice(0, 16), slice(16, 32), slice(48, 64), slice(0, 64)], ids=str)
@pytest.mark.parametrize("pipeline", ["plain", "single"])
@pytest.mark.parametrize("mask_value", ["-inf", "finite"])
def test_scores_of_minus_infinity(device: Device, mask_value: str, pipeline: str, share: slice) -> None:
    """All of a warp's scores may be -inf without being masked: they weigh nothing. Of a row, they leave nothing."""
    call = random_call(problem(**DENSE | {"seq_q": 16, "seq_k": 64, "seqlens_k": False}), 1, device=device.name)
    call.q.fill_(1.0)
    call.k.fill_(0.0)
    call.k[:, :, share] = float("-inf")
    lowering = APART | {"mask_value": mask_value, "dot_precision": "bf16x6", "pipeline": pipeline}
    out, lse = run_core(device, call, lowering, {"block_m": 16, "block_n": 64, "num_warps": 4})
    left = 64 - (share.stop - share.start)
    kept = torch.ones(64, dtype=torch.bool)
    kept[share] = False
    expected = call.v[:, :, kept].mean(2, keepdim=True).expand_as(out) if left else torch.zeros_like(out)
    torch.testing.assert_close(out, expected)
    assert lse is not None
    torch.testing.assert_close(lse, torch.full_like(lse, left).log())


@pytest.mark.parametrize("name", ["lengths and padding", "rows without keys", "sinks"])
def test_gradients_take_what_it_stores(device: Device, name: str) -> None:
    """Its LSE is that of dense_forward: of rows without keys -inf."""
    fields, launch = ROWS[name]
    call = random_call(problem(**fields | {"needs_grad": True}), seed=2, device=device.name)
    lowering = APART | {"dot_precision": "bf16x6"}
    assert not CORES["attention"].limits(call.problem, Lowering(**lowering), Launch().changed(launch))
    assert_right(call, *run_core(device, call, lowering, launch))
