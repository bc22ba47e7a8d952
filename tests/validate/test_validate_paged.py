"""Bad arguments of the ops over pages: paged_attention, and what mla_attention and sparse_attention share with it."""

from typing import Any

import pytest
import torch
from good_calls import PAGED, assert_refused, counts, good, indices, int32, perform, ragged, sparse_paged
from torch import zeros

import portattn
from portattn import PageTable
from portattn.api.ops import make_request
from portattn.testing.oracle import allowed_keys

TABLE = "must be an int32 torch.Tensor of shape (batch, pages a sequence), or a PageTable"


# What all three say of their table.
BAD_TABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"page_table": int32(0, 1)}, "page_table is (2,)", TABLE),
    ({"page_table": int32([0, 1, 2])}, "page_table.shape is (1, 3)", "must be (batch, pages a sequence), (2, 3)"),
    ({"seqlens_k": int32(1, 2, 3)}, "seqlens_k.shape is (3,)", "must be (batch,), (2,)"),
    ({"seqlens_k": int32(12, 13)}, "seqlens_k[1] is 13", "must be in 0..12"),
    ({"seqlens_k": int32(-1, 13)}, "seqlens_k[0] is -1", "must be in 0..12"),
    ({"page_table": int32([0, 1, 5], [9, 4, 0])}, "page_table[0, 2] is 5", "must be in 0..4, the pages of the cache"),
    ({"page_table": int32([0, 1, 2], [3, -1, 0])}, "page_table[1, 1] is -1", "must be in 0..4"),
    ({"page_table": int32([0, 7, 8], [9, 9, 9])}, "page_table[0, 1] is 7", "must be in 0..4"),
    ({"page_table": int32([0, 1, 2], [3, 4, 77]), "seqlens_k": int32(12, 9)}, "page_table[1, 2] is 77", "in 0..4"),
]  # fmt: skip
# Of sparse_attention the tokens are on all pages of their sequence.
TOKENS = int32([0, 4, 9], [0, 4, 7])[:, None].expand(2, 4, 3)
CALLS = {
    "paged_attention": good, "mla_attention": good,
    "sparse_attention": lambda op: sparse_paged() | {"indices": TOKENS, "counts": torch.full((2, 4), 3).int()},
}  # fmt: skip


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("bad", BAD_TABLE, ids=lambda bad: bad[1])
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
def test_pages_that_no_query_sees_have_any_id(op, window, causal, page_id, settings):
    """One more page is an error: seen is what the oracle's mask shows of it."""
    table = int32([0, 1, 2], [3, 4, 0])
    given = good(op) | {"window": window, "causal": causal, "page_table": table, "seqlens_k": int32(12, 8)}
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            given[name] = torch.randn_like(tensor.repeat(1, 1, 2, 1) if name.startswith("q") else tensor)
    seen = allowed_keys(make_request("plan", op, (), given).build()).any(1).unflatten(1, (3, 4)).any(2)
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


BAD_RAGGED: list[tuple[dict[str, Any], str, str]] = [
    ({"cu_seqlens_q": int32(0, 3)}, "page_table.shape is (2, 3)", "must be (batch, pages a sequence), (1, 3)"),
    ({"cu_seqlens_q": int32(1, 2, 3)}, "cu_seqlens_q[0] is 1", "must be 0, the first row"),
    ({"cu_seqlens_q": int32(0, 2, 1)}, "cu_seqlens_q[2] is 1", "must be at least cu_seqlens_q[1], 2"),
    ({"cu_seqlens_q": int32(0, 2, 4)}, "cu_seqlens_q[2] is 4", "must be at most the packed rows, 3"),
    ({"cu_seqlens_q": int32(0, 20, 40)}, "cu_seqlens_q[1] is 20", "must be at most the packed rows, 3"),
    ({"cu_seqlens_q": int32(0, 20, 40), "max_seqlen_q": 20}, "cu_seqlens_q[1] is 20", "the packed rows, 3"),
    ({"max_seqlen_q": 1}, "cu_seqlens_q[1] - cu_seqlens_q[0] is 2", "must be at most max_seqlen_q, 1"),
    ({"max_seqlen_q": -1}, "max_seqlen_q is -1", "must be an integer in 0..2147483647"),
    ({"max_seqlen_q": 2.0}, "max_seqlen_q is 2.0", "must be an integer in 0..2147483647"),
    ({"bias": zeros(1, 1)}, "bias is (1, 1)", "packed queries take none"),
    ({"bias": 1.0}, "bias is 'float'", "packed queries take none"),
    ({"mask": torch.ones(3).bool()}, "mask is (3,)", "packed queries take none"),
    ({"mask": [True]}, "mask is 'list'", "packed queries take none"),
]  # fmt: skip


