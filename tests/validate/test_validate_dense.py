"""Bad arguments of every operation: their tensors, shapes, lengths and numbers; and the views that a Call holds."""

from typing import Any

import numpy as np
import pytest
import torch
from good_calls import CALLS, LAID_OUT, NAN, OPS, assert_refused, counts, good, indices, int32, perform
from torch import zeros

import portattn
from portattn.config import Settings
from portattn.errors import ArgumentError
from portattn.validate import attention_call

Q, K = (2, 4, 5, 16), (2, 2, 7, 16)
# Of each int32 tensor: the part of it that an error about its shape names, and the shape.
INTEGERS = {
    "cu_seqlens_q": ("", "(batch + 1,)"), "cu_seqlens_k": ("", "(batch + 1,)"), "seqlens_k": (".shape", "(batch,)"),
    "seqlens_q": (".shape", "(batch,)"), "leftpad_q": (".shape", "(batch,)"), "leftpad_k": (".shape", "(batch,)"),
    "page_table": ("", "(batch, pages a sequence), or a PageTable"), "counts": (".shape", "(batch, heads_q)"),
    "indices": (".ndim", "(batch, heads_q, places)"),
}  # fmt: skip


def laid_out() -> dict[str, tuple[str, dict[str, Any]]]:
    """CALLS, with lengths and padding of a batch, and in the other layouts of tensors and of pages."""
    padding = dict.fromkeys(("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"), int32(3, 3))
    calls = CALLS | {"padded": ("attention", good("attention") | padding)}
    for op in LAID_OUT:
        turned = {
            n: t.transpose(1, 2) if n[0] in "qkv" and t.ndim == 4 else t for n, t in good(op).items() if n != "scale"
        }
        if "page_table" in turned:
            turned |= {n: t for n, t in good(op).items() if n.endswith("pages")}
        calls[f"{op} in bshd"] = (op, good(op) | turned | {"layout": "bshd"})
    for name in ("paged_attention", "sparse over pages"):
        op, given = CALLS[name]
        pages = {n: t.transpose(1, 2) for n, t in given.items() if n[1:] in ("_pages", "_cache")}
        calls[f"{name} in hpd"] = (op, given | pages | {"page_layout": "hpd"})
    return calls


def axes(name: str, given: dict[str, Any]) -> str:
    if name == "kv_pages":
        return "3: (pages, page_size, rank + rope)"
    if name[0] in "kv" and "page_table" in given:
        return f"4: (pages, {'heads, page_size' if 'page_layout' in given else 'page_size, heads'}, head_dim)"
    if given[name].ndim == 3:
        return "3: (tokens, heads, head_dim)"
    return f"4: (batch, {'seq, heads' if 'layout' in given else 'heads, seq'}, head_dim)"


@pytest.mark.parametrize(("op", "given"), laid_out().values(), ids=laid_out())
def test_each_tensor_has_its_type_device_and_axes(op: str, given: dict[str, Any]) -> None:
    first = next(iter(given))
    for n, t in given.items():
        if not isinstance(t, torch.Tensor):
            continue
        part, shape = INTEGERS.get(n, ("", ""))
        kind = f"must be an int32 torch.Tensor of shape {shape}" if shape else "must be a torch.Tensor"
        bad = [(value, f"{n} is '{type(value).__name__}'", kind) for value in (3, "q", [[0.0]], (0, 2, 3))]
        if shape:
            bad += [(t.long(), f"{n}.dtype is torch.int64", "must be torch.int32")]
            bad += [(t.to("meta"), f"{n}.device is 'meta'", "must be q's, cpu")]
            bad += [(t.repeat_interleave(2, -1)[..., ::2], f"{n}.stride(", "contiguous")]
            for other in (t[None], t[0]):
                bad += [(other, f"{n}{part} is {other.ndim if part == '.ndim' else tuple(other.shape)}", shape)]
        else:
            bad += [(None, f"{n} is 'NoneType'", kind)]
            for dtype in (torch.float64, torch.int32, torch.int64, torch.complex64):
                bad += [(t.to(dtype), f"{n}.dtype is {dtype}", "torch.float16, torch.bfloat16, torch.float32")]
            bad += [(other, f"{n}.ndim is {other.ndim}", f"must be {axes(n, given)}") for other in (t[None], t[0])]
        if n != first and not shape:
            for dtype in (torch.float16, torch.bfloat16):
                bad += [(t.to(dtype), f"{n}.dtype is {dtype}", f"must be {first}'s, torch.float32")]
            bad += [(t.to("meta"), f"{n}.device is 'meta'", f"must be {first}'s, cpu")]
        for wrong, what, limit in bad:
            assert_refused(op, given | {n: wrong}, what, limit)


