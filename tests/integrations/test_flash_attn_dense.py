"""portattn.integrations.flash_attn: the functions of dense tensors, against the definition in float64."""

import math
from typing import Any

import pytest
import torch
from flash_attn_oracle import beginnings, check_one, ints, one, strided, within_gradients

import portattn
from portattn.errors import ArgumentError
from portattn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

SCORES: dict[str, dict[str, Any]] = {
    "plain": {}, "scale": {"softmax_scale": 0.3}, "causal": {"causal": True}, "window": {"window_size": (3, 2)},
    "left_window": {"window_size": (4, -1)}, "right_window": {"window_size": (-1, 2)},
    "causal_window": {"causal": True, "window_size": (3, 3)}, "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.06])},
    "causal_alibi": {"causal": True, "alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 0.06], [0.1, 0.2, 0.3, 0.4]])},
    "all": {"softmax_scale": 0.4, "causal": True, "window_size": (5, 0), "softcap": 2.0},
}  # fmt: skip


def of(scores: dict[str, Any], b: int) -> dict[str, Any]:
    slopes = scores.get("alibi_slopes")
    return scores if slopes is None or slopes.ndim == 1 else {**scores, "alibi_slopes": slopes[b]}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("sizes", [(7, 12), (12, 7), (1, 9)], ids=str)
def test_every_argument(name: str, sizes: tuple[int, int]) -> None:
    scores = SCORES[name]
    torch.manual_seed(1)
    q, k, v = strided(2, sizes[0], 4, 16), strided(2, sizes[1], 2, 16), strided(2, sizes[1], 2, 24)  # GQA, Dv ≠ D
    out, lse, masked = flash_attn_func(q, k, v, **scores, return_attn_probs=True)
    assert (lse.shape, lse.dtype, masked.shape) == ((2, 4, sizes[0]), torch.float32, (0,))
    assert torch.equal(out, flash_attn_func(q, k, v, **scores))
    for b in range(2):
        check_one(out[b], lse[b], q[b], k[b], v[b], math.inf, **of(scores, b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 33, heads, 32).to(dtype) for heads in (6, 2, 2))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.dtype is dtype
    for b in range(2):
        check_one(out[b], lse[b], q[b], k[b], v[b], math.inf, causal=True)


@pytest.mark.interpreter
def test_the_kernels_give_the_same_as_the_reference() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 20, 4, 16), torch.randn(1, 33, 2, 16), torch.randn(1, 33, 2, 16)
    given: dict[str, Any] = {"causal": True, "window_size": (9, 0), "softcap": 2.0}
    with portattn.settings(backend="interpreter"):
        out, lse, _ = flash_attn_func(q, k, v, **given, return_attn_probs=True)
    check_one(out[0], lse[0], q[0], k[0], v[0], math.inf, **given)


def test_no_keys_and_no_queries() -> None:
    out, lse, _ = flash_attn_func(torch.randn(2, 3, 4, 16), torch.randn(2, 0, 2, 16), torch.randn(2, 0, 2, 16),
        return_attn_probs=True)  # fmt: skip
    assert not out.any()
    assert (lse == math.inf).all()
    assert flash_attn_func(torch.randn(2, 0, 4, 16), *torch.randn(2, 2, 5, 2, 16).unbind()).shape == (2, 0, 4, 16)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_packed_tensors_are_read_where_they_lie(name: str) -> None:
    torch.manual_seed(4)
    q, kv, qkv = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 2, 16), torch.randn(2, 8, 3, 4, 16)
    scores = SCORES[name]
    for (out, lse, masked), parts in (
        (flash_attn_kvpacked_func(q, kv, **scores, return_attn_probs=True), (q, kv[:, :, 0], kv[:, :, 1])),
        (flash_attn_qkvpacked_func(qkv, **scores, return_attn_probs=True), tuple(qkv.unbind(2))),
    ):
        assert masked.numel() == 0
        for b in range(2):
            check_one(out[b], lse[b], *(part[b] for part in parts), math.inf, **scores)


@pytest.mark.parametrize("name", ["plain", "causal_window", "causal_alibi", "softcap"])
def test_dropout_and_its_mask(name: str) -> None:
    """S_dmask holds the probabilities, each row by its largest, and its signs are those with which the definition
    gives the same output."""
    scores = SCORES[name]
    torch.manual_seed(5)
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 13, 2, 16), torch.randn(2, 13, 2, 16)
    out, lse, masked = flash_attn_func(q, k, v, 0.3, **scores, return_attn_probs=True)
    assert masked.shape == (2, 4, 9, 13)
    kept = ~torch.signbit(masked)
    assert 0.55 < kept.float().mean() < 0.85
    for b in range(2):
        check_one(out[b], lse[b], q[b], k[b], v[b], math.inf, **of(scores, b), kept=kept[b], dropout_p=0.3)
        _, _, probabilities = one(q[b], k[b], v[b], **of(scores, b))
        largest = probabilities.amax(-1, keepdim=True)  # these few keys are one block of columns
        assert (masked[b].abs() * largest - probabilities).abs().max() < 2e-6
    torch.manual_seed(6)
    first = flash_attn_func(q, k, v, 0.3)
    assert not torch.equal(first, flash_attn_func(q, k, v, 0.3))
    torch.manual_seed(6)
    assert torch.equal(first, flash_attn_func(q, k, v, 0.3))