@pytest.mark.parametrize("op", PAGED)
@pytest.mark.parametrize("bad", BAD_RAGGED, ids=lambda bad: bad[1])
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
        assert perform(op, ragged(op), max_seqlen_q=most).shape == (3, 4, 16)
        made = portattn.plan(op, **ragged(op), max_seqlen_q=most).problem
        assert (made.seq_q, made.total_q) == (3 if most is None else min(most, 3), 3)


def test_packed_parts_must_go_together() -> None:
    for shape, what, limit in (
        ((2, 4, 8), "q_rope's tokens is 2", "must be q_nope's, 3"),
        ((3, 2, 8), "q_rope's heads is 2", "must be q_nope's, 4"),
    ):
        assert_refused("mla_attention", ragged("mla_attention") | {"q_rope": torch.zeros(shape)}, what, limit)


def test_scale_has_no_default() -> None:
    given = good("mla_attention")
    del given["scale"]
    with pytest.raises(TypeError, match="scale"):
        perform("mla_attention", given)


def test_parts_of_one_tensor_of_queries_are_taken_as_they_are() -> None:
    """q_nope and q_rope are usually two slices of one projection."""
    both = torch.randn(2, 4, 1, 24)
    pages = torch.randn(5, 4, 24)
    given = good("mla_attention") | {"kv_pages": pages}
    sliced = perform("mla_attention", given, q_nope=both[..., :16], q_rope=both[..., 16:])
    own = perform("mla_attention", given, q_nope=both[..., :16].clone(), q_rope=both[..., 16:].clone())
    assert torch.equal(sliced, own)


def test_what_does_not_count_can_be_anything() -> None:
    """Negative tokens are padding, places behind `counts` hold anything, and so does a head without any."""
    beyond = torch.full((2, 4, 3), 10**6, dtype=torch.int32)
    beyond[..., 0] = -(2**31)
    beyond[..., 1] = 6
    for given, capacity in ((good("sparse_attention"), 7), (sparse_paged(), 8)):
        perform("sparse_attention", given | {"indices": beyond.clamp(max=capacity - 1), "counts": counts(3)})
        perform("sparse_attention", given | {"indices": beyond, "counts": torch.full((2, 4), 2).int()})
        out, lse = perform(
            "sparse_attention", given | {"indices": beyond, "counts": torch.zeros(2, 4).int()}, return_lse=True
        )
        assert not out.any()
        assert torch.isneginf(lse).all()


def test_a_cache_without_pages_has_no_token() -> None:
    """Whatever a full table says: there is nothing that it could lead to."""
    none = {"k_cache": torch.zeros(0, 4, 2, 16), "v_cache": torch.zeros(0, 4, 2, 16), "seqlens_k": None}
    given = sparse_paged() | none | {"indices": torch.full((2, 4, 3), -1).int()}
    assert not perform("sparse_attention", given).any()
    assert portattn.plan("sparse_attention", **given).problem.seq_k == 0
    assert_refused(
        "sparse_attention", given | {"indices": indices(0, 0, 0)}, "indices[0, 0, 0] is 0", "must be below 0"
    )


def test_every_length_there_is_when_none_is_given() -> None:
    assert portattn.plan("sparse_attention", **good("sparse_attention")).problem.seq_k == 7
    made = portattn.plan("sparse_attention", **(sparse_paged() | {"seqlens_k": None})).problem
    assert (made.seq_k, made.page_size, made.seqlens_k) == (12, 4, False)


def test_fewest_bits_and_tables_are_right() -> None:
    one, two = torch.ones(4).int(), torch.full((4,), 2).int()
    for magicpig in ((1, 2), (one, two), (2**15 - 1, 2**15 - 1)):
        assert torch.isfinite(perform("sparse_attention", good("sparse_attention"), magicpig=magicpig)).all()


def test_integers_and_tensors_say_the_same() -> None:
    torch.manual_seed(0)
    given = good("sparse_attention") |{
        "q": torch.randn(2, 4, 1, 16), "k_cache": torch.randn(2, 2, 7, 16), "v_cache": torch.randn(2, 2, 7, 16),
    }  # fmt: skip
    expected = perform("sparse_attention", given, magicpig=(4, 30))
    assert not torch.equal(expected, perform("sparse_attention", given))
    four, thirty = torch.full((4,), 4).int(), torch.full((4,), 30).int()
    for magicpig in ((four, 30), (4, thirty), [four, thirty]):
        assert torch.equal(perform("sparse_attention", given, magicpig=magicpig), expected)