SIZE = "must be an integer in 0..2147483647"
BEGINNINGS = "must be an int32 torch.Tensor of shape (batch + 1,)"
INTEGER_K, INTEGER_L = (f"must be an integer in {least}..32767, or (Hq,) int32" for least in (1, 2))


# The call of CALLS that is spoiled: the changed arguments, what the error says of one of them, and its limit.
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "attention": [
        ({"q": zeros(Q).to_sparse()}, "q is 'a torch.sparse_coo tensor'", "must be a dense, strided"),
        ({"k": zeros(3, 2, 7, 16)}, "k's batch is 3", "must be q's, 2"),
        ({"v": zeros(1, 2, 7, 16)}, "v's batch is 1", "must be q's, 2"),
        ({"k": zeros(2, 2, 7, 8)}, "k's head_dim is 8", "must be q's, 16"),
        ({"v": zeros(2, 4, 7, 16)}, "v's heads is 4", "must be k's, 2"),
        ({"v": zeros(2, 2, 8, 16)}, "v's seq is 8", "must be k's, 7"),
        ({"q": zeros(2, 3, 5, 16)}, "heads_q is 3", "must be a multiple of the 2 key/value heads"),
        ({"q": zeros(2, 0, 5, 16)}, "heads_q is 0", "must be an integer from 1 to 2147483647"),
        ({"k": zeros(2, 0, 7, 16), "v": zeros(2, 0, 7, 16)}, "heads_k is 0", "must be an integer from 1"),
        ({"q": zeros(2, 4, 5, 0), "k": zeros(2, 2, 7, 0)}, "q's head_dim is 0", "must be in 1..576"),
        ({"v": zeros(2, 2, 7, 0)}, "v's head_dim is 0", "must be in 1..576"),
        ({"q": zeros(2, 4, 5, 577), "k": zeros(2, 2, 7, 577)}, "q's head_dim is 577", "must be in 1..576"),
        ({"v": zeros(2, 2, 7, 577)}, "v's head_dim is 577", "must be in 1..576"),
        ({"causal": torch.ones(5, 7)}, "causal is tensor(", "must be True (bottom_right)"),
        ({"causal": np.ones((5, 7))}, "causal is array(", "must be True (bottom_right)"),
        ({"scale": torch.tensor([0.5])}, "scale is tensor([0.5", "(hint: scale.item())"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0", "must be in [0, 1)"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1", "must be in [0, 1)"),
        ({"dropout_p": NAN}, "dropout_p is nan", "must be one finite number"),
        ({"seqlens_q": int32(5)}, "seqlens_q.shape is (1,)", "must be (batch,), (2,)"),
        ({"seqlens_k": int32(7, 8)}, "seqlens_k[1] is 8", "must be in 0..7, the rows there are"),
        ({"seqlens_q": int32(6, 5)}, "seqlens_q[0] is 6", "must be in 0..5, the rows there are"),
        ({"seqlens_q": int32(-1, 5)}, "seqlens_q[0] is -1", "must be in 0..5"),
        ({"seqlens_k": int32(-2, 99)}, "seqlens_k[0] is -2", "must be in 0..7"),
        ({"leftpad_k": int32(0, -2)}, "leftpad_k[1] is -2", "must be in 0..7"),
        ({"leftpad_q": int32(6, 0)}, "leftpad_q[0] is 6", "must be in 0..5"),
        ({"seqlens_k": int32(7, 5), "leftpad_k": int32(0, 3)}, "seqlens_k[1] is 5",
         "must be in 0..4, the rows there are less its left padding of 3"),
        ({"seqlens_q": int32(5, 5), "leftpad_q": int32(0, 1)}, "seqlens_q[1] is 5",
         "must be in 0..4, the rows there are less its left padding of 1"),
        ({"backend": "tritn"}, "backend is 'tritn'", "reference"),
    ],
    "decode_attention": [
        ({"v_cache": zeros(2, 2, 9, 16)}, "v_cache's seq is 9", "must be k_cache's, 7"),
        ({"v_cache": zeros(2, 4, 7, 16)}, "v_cache's heads is 4", "must be k_cache's, 2"),
        ({"k_cache": zeros(1, 2, 7, 16)}, "k_cache's batch is 1", "must be q's, 2"),
        ({"k_cache": zeros(2, 2, 7, 8)}, "k_cache's head_dim is 8", "must be q's, 16"),
        ({"seqlens_k": int32(3, 8)}, "seqlens_k[1] is 8", "must be in 0..7"),
        ({"seqlens_k": int32(3, 3), "leftpad_k": int32(4, 5)}, "seqlens_k[1] is 3", "must be in 0..2"),
    ],
    "varlen_attention": [
        ({"k": zeros(12, 2, 8)}, "k's head_dim is 8", "must be q's, 16"),
        ({"q": zeros(9, 4, 577), "k": zeros(12, 2, 577)}, "q's head_dim is 577", "must be in 1..576"),
        ({"v": zeros(12, 2, 0)}, "v's head_dim is 0", "must be in 1..576"),
        ({"v": zeros(12, 1, 16)}, "v's heads is 1", "must be k's, 2"),
        ({"v": zeros(11, 2, 16)}, "v's tokens is 11", "must be k's, 12"),
        ({"q": zeros(9, 3, 16)}, "heads_q is 3", "must be a multiple of the 2"),
        ({"cu_seqlens_q": int32()}, "cu_seqlens_q is (0,)", BEGINNINGS),
        ({"cu_seqlens_k": int32(0, 12)}, "cu_seqlens_k's size is 2", "must be cu_seqlens_q's, 3"),
        ({"max_seqlen_q": 5.0}, "max_seqlen_q is 5.0", SIZE), ({"max_seqlen_k": -1}, "max_seqlen_k is -1", SIZE),
        ({"max_seqlen_q": True}, "max_seqlen_q is True", SIZE), ({"max_seqlen_k": None}, "max_seqlen_k is None", SIZE),
        ({"max_seqlen_k": 2**31}, "max_seqlen_k is 2147483648", SIZE),
        ({"max_seqlen_q": torch.tensor(5)}, "max_seqlen_q is tensor(5)", SIZE),
        ({"cu_seqlens_q": int32(1, 4, 9)}, "cu_seqlens_q[0] is 1", "must be 0, the first row"),
        ({"cu_seqlens_k": int32(-1, 4, 9)}, "cu_seqlens_k[0] is -1", "must be 0, the first row"),
        ({"cu_seqlens_q": int32(0, 4, 3)}, "cu_seqlens_q[2] is 3", "must be at least cu_seqlens_q[1], 4"),
        ({"cu_seqlens_k": int32(0, -2, 12)}, "cu_seqlens_k[1] is -2", "at least cu_seqlens_k[0], 0"),
        ({"cu_seqlens_q": int32(0, 5, 10)}, "cu_seqlens_q[2] is 10", "at most the packed rows, 9"),
        ({"cu_seqlens_k": int32(0, 13, 14), "max_seqlen_k": 99}, "cu_seqlens_k[1] is 13",
         "at most the packed rows, 12"),
        ({"max_seqlen_q": 4}, "cu_seqlens_q[2] - cu_seqlens_q[1] is 5", "must be at most max_seqlen_q, 4"),
        ({"max_seqlen_k": 4}, "cu_seqlens_k[1] - cu_seqlens_k[0] is 5", "must be at most max_seqlen_k, 4"),
    ],
    "mla_attention": [
        ({"q_rope": zeros(1, 4, 1, 8)}, "q_rope's batch is 1", "must be q_nope's, 2"),
        ({"q_rope": zeros(2, 1, 1, 8)}, "q_rope's heads is 1", "must be q_nope's, 4"),
        ({"q_rope": zeros(2, 4, 2, 8)}, "q_rope's seq is 2", "must be q_nope's, 1"),
        ({"kv_pages": zeros(5, 4, 16)}, "kv_pages's head_dim is 16",
         "must be q_nope's and q_rope's head_dim together, 16 + 8"),
        ({"q_nope": zeros(2, 4, 1, 512), "q_rope": zeros(2, 4, 1, 65), "kv_pages": zeros(5, 4, 577)},
         "kv_pages's head_dim is 577", "must be in 1..576"),
        ({"q_nope": zeros(2, 4, 1, 0), "kv_pages": zeros(5, 4, 8)}, "q_nope's head_dim is 0", "at least 1"),
        ({"q_rope": zeros(2, 4, 1, 0), "kv_pages": zeros(5, 4, 16)}, "q_rope's head_dim is 0", "at least 1"),
        ({"kv_pages": zeros(5, 0, 24)}, "kv_pages's page_size is 0", "must be at least 1"),
        ({"q_nope": zeros(2, 0, 1, 16), "q_rope": zeros(2, 0, 1, 8)}, "heads_q is 0", "from 1 to"),
        ({"scale": None}, "scale is None", "must be one finite number"),
    ],
    "paged_attention": [
        ({"v_pages": zeros(4, 4, 2, 16)}, "v_pages's pages is 4", "must be k_pages's, 5"),
        ({"v_pages": zeros(5, 2, 2, 16)}, "v_pages's page_size is 2", "must be k_pages's, 4"),
        ({"v_pages": zeros(5, 4, 1, 16)}, "v_pages's heads is 1", "must be k_pages's, 2"),
        ({"k_pages": zeros(5, 0, 2, 16), "v_pages": zeros(5, 0, 2, 16)}, "k_pages's page_size is 0",
         "must be at least 1"),
        ({"k_pages": zeros(5, 2, 0, 16), "v_pages": zeros(5, 2, 0, 16), "page_layout": "hpd"},
         "k_pages's page_size is 0", "must be at least 1"),
        ({"k_pages": zeros(5, 4, 2, 8)}, "k_pages's head_dim is 8", "must be q's, 16"),
        ({"q": zeros(2, 4, 1, 600), "k_pages": zeros(5, 4, 2, 600)}, "q's head_dim is 600", "1..576"),
        ({"v_pages": zeros(5, 4, 2, 600)}, "v_pages's head_dim is 600", "1..576"),
        ({"q": zeros(2, 3, 1, 16)}, "heads_q is 3", "must be a multiple of the 2"),
        ({"page_layout": "dph"}, "page_layout is 'dph'", "must be one of phd, hpd"),
        ({"page_layout": ["phd"]}, "page_layout is ['phd']", "must be one of phd, hpd"),
    ],
    "sparse_attention": [
        ({"q": zeros(2, 4, 2, 16)}, "q's seq is 2", "must be 1: tokens are chosen for one query"),
        ({"q": zeros(2, 4, 0, 16)}, "q's seq is 0", "must be 1: tokens are chosen for one query"),
        ({"v_cache": zeros(1, 2, 7, 16)}, "v_cache's batch is 1", "must be k_cache's, 2"),
        ({"v_cache": zeros(2, 1, 7, 16)}, "v_cache's heads is 1", "must be k_cache's, 2"),
        ({"v_cache": zeros(2, 2, 6, 16)}, "v_cache's seq is 6", "must be k_cache's, 7"),
        ({"k_cache": zeros(2, 2, 7, 8)}, "k_cache's head_dim is 8", "must be q's, 16"),
        ({"q": zeros(2, 4, 1, 577), "k_cache": zeros(2, 2, 7, 577)}, "q's head_dim is 577", "1..576"),
        ({"v_cache": zeros(2, 2, 7, 0)}, "v_cache's head_dim is 0", "must be in 1..576"),
        ({"q": zeros(2, 3, 1, 16), "indices": zeros(2, 3, 3).int(), "counts": zeros(2, 3).int()}, "heads_q is 3",
         "must be a multiple of the 2"),
        ({"k_cache": zeros(3, 2, 7, 16), "v_cache": zeros(3, 2, 7, 16)}, "k_cache's batch is 3", "q's, 2"),
        ({"seqlens_k": int32(7)}, "seqlens_k.shape is (1,)", "must be (batch,), (2,)"),
        ({"seqlens_k": int32(8, 7)}, "seqlens_k[0] is 8", "must be in 0..7, the rows there are"),
        ({"indices": zeros(2, 2, 3).int()}, "indices.shape is (2, 2, 3)", "must be (batch, heads_q, places)"),
        ({"indices": zeros(1, 4, 3).int()}, "indices.shape is (1, 4, 3)", "places), (2, 4, 3)"),
        ({"counts": None}, "counts is 'NoneType'", "torch.Tensor of shape (batch, heads_q)"),
        ({"counts": int32([3, 3], [3, 3])}, "counts.shape is (2, 2)", "(batch, heads_q), (2, 4)"),
        ({"counts": zeros(4, 2).int().T}, "counts.stride(-1) is 2", "its last axis is contiguous"),
        ({"counts": counts(-1)}, "counts[1, 2] is -1", "must be in 0..3, the places there are"),
        ({"counts": counts(4)}, "counts[1, 2] is 4", "must be in 0..3, the places there are"),
        ({"indices": indices(0, 7, 9)}, "indices[1, 2, 1] is 7", "must be below 7, the sequence's length"),
        ({"indices": indices(0, 0, 4), "seqlens_k": int32(7, 4)}, "indices[1, 2, 2] is 4",
         "must be below 4, the sequence's length (negative ones are passed over)"),
        ({"seqlens_k": int32(0, 7)}, "indices[0, 0, 0] is 0", "must be below 0"),
        ({"log_weights": [0.0]}, "log_weights is 'list'", "must be a torch.Tensor of torch.fl"),
        ({"log_weights": zeros(2, 4, 3).half()}, "log_weights is torch.float16", "torch.Tensor of torch.float32"),
        ({"log_weights": zeros(2, 4, 2)}, "log_weights.shape is (2, 4, 2)", "must be indices', (2, 4, 3)"),
        ({"log_weights": zeros(2, 4, 3, device="meta")}, "log_weights.device is 'meta'", "must be q's, cpu"),
        ({"log_weights": zeros(2, 4, 6)[..., ::2]}, "log_weights.stride(-1) is 2", "its last axis is contiguous"),
        ({"magicpig": 10}, "magicpig is 10", "must be (K, L), bits a hash table and number of"),
        ({"magicpig": (1, 2, 3)}, "magicpig is (1, 2, 3)", "must be (K, L)"),
        ({"magicpig": "10"}, "magicpig is '10'", "must be (K, L)"),
        ({"magicpig": (0, 20)}, "magicpig's K is 0", INTEGER_K),
        ({"magicpig": (2**15, 20)}, "magicpig's K is 32768", INTEGER_K),
        ({"magicpig": (8.0, 20)}, "magicpig's K is 8.0", INTEGER_K),
        ({"magicpig": (True, 20)}, "magicpig's K is True", INTEGER_K),
        ({"magicpig": (None, 20)}, "magicpig's K is None", INTEGER_K),
        ({"magicpig": (8, 1)}, "magicpig's L is 1", INTEGER_L),
        ({"magicpig": (8, 2**15)}, "magicpig's L is 32768", INTEGER_L),
        ({"magicpig": (int32(8, 8), 20)}, "magicpig's K.shape is (2,)", "must be (heads_q,), (4,)"),
        ({"magicpig": (8, torch.full((4,), 20))}, "magicpig's L.dtype is torch.int64", "must be torch.int32"),
        ({"magicpig": (int32(8, 8, 8, 8).to("meta"), 20)}, "magicpig's K.device is 'meta'", "must be q's, cpu"),
        ({"magicpig": (8, int32(*[20] * 8)[::2])}, "magicpig's L.stride() is (2,)", "must be contiguous"),
        ({"magicpig": (int32(8, 8, 0, 8), 20)}, "magicpig's K[2] is 0", "must be at least 1"),
        ({"magicpig": (8, int32(20, 1, 20, 0))}, "magicpig's L[1] is 1", "must be at least 2"),
        ({"magicpig": (8, 20), "counts": 3}, "counts is 'int'", "of shape (batch, heads_q)"),
        ({"page_layout": "hp"}, "page_layout is 'hp'", "must be one of phd, hpd"),
    ],
    "sparse over pages": [
        ({"v_cache": zeros(4, 4, 2, 16)}, "v_cache's pages is 4", "must be k_cache's, 5"),
        ({"k_cache": zeros(5, 0, 2, 16), "v_cache": zeros(5, 0, 2, 16)}, "k_cache's page_size is 0",
         "must be at least 1"),
        ({"page_layout": "bhsd"}, "page_layout is 'bhsd'", "must be one of phd, hpd"),
        ({"indices": indices(0, 8, 0)}, "indices[1, 2, 1] is 8", "must be below 8"),
        ({"indices": indices(0, 0, 12), "seqlens_k": None}, "indices[1, 2, 2] is 12", "must be below 12"),
        ({"seqlens_k": None, "page_table": int32([0, 1, 2], [3, 4, 5]), "indices": indices(0, 8, 0)},
         "page_table[1, 2] is 5", "must be in 0..4"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bad"),
    [(name, bad) for name, rows in REFUSED.items() for bad in rows],
    ids=lambda value: value[1:2] and str(value[1]),
)
def test_errors_name_argument_value_and_limit(name: str, bad: tuple[dict[str, Any], str, str]) -> None:
    op, given = CALLS[name]
    changes, what, limit = bad
    assert_refused(op, given | changes, what, limit)


@pytest.mark.parametrize("op", OPS)
def test_the_good_calls_are_good(op: str) -> None:
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
}  # fmt: skip  # fmt: skip


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
    given["v"] = torch.ones(12, 2, 16)
    out, lse = perform("varlen_attention", given, return_lse=True, sinks=torch.zeros(4))
    assert (out[:4] > 0.8).all()  # five keys and the sink
    assert not out[4:].any()
    assert torch.equal(lse[:, 4:7], torch.zeros(4, 3))  # no key, but a sink of 0
    assert torch.isneginf(lse[:, 7:]).all()
