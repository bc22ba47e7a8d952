"""LSE and delta of a full tile of rows: by a descriptor where every tile begins at a multiple of 16 bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradient_cases import DENSE, PACKED, check, random
from support import Device, core_plan

from portattn.launch import kernel_calls

DESCRIPTOR = {"load": "descriptor"}
SQUARE = {"seq_q": 64, "seq_k": 64}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (SQUARE, "descriptor"),
        (SQUARE | {"causal": "bottom_right"}, "descriptor"),
        ({"seq_q": 66, "seq_k": 64}, "pointer"),  # the second head's numbers begin at 264 bytes
        ({"seq_q": 64, "seq_k": 39, "causal": "bottom_right"}, "pointer"),  # the first row that sees a key is 25
        ({"seq_q": 64, "seq_k": 40, "causal": "bottom_right"}, "descriptor"),  # it is 24
        ({"seq_q": 64, "seq_k": 39, "causal": "top_left"}, "descriptor"),
        ({"seq_q": 64, "seq_k": 39, "window_left": 9, "window_right": 1}, "descriptor"),  # 24 again
        (SQUARE | {"seqlens_k": True, "causal": "bottom_right"}, "pointer"),
        (SQUARE | {"leftpad_q": True}, "pointer"),
        (SQUARE | {"bias": True}, "pointer"),
        (SQUARE | {"mask": True}, "pointer"),
        (SQUARE | {"dropout": True}, "descriptor"),
    ],
    ids=str,
)
def test_tiles_that_begin_at_16_bytes(device: Device, fields: dict[str, Any], expected: str) -> None:
    call = random(device, base=DENSE, **fields)
    assert _numbers(device, call) == expected
    check(device, call, DESCRIPTOR, block_m=16, block_n=32)


def test_small_tiles_take_pointers(device: Device) -> None:
    """The second of a pipeline's buffers of 16 numbers would begin at 64 bytes, where no copy by TMA may go."""
    call = random(device, base=DENSE, **SQUARE)
    assert _numbers(device, call, 16) == "pointer"
    check(device, call, DESCRIPTOR, block_m=16, block_n=16)


def test_packed_rows_begin_anywhere(device: Device) -> None:
    call = random(device, base=PACKED)
    assert _numbers(device, call) == "pointer"
    check(device, call, DESCRIPTOR, block_m=16, block_n=32)


def test_other_loads_take_pointers(device: Device) -> None:
    call = random(device, base=DENSE, **SQUARE)
    launches, _, _ = kernel_calls(core_plan(device, call.problem, {"load": "pointer"}), call, 3)
    assert launches[1].constexprs["NUMBERS"] == "pointer"


def test_an_lse_that_begins_off_16_bytes_is_no_aligned_call() -> None:
    from portattn.validate.checks import starts_aligned

    memory = torch.zeros(65)
    assert starts_aligned(memory[:64])
    assert not starts_aligned(memory[1:])
    assert starts_aligned(torch.empty(8, device="meta")[1:])


def _numbers(device: Device, call: Any, block_n: int = 32) -> str:
    launches, _, _ = kernel_calls(core_plan(device, call.problem, DESCRIPTOR, {"block_n": block_n}), call, 3)
    return launches[1].constexprs["NUMBERS"]
