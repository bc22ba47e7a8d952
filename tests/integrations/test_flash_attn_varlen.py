"""portattn.integrations.flash_attn: the functions of packed sequences, against the definition in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_attn_oracle import beginnings, check_one, ints, one, strided, within
from test_flash_attn_dense import SCORES, of

from portattn.errors import ArgumentError
from portattn.integrations.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

LENGTHS_Q, LENGTHS_K = (5, 0, 9), (11, 4, 6)  # the last has rows with nothing to attend where it is causal
CU_Q, CU_K = beginnings(LENGTHS_Q), beginnings(LENGTHS_K)
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.06], [0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.4, 0.3]])
ALL = {**SCORES, "causal_alibi": {"causal": True, "alibi_slopes": SLOPES}}


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return strided(14, 4, 16), strided(21, 2, 16), strided(21, 2, 24)


def check(out: torch.Tensor, lse: torch.Tensor, q: Any, k: Any, v: Any, cu_k: torch.Tensor, scores: Any) -> None:
    for b, rows in enumerate(CU_Q.diff().tolist()):
        queries, keys = slice(int(CU_Q[b]), int(CU_Q[b]) + rows), slice(int(cu_k[b]), int(cu_k[b + 1]))
        check_one(out[queries], lse[:, queries], q[queries], k[keys], v[keys], math.inf, **of(scores, b))


@pytest.mark.parametrize("name", ALL)
def test_every_argument(name: str) -> None:
    q, k, v = packed()
    out, lse, masked = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 9, 11, **ALL[name], return_attn_probs=True)
    assert out.shape == (14, 4, 24)
    assert lse.shape == (4, 14)
    assert masked.numel() == 0
    check(out, lse, q, k, v, CU_K, ALL[name])


def test_lengths_as_tensors_of_one_element() -> None:
    """transformers gives them so."""
    q, k, v = packed()
    longest = torch.tensor(9), torch.tensor([11])
    assert torch.equal(
        flash_attn_varlen_func(q, k, v, CU_Q, CU_K, *longest), flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 9, 11)
    )


@pytest.mark.parametrize("name", ["plain", "all"])
def test_packed_tensors_are_read_where_they_lie(name: str) -> None:
    torch.manual_seed(2)
    q, kv, qkv = torch.randn(14, 4, 16), torch.randn(21, 2, 2, 16), torch.randn(14, 3, 4, 16)
    scores = ALL[name]
    out, lse, _ = flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_K, 9, 11, **scores, return_attn_probs=True)
    check(out, lse, q, kv[:, 0], kv[:, 1], CU_K, scores)
    out, lse, _ = flash_attn_varlen_qkvpacked_func(qkv, CU_Q, 9, **scores, return_attn_probs=True)
    check(out, lse, *qkv.unbind(1), CU_Q, scores)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("name", ["plain", "causal_alibi", "all"])
def test_pages(page: int, name: str) -> None:
    """block_table, in an order of its own; what no sequence reaches holds NaN, in keys and in values."""
    q, k, v = packed()
    most = -(-max(LENGTHS_K) // page)
    table = torch.full((3, most), -1, dtype=torch.int32)
    pages = torch.randperm(3 * most + 2).tolist()
    k_pages, v_pages = (torch.full((3 * most + 2, page, *t.shape[1:]), math.nan) for t in (k, v))
    for b, length in enumerate(LENGTHS_K):
        for place in range(-(-length // page)):
            table[b, place] = pages.pop()
            rows = slice(int(CU_K[b]) + place * page, int(CU_K[b]) + min((place + 1) * page, length))
            for cache, rows_of in ((k_pages, k), (v_pages, v)):
                cache[table[b, place], : rows.stop - rows.start] = rows_of[rows]
    out, lse, masked = flash_attn_varlen_func(
        q, k_pages, v_pages, CU_Q, CU_K, 9, 11, **ALL[name], return_attn_probs=True, block_table=table
    )
    assert masked.numel() == 0
    check(out, lse, q, k, v, CU_K, ALL[name])


def test_dropout_and_its_mask() -> None:
    q, k, v = packed()
    given = ALL["causal_alibi"]
    out, lse, masked = flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 10, 12, dropout_p=0.3, **given, return_attn_probs=True
    )
    assert masked.shape == (3, 4, 10, 12)
    for b, (rows, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        queries, its = slice(int(CU_Q[b]), int(CU_Q[b]) + rows), slice(int(CU_K[b]), int(CU_K[b]) + keys)
        mine = masked[b, :, :rows, :keys]
        kept = {"kept": ~torch.signbit(mine), "dropout_p": 0.3}
        check_one(out[queries], lse[:, queries], q[queries], k[its], v[its], math.inf, **of(given, b), **kept)
        _, _, probabilities = one(q[queries], k[its], v[its], **of(given, b))
        largest = probabilities.amax(-1, keepdim=True)  # these few keys are one block of columns
        assert not rows or (mine.abs() * largest - probabilities).abs().max() < 2e-6
        assert not masked[b, :, rows:].any()
        assert not masked[b, :, :, keys:].any()


@pytest.mark.parametrize("name", ["plain", "all"])
def test_gradients(name: str) -> None:
    tensors = packed()
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = flash_attn_varlen_func(*leaves, CU_Q, CU_K, 9, 11, **ALL[name])
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    found = []
    for exact in (True, False):
        q, k, v = (t.double().requires_grad_() if exact else t.clone().requires_grad_() for t in tensors)
        for b in range(3):
            queries, keys = slice(*CU_Q[b : b + 2].tolist()), slice(*CU_K[b : b + 2].tolist())
            (one(q[queries], k[keys], v[keys], **ALL[name], exact=exact)[0] * weight[queries]).sum().backward()
        found.append([t.grad for t in (q, k, v)])
    for ours, right, same in zip(leaves, *found, strict=True):
        within(ours.grad, right, same)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cu_seqlens_q": CU_Q.long()}, r"cu_seqlens_q\.dtype is torch\.int64, but must be torch\.int32"),
        ({"cu_seqlens_k": CU_K[:3]}, r"cu_seqlens_k"),
        ({"cu_seqlens_k": ints(0, 11, 15, 22)}, r"cu_seqlens_k\[3\] is 22, but must be at most the packed rows, 21"),
        ({"max_seqlen_q": 8}, r"cu_seqlens_q\[3\] - cu_seqlens_q\[2\] is 9, but must be at most max_seqlen_q, 8"),
        ({"max_seqlen_k": "9"}, r"max_seqlen_k is '9', but must be an integer"),
        ({"dropout_p": torch.ones(2)}, r"dropout_p is tensor\(\[1\., 1\.\]\), but must be one finite number"),
        ({"q": [1], "dropout_p": 0.1, "return_attn_probs": True}, r"q is 'list', but must be a torch\.Tensor"),
        ({"q": torch.zeros(1, 14, 4, 16)}, r"q\.ndim is 4, but must be 3"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"k\.ndim is 3, but must be 4"),
    ],
)
def test_bad_input_is_one_error_in_flash_attn_s_names(given: dict[str, Any], text: str) -> None:
    q, k, v = packed()
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 9, "max_seqlen_k": 11}
    with pytest.raises(ArgumentError, match=f"^flash_attn_varlen_func: {text}"):
        flash_attn_varlen_func(**{**call, **given})


def test_what_pages_have_not_is_refused() -> None:
    q, pages, table = torch.randn(14, 4, 16), torch.randn(6, 16, 2, 16), torch.arange(3, dtype=torch.int32)[:, None]
    with pytest.raises(
        ArgumentError, match=r"^flash_attn_varlen_func: dropout_p is 0\.1, but is not taken with block_ta"
    ):
        flash_attn_varlen_func(q, pages, pages, CU_Q, CU_K, 9, 11, 0.1, block_table=table)
    with pytest.raises(
        ArgumentError, match=r"^flash_attn_varlen_func: block_table\[2, 0\] is 7, but must be in 0\.\.5"
    ):
        flash_attn_varlen_func(q, pages, pages, CU_Q, CU_K, 9, 11, block_table=ints(0, 1, 7)[:, None])
