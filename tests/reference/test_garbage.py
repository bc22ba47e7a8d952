"""Lengths, page ids and indices that were never validated: nothing outside the storage is read or written. On the CPU
an index outside a tensor raises."""

from dataclasses import replace

import msgspec
import pytest
import torch
from reference_cases import CASES, OPS, problem, run
from support import assert_right

from portattn.reference import blockwise
from portattn.schema.call import TENSORS, Call
from portattn.schema.problem import Problem
from portattn.testing.tolerance import random_call

LOWEST, HIGHEST = -(2**31), 2**31 - 1
VALUES = (LOWEST, HIGHEST, -1, 0, 1, 5, 23, 1000, 2**30)
NUMBERS = (
    "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "indices",
    "counts",
)  # fmt: skip


def clean(p: Problem, seed: int) -> Call:
    call = random_call(p, seed)
    for name in ("q", "k", "v", "q_rope", "log_weights"):
        if getattr(call, name) is not None:
            setattr(call, name, getattr(call, name).nan_to_num(0.5))
    return call


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(8))
def test_any_number_is_survived(op: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    call = clean(problem(op, "all" if seed % 2 else "plain"), seed)
    for name in NUMBERS:
        tensor = getattr(call, name)
        if tensor is not None:
            wild = torch.tensor(VALUES)[torch.randint(len(VALUES), tensor.shape, generator=generator)].int()
            setattr(call, name, torch.where(torch.rand(tensor.shape, generator=generator) < 0.6, wild, tensor))
    out, lse = run(call)
    assert torch.isfinite(out).all()
    assert not (torch.isnan(lse) | torch.isposinf(lse)).any()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([-5, 4, 22, 999], [0, 4, 17, 22]),  # clamped to the rows there are, and a sequence to 13
        ([0, 9, 3, 3], [0, 9, 9, 9]),  # the second would end before it begins
    ],
)
def test_cu_seqlens_are_clamped(given: list[int], meant: list[int]) -> None:
    call = clean(problem("varlen"), seed=3)
    rows = [torch.tensor(values, dtype=torch.int32) for values in (given, meant)]
    wild, clamped = (run(replace(call, cu_seqlens_q=cu)) for cu in rows)
    first = meant[1]
    for ours, theirs in zip(wild, clamped, strict=True):
        assert torch.equal(ours[:, :, :first], theirs[:, :, :first])


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("dense", {"batch": 0}), ("varlen", {"batch": 0}), ("varlen", {"total_q": 0}), ("varlen", {"total_k": 0}),
        ("varlen", {"seq_q": 0, "total_q": 3}), ("varlen", {"seq_k": 0}), ("paged", {"batch": 0}),
        ("paged", {"seq_q": 0}), ("paged", {"seq_k": 0}), ("paged_packed", {"batch": 0, "total_q": 4}),
        ("paged_packed", {"total_q": 0}), ("sparse", {"tokens": 0}), ("sparse", {"seq_k": 0}), ("sparse", {"batch": 0}),
        ("sparse_paged", {"seq_k": 0}), ("mla", {"batch": 0}), ("mla", {"seq_k": 0}), ("mla", {"head_dim": 16}),
        ("mla_packed", {"total_q": 1}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("feature", ["plain", "sinks", "all"])
@pytest.mark.parametrize("extremes", [False, True])
def test_empty_and_smallest_sizes(op: str, sizes: dict, feature: str, extremes: bool) -> None:
    for seed in range(4):
        call = random_call(problem(op, feature, **sizes), seed, extremes=extremes)
        assert_right(call, *run(call))


def test_a_cache_without_pages() -> None:
    for op, sizes in (("paged", {}), *((op, {"seq_k": 0}) for op in ("paged", "sparse_paged", "mla"))):
        call = random_call(problem(op, **sizes), seed=0)
        call.k, call.v = call.k[:0], call.v[:0]
        if sizes:
            call.page_table = torch.full((3, 4), 7, dtype=torch.int32)
        out, lse = run(call)
        assert not out.any()
        assert torch.isneginf(lse).all()


@pytest.mark.parametrize(("op", "feature"), CASES)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_nothing_is_read_back_from_an_accelerator(op: str, feature: str, needs_grad: bool) -> None:
    """A meta tensor has no values: whatever asks for one, or for a shape that depends on some, raises."""
    call = random_call(problem(op, feature, needs_grad=needs_grad), seed=0)
    elsewhere = replace(call, **{name: t.to("meta") for name in TENSORS if (t := getattr(call, name)) is not None})
    out, lse = blockwise.run(elsewhere)
    assert out.shape == call.new_out().shape
    assert lse.shape == call.new_lse().shape


def test_a_claimed_longest_sequence_costs_nothing_on_a_cpu() -> None:
    """Lengths on the CPU are read, so that no block is computed that holds nothing."""
    call = random_call(problem("varlen"), seed=0)
    boastful = replace(call, problem=msgspec.structs.replace(call.problem, seq_q=2**20, seq_k=2**20))
    torch.testing.assert_close(run(boastful), run(call), rtol=0, atol=0)


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_sequences_longer_than_the_claimed_longest_are_cut(causal: str) -> None:
    call = clean(problem("varlen", causal=causal), seed=4)
    assert int(call.cu_seqlens_q.diff().max()) > 5
    assert int(call.cu_seqlens_k.diff().max()) > 7
    modest = replace(call, problem=msgspec.structs.replace(call.problem, seq_q=5, seq_k=7))
    assert_right(modest, *run(modest))
