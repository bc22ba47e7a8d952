"""decode_split over a latent cache, whose rows are keys as a whole and values in their first columns."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from kernel_cases import CAUSAL, check, page_loops, problem, run, with_lengths
from support import Device, assert_right, random_call


@pytest.mark.parametrize("page", [1, 3, 16, 48, 64])
def test_pages_of_any_size(device: Device, page: int) -> None:
    fields = {"page_size": page, "seq_k": -(-41 // page) * page, "causal": "bottom_right"}
    uniform, ragged = problem("mla", batch=3, seq_q=2, **fields), problem("mla ragged", **fields)
    for seed, p in enumerate((uniform, ragged)):
        call = random_call(p, seed, device=device.name, extremes=True)
        for loop in page_loops(p):
            check(device, call, 1 + (seed + page) % 3, page_loop=loop)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 20])
def test_any_number_of_splits(device: Device, parts: int) -> None:
    p = problem("mla", causal="bottom_right", sinks=True, heads_q=5)
    check(device, random_call(p, 2, device=device.name, extremes=True), parts)


@pytest.mark.parametrize("causal", CAUSAL)
def test_a_ragged_batch(device: Device, causal: str) -> None:
    queries, keys = (1, 0, 9, 3, 0), (40, 7, 30, 0, 0)
    p = problem("mla ragged", batch=5, total_q=sum(queries) + 2, causal=causal, sinks=True)
    call = random_call(p, 3, device=device.name)
    call.k = torch.cat([call.k] * 5)
    call.v = call.k[..., : p.head_dim_v]
    check(device, with_lengths(call, keys, queries))


def test_every_head_reads_the_same_rows(device: Device) -> None:
    """Twenty heads are more than a tile's rows."""
    for rows in (1, 2):
        p = problem("mla", heads_q=20, seq_q=rows, causal="bottom_right", batch=1)
        check(device, random_call(p, 4, device=device.name), 2)


def test_it_is_paged_attention_of_one_wide_head(device: Device) -> None:
    latent = random_call(problem("mla", causal="bottom_right", sinks=True), 5, device=device.name)
    p = msgspec.structs.replace(latent.problem, op="paged_attention")
    paged = replace(latent, problem=p, q=torch.cat([latent.q, latent.q_rope], dim=3), q_rope=None)
    for ours, theirs in zip(run(device, latent, 2), run(device, paged, 2), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_sequences_without_keys(device: Device) -> None:
    call = with_lengths(random_call(problem("mla"), 6, device=device.name), (0, 0))
    call.k.fill_(float("nan"))
    for parts in (1, 2):
        out, lse = run(device, call, parts)
        assert_right(call, out, lse)
        assert not out.any()
        assert torch.isneginf(lse).all()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seq_q": 0}, {"seq_k": 0}, {"seq_k": 8}], ids=str)
def test_empty_and_smallest_sizes(device: Device, sizes: dict) -> None:
    for parts in (1, 2):
        check(device, random_call(problem("mla", **sizes), device=device.name), parts)
