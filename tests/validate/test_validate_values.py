"""When lengths, page ids, indices and counts are read back, and when they are not; the cures that errors name."""

import itertools
import types
from typing import Any

import numpy as np
import pytest
import torch
from good_calls import OPS, assert_refused, good, int32, perform, ragged, sparse_paged
from torch import zeros

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


I32, I64 = torch.int32, torch.int64
ONES = torch.ones(2, 7, dtype=I64)
HPD = {"k_pages": zeros(5, 2, 16, 16), "v_pages": zeros(5, 2, 16, 16)}  # (pages, heads, page_size, D)
FUSED = zeros(5, 2, 4, 2, 16)
BSHD = {name: tensor.transpose(1, 2) for name, tensor in good("attention").items()}
# Mistakes of callers who know other libraries: the operation, the arguments that are changed, the error's beginning,
# the cure in it, and the arguments after that cure, with which the call runs (None: the error only names a limit).
CURES: dict[str, list[tuple[dict[str, Any], str, str, dict[str, Any] | None]]] = {
    "attention": [
        # torch's SDPA
        ({"mask": zeros(5, 7)}, "mask.dtype is torch.float32", "bias=", {"bias": zeros(5, 7)}),
        ({"bias": torch.ones(5, 7).bool()}, "bias.dtype is torch.bool", "mask=", {"mask": torch.ones(5, 7).bool()}),
        ({"mask": torch.ones(5, 7, dtype=I64)}, "mask.dtype is torch.int64", "mask.bool()",
         {"mask": torch.ones(5, 7).bool()}),
        ({"bias": torch.ones(5, 7, dtype=I64)}, "bias.dtype is torch.int64", "bias.float()",
         {"bias": torch.ones(5, 7)}),
        ({"mask": ONES.bool()}, "mask.shape is (2, 7)", "mask[:, None, None]", {"mask": ONES.bool()[:, None, None]}),
        ({"mask": torch.ones(2, 5, 7).bool()}, "mask.shape is (2, 5, 7)", "mask[:, None]",
         {"mask": torch.ones(2, 1, 5, 7).bool()}),
        ({"mask": torch.ones(7, 5).bool()}, "mask.shape is (7, 5)", "(2, 4, 5, 7)", None),
        ({"bias": zeros(5, 7).half()}, "bias.dtype is torch.float16", "must be torch.float32", {"bias": zeros(5, 7)}),
        ({"causal": "lower_right"}, "causal is 'lower_right'", "'bottom_right')", {"causal": "bottom_right"}),
        ({"causal": "CAUSAL_UPPER_LEFT"}, "causal is 'CAUSAL_UPPER_LEFT'", "(hint: 'top_left')",
         {"causal": "top_left"}),
        ({"causal": None}, "causal is None", "False", {"causal": False}),
        ({"dropout_p": None}, "dropout_p is None", "0.0 drops nothing", {"dropout_p": 0.0}),
        ({"q": zeros(2, 4, 5, 16).double()}, "q.dtype is torch.float64", "float()", {"q": zeros(2, 4, 5, 16)}),
        ({"q": zeros(5, 16)}, "q.ndim is 2", "q[None, None]", {"q": zeros(2, 4, 5, 16)}),
        ({"q": zeros(4, 5, 16)}, "q.ndim is 3", "q[None]", {"q": zeros(2, 4, 5, 16)}),
        ({"k": np.zeros((2, 2, 7, 16), np.float32)}, "k is 'ndarray'", "torch.from_numpy(k)",
         {"k": zeros(2, 2, 7, 16)}),
        ({"q": [[1.0]]}, "q is 'list'", "torch.tensor(q)", None),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, "scale.requires_grad is True", "multiply q", {"scale": 1.0}),
        ({"scale": torch.ones(4)}, "scale is tensor(", "must be one finite number", None),
        # flash_attn
        ({"q": zeros(2, 5, 4, 16), "k": zeros(2, 7, 2, 16), "v": zeros(2, 7, 2, 16)}, "heads_q is 5",
         "give layout='bshd'", BSHD | {"layout": "bshd"}),
        ({"q": zeros(2, 5, 4, 16)}, "heads_q is 5", "q.transpose(1, 2)", {"q": zeros(2, 4, 5, 16)}),
        (BSHD | {"layout": "BSHD"}, "layout is 'BSHD'", "layout='bshd'", BSHD | {"layout": "bshd"}),
        ({"window": 4}, "window is 4", "(W - 1, 0)", {"window": (3, 0)}),
        ({"window": (4,)}, "window is (4,)", "(W - 1, 0)", {"window": (3, 0)}),
        ({"window": [4, 0]}, "window is [4, 0]", "tuple(window)", {"window": (4, 0)}),
        ({"window": torch.tensor([4.0, 0.0])}, "window is tensor(", "tuple(int(x) for x in window)",
         {"window": (4, 0)}),
        ({"window": (-5, 0)}, "window's left is -5", "None or -1 for no limit", {"window": (-1, 0)}),
        ({"window": (4.0, 0)}, "window's left is 4.0", "an integer", {"window": (4, 0)}),
        ({"softcap": -1.0}, "softcap is -1.0", "None or 0 for none", {"softcap": 0}),
        ({"alibi_slopes": [0.5] * 4}, "alibi_slopes is 'list'", "torch.tensor(alibi_slopes, device",
         {"alibi_slopes": torch.ones(4)}),
        ({"alibi_slopes": torch.ones(4).half()}, "alibi_slopes.dtype is torch.float16", "torch.float32",
         {"alibi_slopes": torch.ones(4)}),
        ({"dropout_p": 0.1, "dropout_seed": 7}, "dropout_seed is 'int'",
         "torch.tensor([dropout_seed], dtype=torch.int64", {"dropout_p": 0.1, "dropout_seed": torch.tensor([7])}),
        # vLLM, FlashInfer, SGLang
        ({"seqlens_k": torch.tensor([7, 3])}, "seqlens_k.dtype is torch.int64", "seqlens_k.int()",
         {"seqlens_k": int32(7, 3)}),
        ({"seqlens_k": [7, 3]}, "seqlens_k is 'list'", "torch.tensor(seqlens_k, dtype=torch.int32",
         {"seqlens_k": int32(7, 3)}),
        ({"seqlens_k": int32(0, 7, 10)}, "seqlens_k.shape is (3,)", "seqlens_k.diff()",
         {"seqlens_k": int32(0, 7, 10).diff()}),
        # FlexAttention
        ({"mask": lambda b, h, i, j: i >= j}, "mask is 'function'", "block_mask=create_block_mask", None),
        ({"block_mask": lambda b, h, i, j: i >= j}, "block_mask is 'function'", "create_block_mask(block_mask", None),
        ({"backend": torch.nn.attention.SDPBackend.MATH}, "backend is <SDPBackend", "the name of a path",
         {"backend": "reference"}),
    ],
    "decode_attention": [
        ({"q": zeros(2, 1, 4, 16), "k_cache": zeros(2, 7, 2, 16), "v_cache": zeros(2, 7, 2, 16)}, "heads_q is 1",
         "give layout='bshd'",
         {"q": zeros(2, 1, 4, 16), "k_cache": zeros(2, 7, 2, 16), "v_cache": zeros(2, 7, 2, 16), "layout": "bshd"}),
    ],
    "varlen_attention": [
        ({"cu_seqlens_q": torch.tensor([0, 4, 9])}, "cu_seqlens_q.dtype is torch.int64", "cu_seqlens_q.int()",
         {"cu_seqlens_q": int32(0, 4, 9)}),
        ({"cu_seqlens_q": [0, 4, 9]}, "cu_seqlens_q is 'list'", "torch.tensor(cu_seqlens_q, dtype=torch.int32",
         {"cu_seqlens_q": int32(0, 4, 9)}),
        ({"cu_seqlens_q": int32(4, 5, 9)}, "cu_seqlens_q[0] is 4", "must be 0", {"cu_seqlens_q": int32(0, 4, 9)}),
        ({"max_seqlen_q": torch.tensor(5)}, "max_seqlen_q is tensor(5)", "int(max_seqlen_q)", {"max_seqlen_q": 5}),
        ({"q": zeros(2, 4, 5, 16)}, "q.ndim is 4", "are attention's", None),
    ],
    "paged_attention": [
        ({"page_layout": "NHD"}, "page_layout is 'NHD'", "page_layout='phd'", {"page_layout": "phd"}),
        (HPD | {"page_layout": "HND"}, "page_layout is 'HND'", "page_layout='hpd'", HPD | {"page_layout": "hpd"}),
        (HPD, "heads_q is 4", "give page_layout='hpd'", HPD | {"page_layout": "hpd"}),
        ({"v_pages": FUSED}, "v_pages.ndim is 5", "v_pages[:, 1]", {"v_pages": FUSED[:, 1]}),
        ({"k_pages": zeros(20, 2, 16), "v_pages": zeros(20, 1, 2, 16)}, "k_pages.ndim is 3", "k_pages[:, None]",
         {"k_pages": zeros(20, 1, 2, 16), "v_pages": zeros(20, 1, 2, 16), "seqlens_k": int32(3, 1)}),
        ({"page_table": zeros(2, 3, dtype=I64)}, "page_table.dtype is torch.int64", "page_table.int()",
         {"page_table": zeros(2, 3, dtype=I32)}),
        ({"page_table": [[0, 1, 2], [3, 4, 0]]}, "page_table is 'list'", "torch.tensor(page_table, dtype=torch.int32",
         {"page_table": zeros(2, 3, dtype=I32)}),
        ({"page_table": zeros(6, dtype=I32)}, "page_table is (6,)", "PageTable.from_csr", None),
        ({"q": zeros(2, 4, 16)}, "q.ndim is 3", "cu_seqlens_q", None),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "mistake"),
    [(op, row) for op, rows in CURES.items() for row in rows],
    ids=lambda at: at if isinstance(at, str) else at[1],
)
def test_an_error_names_argument_value_and_the_right_cure(op: str, mistake: tuple[Any, ...]) -> None:
    changes, said, cure, cured = mistake
    assert_refused(op, good(op) | changes, said, cure)
    if cured is not None:
        perform(op, good(op) | cured)


def test_a_number_in_a_tensor_breaks_a_graph_and_counts() -> None:
    q = torch.randn(1, 2, 5, 16)
    compiled = torch.compile(lambda q, scale: portattn.attention(q, q, q, scale=scale), backend="eager")
    torch.testing.assert_close(compiled(q, torch.tensor(0.1)), portattn.attention(q, q, q, scale=0.1))


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
