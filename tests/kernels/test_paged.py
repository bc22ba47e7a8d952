"""decode_split over pages: any size and order of pages, either loop over them, uniform and packed queries."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CAUSAL, check, page_loops, problem, run, with_lengths
from support import Device, assert_right, random_call, run_core

CAPACITY = 57  # keys that a sequence's pages hold at least: four tiles


def sized(page: int, **fields):
    """A problem with pages of this size."""
    return {"page_size": page, "seq_k": -(-CAPACITY // page) * page} | fields


@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize(("page", "parts"), [(1, 1), (3, 2), (16, 3), (48, 4), (64, 5)])
def test_pages_of_any_size(device: Device, page: int, parts: int, page_layout: str) -> None:
    fields = sized(page, heads_q=2, heads_k=2, page_layout=page_layout)
    uniform = problem("paged", batch=3, seq_q=2, causal="bottom_right", **fields)
    ragged = problem("ragged", **fields | {"heads_k": 1}, causal="bottom_right")
    for seed, p in enumerate((uniform, ragged)):
        call = random_call(p, seed, device=device.name, extremes=True)
        for loop in page_loops(p):
            check(device, call, parts if p is uniform else 1 + parts % 2, page_loop=loop)


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_tiles_of_another_size(device: Device, block_n: int) -> None:
    """Pages that hold one tile, several, and a part of one."""
    for page in (16, 32, 64):
        call = random_call(problem("paged", **sized(page), heads_q=2, heads_k=1), page, device=device.name)
        for loop in ("flat_masked",) if page % block_n else ("per_page", "flat_masked"):
            launch = {"block_n": block_n, "splits": 2}
            assert_right(call, *run_core(device, call, {"page_loop": loop}, launch))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("name", ["paged", "whole pages"])
def test_any_number_of_splits(device: Device, name: str, parts: int) -> None:
    """More splits than key tiles (three) leave some programs with nothing: their share counts for nothing."""
    p = problem(name, causal="bottom_right", window_left=30, sinks=True, heads_q=2, heads_k=1)
    check(device, random_call(p, 4, device=device.name, extremes=True), parts)


# Rows of queries and of keys: decoding ones, chunks of a prefill, and sequences without rows, beside one another.
MIXED = {
    "decode and prefill": ((1, 40), (18, 30), (1, 16), (3, 3)),
    "no queries or no keys": ((0, 17), (4, 0), (0, 0), (2, 33), (0, 1)),
    "more queries than keys": ((18, 4), (5, 1)),
    "nothing at all": ((0, 0), (0, 0)),
}


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("rows", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("behind", [0, 3])
def test_a_ragged_batch(device: Device, rows: tuple, causal: str, behind: int) -> None:
    queries, keys = zip(*rows, strict=True)
    p = problem("ragged", batch=len(rows), seq_q=max(1, *queries), total_q=sum(queries) + behind, causal=causal)
    # A call whose sequences all are full has pages enough for any lengths.
    call = random_call(p, 5, device=device.name)
    call.k, call.v = (torch.cat([x] * 5) for x in (call.k, call.v))
    call = with_lengths(call, keys, queries)
    out, lse = run(device, call, 1 + behind % 2)
    assert_right(call, out, lse)
    if behind:
        assert not out[:, :, -behind:].any()
        assert torch.isneginf(lse[:, :, -behind:]).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_more_rows_than_a_tile(device: Device, parts: int) -> None:
    """A chunk of a prefill, with query heads that do not divide a tile."""
    p = problem("paged", heads_q=3, heads_k=1, seq_q=13, causal="bottom_right", window_left=20, batch=1)
    check(device, random_call(p, 6, device=device.name, extremes=True), parts)


def test_sequences_without_keys(device: Device) -> None:
    """What their tables hold is nobody's business; with a sink a row still has that as its LSE."""
    for sinks in (False, True):
        call = with_lengths(random_call(problem("paged", batch=3, sinks=sinks), 7, device=device.name), (0, 0, 0))
        call.page_table[:] = 2**31 - 1
        call.k.fill_(float("nan"))
        call.v.fill_(float("nan"))
        for parts in (1, 3):
            out, lse = run(device, call, parts)
            assert_right(call, out, lse)
            assert not out.any()
            assert torch.isfinite(lse).all() if sinks else torch.isneginf(lse).all()


def test_pages_that_sequences_share(device: Device) -> None:
    """Prefix caching: both tables begin with the same pages, and one sequence has one of them twice."""
    call = with_lengths(random_call(problem("paged", causal="bottom_right"), 8, device=device.name), (20, 24))
    call.page_table = torch.tensor([[2, 0, 1, -1, -1], [2, 0, 2, -1, -1]], dtype=torch.int32, device=device.name)
    for parts in (1, 2):
        check(device, call, parts)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"seq_k": 8}], ids=str)
def test_empty_and_smallest_sizes(device: Device, sizes: dict) -> None:
    for parts in (1, 2):
        check(device, random_call(problem("paged", sinks=True, **sizes), device=device.name), parts)


@pytest.mark.parametrize("sizes", [{"batch": 0, "total_q": 3}, {"total_q": 0}, {"seq_k": 0}, {"total_q": 1}], ids=str)
def test_empty_and_smallest_ragged_sizes(device: Device, sizes: dict) -> None:
    for parts in (1, 2):
        check(device, random_call(problem("ragged", **sizes), device=device.name, extremes=True), parts)


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(device: Device, seed: int) -> None:
    generator = torch.Generator().manual_seed(4000 + seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    heads_k, page, ragged, causal = pick(1, 2), pick(1, 3, 5, 16, 32), seed % 2 == 0, pick(*CAUSAL)
    fields = {"seq_q": 20, "total_q": pick(*range(1, 25))} if ragged else {"seq_q": pick(1, 2, 5), "bias": seed == 1}
    p = problem(
        "ragged" if ragged else "paged", batch=pick(1, 2, 4), heads_k=heads_k, heads_q=heads_k * pick(1, 3),
        page_size=page, seq_k=page * pick(1, 2, 40 // page), page_layout=pick("phd", "hpd"), causal=causal,
        head_dim=pick(16, 33), head_dim_v=pick(16, 40), dtype=pick("fp32", "fp16", "bf16"),
        window_left=pick(-1, 0, 7), window_right=pick(-1, 4) if causal == "none" else -1, softcap=pick(True, False),
        sinks=pick(True, False), alibi_slopes=pick(True, False), **fields,
    )  # fmt: skip
    call = random_call(p, seed, device=device.name, strides=pick("plain", "spare"), extremes=pick(True, False))
    check(device, call, pick(1, 2, 3), page_loop=pick(*page_loops(p)))
