"""Bad arguments of the ops over pages: paged_attention, and what mla_attention and sparse_attention share with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from good_calls import PAGED, assert_refused, good, int32, perform, ragged, sparse_paged

import portattn
from portattn import PageTable
from portattn.api.ops import make_request
from portattn.testing.dense_view import allowed_keys

PAGES = (5, 4, 2, 16)
TABLE = "must be an int32 torch.Tensor of shape (batch, pages a sequence), or a PageTable"

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "q is no tensor": ({"q": 1}, "q is 'int'", "must be a torch.Tensor"),
    "q has rank 3": ({"q": torch.zeros(2, 4, 16)}, "q.ndim is 3", "must be 4: (batch, heads, seq, head_dim)"),
    "k_pages has rank 3": (
        {"k_pages": torch.zeros(5, 4, 32)}, "k_pages.ndim is 3", "must be 4: (pages, page_size, heads, head_dim)",
    ),
    "v_pages has rank 3 in hpd": (
        {"v_pages": torch.zeros(5, 4, 32), "page_layout": "hpd"}, "v_pages.ndim is 3",
        "must be 4: (pages, heads, page_size, head_dim)",
    ),
    "k_pages is an integer": ({"k_pages": torch.zeros(PAGES).int()}, "k_pages.dtype is torch.int32", "torch.float16"),
    "k_pages has another dtype": ({"k_pages": torch.zeros(PAGES).half()}, "k_pages.dtype is torch.float16", "q's"),
    "v_pages has another dtype": ({"v_pages": torch.zeros(PAGES).half()}, "v_pages.dtype is torch.float16", "q's"),
    "k_pages elsewhere": ({"k_pages": torch.zeros(PAGES, device="meta")}, "k_pages.device is 'meta'", "q's, cpu"),
    "v_pages elsewhere": ({"v_pages": torch.zeros(PAGES, device="meta")}, "v_pages.device is 'meta'", "q's, cpu"),
    "fewer pages of values": ({"v_pages": torch.zeros(4, 4, 2, 16)}, "v_pages's pages is 4", "must be k_pages's, 5"),
    "smaller pages of values": (
        {"v_pages": torch.zeros(5, 2, 2, 16)}, "v_pages's page_size is 2", "must be k_pages's, 4",
    ),
    "fewer heads of values": ({"v_pages": torch.zeros(5, 4, 1, 16)}, "v_pages's heads is 1", "must be k_pages's, 2"),
    "pages of nothing": (
        {"k_pages": torch.zeros(5, 0, 2, 16), "v_pages": torch.zeros(5, 0, 2, 16)}, "k_pages's page_size is 0",
        "must be at least 1",
    ),
    "pages of nothing in hpd": (
        {"k_pages": torch.zeros(5, 2, 0, 16), "v_pages": torch.zeros(5, 2, 0, 16), "page_layout": "hpd"},
        "k_pages's page_size is 0", "must be at least 1",
    ),
    "head_dim differs": ({"k_pages": torch.zeros(5, 4, 2, 8)}, "k_pages's head_dim is 8", "must be q's, 16"),
    "head_dim too wide": (
        {"q": torch.zeros(2, 4, 1, 600), "k_pages": torch.zeros(5, 4, 2, 600)}, "q's head_dim is 600", "1..576",
    ),
    "head_dim_v too wide": ({"v_pages": torch.zeros(5, 4, 2, 600)}, "v_pages's head_dim is 600", "1..576"),
    "heads do not divide": ({"q": torch.zeros(2, 3, 1, 16)}, "heads_q is 3", "must be a multiple of the 2"),
    "unknown page_layout": ({"page_layout": "dph"}, "page_layout is 'dph'", "must be one of phd, hpd"),
    "page_layout is a list": ({"page_layout": ["phd"]}, "page_layout is ['phd']", "must be one of phd, hpd"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_errors_name_argument_value_and_limit(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused("paged_attention", good("paged_attention") | changes, what, limit)


# What all three say of their table.
BAD_TABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "page_table is a list": ({"page_table": [[0, 1, 2], [3, 4, 0]]}, "page_table is 'list'", TABLE),
    "page_table of rank 1": ({"page_table": int32(0, 1)}, "page_table is (2,)", TABLE),
    "page_table of rank 3": ({"page_table": int32([[0]], [[1]])}, "page_table is (2, 1, 1)", TABLE),
    "page_table is int64": (
        {"page_table": torch.zeros(2, 3).long()}, "page_table.dtype is torch.int64", "must be torch.int32",
    ),
    "page_table of another batch": (
        {"page_table": int32([0, 1, 2])}, "page_table.shape is (1, 3)", "must be (batch, pages a sequence), (2, 3)",
    ),
    "page_table elsewhere": (
        {"page_table": torch.zeros(2, 3, device="meta").int()}, "page_table.device is 'meta'", "must be q's, cpu",
    ),
    "page_table not contiguous": (
        {"page_table": torch.zeros(2, 6).int()[:, ::2]}, "page_table.stride(-1) is 2", "its last axis is contiguous",
    ),
    "seqlens_k is a list": ({"seqlens_k": [10, 8]}, "seqlens_k is 'list'", "int32 torch.Tensor of shape (batch,)"),
    "seqlens_k is int64": ({"seqlens_k": torch.tensor([10, 8])}, "seqlens_k.dtype is torch.int64", "torch.int32"),
    "seqlens_k of another batch": ({"seqlens_k": int32(1, 2, 3)}, "seqlens_k.shape is (3,)", "must be (batch,), (2,)"),
    "seqlens_k elsewhere": ({"seqlens_k": int32(1, 2).to("meta")}, "seqlens_k.device is 'meta'", "must be q's, cpu"),
    "seqlens_k not contiguous": (
        {"seqlens_k": int32(1, 2, 3, 4)[::2]}, "seqlens_k.stride() is (2,)", "must be contiguous",
    ),
    "longer than the table": ({"seqlens_k": int32(12, 13)}, "seqlens_k[1] is 13", "must be in 0..12"),
    "negative length": ({"seqlens_k": int32(-1, 13)}, "seqlens_k[0] is -1", "must be in 0..12"),
    "page id too large": (
        {"page_table": int32([0, 1, 5], [9, 4, 0])}, "page_table[0, 2] is 5", "must be in 0..4, the pages of the cache",
    ),
    "negative page id": ({"page_table": int32([0, 1, 2], [3, -1, 0])}, "page_table[1, 1] is -1", "must be in 0..4"),
    "the first bad id": ({"page_table": int32([0, 7, 8], [9, 9, 9])}, "page_table[0, 1] is 7", "must be in 0..4"),
    "the id of one token": (
        {"page_table": int32([0, 1, 2], [3, 4, 77]), "seqlens_k": int32(12, 9)}, "page_table[1, 2] is 77", "in 0..4",
    ),
}  # fmt: skip
# Of sparse_attention the tokens are on all pages of their sequence.
TOKENS = int32([0, 4, 9], [0, 4, 7])[:, None].expand(2, 4, 3)
CALLS = {
    "paged_attention": good,
    "mla_attention": good,
    "sparse_attention": lambda op: sparse_paged() | {"indices": TOKENS, "counts": torch.full((2, 4), 3).int()},
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("bad", BAD_TABLE.values(), ids=BAD_TABLE)
def test_a_bad_table_is_named(op: str, bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    if op == "sparse_attention" and what.startswith("page_table[1, 2]"):  # by its ninth token
        changes = changes | {"indices": TOKENS.clamp(min=8)}
    assert_refused(op, CALLS[op](op) | changes, what, limit)


@pytest.mark.parametrize("settings", [{}, {"validate": "always"}], ids=["", "always"])
@pytest.mark.parametrize("page_id", [-1, -(2**31), 99])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [None, (4, None), (2, 3), (0, 0), (None, 2)])
@pytest.mark.parametrize("op", PAGED)
def test_pages_that_no_query_sees_have_any_id(
    op: str, window: tuple[int | None, int | None] | None, causal: bool | str, page_id: int, settings: dict[str, Any]
) -> None:
    """One more page is an error: seen is what the oracle's mask shows of it."""
    table = int32([0, 1, 2], [3, 4, 0])
    given = good(op) | {"window": window, "causal": causal, "page_table": table, "seqlens_k": int32(12, 8)}
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            given[name] = torch.randn_like(tensor.repeat(1, 1, 2, 1) if name.startswith("q") else tensor)
    call = make_request("plan", op, (), given).build()
    seen = allowed_keys(call).any(1).unflatten(1, (3, 4)).any(2)
    hidden = table.masked_fill(~seen, page_id)
    right = perform(op, given)
    with portattn.settings(**settings):
        assert torch.equal(perform(op, given | {"page_table": hidden}), right)
        for sequence, place in seen.nonzero().tolist():
            wrong = table.clone()
            wrong[sequence, place] = page_id
            what = f"page_table[{sequence}, {place}] is {page_id}"
            assert_refused(op, given | {"page_table": wrong}, what, "must be in 0..4, the pages of the cache")


