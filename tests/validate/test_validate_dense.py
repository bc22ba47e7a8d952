"""Bad arguments: each error names the argument, the value and the limit. And what a Problem records of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import portattn
from portattn.config import Settings
from portattn.validate import _reachable, attention_call

Q, K = (2, 4, 5, 16), (2, 2, 7, 16)
NAN = float("nan")


def arguments(**changes: Any) -> tuple[list[Any], dict[str, Any]]:
    tensors = {"q": torch.zeros(Q), "k": torch.zeros(K), "v": torch.zeros(K)} | changes
    return [tensors.pop(n) for n in ("q", "k", "v")], tensors


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD = {
    # changed arguments -> what the message must hold: argument, value, limit
    "q is no tensor": ({"q": [1.0]}, ["q is 'list'", "torch.Tensor"]),
    "v is None": ({"v": None}, ["v is 'NoneType'", "torch.Tensor"]),
    "q has rank 3": ({"q": torch.zeros(4, 5, 16)}, ["q.ndim is 3", "4: (batch, heads, seq, head_dim)"]),
    "k has rank 5": ({"k": torch.zeros(1, *K)}, ["k.ndim is 5", "must be 4"]),
    "rank 3 in bshd": (
        {"q": torch.zeros(4, 5, 16), "layout": "bshd"}, ["q.ndim is 3", "(batch, seq, heads, head_dim)"],
    ),
    "q is float64": ({"q": torch.zeros(Q).double()}, ["q.dtype is torch.float64", "torch.float16"]),
    "q is an integer": ({"q": torch.zeros(Q).int()}, ["q.dtype is torch.int32", "torch.bfloat16"]),
    "q is complex": ({"q": torch.zeros(Q, dtype=torch.complex64)}, ["q.dtype is torch.complex64", "torch.float32"]),
    "q is sparse": ({"q": torch.zeros(Q).to_sparse()}, ["q.layout is torch.sparse_coo", "torch.strided"]),
    "k has another dtype": ({"k": torch.zeros(K).half()}, ["k.dtype is torch.float16", "q's, torch.float32"]),
    "v is on another device": ({"v": torch.zeros(K, device="meta")}, ["v.device is 'meta'", "q's, cpu"]),
    "batches differ": ({"k": torch.zeros(3, 2, 7, 16)}, ["k's batch is 3", "q's, 2"]),
    "v's batch differs": ({"v": torch.zeros(1, 2, 7, 16)}, ["v's batch is 1", "q's, 2"]),
    "head_dim differs": ({"k": torch.zeros(2, 2, 7, 8)}, ["k's head_dim is 8", "q's, 16"]),
    "v's heads differ": ({"v": torch.zeros(2, 4, 7, 16)}, ["v's heads is 4", "k's, 2"]),
    "v's length differs": ({"v": torch.zeros(2, 2, 8, 16)}, ["v's seq is 8", "k's, 7"]),
    "heads do not divide": ({"q": torch.zeros(2, 3, 5, 16)}, ["heads_q is 3", "multiple of the 2 key/value heads"]),
    "no query heads": ({"q": torch.zeros(2, 0, 5, 16)}, ["heads_q is 0", "from 1"]),
    "no key heads": (
        {"k": torch.zeros(2, 0, 7, 16), "v": torch.zeros(2, 0, 7, 16)}, ["heads_k is 0", "from 1"],
    ),
    "head_dim 0": (
        {"q": torch.zeros(2, 4, 5, 0), "k": torch.zeros(2, 2, 7, 0)}, ["q's head_dim is 0", "1..576"],
    ),
    "head_dim_v 0": ({"v": torch.zeros(2, 2, 7, 0)}, ["v's head_dim is 0", "1..576"]),
    "head_dim too wide": (
        {"q": torch.zeros(2, 4, 5, 577), "k": torch.zeros(2, 2, 7, 577)}, ["q's head_dim is 577", "576"],
    ),
    "unknown layout": ({"layout": "sbhd"}, ["layout is 'sbhd'", "bhsd, bshd"]),
    "layout is a list": ({"layout": ["bhsd"]}, ["layout is ['bhsd']", "bhsd, bshd"]),
    "unknown causal": ({"causal": "lower_right"}, ["causal is 'lower_right'", "'top_left'"]),
    "causal is 2": ({"causal": 2}, ["causal is 2", "True (bottom_right)"]),
    "causal is None": ({"causal": None}, ["causal is None", "'bottom_right'"]),
    "causal is a mask": ({"causal": torch.ones(5, 7)}, ["causal is tensor(", "'bottom_right'"]),
    "causal is an array": ({"causal": np.ones((5, 7))}, ["causal is array(", "'bottom_right'"]),
    "scale is NaN": ({"scale": NAN}, ["scale is nan", "finite number"]),
    "scale is infinite": ({"scale": float("-inf")}, ["scale is -inf", "finite number"]),
    "scale leaves float32": ({"scale": 1e39}, ["scale is 1e+39", "3.403e+38"]),
    "scale is a huge integer": ({"scale": 10**400}, ["scale is 1000", "3.403e+38"]),
    "scale is True": ({"scale": True}, ["scale is True", "finite number"]),
    "scale is text": ({"scale": "0.5"}, ["scale is '0.5'", "finite number"]),
    "scale is a tensor": ({"scale": torch.tensor(0.5)}, ["scale is tensor(0.5", "finite number"]),
    "dropout_p is 1": ({"dropout_p": 1.0}, ["dropout_p is 1.0", "[0, 1)"]),
    "dropout_p is negative": ({"dropout_p": -0.1}, ["dropout_p is -0.1", "[0, 1)"]),
    "dropout_p is NaN": ({"dropout_p": NAN}, ["dropout_p is nan", "finite number"]),
    "return_lse is 1": ({"return_lse": 1}, ["return_lse is 1", "True or False"]),
    "seqlens_k is a list": ({"seqlens_k": [7, 7]}, ["seqlens_k is 'list'", "int32 torch.Tensor"]),
    "seqlens_k is int64": ({"seqlens_k": torch.tensor([7, 7])}, ["seqlens_k.dtype is torch.int64", "torch.int32"]),
    "seqlens_q of another batch": ({"seqlens_q": int32(5)}, ["seqlens_q.shape is (1,)", "(2,)"]),
    "leftpad_k of rank 2": ({"leftpad_k": int32(1, 1)[None]}, ["leftpad_k.shape is (1, 2)", "(2,)"]),
    "seqlens_k on another device": (
        {"seqlens_k": int32(7, 7).to("meta")}, ["seqlens_k.device is 'meta'", "q's, cpu"],
    ),
    "leftpad_q not contiguous": (
        {"leftpad_q": int32(0, 0, 0, 0)[::2]}, ["leftpad_q.stride() is (2,)", "contiguous"],
    ),
    "seqlens_k too long": ({"seqlens_k": int32(7, 8)}, ["seqlens_k[1] is 8", "0..7"]),
    "seqlens_q negative": ({"seqlens_q": int32(-1, 5)}, ["seqlens_q[0] is -1", "0..5"]),
    "leftpad_k negative": ({"leftpad_k": int32(0, -2)}, ["leftpad_k[1] is -2", "0..7"]),
    "leftpad_q too long": ({"leftpad_q": int32(6, 0)}, ["leftpad_q[0] is 6", "0..5"]),
    "length and padding too long": (
        {"seqlens_k": int32(7, 5), "leftpad_k": int32(0, 3)}, ["seqlens_k[1] is 5", "0..4", "left padding of 3"],
    ),
    "unknown path": ({"backend": "tritn"}, ["backend is 'tritn'", "reference"]),
    "backend is a number": ({"backend": 3}, ["backend is 3", "name of a path"]),
    "backend is a list": ({"backend": ["auto"]}, ["backend is ['auto']", "name of a path"]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "parts"), BAD.values(), ids=BAD)
def test_errors_name_argument_value_and_limit(changes: dict, parts: list[str]) -> None:
    tensors, rest = arguments(**changes)
    with pytest.raises(portattn.ArgumentError) as error:
        portattn.attention(*tensors, **rest)
    message = str(error.value)
    assert message.startswith("attention: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"k_cache": torch.zeros(K).half()}, ["k_cache.dtype is torch.float16"]),
        ({"v_cache": torch.zeros(2, 2, 9, 16)}, ["v_cache's seq is 9", "k_cache's, 7"]),
        ({"seqlens_k": int32(3, 8)}, ["seqlens_k[1] is 8", "0..7"]),
        ({"seqlens_k": 7}, ["seqlens_k is 'int'"]),
    ],
)
def test_decode_errors_use_its_own_names(changes: dict, parts: list[str]) -> None:
    given = {"q": torch.zeros(Q), "k_cache": torch.zeros(K), "v_cache": torch.zeros(K), "seqlens_k": None} | changes
    with pytest.raises(portattn.ArgumentError) as error:
        portattn.decode_attention(**given)
    assert str(error.value).startswith("decode_attention: ")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("op", [portattn.attention, portattn.decode_attention])
def test_an_unknown_keyword_is_pythons_own_error(op) -> None:
    tensors, _ = arguments()
    with pytest.raises(TypeError, match="is_causal"):
        op(*tensors, is_causal=True)


def test_an_argument_error_is_a_value_error_of_ours() -> None:
    tensors, _ = arguments()
    with pytest.raises(ValueError, match="layout"):
        portattn.attention(*tensors, layout="x")
    with pytest.raises(portattn.PortattnError, match="layout"):
        portattn.attention(*tensors, layout="x")


def test_lengths_are_read_back_only_when_asked() -> None:
    """`never` leaves clamping to the path that runs; here it means that nothing is raised."""
    tensors, _ = arguments()
    with portattn.settings(validate="never"):
        out = portattn.attention(*tensors, seqlens_k=int32(70, -2))
    assert torch.isfinite(out).all()


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any):
    given = {"scale": None, "causal": False, "return_lse": False, "layout": "bhsd"} | rest
    return attention_call("attention", q, k, v, names=("q", "k", "v"), settings=Settings(), **given)


@pytest.mark.parametrize(
    ("causal", "meant"),
    [(True, "bottom_right"), (False, "none"), ("top_left", "top_left"), ("bottom_right", "bottom_right")],
)
def test_causal_words(causal: object, meant: str) -> None:
    tensors, _ = arguments()
    assert call(*tensors, causal=causal).problem.causal == meant


def test_bshd_tensors_become_bhsd_views() -> None:
    q, k, v = (torch.randn(s).transpose(1, 2).contiguous() for s in (Q, K, K))
    made = call(q, k, v, layout="bshd")
    assert made.q.shape == Q
    assert made.k.shape == K
    assert made.q.data_ptr() == q.data_ptr()


def test_aligned_is_what_descriptors_need() -> None:
    def aligned(q: torch.Tensor) -> bool:
        return call(q, torch.zeros(1, 1, 7, q.shape[3]), torch.zeros(1, 1, 7, q.shape[3])).problem.aligned

    assert aligned(torch.zeros(1, 1, 5, 16))
    assert aligned(torch.zeros(1, 1, 5, 20))  # 80-byte rows
    assert not aligned(torch.zeros(1, 1, 5, 17)[..., :16])  # 68-byte rows
    assert not aligned(torch.zeros(1, 1, 16, 5).transpose(2, 3))  # rows are not contiguous
    assert not aligned(torch.zeros(81)[1:].view(1, 1, 5, 16))  # the base is off by four bytes
    assert not aligned(torch.zeros(1, 1, 1, 17)[..., :16])  # one row: a descriptor is encoded with its stride too


def test_needs_grad_only_where_autograd_will_ask() -> None:
    q, k, v = (torch.zeros(s, requires_grad=s == K) for s in (Q, K, K))
    assert call(q, k, v).problem.needs_grad
    with torch.no_grad():
        assert not call(q, k, v).problem.needs_grad


def test_rows_too_far_apart_for_32_bit_offsets_are_copied() -> None:
    near = torch.zeros(1, 1, 3, 16)
    assert _reachable(near) is near
    far = torch.empty_strided((1, 1, 3, 16), (0, 0, 2**24, 1), device="meta")
    assert _reachable(far).stride(2) == 16


def test_large_is_what_32_bit_byte_offsets_do_not_reach() -> None:
    k = torch.empty(1, 1, 2**23, 64, device="meta")
    q = torch.empty(1, 1, 1, 64, device="meta")
    assert call(q, k, k).problem.large
    assert not call(q, k[:, :, :-1], k[:, :, :-1]).problem.large
