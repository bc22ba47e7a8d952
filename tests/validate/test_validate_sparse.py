"""Bad arguments of sparse_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from good_calls import assert_refused, good, int32, perform, sparse_paged

import portattn

OP = "sparse_attention"
CACHE = (2, 2, 7, 16)
INTEGER_K, INTEGER_L = (
    "must be an integer in 1..32767, or (Hq,) int32",
    "must be an integer in 2..32767, or (Hq,) int32",
)


def indices(*first: int) -> torch.Tensor:
    """(2, 4, 3): these for the second sequence's third head, 0 elsewhere."""
    made = torch.zeros(2, 4, 3, dtype=torch.int32)
    made[1, 2] = torch.tensor(first, dtype=torch.int32)
    return made


def counts(value: int) -> torch.Tensor:
    made = torch.full((2, 4), 3, dtype=torch.int32)
    made[1, 2] = value
    return made


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "q is no tensor": ({"q": "q"}, "q is 'str'", "must be a torch.Tensor"),
    "two queries": ({"q": torch.zeros(2, 4, 2, 16)}, "q's seq is 2", "must be 1: tokens are chosen for one query"),
    "no query": ({"q": torch.zeros(2, 4, 0, 16)}, "q's seq is 0", "must be 1: tokens are chosen for one query"),
    "q has rank 3": ({"q": torch.zeros(2, 4, 16)}, "q.ndim is 3", "must be 4: (batch, heads, seq, head_dim)"),
    "k_cache has rank 3": ({"k_cache": torch.zeros(2, 7, 16)}, "k_cache.ndim is 3", "must be 4: (batch, heads, seq"),
    "v_cache has rank 3 in bshd": (
        {"q": torch.zeros(2, 1, 4, 16), "v_cache": torch.zeros(2, 7, 16), "layout": "bshd"}, "v_cache.ndim is 3",
        "must be 4: (batch, seq, heads, head_dim)",
    ),
    "k_cache has another dtype": ({"k_cache": torch.zeros(CACHE).half()}, "k_cache.dtype is torch.float16", "q's"),
    "v_cache has another dtype": ({"v_cache": torch.zeros(CACHE).half()}, "v_cache.dtype is torch.float16", "q's"),
    "k_cache elsewhere": ({"k_cache": torch.zeros(CACHE, device="meta")}, "k_cache.device is 'meta'", "q's, cpu"),
    "v_cache elsewhere": ({"v_cache": torch.zeros(CACHE, device="meta")}, "v_cache.device is 'meta'", "q's, cpu"),
    "caches of other batches": ({"v_cache": torch.zeros(1, 2, 7, 16)}, "v_cache's batch is 1", "must be k_cache's, 2"),
    "caches of other heads": ({"v_cache": torch.zeros(2, 1, 7, 16)}, "v_cache's heads is 1", "must be k_cache's, 2"),
    "caches of other lengths": ({"v_cache": torch.zeros(2, 2, 6, 16)}, "v_cache's seq is 6", "must be k_cache's, 7"),
    "head_dim differs": ({"k_cache": torch.zeros(2, 2, 7, 8)}, "k_cache's head_dim is 8", "must be q's, 16"),
    "head_dim too wide": (
        {"q": torch.zeros(2, 4, 1, 577), "k_cache": torch.zeros(2, 2, 7, 577)}, "q's head_dim is 577", "1..576",
    ),
    "head_dim_v 0": ({"v_cache": torch.zeros(2, 2, 7, 0)}, "v_cache's head_dim is 0", "must be in 1..576"),
    "heads do not divide": (
        {"q": torch.zeros(2, 3, 1, 16), "indices": torch.zeros(2, 3, 3).int(), "counts": torch.zeros(2, 3).int()},
        "heads_q is 3", "must be a multiple of the 2",
    ),
    "caches of another batch": (
        {"k_cache": torch.zeros(3, 2, 7, 16), "v_cache": torch.zeros(3, 2, 7, 16)}, "k_cache's batch is 3", "q's, 2",
    ),
    "seqlens_k is a number": ({"seqlens_k": 7}, "seqlens_k is 'int'", "an int32 torch.Tensor of shape (batch,)"),
    "seqlens_k of another batch": ({"seqlens_k": int32(7)}, "seqlens_k.shape is (1,)", "must be (batch,), (2,)"),
    "seqlens_k too long": ({"seqlens_k": int32(8, 7)}, "seqlens_k[0] is 8", "must be in 0..7, the rows there are"),
    "indices are a list": ({"indices": [[[0]]]}, "indices is 'list'", "of shape (batch, heads_q, places)"),
    "indices of rank 2": ({"indices": torch.zeros(2, 4).int()}, "indices.ndim is 2", "3: (batch, heads_q, places)"),
    "indices are int64": ({"indices": indices(0, 0, 0).long()}, "indices.dtype is torch.int64", "must be torch.int32"),
    "indices of key heads": (
        {"indices": torch.zeros(2, 2, 3).int()}, "indices.shape is (2, 2, 3)", "must be (batch, heads_q, places)",
    ),
    "indices of another batch": (
        {"indices": torch.zeros(1, 4, 3).int()}, "indices.shape is (1, 4, 3)", "places), (2, 4, 3)",
    ),
    "indices elsewhere": ({"indices": indices(0, 0, 0).to("meta")}, "indices.device is 'meta'", "must be q's, cpu"),
    "indices not contiguous": (
        {"indices": torch.zeros(2, 4, 6).int()[..., ::2]}, "indices.stride(-1) is 2", "its last axis is contiguous",
    ),
    "counts are None": ({"counts": None}, "counts is 'NoneType'", "torch.Tensor of shape (batch, heads_q)"),
    "counts are int64": ({"counts": counts(0).long()}, "counts.dtype is torch.int64", "must be torch.int32"),
    "counts of key heads": ({"counts": int32([3, 3], [3, 3])}, "counts.shape is (2, 2)", "(batch, heads_q), (2, 4)"),
    "counts of rank 3": ({"counts": counts(3)[..., None]}, "counts.shape is (2, 4, 1)", "(batch, heads_q), (2, 4)"),
    "counts elsewhere": ({"counts": counts(3).to("meta")}, "counts.device is 'meta'", "must be q's, cpu"),
    "counts not contiguous": (
        {"counts": torch.zeros(4, 2).int().T}, "counts.stride(-1) is 2", "its last axis is contiguous",
    ),
    "negative count": ({"counts": counts(-1)}, "counts[1, 2] is -1", "must be in 0..3, the places there are"),
    "count beyond the places": ({"counts": counts(4)}, "counts[1, 2] is 4", "must be in 0..3, the places there are"),
    "token beyond the cache": (
        {"indices": indices(0, 7, 9)}, "indices[1, 2, 1] is 7", "must be below 7, the sequence's length",
    ),
    "token beyond the sequence": (
        {"indices": indices(0, 0, 4), "seqlens_k": int32(7, 4)}, "indices[1, 2, 2] is 4",
        "must be below 4, the sequence's length (negative ones are passed over)",
    ),
    "token of an empty sequence": ({"seqlens_k": int32(0, 7)}, "indices[0, 0, 0] is 0", "must be below 0"),
    "log_weights are a list": ({"log_weights": [0.0]}, "log_weights is 'list'", "must be a torch.Tensor of torch.fl"),
    "log_weights in half": (
        {"log_weights": torch.zeros(2, 4, 3).half()}, "log_weights is torch.float16", "torch.Tensor of torch.float32",
    ),
    "log_weights of other places": (
        {"log_weights": torch.zeros(2, 4, 2)}, "log_weights.shape is (2, 4, 2)", "must be indices', (2, 4, 3)",
    ),
    "log_weights elsewhere": (
        {"log_weights": torch.zeros(2, 4, 3, device="meta")}, "log_weights.device is 'meta'", "must be q's, cpu",
    ),
    "log_weights not contiguous": (
        {"log_weights": torch.zeros(2, 4, 6)[..., ::2]}, "log_weights.stride(-1) is 2", "its last axis is contiguous",
    ),
    "magicpig is a number": ({"magicpig": 10}, "magicpig is 10", "must be (K, L), bits a hash table and number of"),
    "magicpig of three": ({"magicpig": (1, 2, 3)}, "magicpig is (1, 2, 3)", "must be (K, L)"),
    "magicpig as words": ({"magicpig": "10"}, "magicpig is '10'", "must be (K, L)"),
    "K is 0": ({"magicpig": (0, 20)}, "magicpig's K is 0", INTEGER_K),
    "K is too large": ({"magicpig": (2**15, 20)}, "magicpig's K is 32768", INTEGER_K),
    "K is a float": ({"magicpig": (8.0, 20)}, "magicpig's K is 8.0", INTEGER_K),
    "K is True": ({"magicpig": (True, 20)}, "magicpig's K is True", INTEGER_K),
    "K is None": ({"magicpig": (None, 20)}, "magicpig's K is None", INTEGER_K),
    "L is 1": ({"magicpig": (8, 1)}, "magicpig's L is 1", INTEGER_L),
    "L is too large": ({"magicpig": (8, 2**15)}, "magicpig's L is 32768", INTEGER_L),
    "K of another head": (
        {"magicpig": (int32(8, 8), 20)}, "magicpig's K.shape is (2,)", "must be (heads_q,), (4,)",
    ),
    "L is int64": (
        {"magicpig": (8, torch.full((4,), 20))}, "magicpig's L.dtype is torch.int64", "must be torch.int32",
    ),
    "K elsewhere": (
        {"magicpig": (int32(8, 8, 8, 8).to("meta"), 20)}, "magicpig's K.device is 'meta'", "must be q's, cpu",
    ),
    "L not contiguous": (
        {"magicpig": (8, int32(*[20] * 8)[::2])}, "magicpig's L.stride() is (2,)", "must be contiguous",
    ),
    "a head's K is 0": ({"magicpig": (int32(8, 8, 0, 8), 20)}, "magicpig's K[2] is 0", "must be at least 1"),
    "a head's L is 1": ({"magicpig": (8, int32(20, 1, 20, 0))}, "magicpig's L[1] is 1", "must be at least 2"),
    "magicpig beside bad counts": ({"magicpig": (8, 20), "counts": 3}, "counts is 'int'", "of shape (batch, heads_q)"),
    "unknown page_layout without pages": ({"page_layout": "hp"}, "page_layout is 'hp'", "must be one of phd, hpd"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_errors_name_argument_value_and_limit(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused(OP, good(OP) | changes, what, limit)


BAD_PAGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "k_cache has rank 3": (
        {"k_cache": torch.zeros(5, 4, 16)}, "k_cache.ndim is 3", "must be 4: (pages, page_size, heads, head_dim)",
    ),
    "fewer pages of values": ({"v_cache": torch.zeros(4, 4, 2, 16)}, "v_cache's pages is 4", "must be k_cache's, 5"),
    "pages of nothing": (
        {"k_cache": torch.zeros(5, 0, 2, 16), "v_cache": torch.zeros(5, 0, 2, 16)}, "k_cache's page_size is 0",
        "must be at least 1",
    ),
    "unknown page_layout": ({"page_layout": "bhsd"}, "page_layout is 'bhsd'", "must be one of phd, hpd"),
    "token beyond the sequence": ({"indices": indices(0, 8, 0)}, "indices[1, 2, 1] is 8", "must be below 8"),
    "token beyond the table": (
        {"indices": indices(0, 0, 12), "seqlens_k": None}, "indices[1, 2, 2] is 12", "must be below 12",
    ),
    "an id of a full table": (
        {"seqlens_k": None, "page_table": int32([0, 1, 2], [3, 4, 5]), "indices": indices(0, 8, 0)},
        "page_table[1, 2] is 5", "must be in 0..4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_PAGES.values(), ids=BAD_PAGES)
def test_errors_over_pages(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused(OP, sparse_paged() | changes, what, limit)


def test_what_does_not_count_can_be_anything() -> None:
    """Negative tokens are padding, places behind `counts` hold anything, and so does a head without any."""
    beyond = torch.full((2, 4, 3), 10**6, dtype=torch.int32)
    beyond[..., 0] = -(2**31)
    beyond[..., 1] = 6
    for given, capacity in ((good(OP), 7), (sparse_paged(), 8)):
        perform(OP, given | {"indices": beyond.clamp(max=capacity - 1), "counts": counts(3)})
        perform(OP, given | {"indices": beyond, "counts": torch.full((2, 4), 2).int()})
        out, lse = perform(OP, given | {"indices": beyond, "counts": torch.zeros(2, 4).int()}, return_lse=True)
        assert not out.any()
        assert torch.isneginf(lse).all()


def test_a_cache_without_pages_has_no_token() -> None:
    """Whatever a full table says: there is nothing that it could lead to."""
    none = {"k_cache": torch.zeros(0, 4, 2, 16), "v_cache": torch.zeros(0, 4, 2, 16), "seqlens_k": None}
    given = sparse_paged() | none | {"indices": torch.full((2, 4, 3), -1).int()}
    assert not perform(OP, given).any()
    assert portattn.plan(OP, **given).problem.seq_k == 0
    assert_refused(OP, given | {"indices": indices(0, 0, 0)}, "indices[0, 0, 0] is 0", "must be below 0")


def test_every_length_there_is_when_none_is_given() -> None:
    assert portattn.plan(OP, **good(OP)).problem.seq_k == 7
    made = portattn.plan(OP, **(sparse_paged() | {"seqlens_k": None})).problem
    assert (made.seq_k, made.page_size, made.seqlens_k) == (12, 4, False)


def test_fewest_bits_and_tables_are_right() -> None:
    one, two = torch.ones(4).int(), torch.full((4,), 2).int()
    for magicpig in ((1, 2), (one, two), (2**15 - 1, 2**15 - 1)):
        assert torch.isfinite(perform(OP, good(OP), magicpig=magicpig)).all()


def test_integers_and_tensors_say_the_same() -> None:
    torch.manual_seed(0)
    given = good(OP) | {"q": torch.randn(2, 4, 1, 16), "k_cache": torch.randn(CACHE), "v_cache": torch.randn(CACHE)}
    expected = perform(OP, given, magicpig=(4, 30))
    assert not torch.equal(expected, perform(OP, given))
    four, thirty = torch.full((4,), 4).int(), torch.full((4,), 30).int()
    for magicpig in ((four, 30), (4, thirty), [four, thirty]):
        assert torch.equal(perform(OP, given, magicpig=magicpig), expected)