def test_pages_without_a_chosen_token_have_any_id() -> None:
    given = sparse_paged() | {"indices": TOKENS, "counts": torch.full((2, 4), 2).int()}
    hidden = given | {"page_table": int32([0, 1, -1], [3, 4, 77])}
    assert torch.equal(perform("sparse_attention", hidden), perform("sparse_attention", given))


@pytest.mark.parametrize("op", CALLS)
def test_ids_past_a_sequences_length_are_not_looked_at(op: str) -> None:
    garbage = {"page_table": int32([0, 1, 2], [3, 4, -77]), "seqlens_k": int32(12, 8)}
    perform(op, CALLS[op](op) | garbage)
    empty = {"page_table": torch.full((2, 3), 2**31 - 1).int(), "seqlens_k": int32(0, 0)}
    if op == "sparse_attention":
        empty["counts"] = torch.zeros(2, 4, dtype=torch.int32)
    perform(op, CALLS[op](op) | empty)


@pytest.mark.parametrize("op", CALLS)
def test_a_table_of_more_tokens_than_positions_can_be_added_up_is_named(op: str) -> None:
    shapes = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in CALLS[op](op).items()}
    wide = torch.empty(2, 2**27 + 1, dtype=torch.int32, device="meta")
    limit = f"pages of 4 tokens must hold at most {2**29} of a sequence, and these hold {2**29 + 4}"
    assert_refused(op, shapes | {"page_table": wide}, f"page_table.shape is (2, {2**27 + 1})", limit)
    assert portattn.plan(op, **(shapes | {"page_table": wide[:, 1:]})).problem.seq_k == 2**29


