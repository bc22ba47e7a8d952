"""In which order tiles of rows are worked on."""

from __future__ import annotations

import msgspec
import pytest
import torch
import triton
import triton.language as tl
from support import Device

from portattn import Problem
from portattn.kernels.tiles import heads_in_turn
from portattn.planning.kernel_specs import heads_together
from portattn.planning.registry import parse_target

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
PROBLEM = Problem(batch=16, heads_q=8, heads_k=8, seq_q=4096, seq_k=4096, head_dim=128, dtype="bf16", causal="top_left")


@triton.jit
def order(out, row_tiles, together, tiles):
    tile = tl.program_id(0)
    row_tile, head = heads_in_turn(tile, row_tiles, together, tiles)
    tl.store(out + tile * 2, row_tile)
    tl.store(out + tile * 2 + 1, head)


@pytest.mark.parametrize(("row_tiles", "heads", "together"), [(1, 1, 4), (3, 5, 4), (7, 4, 4), (5, 9, 2), (2, 64, 64)])
def test_every_tile_once_and_some_heads_at_a_time(device: Device, row_tiles: int, heads: int, together: int) -> None:
    tiles = row_tiles * heads
    out = torch.full((tiles, 2), -1, dtype=torch.int32, device=device.name)
    order[(tiles,)](out, row_tiles, together, tiles)
    found = [tuple(pair) for pair in out.tolist()]
    assert sorted(found) == [(row, head) for row in range(row_tiles) for head in range(heads)]
    groups = [range(first, min(first + together, heads)) for first in range(0, heads, together)]
    assert found == [(row, head) for group in groups for row in range(row_tiles) for head in group]


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({}, 8),  # 2 MiB a head
        ({"dtype": "fp32"}, 4),
        ({"heads_k": 2}, 32),  # four heads share their keys
        ({"seq_k": 1 << 20}, 1),
        ({"seq_k": 0}, 64),
        ({"head_dim": 80, "head_dim_v": 80}, 12),  # 1.25 MiB
        ({"batch": 1, "heads_q": 3, "heads_k": 3, "seq_k": 64}, 3),  # no more than there are
        (
            {"op": "varlen_attention", "batch": 4, "heads_q": 32, "heads_k": 32, "total_q": 8192, "total_k": 8192},
            16,
        ),  # 1 MiB a head on average
    ],
)
def test_how_many_heads(fields: dict[str, int | str], heads: int) -> None:
    arch = msgspec.structs.replace(SM_90.arch, cache_share=16 << 20)
    problem = msgspec.structs.replace(PROBLEM, **fields)
    assert heads_together(problem, arch) == heads
    assert heads_together(problem, msgspec.structs.replace(arch, cache_share=0)) == 1  # nobody has timed it
