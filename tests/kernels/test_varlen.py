"""Packed sequences: who owns which rows, and that every row is written."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CAUSAL, check, problem, run, with_lengths
from support import Device, assert_right, random_call, run_core

from portattn.planning.kernel_specs import base as kernel_specs

# Rows of queries and of keys of each sequence: the ends of tiles, none of either kind, and of both.
ROWS = {
    "ends of tiles": ((17, 33), (16, 16), (15, 32), (1, 31)),
    "no queries or no keys": ((3, 0), (0, 5), (0, 0), (2, 20), (0, 7)),
    "one long one": ((40, 40),),
    "single rows": ((1, 1), (1, 17), (1, 1), (1, 16), (1, 2)),
    "nothing at all": ((0, 0), (0, 0)),
    "more queries than keys": ((20, 3), (4, 1)),
}
BEHIND = 3  # rows of no sequence


def packed(device: Device, rows: tuple[tuple[int, int], ...], behind: int = BEHIND, seed: int = 0, **fields):
    queries, keys = zip(*rows, strict=True)
    p = problem(
        "varlen", batch=len(rows), seq_q=max(1, *queries), seq_k=max(1, *keys), total_q=sum(queries) + behind,
        total_k=sum(keys) + behind, **fields,
    )  # fmt: skip
    return with_lengths(random_call(p, seed, device=device.name), keys, queries)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_lengths_at_the_edges_of_tiles(device: Device, rows: tuple, causal: str) -> None:
    call = packed(device, rows, causal=causal, heads_q=1)
    out, lse = run(device, call)
    assert_right(call, out, lse)
    assert not out[:, :, -BEHIND:].any()
    assert torch.isneginf(lse[:, :, -BEHIND:]).all()


@pytest.mark.parametrize(
    "fields", [{"heads_q": 4, "heads_k": 2}, {"heads_q": 3, "heads_k": 1}, {"sinks": True}], ids=str
)
def test_heads_and_sinks(device: Device, fields: dict) -> None:
    """A row of no sequence has no sink."""
    check(device, packed(device, ROWS["no queries or no keys"], causal="bottom_right", **fields))


@pytest.mark.parametrize("behind", [0, 1, 16, 20])
def test_rows_behind_the_last_sequence(device: Device, behind: int) -> None:
    check(device, packed(device, ((13, 9), (19, 20)), behind, heads_q=1))


@pytest.mark.parametrize("search", [1, 2, 4, 8])
def test_more_sequences_than_are_searched_at_a_time(
    device: Device, monkeypatch: pytest.MonkeyPatch, search: int
) -> None:
    monkeypatch.setattr(kernel_specs, "SEARCH", search)
    rows = ((1, 2), (0, 3), (5, 1), (18, 2), (0, 0), (2, 4), (3, 3))
    check(device, packed(device, rows, heads_q=1, causal="top_left"))


@pytest.mark.parametrize("block_m", [32, 64])
@pytest.mark.parametrize("block_n", [16, 32])
def test_tiles_of_another_size(device: Device, block_m: int, block_n: int) -> None:
    call = packed(device, ROWS["ends of tiles"], causal="bottom_right", heads_q=1, window_left=20)
    assert_right(call, *run_core(device, call, launch={"block_m": block_m, "block_n": block_n}))


@pytest.mark.parametrize("sizes", [
    {"batch": 0, "total_q": 5}, {"total_q": 0}, {"total_k": 0}, {"seq_k": 0}, {"total_q": 1, "total_k": 1},
], ids=str)  # fmt: skip
def test_empty_and_smallest_sizes(device: Device, sizes: dict) -> None:
    for sinks in (False, True):
        check(device, random_call(problem("varlen", sinks=sinks, **sizes), device=device.name, extremes=True))


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(device: Device, seed: int) -> None:
    generator = torch.Generator().manual_seed(3000 + seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    heads_k, causal = pick(1, 2), pick(*CAUSAL)
    p = problem(
        "varlen", batch=pick(1, 2, 5), heads_k=heads_k, heads_q=heads_k * pick(1, 2), seq_q=40, seq_k=50,
        total_q=pick(*range(1, 40)), total_k=pick(*range(1, 50)), head_dim=pick(16, 24, 33), head_dim_v=pick(16, 40),
        dtype=pick("fp32", "fp16", "bf16"), causal=causal, window_left=pick(-1, 0, 7),
        window_right=pick(-1, 0, 5) if causal == "none" else -1, softcap=pick(True, False), sinks=pick(True, False),
        alibi_slopes=pick(True, False),
    )  # fmt: skip
    call = random_call(p, seed, device=device.name, scale=pick(None, -0.3, 0.8), strides=pick("plain", "spare"),
                       extremes=pick(True, False))  # fmt: skip
    assert_right(call, *run_core(device, call, launch={"block_m": pick(16, 32), "block_n": pick(16, 32)}))