@pytest.mark.parametrize("op", PAGED)
def test_lengths_must_be_there(op: str) -> None:
    shape = "must be an int32 torch.Tensor of shape (batch,)"
    assert_refused(op, good(op) | {"seqlens_k": None}, "seqlens_k is None", shape)
    given = good(op)
    del given["seqlens_k"]
    assert_refused(op, given, "seqlens_k is None", shape)


@pytest.mark.parametrize("op", CALLS)
def test_a_page_table_brings_its_own_lengths(op: str) -> None:
    table = PageTable.from_csr(int32(0, 3, 5), int32(0, 1, 2, 3, 4), int32(2, 4))
    with_own = CALLS[op](op) | {"page_table": table, "seqlens_k": None}
    assert torch.equal(perform(op, with_own), perform(op, CALLS[op](op)))
    what = "seqlens_k is (2,)"
    assert_refused(op, with_own | {"seqlens_k": int32(10, 8)}, what, "a PageTable has its own")


@pytest.mark.parametrize("op", CALLS)
def test_what_a_page_table_holds_is_checked_too(op: str) -> None:
    beyond = PageTable.from_csr(int32(0, 3, 5), int32(0, 1, 2, 3, 9), int32(2, 4))
    given = CALLS[op](op) | {"seqlens_k": None}
    assert_refused(op, given | {"page_table": beyond}, "page_table[1, 1] is 9", "must be in 0..4")
    too_full = PageTable.from_csr(int32(0, 3, 5), int32(0, 1, 2, 3, 4), int32(2, 5))  # of a page of 4 tokens
    assert_refused(op, given | {"page_table": too_full}, "page_table.last_page_len[1] is 5", "must be in 1..4")
    fuller = PageTable.from_csr(int32(0, 3, 5), int32(0, 1, 2, 3, 4), int32(5, 4))
    assert_refused(op, given | {"page_table": fuller}, "page_table.last_page_len[0] is 5", "must be in 1..4")
    narrow = PageTable.from_csr(int32(0, 3, 5), int32(0, 1, 2, 3, 4), int32(2, 4), max_pages=2)
    assert_refused(op, given | {"page_table": narrow}, "seqlens_k[0] is 10", "must be in 0..8")
    one = PageTable.from_csr(int32(0, 3), int32(0, 1, 2), int32(2))
    assert_refused(op, given | {"page_table": one}, "page_table.shape is (1, 3)", "must be (batch, pages a sequence)")


