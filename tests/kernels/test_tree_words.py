"""Tree masks in decode_split: random words against the oracle, chains against the causal mask, bits one at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import check, problem, run, with_lengths
from support import Device, assert_right, random_call

from portattn.schema.call import Call

OPS = ("decode", "paged", "whole pages", "ragged", "mla", "mla ragged")
FEATURES: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": "bottom_right"},
    "top left": {"causal": "top_left"},
    "window": {"window_left": 3, "window_right": 1},
    "more": {"causal": "bottom_right", "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True},
}
LOWERINGS: dict[str, dict[str, str]] = {
    "finite": {"mask_value": "finite"}, "exp": {"exp": "exp"}, "persistent": {"grid": "persistent"},
    "reload": {"q_operand": "reload"}, "inside": {"reads": "inside"}, "rotated": {"pipeline": "rotated"},
    "block_ptr": {"load": "block_ptr"}, "transposed": {"k_tile": "transposed"},
}  # fmt: skip


def with_words(call: Call, words: list[int]) -> Call:
    """The call with the same words for every sequence; of packed queries one for each row."""
    words = [word - 2**64 if word >= 2**63 else word for word in words]
    mask = torch.tensor(words, dtype=torch.int64, device=call.q.device)
    return replace(call, tree_mask=mask.expand(call.problem.query_rows[0], -1))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", OPS)
def test_random_words_are_right(device: Device, name: str, feature: str) -> None:
    seed = list(FEATURES).index(feature) % 2
    call = random_call(problem(name, tree_mask=True, **FEATURES[feature]), seed, device=device.name)
    check(device, call, 1 + seed * 2 if "ragged" not in name else 1)


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("name", OPS)
def test_what_no_query_sees_may_be_nan(device: Device, name: str, poison: str) -> None:
    call = random_call(problem(name, tree_mask=True, dtype="fp16"), 2, device=device.name, poison=poison, extremes=True)
    assert call.k.isnan().any() or call.v.isnan().any()
    check(device, call)


@pytest.mark.parametrize(("lowering", "name"), [(one, "ragged" if one == "inside" else "decode") for one in LOWERINGS])
def test_every_way_to_lower_it(device: Device, lowering: str, name: str) -> None:
    call = random_call(problem(name, tree_mask=True, mask=name != "ragged"), 3, device=device.name)
    check(device, call, **LOWERINGS[lowering])


@pytest.mark.parametrize("queries", [1, 64])
def test_every_bit_by_itself(device: Device, queries: int) -> None:
    """Query i sees new token (7·i) mod n, in each half of its word and at both halves' ends, and no other."""
    call = random_call(problem("decode", seq_q=queries, seq_k=80, seqlens_k=False, leftpad_k=False), 0,
                       device=device.name)  # fmt: skip
    call = with_words(call, [1 << (7 * i % queries) for i in range(queries)])
    call.problem = msgspec.structs.replace(call.problem, tree_mask=True)
    assert_right(call, *run(device, call))


def test_a_word_of_zero_leaves_the_keys_before(device: Device) -> None:
    call = random_call(problem("decode", batch=1, seq_q=1, seqlens_k=False, leftpad_k=False), 0, device=device.name)
    call = with_words(call, [0])
    call.problem = msgspec.structs.replace(call.problem, tree_mask=True)
    call.k[:, :, -1] = call.v[:, :, -1] = float("nan")
    shorter = replace(call, tree_mask=None, k=call.k[:, :, :-1], v=call.v[:, :, :-1], problem=msgspec.structs.replace(
        call.problem, tree_mask=False, seq_k=call.problem.seq_k - 1))  # fmt: skip
    for ours, theirs in zip(run(device, call), run(device, shorter), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["decode", "ragged"])
def test_a_chain_is_the_causal_mask(device: Device, name: str) -> None:
    call = random_call(problem(name), 5, device=device.name)
    keys, queries = [21, 2, 0][: call.problem.batch], None
    if call.problem.packed:
        queries = [9, 0, 13]
        keys = [37, 4, 13]
    call = with_lengths(replace(call, leftpad_k=None), keys, queries)
    p = msgspec.structs.replace(call.problem, leftpad_k=False)
    count = p.query_rows[1] if queries is None else 22
    numbers = list(range(count)) if queries is None else [i for n in queries for i in range(n)]
    chain = with_words(call, [(2 << i) - 1 for i in numbers])
    chain.problem = msgspec.structs.replace(p, tree_mask=True)
    causal = replace(call, problem=msgspec.structs.replace(p, causal="bottom_right"))
    both = replace(chain, problem=msgspec.structs.replace(chain.problem, causal="bottom_right"))
    wanted = run(device, causal)
    for found in (run(device, chain), run(device, both)):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_rows_without_a_key(device: Device) -> None:
    """More new tokens than keys: the first nodes are none, and a word that shows only those shows nothing."""
    call = random_call(problem("decode", leftpad_k=False), 0, device=device.name)
    call.problem = msgspec.structs.replace(call.problem, tree_mask=True)
    call = with_words(with_lengths(call, [2, 0]), [0b001, 0b011, 0b111])
    out, lse = run(device, call)
    assert_right(call, out, lse)
    assert not out[0, :, 0].any()
    assert lse[0, :, 0].eq(float("-inf")).all()
    assert not out[1].any()
