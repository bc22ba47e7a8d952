"""Bad arguments of attention and decode_attention, and the views that their Call holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from good_calls import LAID_OUT, NAN, OPS, assert_refused, good, int32, perform

import portattn
from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.validate import attention_call

Q, K = (2, 4, 5, 16), (2, 2, 7, 16)

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    # changed arguments -> "argument is value", and the limit
    "q is no tensor": ({"q": [1.0]}, "q is 'list'", "must be a torch.Tensor"),
    "v is None": ({"v": None}, "v is 'NoneType'", "must be a torch.Tensor"),
    "q has rank 3": ({"q": torch.zeros(4, 5, 16)}, "q.ndim is 3", "must be 4: (batch, heads, seq, head_dim)"),
    "k has rank 5": ({"k": torch.zeros(1, *K)}, "k.ndim is 5", "must be 4: (batch, heads, seq, head_dim)"),
    "rank 3 in bshd": (
        {"q": torch.zeros(4, 5, 16), "layout": "bshd"}, "q.ndim is 3", "must be 4: (batch, seq, heads, head_dim)",
    ),
    "q is float64": ({"q": torch.zeros(Q).double()}, "q.dtype is torch.float64", "torch.float16, torch.bfloat16"),
    "v is float64": ({"v": torch.zeros(K).double()}, "v.dtype is torch.float64", "torch.float16, torch.bfloat16"),
    "q is an integer": ({"q": torch.zeros(Q).int()}, "q.dtype is torch.int32", "torch.bfloat16, torch.float32"),
    "q is complex": ({"q": torch.zeros(Q, dtype=torch.complex64)}, "q.dtype is torch.complex64", "torch.float32"),
    "q is sparse": ({"q": torch.zeros(Q).to_sparse()}, "q is 'a torch.sparse_coo tensor'", "must be a dense, strided"),
    "k has another dtype": ({"k": torch.zeros(K).half()}, "k.dtype is torch.float16", "must be q's, torch.float32"),
    "v has another dtype": ({"v": torch.zeros(K).half()}, "v.dtype is torch.float16", "must be q's, torch.float32"),
    "k is on another device": ({"k": torch.zeros(K, device="meta")}, "k.device is 'meta'", "must be q's, cpu"),
    "v is on another device": ({"v": torch.zeros(K, device="meta")}, "v.device is 'meta'", "must be q's, cpu"),
    "k's batch differs": ({"k": torch.zeros(3, 2, 7, 16)}, "k's batch is 3", "must be q's, 2"),
    "v's batch differs": ({"v": torch.zeros(1, 2, 7, 16)}, "v's batch is 1", "must be q's, 2"),
    "head_dim differs": ({"k": torch.zeros(2, 2, 7, 8)}, "k's head_dim is 8", "must be q's, 16"),
    "v's heads differ": ({"v": torch.zeros(2, 4, 7, 16)}, "v's heads is 4", "must be k's, 2"),
    "v's length differs": ({"v": torch.zeros(2, 2, 8, 16)}, "v's seq is 8", "must be k's, 7"),
    "heads do not divide": (
        {"q": torch.zeros(2, 3, 5, 16)}, "heads_q is 3", "must be a multiple of the 2 key/value heads",
    ),
    "no query heads": ({"q": torch.zeros(2, 0, 5, 16)}, "heads_q is 0", "must be an integer from 1 to 2147483647"),
    "no key heads": (
        {"k": torch.zeros(2, 0, 7, 16), "v": torch.zeros(2, 0, 7, 16)}, "heads_k is 0", "must be an integer from 1",
    ),
    "head_dim 0": (
        {"q": torch.zeros(2, 4, 5, 0), "k": torch.zeros(2, 2, 7, 0)}, "q's head_dim is 0", "must be in 1..576",
    ),
    "head_dim_v 0": ({"v": torch.zeros(2, 2, 7, 0)}, "v's head_dim is 0", "must be in 1..576"),
    "head_dim too wide": (
        {"q": torch.zeros(2, 4, 5, 577), "k": torch.zeros(2, 2, 7, 577)}, "q's head_dim is 577", "must be in 1..576",
    ),
    "head_dim_v too wide": ({"v": torch.zeros(2, 2, 7, 577)}, "v's head_dim is 577", "must be in 1..576"),
    "causal is a mask": ({"causal": torch.ones(5, 7)}, "causal is tensor(", "must be True (bottom_right)"),
    "causal is an array": ({"causal": np.ones((5, 7))}, "causal is array(", "must be True (bottom_right)"),
    "scale is a tensor with axes": ({"scale": torch.tensor([0.5])}, "scale is tensor([0.5", "(hint: scale.item())"),
    "dropout_p is 1": ({"dropout_p": 1.0}, "dropout_p is 1.0", "must be in [0, 1)"),
    "dropout_p is negative": ({"dropout_p": -0.1}, "dropout_p is -0.1", "must be in [0, 1)"),
    "dropout_p is NaN": ({"dropout_p": NAN}, "dropout_p is nan", "must be one finite number"),
    "seqlens_k is a list": ({"seqlens_k": [7, 7]}, "seqlens_k is 'list'", "an int32 torch.Tensor of shape (batch,)"),
    "seqlens_k is int64": ({"seqlens_k": torch.tensor([7, 7])}, "seqlens_k.dtype is torch.int64", "torch.int32"),
    "seqlens_q of another batch": ({"seqlens_q": int32(5)}, "seqlens_q.shape is (1,)", "must be (batch,), (2,)"),
    "leftpad_k of rank 2": ({"leftpad_k": int32([1, 1])}, "leftpad_k.shape is (1, 2)", "must be (batch,), (2,)"),
    "seqlens_k on another device": (
        {"seqlens_k": int32(7, 7).to("meta")}, "seqlens_k.device is 'meta'", "must be q's, cpu",
    ),
    "leftpad_q not contiguous": ({"leftpad_q": int32(0, 0, 0, 0)[::2]}, "leftpad_q.stride() is (2,)", "contiguous"),
    "seqlens_k too long": ({"seqlens_k": int32(7, 8)}, "seqlens_k[1] is 8", "must be in 0..7, the rows there are"),
    "seqlens_q too long": ({"seqlens_q": int32(6, 5)}, "seqlens_q[0] is 6", "must be in 0..5, the rows there are"),
    "seqlens_q negative": ({"seqlens_q": int32(-1, 5)}, "seqlens_q[0] is -1", "must be in 0..5"),
    "the first of two is named": ({"seqlens_k": int32(-2, 99)}, "seqlens_k[0] is -2", "must be in 0..7"),
    "leftpad_k negative": ({"leftpad_k": int32(0, -2)}, "leftpad_k[1] is -2", "must be in 0..7"),
    "leftpad_q too long": ({"leftpad_q": int32(6, 0)}, "leftpad_q[0] is 6", "must be in 0..5"),
    "length and padding too long": (
        {"seqlens_k": int32(7, 5), "leftpad_k": int32(0, 3)}, "seqlens_k[1] is 5",
        "must be in 0..4, the rows there are less its left padding of 3",
    ),
    "and of the queries": (
        {"seqlens_q": int32(5, 5), "leftpad_q": int32(0, 1)}, "seqlens_q[1] is 5",
        "must be in 0..4, the rows there are less its left padding of 1",
    ),
    "unknown path": ({"backend": "tritn"}, "backend is 'tritn'", "reference"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_attention_names_argument_value_and_limit(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused("attention", good("attention") | changes, what, limit)


BAD_DECODE: dict[str, tuple[dict[str, Any], str, str]] = {
    "k_cache has another dtype": (
        {"k_cache": torch.zeros(K).half()}, "k_cache.dtype is torch.float16", "must be q's, torch.float32",
    ),
    "v_cache is no tensor": ({"v_cache": 3}, "v_cache is 'int'", "must be a torch.Tensor"),
    "v_cache is longer": ({"v_cache": torch.zeros(2, 2, 9, 16)}, "v_cache's seq is 9", "must be k_cache's, 7"),
    "v_cache has more heads": ({"v_cache": torch.zeros(2, 4, 7, 16)}, "v_cache's heads is 4", "must be k_cache's, 2"),
    "k_cache of another batch": ({"k_cache": torch.zeros(1, 2, 7, 16)}, "k_cache's batch is 1", "must be q's, 2"),
    "k_cache is narrower": ({"k_cache": torch.zeros(2, 2, 7, 8)}, "k_cache's head_dim is 8", "must be q's, 16"),
    "seqlens_k too long": ({"seqlens_k": int32(3, 8)}, "seqlens_k[1] is 8", "must be in 0..7"),
    "seqlens_k is a number": ({"seqlens_k": 7}, "seqlens_k is 'int'", "int32 torch.Tensor of shape (batch,)"),
    "leftpad_k and seqlens_k": (
        {"seqlens_k": int32(3, 3), "leftpad_k": int32(4, 5)}, "seqlens_k[1] is 3", "must be in 0..2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_DECODE.values(), ids=BAD_DECODE)
def test_decode_uses_its_own_names(bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    assert_refused("decode_attention", good("decode_attention") | changes, what, limit)


# What every op that has the argument says of it.
ANY_OP: dict[str, tuple[tuple[str, ...], dict[str, Any], str, str]] = {
    "scale is NaN": (OPS, {"scale": NAN}, "scale is nan", "must be one finite number"),
    "scale is infinite": (OPS, {"scale": float("-inf")}, "scale is -inf", "must be one finite number"),
    "scale leaves float32": (OPS, {"scale": 1e39}, "scale is 1e+39", "float32's range of ±3.403e+38"),
    "scale is a huge integer": (OPS, {"scale": 10**400}, "scale is 1000", "float32's range of ±3.403e+38"),
    "scale is True": (OPS, {"scale": True}, "scale is True", "must be one finite number"),
    "scale is text": (OPS, {"scale": "0.5"}, "scale is '0.5'", "must be one finite number"),
    "return_lse is 1": (OPS, {"return_lse": 1}, "return_lse is 1", "must be True or False"),
    "return_lse is None": (OPS, {"return_lse": None}, "return_lse is None", "must be True or False"),
    "unknown layout": (LAID_OUT, {"layout": "sbhd"}, "layout is 'sbhd'", "must be one of bhsd, bshd"),
    "layout is a list": (LAID_OUT, {"layout": ["bhsd"]}, "layout is ['bhsd']", "must be one of bhsd, bshd"),
    "backend is a number": (OPS, {"backend": 3}, "backend is 3", "must be the name of a path, or None"),
    "backend is a list": (OPS, {"backend": ["auto"]}, "backend is ['auto']", "must be the name of a path, or None"),
    "validate is 1": (OPS, {"validate": 1}, "validate is 1", "must be True, False, or None for the setting"),
    "validate is a word": (OPS, {"validate": "never"}, "validate is 'never'", "must be True, False, or None"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "bad"), [(op, name) for name, (ops, *_) in ANY_OP.items() for op in ops], ids=lambda value: value
)
def test_every_op_says_the_same(op: str, bad: str) -> None:
    _, changes, what, limit = ANY_OP[bad]
    assert_refused(op, good(op) | changes, what, limit)


@pytest.mark.parametrize("op", OPS)
def test_the_good_calls_are_good(op: str) -> None:
    """So what the tests spoil is the only thing wrong."""
    out, lse = perform(op, good(op), return_lse=True)
    assert not out.any()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_keyword_is_a_type_error(op: str) -> None:
    with pytest.raises(TypeError, match="is_causal"):
        perform(op, good(op), is_causal=True)


def test_an_argument_error_is_a_value_error_of_ours() -> None:
    for kind in (ValueError, portattn.PortattnError):
        with pytest.raises(kind, match="layout"):
            perform("attention", good("attention"), layout="x")


def test_an_error_holds_its_parts() -> None:
    with pytest.raises(portattn.ArgumentError) as error:
        perform("decode_attention", good("decode_attention"), num_splits=0)
    assert (error.value.op, error.value.argument, error.value.value) == ("decode_attention", "num_splits", 0)
    assert error.value.limit == "must be None or an integer in 1..128"


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any):
    return attention_call("attention", q, k, v, names=("q", "k", "v"), settings=Settings(), **rest)


@pytest.mark.parametrize(
    ("causal", "meant"),
    [
        (True, "bottom_right"), (False, "none"), ("top_left", "top_left"), ("bottom_right", "bottom_right"),
        (1, "bottom_right"), (0, "none"),
    ],
)  # fmt: skip
def test_causal_words(causal: object, meant: str) -> None:
    assert call(**good("attention"), causal=causal).problem.causal == meant


def test_bshd_tensors_become_bhsd_views() -> None:
    q, k, v = (torch.randn(s).transpose(1, 2).contiguous() for s in (Q, K, K))
    made = call(q, k, v, layout="bshd")
    assert made.q.shape == Q
    assert made.k.shape == made.v.shape == K
    for view, given in zip((made.q, made.k, made.v), (q, k, v), strict=True):
        assert view.data_ptr() == given.data_ptr()


def test_the_problem_records_what_was_asked() -> None:
    p = call(
        **good("attention"), causal="top_left", scale=-0.5, return_lse=True, dropout_p=0.25, seqlens_q=int32(5, 5),
        leftpad_k=int32(0, 7),
    ).problem  # fmt: skip
    assert (p.batch, p.heads_q, p.heads_k, p.seq_q, p.seq_k, p.head_dim, p.head_dim_v) == (2, 4, 2, 5, 7, 16, 16)
    assert (p.seqlens_q, p.seqlens_k, p.leftpad_q, p.leftpad_k) == (True, False, False, True)
    assert (p.negative_scale, p.dropout, p.return_lse, p.dtype, p.layout) == (True, True, True, "fp32", "bhsd")
    p = call(**good("attention")).problem
    assert (p.negative_scale, p.dropout, p.return_lse, p.seqlens_q, p.leftpad_k) == (False,) * 5


def test_the_default_scale_is_that_of_the_keys_width() -> None:
    wide = torch.zeros(2, 2, 7, 64)
    assert call(**(good("attention") | {"v": wide})).scale == 0.25
    assert call(**good("attention"), scale=0).scale == 0.0


def shaped(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


BSHD = "as (batch, seq, heads, head_dim) the shapes agree: give layout='bshd'"
OTHER_LAYOUT: dict[str, tuple[list[torch.Tensor], dict[str, Any], str]] = {
    "all": (shaped((2, 5, 8, 64), (2, 100, 2, 64), (2, 100, 2, 64)), {}, BSHD),
    "all, of bshd": (
        shaped((2, 8, 5, 64), (2, 2, 100, 64), (2, 2, 100, 64)), {"layout": "bshd"},
        "as (batch, heads, seq, head_dim) the shapes agree: give layout='bhsd'",
    ),
    "q alone": (shaped((2, 5, 8, 64), (2, 2, 100, 64), (2, 2, 100, 64)), {}, "agree: give q.transpose(1, 2)"),
    "v alone": (shaped((2, 8, 5, 64), (2, 2, 100, 64), (2, 100, 2, 64)), {}, "agree: give v.transpose(1, 2)"),
    "k and v": (
        shaped((2, 8, 5, 64), (2, 100, 2, 64), (2, 100, 2, 64)), {},
        "with k and v as (batch, seq, heads, head_dim) the shapes agree: give k.transpose(1, 2), v.transpose(1, 2)",
    ),
    "decode": (shaped((2, 1, 8, 64), (2, 100, 2, 64), (2, 100, 2, 64)), {"seqlens_k": None}, BSHD),
}  # fmt: skip


def test_query_heads_that_are_no_multiple_are_not_taken_for_rows() -> None:
    """They also agree as (batch, seq, heads, head_dim): 16 heads of 8 queries and 3 keys."""
    with pytest.raises(ArgumentError, match=r"must be a multiple of the 3 key/value heads \(heads_k\)$"):
        portattn.attention(*shaped((1, 8, 16, 64), (1, 3, 16, 64), (1, 3, 16, 64)))


NUMBERS = [torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), np.float32(0.1), np.array(0.1)]


@pytest.mark.parametrize("op", ["attention", "decode_attention", "varlen_attention", "paged_attention"])
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{type(number).__name__}-{number.dtype}")
def test_scale_and_softcap_may_be_0d_tensors_and_numpy_numbers(op: str, number: Any) -> None:
    call, given = getattr(portattn, op), good(op)
    for name in ("scale", "softcap"):
        assert torch.equal(call(**given, **{name: number}), call(**given, **{name: number.item()}))
    whole = {"causal": np.True_, "return_lse": np.True_, "chunk": np.int64(4)}
    problem = portattn.plan(op, **given, scale=number, **whole).problem
    assert problem == portattn.plan(op, **given, scale=0.1, causal=True, return_lse=True, chunk=4).problem


def test_a_scale_that_is_trained_or_cannot_be_read_is_refused() -> None:
    trained = torch.tensor(0.5, requires_grad=True)
    assert_refused("attention", good("attention") | {"scale": trained}, "scale.requires_grad is True", "multiply q by")
    nowhere = torch.tensor(0.5, device="meta")
    assert_refused(
        "attention", good("attention") | {"scale": nowhere}, "scale is 'a tensor without data'", "0-d tensor"
    )


@pytest.mark.parametrize("name", OTHER_LAYOUT)
def test_shapes_that_agree_in_the_other_layout_are_said_to(name: str) -> None:
    tensors, more, said = OTHER_LAYOUT[name]
    op = portattn.decode_attention if "seqlens_k" in more else portattn.attention
    with pytest.raises(ArgumentError) as raised:
        op(*tensors, **more)  # type: ignore[operator]
    assert str(raised.value).endswith(f"; {said}" if said.startswith(("as", "with")) else said)


@pytest.mark.parametrize(
    ("tensors", "more"),
    [
        (shaped((2, 5, 8, 64), (2, 7, 3, 64), (2, 7, 3, 64)), {}),  # no order of axes helps
        (shaped((2, 8, 5, 64), (2, 8, 5, 32), (2, 8, 5, 64)), {}),
        (shaped((2, 8, 5, 64), (2, 8, 5, 64), (2, 8, 5, 64)), {"causal": "left"}),  # nothing is wrong with the shapes
        (shaped((2, 8, 0, 64), (2, 0, 2, 64), (2, 2, 2, 64)), {"dropout_p": 2.0}),
    ],
)
def test_no_advice_where_it_would_not_help(tensors: list[torch.Tensor], more: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as raised:
        portattn.attention(*tensors, **more)  # type: ignore[arg-type]
    assert "agree" not in str(raised.value)


def test_packed_rows_are_sent_to_varlen_attention_and_batches_back() -> None:
    rows, batch = torch.zeros(7, 2, 8), torch.zeros(1, 2, 7, 8)
    lengths = torch.tensor([0, 7], dtype=torch.int32)
    told = (
        r"must be 4: .*; packed rows \(tokens, heads, head_dim\) are varlen_attention's; of one sequence give q\[None"
    )
    with pytest.raises(ArgumentError, match=told):
        portattn.attention(rows, rows, rows)
    with pytest.raises(ArgumentError, match=r"must be 3: .*; batches \(batch, heads, seq, head_dim\) are attention's"):
        portattn.varlen_attention(batch, batch, batch, lengths, lengths, 7, 7)
