"""Bad arguments of varlen_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from good_calls import assert_refused, good, int32, perform

import portattn

Q, K = (9, 4, 16), (12, 2, 16)
SIZE = "must be an integer in 0..2147483647"
BEGINNINGS = "must be an int32 torch.Tensor of shape (batch + 1,)"

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "q is no tensor": ({"q": None}, "q is 'NoneType'", "must be a torch.Tensor"),
    "q has rank 4": ({"q": torch.zeros(1, *Q)}, "q.ndim is 4", "must be 3: (tokens, heads, head_dim)"),
    "k has rank 2": ({"k": torch.zeros(12, 16)}, "k.ndim is 2", "must be 3: (tokens, heads, head_dim)"),
    "v is an integer": ({"v": torch.zeros(K).long()}, "v.dtype is torch.int64", "must be one of torch.float16"),
    "k has another dtype": ({"k": torch.zeros(K).bfloat16()}, "k.dtype is torch.bfloat16", "must be q's"),
    "v has another dtype": ({"v": torch.zeros(K).bfloat16()}, "v.dtype is torch.bfloat16", "must be q's"),
    "k elsewhere": ({"k": torch.zeros(K, device="meta")}, "k.device is 'meta'", "must be q's, cpu"),
    "v elsewhere": ({"v": torch.zeros(K, device="meta")}, "v.device is 'meta'", "must be q's, cpu"),
    "head_dim differs": ({"k": torch.zeros(12, 2, 8)}, "k's head_dim is 8", "must be q's, 16"),
    "head_dim too wide": (
        {"q": torch.zeros(9, 4, 577), "k": torch.zeros(12, 2, 577)}, "q's head_dim is 577", "must be in 1..576",
    ),
    "head_dim_v 0": ({"v": torch.zeros(12, 2, 0)}, "v's head_dim is 0", "must be in 1..576"),
    "v's heads differ": ({"v": torch.zeros(12, 1, 16)}, "v's heads is 1", "must be k's, 2"),
    "v has fewer tokens": ({"v": torch.zeros(11, 2, 16)}, "v's tokens is 11", "must be k's, 12"),
    "heads do not divide": ({"q": torch.zeros(9, 3, 16)}, "heads_q is 3", "must be a multiple of the 2"),
    "cu_seqlens_q is a list": ({"cu_seqlens_q": [0, 4, 9]}, "cu_seqlens_q is 'list'", BEGINNINGS),
    "cu_seqlens_k of rank 2": ({"cu_seqlens_k": int32([0, 5, 12])}, "cu_seqlens_k is (1, 3)", BEGINNINGS),
    "cu_seqlens_q is empty": ({"cu_seqlens_q": int32()}, "cu_seqlens_q is (0,)", BEGINNINGS),
    "cu_seqlens_k is int64": (
        {"cu_seqlens_k": torch.tensor([0, 5, 12])}, "cu_seqlens_k.dtype is torch.int64", "must be torch.int32",
    ),
    "cu_seqlens_q elsewhere": (
        {"cu_seqlens_q": int32(0, 4, 9).to("meta")}, "cu_seqlens_q.device is 'meta'", "must be q's, cpu",
    ),
    "cu_seqlens_k not contiguous": (
        {"cu_seqlens_k": int32(0, 0, 5, 0, 12, 0)[::2]}, "cu_seqlens_k.stride() is (2,)", "must be contiguous",
    ),
    "another batch of keys": ({"cu_seqlens_k": int32(0, 12)}, "cu_seqlens_k's size is 2", "must be cu_seqlens_q's, 3"),
    "max_seqlen_q is a float": ({"max_seqlen_q": 5.0}, "max_seqlen_q is 5.0", SIZE),
    "max_seqlen_k is negative": ({"max_seqlen_k": -1}, "max_seqlen_k is -1", SIZE),
    "max_seqlen_q is True": ({"max_seqlen_q": True}, "max_seqlen_q is True", SIZE),
    "max_seqlen_k is None": ({"max_seqlen_k": None}, "max_seqlen_k is None", SIZE),
    "max_seqlen_k leaves int32": ({"max_seqlen_k": 2**31}, "max_seqlen_k is 2147483648", SIZE),
    "max_seqlen_q is a tensor": ({"max_seqlen_q": torch.tensor(5)}, "max_seqlen_q is tensor(5)", SIZE),
    "not from 0": ({"cu_seqlens_q": int32(1, 4, 9)}, "cu_seqlens_q[0] is 1", "must be 0, the first row"),
    "from below 0": ({"cu_seqlens_k": int32(-1, 4, 9)}, "cu_seqlens_k[0] is -1", "must be 0, the first row"),
    "falling": ({"cu_seqlens_q": int32(0, 4, 3)}, "cu_seqlens_q[2] is 3", "must be at least cu_seqlens_q[1], 4"),
    "falling below 0": ({"cu_seqlens_k": int32(0, -2, 12)}, "cu_seqlens_k[1] is -2", "at least cu_seqlens_k[0], 0"),
    "beyond the rows": ({"cu_seqlens_q": int32(0, 5, 10)}, "cu_seqlens_q[2] is 10", "at most the packed rows, 9"),
    "the first beyond the rows": (
        {"cu_seqlens_k": int32(0, 13, 14), "max_seqlen_k": 99}, "cu_seqlens_k[1] is 13", "at most the packed rows, 12",
    ),
    "longer than max_seqlen_q": (
        {"max_seqlen_q": 4}, "cu_seqlens_q[2] - cu_seqlens_q[1] is 5", "must be at most max_seqlen_q, 4",
    ),
    "longer than max_seqlen_k": (
        {"max_seqlen_k": 4}, "cu_seqlens_k[1] - cu_seqlens_k[0] is 5", "must be at most max_seqlen_k, 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_errors_name_argument_value_and_limit(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused("varlen_attention", good("varlen_attention") | changes, what, limit)


def test_more_than_the_longest_sequence_is_no_other_problem() -> None:
    """What a caller claims beyond the rows there are changes nothing."""
    made = [
        portattn.plan("varlen_attention", **(good("varlen_attention") | {"max_seqlen_q": q, "max_seqlen_k": k}))
        for q, k in ((9, 12), (2**31 - 1, 2**31 - 1))
    ]
    assert made[0].problem == made[1].problem
    assert (made[0].problem.seq_q, made[0].problem.seq_k) == (9, 12)


def test_rows_after_the_last_sequence_give_nothing() -> None:
    given = good("varlen_attention") | {"cu_seqlens_q": int32(0, 4, 7), "cu_seqlens_k": int32(0, 5, 5)}
    given["v"] = torch.ones(K)
    out, lse = perform("varlen_attention", given, return_lse=True, sinks=torch.zeros(4))
    assert (out[:4] > 0.8).all()  # five keys and the sink
    assert not out[4:].any()
    assert torch.equal(lse[:, 4:7], torch.zeros(4, 3))  # no key, but a sink of 0
    assert torch.isneginf(lse[:, 7:]).all()
