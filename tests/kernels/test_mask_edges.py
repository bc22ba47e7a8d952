"""Where masks end: rows and windows whose limits lie one before, at, and one after the end of a tile of keys.

A tile is read unmasked where every row of its program attends all of it, and not at all where no row does: off by one,
either is wrong at one place in sixteen only. So each test goes through all sixteen.
"""

from __future__ import annotations

import pytest
from kernel_cases import check, problem
from support import TILE, Device, random_call

ONE = {"batch": 1, "heads_q": 1, "heads_k": 1}


@pytest.mark.parametrize("name", ["dense", "decode"])
@pytest.mark.parametrize("pipeline", ["plain", "rotated"])
def test_windows_that_begin_around_a_tiles_end(device: Device, name: str, pipeline: str) -> None:
    """Windows of two to three tiles: some hold a tile for all rows, and all have edges before and after it."""
    rows = 18 if name == "dense" else 3
    for left in range(2 * TILE, 3 * TILE):
        fields = ONE | {"seq_q": rows, "seq_k": 75, "causal": "bottom_right", "window_left": left}
        if name == "decode":
            fields |= {"seqlens_k": False, "leftpad_k": False}
        check(device, random_call(problem(name, **fields), left, device=device.name), pipeline=pipeline)


@pytest.mark.parametrize("pipeline", ["plain", "rotated"])
def test_rows_that_end_around_a_tiles_end(device: Device, pipeline: str) -> None:
    for seq_k in range(2 * TILE, 3 * TILE):
        p = problem("dense", **ONE, seq_q=TILE + 2, seq_k=seq_k, causal="bottom_right")
        check(device, random_call(p, seq_k, device=device.name), pipeline=pipeline)


@pytest.mark.parametrize("splits", [17, 21])
def test_more_splits_than_are_merged_at_a_time(device: Device, splits: int) -> None:
    """The largest scores are in the last split, which the merging kernel reads in a second step."""
    fields = {"seq_q": 1, "seq_k": splits * TILE - 5, "batch": 1, "seqlens_k": False, "leftpad_k": False}
    call = random_call(problem("decode", **fields), 1, device=device.name)
    call.k[:, :, -TILE + 5 :] *= 4.0
    check(device, call, splits)
