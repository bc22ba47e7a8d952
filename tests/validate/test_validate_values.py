"""When lengths, page ids, indices and counts are read back, and that nothing is raised where they are not."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
from good_calls import OPS, good, int32, perform, ragged, sparse_paged

import portattn
from portattn.config import Settings
from portattn.validate import values

# Calls whose shapes are right, and whose values are not.
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", good("attention") | {"seqlens_q": int32(70, -2), "leftpad_k": int32(-4, 99)}),
    "varlen": ("varlen_attention", good("varlen_attention") | {"cu_seqlens_k": int32(3, 99, -5)}),
    "decode": ("decode_attention", good("decode_attention") | {"seqlens_k": int32(-1, 8)}),
    "lengths of pages": ("paged_attention", good("paged_attention") | {"seqlens_k": int32(2**31 - 1, -(2**31))}),
    "ids of pages": ("paged_attention", good("paged_attention") | {"page_table": int32([-1, 99, 5], [3, 4, 0])}),
    "ragged": ("paged_attention", ragged("paged_attention") | {"cu_seqlens_q": int32(0, 9, 2)}),
    "latent": ("mla_attention", good("mla_attention") | {"page_table": int32([0, 1, 99], [3, 4, 0])}),
    "ragged latent": ("mla_attention", ragged("mla_attention") | {"cu_seqlens_q": int32(2, 2, 3)}),
    "indices": ("sparse_attention", good("sparse_attention") | {"indices": torch.full((2, 4, 3), 2**31 - 1).int()}),
    "counts": ("sparse_attention", good("sparse_attention") | {"counts": torch.full((2, 4), -9).int()}),
    "sparse ids": ("sparse_attention", sparse_paged() | {"page_table": int32([99, 1, 2], [3, 4, 0])}),
    "K and L": ("sparse_attention", good("sparse_attention") | {"magicpig": (int32(0, -1, 5, 5), int32(0, 1, 5, 5))}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_call_says_whether_values_are_read(wrong: tuple[str, dict[str, Any]]) -> None:
    """On a CPU they are unless forbidden; a call's own word outweighs the setting, either way."""
    op, given = wrong
    with pytest.raises(portattn.ArgumentError):
        perform(op, given)
    perform(op, given, validate=False)
    for setting in ("auto", "always"):
        with portattn.settings(validate=setting):
            with pytest.raises(portattn.ArgumentError):
                perform(op, given)
            perform(op, given, validate=False)
    with portattn.settings(validate="never"):
        perform(op, given)
        with pytest.raises(portattn.ArgumentError):
            perform(op, given, validate=True)


@pytest.mark.parametrize("op", OPS)
def test_what_is_right_is_right_however_it_is_validated(op: str) -> None:
    expected = perform(op, good(op))
    for validate in (True, False):
        assert torch.equal(perform(op, good(op), validate=validate), expected)


@pytest.mark.parametrize(
    ("validate", "device", "expected"),
    [
        ("auto", "cpu", True), ("auto", "cuda", False), ("auto", "meta", False),
        ("always", "cpu", True), ("always", "cuda", True), ("always", "meta", False),
        ("never", "cpu", False), ("never", "cuda", False), ("never", "meta", False),
    ],
)  # fmt: skip
def test_where_values_are_read(validate: Any, device: str, expected: bool) -> None:
    like = types.SimpleNamespace(device=torch.device(device), is_meta=device == "meta")
    assert values.reads(Settings(validate=validate), like) is expected


def test_lengths_at_their_limits_are_right() -> None:
    perform("attention", good("attention"), seqlens_q=int32(0, 5), seqlens_k=int32(7, 0), leftpad_q=int32(5, 0),
            leftpad_k=int32(0, 7))  # fmt: skip
    perform("varlen_attention", good("varlen_attention") | {"cu_seqlens_q": int32(0, 5, 5)})
    perform("varlen_attention", good("varlen_attention") | {"cu_seqlens_q": int32(0, 0, 0)})
    perform("paged_attention", good("paged_attention") | {"seqlens_k": int32(12, 0)})
    perform("sparse_attention", sparse_paged() | {"indices": torch.full((2, 4, 3), 7).int()})


def test_sizes_at_their_limits_are_right() -> None:
    """One token a page, latent rows of one column and one of positions, no sequence, and the widest heads."""
    pages = {"k_pages": torch.zeros(5, 1, 2, 16), "v_pages": torch.zeros(5, 1, 2, 1), "seqlens_k": int32(3, 0)}
    assert perform("paged_attention", good("paged_attention") | pages).shape == (2, 4, 1, 1)
    latent = {
        "q_nope": torch.zeros(2, 4, 1, 1), "q_rope": torch.zeros(2, 4, 1, 1), "kv_pages": torch.zeros(5, 1, 2),
        "seqlens_k": int32(0, 3),
    }  # fmt: skip
    assert perform("mla_attention", good("mla_attention") | latent).shape == (2, 4, 1, 1)
    none = {"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0), "max_seqlen_q": 0, "max_seqlen_k": 0}
    assert not perform("varlen_attention", good("varlen_attention") | none).any()
    wide = {"q": torch.zeros(2, 4, 5, 576), "k": torch.zeros(2, 2, 7, 576), "v": torch.zeros(2, 2, 7, 576)}
    assert perform("attention", wide).shape == (2, 4, 5, 576)


@pytest.mark.parametrize("chunk", [0, 1, 4, 5, 50])
@pytest.mark.parametrize(
    ("causal", "left", "right"),
    [("none", -1, -1), ("none", 2, 1), ("top_left", -1, -1), ("bottom_right", -1, -1), ("bottom_right", 3, -1)],
)
def test_the_keys_that_some_query_sees(causal: str, left: int, right: int, chunk: int) -> None:
    """By definition: a query at a position sees the keys of its window, of its chunk, and not after it if causal."""
    problem = {"causal": causal, "window_left": left, "window_right": right, "chunk": chunk}
    for rows, size in itertools.product((0, 1, 3, 7), (0, 1, 6, 13, 20)):
        seen = set()
        for at in range(rows) if causal == "top_left" else range(size - rows, size):
            for key in range(size):
                inside = (left < 0 or key >= at - left) and (right < 0 or key <= at + right)
                if inside and (causal == "none" or key <= at) and (not chunk or key // chunk == at // chunk):
                    seen.add(key)
        ((first, end),) = values.seen_keys(problem, [rows], [size])
        assert set(range(first, end)) == seen