BAD_RAGGED: dict[str, tuple[dict[str, Any], str, str]] = {
    "cu_seqlens_q is a tuple": ({"cu_seqlens_q": (0, 2, 3)}, "cu_seqlens_q is 'tuple'", "of shape (batch + 1,)"),
    "cu_seqlens_q is empty": ({"cu_seqlens_q": int32()}, "cu_seqlens_q is (0,)", "of shape (batch + 1,)"),
    "cu_seqlens_q is int64": (
        {"cu_seqlens_q": torch.tensor([0, 2, 3])}, "cu_seqlens_q.dtype is torch.int64", "must be torch.int32",
    ),
    "cu_seqlens_q of another batch": (
        {"cu_seqlens_q": int32(0, 3)}, "page_table.shape is (2, 3)", "must be (batch, pages a sequence), (1, 3)",
    ),
    "not from 0": ({"cu_seqlens_q": int32(1, 2, 3)}, "cu_seqlens_q[0] is 1", "must be 0, the first row"),
    "falling": ({"cu_seqlens_q": int32(0, 2, 1)}, "cu_seqlens_q[2] is 1", "must be at least cu_seqlens_q[1], 2"),
    "beyond the rows": ({"cu_seqlens_q": int32(0, 2, 4)}, "cu_seqlens_q[2] is 4", "must be at most the packed rows, 3"),
    "far beyond the rows": (
        {"cu_seqlens_q": int32(0, 20, 40)}, "cu_seqlens_q[1] is 20", "must be at most the packed rows, 3",
    ),
    "far beyond the rows, and yet as long as may be": (
        {"cu_seqlens_q": int32(0, 20, 40), "max_seqlen_q": 20}, "cu_seqlens_q[1] is 20", "the packed rows, 3",
    ),
    "longer than max_seqlen_q": (
        {"max_seqlen_q": 1}, "cu_seqlens_q[1] - cu_seqlens_q[0] is 2", "must be at most max_seqlen_q, 1",
    ),
    "max_seqlen_q is negative": ({"max_seqlen_q": -1}, "max_seqlen_q is -1", "must be an integer in 0..2147483647"),
    "max_seqlen_q is a float": ({"max_seqlen_q": 2.0}, "max_seqlen_q is 2.0", "must be an integer in 0..2147483647"),
    "bias": ({"bias": torch.zeros(1, 1)}, "bias is (1, 1)", "packed queries take none"),
    "bias that is no tensor": ({"bias": 1.0}, "bias is 'float'", "packed queries take none"),
    "mask": ({"mask": torch.ones(3).bool()}, "mask is (3,)", "packed queries take none"),
    "mask that is no tensor": ({"mask": [True]}, "mask is 'list'", "packed queries take none"),
}  # fmt: skip


@pytest.mark.parametrize("op", PAGED)
@pytest.mark.parametrize("bad", BAD_RAGGED.values(), ids=BAD_RAGGED)
def test_bad_packed_queries_are_named(op: str, bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused(op, ragged(op) | changes, what, limit)


@pytest.mark.parametrize("op", PAGED)
def test_packed_queries_are_of_rank_3_and_others_of_rank_4(op: str) -> None:
    name = "q" if op == "paged_attention" else "q_nope"
    packed = good(op) | {"cu_seqlens_q": int32(0, 2, 3)}
    assert_refused(op, packed, f"{name}.ndim is 4", "must be 3: (tokens, heads, head_dim)")
    padded = ragged(op) | {"cu_seqlens_q": None}
    assert_refused(op, padded, f"{name}.ndim is 3", "must be 4: (batch, heads, seq, head_dim)")


@pytest.mark.parametrize("op", PAGED)
def test_max_seqlen_q_goes_with_packed_queries(op: str) -> None:
    assert_refused(op, good(op) | {"max_seqlen_q": 1}, "max_seqlen_q is 1", "goes with cu_seqlens_q")
    for most in (None, 2, 3, 2**31 - 1):
        out = perform(op, ragged(op), max_seqlen_q=most)
        assert out.shape == (3, 4, 16)
        made = portattn.plan(op, **ragged(op), max_seqlen_q=most).problem
        assert (made.seq_q, made.total_q) == (3 if most is None else min(most, 3), 3)