@pytest.mark.parametrize("name", ["plain", "all", "causal_alibi"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_gradients(name: str, dropout_p: float) -> None:
    scores = SCORES[name]
    torch.manual_seed(7)
    q, k, v = torch.randn(2, 6, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, _, masked = flash_attn_func(*leaves, dropout_p, **scores, return_attn_probs=True)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    kept = ~torch.signbit(masked) if dropout_p else [None, None]

    def loss(*tensors: torch.Tensor, exact: bool) -> Any:
        given: list[Any] = [{**of(scores, b), "kept": kept[b], "dropout_p": dropout_p} for b in range(2)]
        return sum((one(*(t[b] for t in tensors), **given[b], exact=exact)[0] * weight[b]).sum() for b in range(2))

    within_gradients([leaf.grad for leaf in leaves], (q, k, v), loss)


def test_the_lse_has_a_gradient() -> None:
    """Of rows with nothing to attend, whose LSE is +inf, it is 0."""
    torch.manual_seed(9)
    q, k = torch.randn(1, 5, 2, 16, requires_grad=True), torch.randn(1, 3, 2, 16)
    _, lse, _ = flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    lse.masked_fill(lse == math.inf, 0.0).square().sum().backward()

    def loss(leaf: torch.Tensor, exact: bool) -> torch.Tensor:
        return one(leaf[0, 2:], k[0], k[0], causal=True, exact=exact)[1].square().sum()  # rows from 2 on see keys

    within_gradients([q.grad], [q], loss)
    assert not q.grad[:, :2].any()


def test_gradients_of_packed_tensors() -> None:
    torch.manual_seed(8)
    qkv, kv, q = torch.randn(1, 6, 3, 2, 16), torch.randn(1, 7, 2, 2, 16), torch.randn(1, 6, 4, 16)
    packed = qkv.clone().requires_grad_()
    flash_attn_qkvpacked_func(packed, causal=True).square().sum().backward()
    parts = [t.clone().requires_grad_() for t in qkv.unbind(2)]
    flash_attn_func(*parts, causal=True).square().sum().backward()
    assert torch.allclose(packed.grad, torch.stack([t.grad for t in parts], 2), atol=1e-6)
    pair, query = kv.clone().requires_grad_(), q.clone().requires_grad_()
    flash_attn_kvpacked_func(query, pair).square().sum().backward()
    parts = [t.clone().requires_grad_() for t in (q, *kv.unbind(2))]
    flash_attn_func(*parts).square().sum().backward()
    assert torch.allclose(query.grad, parts[0].grad, atol=1e-6)
    assert torch.allclose(pair.grad, torch.stack([t.grad for t in parts[1:]], 2), atol=1e-6)


# portattn.integrations.flash_attn: the functions of packed sequences, against the definition in float64.


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
def test_every_argument_packed(name: str) -> None:
    q, k, v = packed()
    out, lse, masked = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 9, 11, **ALL[name], return_attn_probs=True)
    assert (out.shape, lse.shape, masked.numel()) == ((14, 4, 24), (4, 14), 0)
    check(out, lse, q, k, v, CU_K, ALL[name])


def test_lengths_as_tensors_of_one_element() -> None:
    """transformers gives them so."""
    q, k, v = packed()
    longest = torch.tensor(9), torch.tensor([11])
    assert torch.equal(flash_attn_varlen_func(q, k, v, CU_Q, CU_K, *longest),
        flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 9, 11))  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "all"])
def test_packed_heads_of_packed_rows_are_read_where_they_lie(name: str) -> None:
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
    table, pages = torch.full((3, most), -1, dtype=torch.int32), torch.randperm(3 * most + 2).tolist()
    k_pages, v_pages = (torch.full((3 * most + 2, page, *t.shape[1:]), math.nan) for t in (k, v))
    for b, length in enumerate(LENGTHS_K):
        for place in range(-(-length // page)):
            table[b, place] = pages.pop()
            rows = slice(int(CU_K[b]) + place * page, int(CU_K[b]) + min((place + 1) * page, length))
            for cache, rows_of in ((k_pages, k), (v_pages, v)):
                cache[table[b, place], : rows.stop - rows.start] = rows_of[rows]
    out, lse, masked = flash_attn_varlen_func(q, k_pages, v_pages, CU_Q, CU_K, 9, 11, **ALL[name],
        return_attn_probs=True, block_table=table)  # fmt: skip
    assert masked.numel() == 0
    check(out, lse, q, k, v, CU_K, ALL[name])


def test_dropout_and_its_mask_packed() -> None:
    q, k, v = packed()
    given = ALL["causal_alibi"]
    out, lse, masked = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 10, 12, dropout_p=0.3, **given,
        return_attn_probs=True)  # fmt: skip
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
def test_gradients_packed(name: str) -> None:
    tensors = packed()
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = flash_attn_varlen_func(*leaves, CU_Q, CU_K, 9, 11, **ALL[name])
    weight = torch.randn_like(out)
    (out * weight).sum().backward()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exact: bool) -> Any:
        places = [(slice(*CU_Q[b : b + 2].tolist()), slice(*CU_K[b : b + 2].tolist())) for b in range(3)]
        return sum((one(q[mine], k[its], v[its], **ALL[name], exact=exact)[0] * weight[mine]).sum()
            for mine, its in places)  # fmt: skip

    within_gradients([leaf.grad for leaf in leaves], tensors, loss)


