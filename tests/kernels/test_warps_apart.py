"""decode_split with each warp at keys of its own (kernels/apart.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import with_lengths
from support import Device, assert_right, problem, random_call, run_core

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
