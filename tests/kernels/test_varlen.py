"""Packed sequences: who owns which rows, and that every row is written."""

import pytest
import torch
from kernel_cases import CAUSAL, check, picker, problem, run, with_lengths
from support import Device, assert_right, random_call, run_core

from portattn.planning.kernel_specs import base as kernel_specs
from portattn.testing.oracle import oracle

# Rows of queries and of keys of each sequence: the ends of tiles, none of either kind, and of both.
ROWS = {
    "ends of tiles": ((17, 33), (16, 16), (15, 32), (1, 31)),
    "no queries or no keys": ((3, 0), (0, 5), (0, 0), (2, 20), (0, 7)), "one long one": ((40, 40),),
    "single rows": ((1, 1), (1, 17), (1, 1), (1, 16), (1, 2)), "nothing at all": ((0, 0), (0, 0)),
    "more queries than keys": ((20, 3), (4, 1)),
}  # fmt: skip
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
    check(device, packed(device, ROWS["no queries or no keys"], causal="bottom_right", **fields))


@pytest.mark.parametrize("behind", [0, 1, 16, 20])
def test_rows_behind_the_last_sequence(device: Device, behind: int) -> None:
    check(device, packed(device, ((13, 9), (19, 20)), behind, heads_q=1))


@pytest.mark.parametrize("search", [1, 2, 4, 8])
def test_more_sequences_than_are_searched_at_a_time(device, monkeypatch, search):
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
    pick = picker(3000 + seed)
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


@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
@pytest.mark.parametrize("page", [1, 3, 16, 48, 64])
def test_pages_of_any_size(device: Device, page: int, page_layout: str) -> None:
    p = problem("sparse paged", batch=3, page_size=page, seq_k=-(-41 // page) * page, page_layout=page_layout)
    check(device, random_call(p, page, device=device.name, extremes=True), 1 + page % 2)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("name", ["sparse", "sparse paged"])
def test_any_number_of_splits(device: Device, name: str, parts: int) -> None:
    """More splits than tiles of tokens leave some programs with nothing, but for the sink in the first."""
    p = problem(name, batch=1, tokens=40, sinks=True, log_weights=True)
    check(device, random_call(p, 1, device=device.name, extremes=True), parts)


@pytest.mark.parametrize("block_n", [32, 64])
def test_tiles_of_another_size_of_tokens(device: Device, block_n: int) -> None:
    call = random_call(problem("sparse", batch=1, tokens=36), 2, device=device.name, extremes=True)
    assert_right(call, *run_core(device, call, launch={"block_n": block_n, "splits": 2}))


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seq_k": 0}, {"tokens": 1}, {"tokens": 16}, {"tokens": 17}, {"heads_k": 4}], ids=str
)
def test_empty_and_smallest_sizes_of_tokens(device: Device, sizes: dict) -> None:
    for parts in (1, 2):
        check(device, random_call(problem("sparse", **sizes), 3, device=device.name, extremes=True), parts)


def test_counts_say_how_many_places_are_used(device: Device) -> None:
    call = random_call(problem("sparse", batch=1, seqlens_k=False), 4, device=device.name)
    call.k, call.v = call.k.nan_to_num(0.5), call.v.nan_to_num(0.5)
    call.indices = torch.arange(20, dtype=torch.int32, device=device.name).expand(1, 4, 20).contiguous()
    call.counts = torch.tensor([[0, 1, 16, 20]], dtype=torch.int32, device=device.name)
    for parts in (1, 2):
        out, lse = run(device, call, parts)
        assert_right(call, out, lse)
        assert not out[0, 0].any()
        assert torch.isneginf(lse[0, 0]).all()
        torch.testing.assert_close(out[0, 1, 0], call.v[0, 0, 0], atol=1e-6, rtol=1e-6)


def test_a_token_counts_as_often_as_it_is_listed(device: Device) -> None:
    call = random_call(problem("sparse", batch=1, seqlens_k=False, log_weights=True), 5, device=device.name)
    call.k, call.v = call.k.nan_to_num(0.5), call.v.nan_to_num(0.5)
    call.log_weights = torch.zeros_like(call.log_weights)
    call.log_weights[..., 1:3] = float("-inf")  # masks
    call.indices = torch.tensor([3, 4, 5, -1, 9, 3, 3, 3], dtype=torch.int32, device=device.name).repeat(1, 4, 3)[
        ..., :20
    ]
    call.indices = call.indices.contiguous()
    call.counts = torch.full((1, 4), 20, dtype=torch.int32, device=device.name)
    for parts in (1, 2):
        check(device, call, parts)


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (1, 3), (2, 5), (10, 150), (9, 32767), (30, 1000)])
def test_magicpig_of_any_tables(device: Device, bits: int, tables: int) -> None:
    """From tables that nearly always are hit by two to those that never are."""
    p = problem("sparse", batch=1, magicpig=True, head_dim=32)
    for scale in (None, -0.2):
        call = random_call(p, 6, device=device.name, scale=scale, extremes=True)
        call.magicpig_bits.fill_(bits)
        call.magicpig_tables.fill_(tables)
        check(device, call, 2)


def test_magicpig_at_the_ends_of_the_angle(device: Device) -> None:
    """Keys that are the query, its opposite, nothing, and so near that rounding takes the cosine past 1."""
    call = random_call(problem("sparse", batch=1, magicpig=True, seqlens_k=False), 7, device=device.name, scale=0.1)
    q = call.q[0, ::2]  # one query head of each group, (Hk, 1, D)
    call.k[0] = q * torch.linspace(0.5, 3.0, 37, device=device.name)[:, None]
    call.k[0, :, ::5] = -q
    call.k[0, :, 1::5] = 0.0
    call.v[:] = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(8)).to(device.name)
    call.indices = torch.arange(20, dtype=torch.int32, device=device.name).expand(1, 4, 20).contiguous()
    call.counts = torch.full((1, 4), 20, dtype=torch.int32, device=device.name)
    check(device, call)


@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (10, 150), (32767, 32767)])
def test_magicpig_by_numbers_is_magicpig_by_tensors(device: Device, bits: int, tables: int) -> None:
    call = random_call(problem("sparse", batch=1, magicpig=True, head_dim=32), 3, device=device.name)
    call.magicpig_bits.fill_(bits)
    call.magicpig_tables.fill_(tables)
    expected = run(device, call)
    call.magicpig_bits = call.magicpig_tables = None
    call.magicpig = (bits, tables)
    torch.testing.assert_close(run(device, call), expected, rtol=0, atol=0)
    check(device, call)


@pytest.mark.parametrize("bits", [4, 10])
def test_a_sampling_probability_is_nearly_exact(device: Device, bits: int) -> None:
    """One token each, so that the LSE is its score less log u: from rare hits to frequent ones, without a jump."""
    p = problem("sparse", batch=1, heads_q=48, heads_k=48, tokens=1, seq_k=1, seqlens_k=False, magicpig=True)
    call = random_call(p, 9, device=device.name, scale=0.0)
    angle = torch.linspace(0.05, 2.6, p.heads_q, device=device.name)
    call.q.zero_()
    call.k.zero_()
    call.q[0, :, 0, 0] = 1.0
    call.k[0, :, 0, 0], call.k[0, :, 0, 1] = torch.cos(angle), torch.sin(angle)
    call.v.fill_(1.0)
    call.indices.zero_()
    call.counts.fill_(1)
    call.magicpig_bits.fill_(bits)
    call.magicpig_tables.fill_(150)
    _, lse = run(device, call)
    torch.testing.assert_close(lse.double(), oracle(call)[1].double(), atol=1e-5, rtol=1e-5)