Q, K = torch.zeros(2, 5, 4, 16), torch.zeros(2, 7, 2, 16)
DENSE = {"q": Q, "k": K, "v": K}
PACKED: dict[str, Any] = {
    "q": torch.zeros(14, 4, 16), "k": torch.zeros(21, 2, 16), "v": torch.zeros(21, 2, 24), "cu_seqlens_q": CU_Q,
    "cu_seqlens_k": CU_K, "max_seqlen_q": 9, "max_seqlen_k": 11,
}  # fmt: skip
PAGED = PACKED | {"k": torch.zeros(6, 16, 2, 16), "v": torch.zeros(6, 16, 2, 16)}
REFUSED: list[tuple[Any, dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (flash_attn_func, DENSE, [
        ({"q": Q[0]}, r"q\.ndim is 3, but must be 4"), ({"k": K[..., :8]}, r"k's head_dim is 8, but must be q's, 16"),
        ({"k": K.half()}, r"k\.dtype is torch\.float16, but must be q's"),
        ({"k": K[:1]}, r"k's batch is 1, but must be q's, 2"),
        ({"q": Q[:, :, :3]}, r"heads_q is 3, but must be a multiple of the 2 key/value heads"),
        ({"dropout_p": 1.0}, r"dropout_p is 1\.0, but must be in \[0, 1\)"),
        ({"softmax_scale": math.nan}, r"softmax_scale is nan, but must be one finite number"),
        ({"causal": "top_left"}, r"causal is 'top_left', but must be True or False"),
        ({"window_size": 5}, r"window_size is 5, but must be two integers"),
        ({"window_size": (1.5, 0)}, r"window_size is \(1\.5, 0\), but must be two integers"),
        ({"softcap": "1"}, r"softcap is '1', but must be one finite number"),
        ({"alibi_slopes": torch.zeros(3)}, r"alibi_slopes\.shape is \(3,\)"),
        ({"alibi_slopes": torch.zeros(4).half()}, r"alibi_slopes\.dtype is torch\.float16"),
        ({"deterministic": 2}, r"deterministic is 2, but must be True or False"),
        ({"return_attn_probs": None}, r"return_attn_probs is None, but must be True or False"),
    ]),
    (flash_attn_qkvpacked_func, {}, [({"qkv": torch.zeros(2, 5, 2, 4, 16)}, r"qkv\.shape is \(2, 5, 2, 4, 16\), but")]),
    (flash_attn_kvpacked_func, {"q": Q}, [({"kv": Q}, r"kv\.shape is \(2, 5, 4, 16\), but must be")]),
    (flash_attn_varlen_func, PACKED, [
        ({"cu_seqlens_q": CU_Q.long()}, r"cu_seqlens_q\.dtype is torch\.int64, but must be torch\.int32"),
        ({"cu_seqlens_k": CU_K[:3]}, r"cu_seqlens_k"),
        ({"cu_seqlens_k": ints(0, 11, 15, 22)}, r"cu_seqlens_k\[3\] is 22, but must be at most the packed rows, 21"),
        ({"max_seqlen_q": 8}, r"cu_seqlens_q\[3\] - cu_seqlens_q\[2\] is 9, but must be at most max_seqlen_q, 8"),
        ({"max_seqlen_k": "9"}, r"max_seqlen_k is '9', but must be an integer"),
        ({"dropout_p": torch.ones(2)}, r"dropout_p is tensor\(\[1\., 1\.\]\), but must be one finite number"),
        ({"q": [1], "dropout_p": 0.1, "return_attn_probs": True}, r"q is 'list', but must be a torch\.Tensor"),
        ({"q": torch.zeros(1, 14, 4, 16)}, r"q\.ndim is 4, but must be 3"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"k\.ndim is 3, but must be 4"),
    ]),
    (flash_attn_varlen_func, PAGED, [
        ({"dropout_p": 0.1, "block_table": ints(0, 1, 2)[:, None]}, r"dropout_p is 0\.1, but is not taken with block"),
        ({"block_table": ints(0, 1, 7)[:, None]}, r"block_table\[2, 0\] is 7, but must be in 0\.\.5"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "text"), [(call, base | given, text) for call, base, rows in REFUSED
    for given, text in rows])  # fmt: skip
def test_bad_input_is_one_error_in_flash_attn_s_names(call: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{call.__name__}: {text}") as caught:
        call(**given)
    assert (caught.value.op, caught.value.__cause__) == (call.__name__, None)
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(**given, scale=1.0)
