"""Bad arguments of mla_attention, beside what it shares with paged_attention (test_validate_paged.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from good_calls import assert_refused, good, perform, ragged

import portattn

OP = "mla_attention"

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "q_nope is no tensor": ({"q_nope": 0}, "q_nope is 'int'", "must be a torch.Tensor"),
    "q_rope is None": ({"q_rope": None}, "q_rope is 'NoneType'", "must be a torch.Tensor"),
    "kv_pages are None": ({"kv_pages": None}, "kv_pages is 'NoneType'", "must be a torch.Tensor"),
    "q_nope has rank 3": (
        {"q_nope": torch.zeros(2, 4, 16)}, "q_nope.ndim is 3", "must be 4: (batch, heads, seq, head_dim)",
    ),
    "q_rope has rank 3 in bshd": (
        {"q_nope": torch.zeros(2, 1, 4, 16), "q_rope": torch.zeros(2, 4, 8), "layout": "bshd"}, "q_rope.ndim is 3",
        "must be 4: (batch, seq, heads, head_dim)",
    ),
    "kv_pages have heads": (
        {"kv_pages": torch.zeros(5, 4, 1, 24)}, "kv_pages.ndim is 4", "must be 3: (pages, page_size, rank + rope)",
    ),
    "q_nope is float64": ({"q_nope": torch.zeros(2, 4, 1, 16).double()}, "q_nope.dtype is torch.float64", "float16"),
    "q_rope has another dtype": (
        {"q_rope": torch.zeros(2, 4, 1, 8).half()}, "q_rope.dtype is torch.float16", "must be q_nope's, torch.float32",
    ),
    "kv_pages have another dtype": (
        {"kv_pages": torch.zeros(5, 4, 24).half()}, "kv_pages.dtype is torch.float16", "must be q_nope's",
    ),
    "q_rope elsewhere": (
        {"q_rope": torch.zeros(2, 4, 1, 8, device="meta")}, "q_rope.device is 'meta'", "must be q_nope's, cpu",
    ),
    "kv_pages elsewhere": (
        {"kv_pages": torch.zeros(5, 4, 24, device="meta")}, "kv_pages.device is 'meta'", "must be q_nope's, cpu",
    ),
    "q_rope of another batch": ({"q_rope": torch.zeros(1, 4, 1, 8)}, "q_rope's batch is 1", "must be q_nope's, 2"),
    "q_rope of other heads": ({"q_rope": torch.zeros(2, 1, 1, 8)}, "q_rope's heads is 1", "must be q_nope's, 4"),
    "q_rope of other rows": ({"q_rope": torch.zeros(2, 4, 2, 8)}, "q_rope's seq is 2", "must be q_nope's, 1"),
    "latent rows too narrow": (
        {"kv_pages": torch.zeros(5, 4, 16)}, "kv_pages's head_dim is 16",
        "must be q_nope's and q_rope's head_dim together, 16 + 8",
    ),
    "latent rows too wide": (
        {"q_nope": torch.zeros(2, 4, 1, 512), "q_rope": torch.zeros(2, 4, 1, 65), "kv_pages": torch.zeros(5, 4, 577)},
        "kv_pages's head_dim is 577", "must be in 1..576",
    ),
    "no rank": (
        {"q_nope": torch.zeros(2, 4, 1, 0), "kv_pages": torch.zeros(5, 4, 8)}, "q_nope's head_dim is 0", "at least 1",
    ),
    "no positions": (
        {"q_rope": torch.zeros(2, 4, 1, 0), "kv_pages": torch.zeros(5, 4, 16)}, "q_rope's head_dim is 0", "at least 1",
    ),
    "pages of nothing": ({"kv_pages": torch.zeros(5, 0, 24)}, "kv_pages's page_size is 0", "must be at least 1"),
    "no heads": (
        {"q_nope": torch.zeros(2, 0, 1, 16), "q_rope": torch.zeros(2, 0, 1, 8)}, "heads_q is 0", "from 1 to",
    ),
    "scale is None": ({"scale": None}, "scale is None", "must be one finite number"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_errors_name_argument_value_and_limit(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused(OP, good(OP) | changes, what, limit)


def test_packed_parts_must_go_together() -> None:
    for shape, what, limit in (
        ((2, 4, 8), "q_rope's tokens is 2", "must be q_nope's, 3"),
        ((3, 2, 8), "q_rope's heads is 2", "must be q_nope's, 4"),
    ):
        assert_refused(OP, ragged(OP) | {"q_rope": torch.zeros(shape)}, what, limit)


def test_scale_has_no_default() -> None:
    given = good(OP)
    del given["scale"]
    with pytest.raises(TypeError, match="scale"):
        perform(OP, given)


def test_the_problem_of_latent_rows() -> None:
    p = portattn.plan(OP, **good(OP)).problem
    assert (p.heads_q, p.heads_k, p.head_dim, p.head_dim_v, p.page_size, p.seq_k) == (4, 1, 24, 16, 4, 12)


def test_parts_of_one_tensor_of_queries_are_taken_as_they_are() -> None:
    """q_nope and q_rope are usually two slices of one projection."""
    both = torch.randn(2, 4, 1, 24)
    pages = torch.randn(5, 4, 24)
    given = good(OP) | {"kv_pages": pages}
    sliced = perform(OP, given, q_nope=both[..., :16], q_rope=both[..., 16:])
    own = perform(OP, given, q_nope=both[..., :16].clone(), q_rope=both[..., 16:].clone())
    assert torch.equal(sliced, own)
