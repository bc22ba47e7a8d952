"""Bad quantised caches: what they may hold, what their scales must be, and what takes none."""

from typing import Any

import pytest
import torch
from good_calls import NAN, assert_refused, good, int32, sparse_paged
from torch import zeros

import portattn
from portattn import ArgumentError

E4M3, E5M2, INT8, INT4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
CACHES = {
    "decode_attention": ("k_cache", "v_cache"), "paged_attention": ("k_pages", "v_pages"),
    "sparse_attention": ("k_cache", "v_cache"),
}  # fmt: skip
TOKENS = {"decode_attention": (2, 2, 7), "paged_attention": (5, 4, 2), "sparse_attention": (2, 2, 7)}


def quantised(op: str, dtype: torch.dtype = E4M3, other: torch.dtype | None = None) -> dict[str, Any]:
    """A good call with a cache of this dtype; values in another one where it is named."""
    given = good(op)
    k, v = CACHES[op]

    def stored(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype is not INT4:
            return cache.to(dtype)
        return torch.randint(256, (*cache.shape[:-1], cache.shape[-1] // 2), dtype=INT4)

    return given | {"q": given["q"].bfloat16(), k: stored(given[k], dtype), v: stored(given[v], other or dtype)}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def both(scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"k_scale": scale, "v_scale": scale.clone()}


@pytest.mark.parametrize("op", CACHES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float8_e4m3fnuz, INT8, INT4])
def test_the_shapes_that_scales_may_have(op: str, dtype: torch.dtype) -> None:
    """All ones: the result of each is the same. One for each token of int4 says beside it that 8 stands for 0."""
    torch.manual_seed(0)
    tokens = (ones(*TOKENS[op]).view(torch.int32) | 8).view(torch.float32) if dtype is INT4 else ones(*TOKENS[op])
    cases = [both(ones(*shape)) for shape in ((), (1,), (2,), (2, 2))] + [both(tokens)]
    cases += [{"k_scale": ones(), "v_scale": ones(2, 2)}] + ([] if dtype in (INT8, INT4) else [{}])
    given = quantised(op, dtype)
    results = [getattr(portattn, op)(**given, **case) for case in cases]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_tokens_come_as_the_cache_has_them() -> None:
    given = quantised("decode_attention")
    turned = {name: t.transpose(1, 2) for name, t in given.items() if t is not None and t.ndim == 4}
    out = portattn.decode_attention(**given | turned, **both(ones(2, 7, 2)), layout="bshd")
    assert out.shape == (2, 1, 4, 16)
    assert_refused(
        "decode_attention", quantised("decode_attention") | both(ones(2, 7, 2)), "k_scale.shape is (2, 7, 2)",
        "(2, 2, 7)",
    )  # fmt: skip


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"k_scale": ones()}, "v_scale is None", "as k_scale is"),
    ({"v_scale": ones()}, "k_scale is None", "as v_scale is"),
    ({"k_scale": 1.0, "v_scale": 1.0}, "k_scale is 'float'", "float32 torch.Tensor"),
    (both(ones().half()), "k_scale.dtype is torch.float16", "torch.float32"),
    (both(torch.ones((), device="meta")), "k_scale.device is 'meta'", "q's, cpu"),
    (both(ones(3)), "k_scale.shape is (3,)", "(heads_k,)"),
    (both(ones(2, 2, 7, 16)), "k_scale.shape is (2, 2, 7, 16)", "(2, 2)"),
    ({"k_scale": ones(), "v_scale": None}, "k_scale.shape is ()", "a scale for each token, as one of the two has"),
    ({"k_scale": None, "v_scale": ones()}, "v_scale.shape is ()", "a scale for each token, as one of the two has"),
    ({"k_scale": torch._neg_view(-ones()), "v_scale": ones()}, "k_scale is 'a view to be negated'", "resolve_neg()"),
    (both(zeros(())), "k_scale of sequence 0, head 0 is 0.0", "positive and finite"),
    (both(-ones(2)), "k_scale of sequence 0, head 0 is -1.0", "positive and finite"),
    (both(torch.full((1,), NAN)), "k_scale of sequence 0, head 0 is nan", "positive and finite"),
    (both(torch.full((), float("inf"))), "k_scale of sequence 0, head 0 is inf", "positive and finite"),
]  # fmt: skip


@pytest.mark.parametrize("op", CACHES)
@pytest.mark.parametrize("bad", BAD, ids=lambda case: case[1])
def test_bad_scales_are_named(op: str, bad: tuple[dict[str, Any], str, str]) -> None:
    changes, what, limit = bad
    if "one of the two" in limit:
        changes = {name: ones(*TOKENS[op]) if scale is None else scale for name, scale in changes.items()}
    assert_refused(op, quantised(op) | changes, what, limit)


@pytest.mark.parametrize("op", CACHES)
@pytest.mark.parametrize(
    ("dtypes", "what", "limit"),
    [
        ((E4M3, E5M2), "{v}.dtype is torch.float8_e5m2", "must be {k}'s, torch.float8_e4m3fn"),
        ((E4M3, torch.bfloat16), "{v}.dtype is torch.bfloat16", "must be {k}'s, torch.float8_e4m3fn"),
        ((torch.bfloat16, E4M3), "{v}.dtype is torch.float8_e4m3fn", "must be q's, torch.bfloat16"),
        ((INT8, INT8), "k_scale is None", "with a cache of torch.int8"),
        ((INT4, INT4), "k_scale is None", "with a cache of torch.uint8"),
        ((INT4, INT8), "{v}.dtype is torch.int8", "must be {k}'s, torch.uint8"),
        ((torch.bfloat16, INT4), "{v}.dtype is torch.uint8", "must be q's, torch.bfloat16"),
        ((torch.float8_e5m2fnuz, torch.float8_e5m2fnuz), "{k}.dtype is torch.float8_e5m2fnuz", "torch.float8_e4m3fn"),
    ],
)
def test_bad_formats_are_named(op: str, dtypes: tuple[torch.dtype, torch.dtype], what: str, limit: str) -> None:
    k, v = CACHES[op]
    assert_refused(op, quantised(op, *dtypes), what.format(k=k, v=v), limit.format(k=k, v=v))


@pytest.mark.parametrize("op", CACHES)
def test_int4_rows_have_half_as_many_bytes_as_numbers(op: str) -> None:
    """So bytes of another width, or of a head of odd width, are no int4 cache."""
    k, v = CACHES[op]
    given = quantised(op, INT4) | both(ones())
    whole = torch.cat((given[k], given[k]), dim=-1)
    assert_refused(op, given | {k: whole}, f"{k}'s head_dim is 16", "must be 8 as torch.uint8: two int4 numbers a byte")
    odd = given | {"q": given["q"][..., :15]}
    assert_refused(op, odd, "q's head_dim is 15", "must be even with a cache of torch.uint8")
    narrow = given | {v: given[v][..., :3]}  # values have a width of their own
    assert getattr(portattn, op)(**narrow).shape[-1] == 6
    assert_refused(op, given | {v: given[v][..., :0]}, f"{v}'s head_dim is 0", "must be in 1..576")


@pytest.mark.parametrize("op", CACHES)
def test_the_cache_is_where_the_queries_are(op: str) -> None:
    given = quantised(op)
    k, v = CACHES[op]
    away = {name: given[name].to("meta") for name in (k, v)}
    assert_refused(op, given | away, f"{k}.device is 'meta'", "must be q's, cpu")


@pytest.mark.parametrize("op", CACHES)
def test_what_goes_with_a_quantised_cache(op: str) -> None:
    given = quantised(op)
    assert_refused(op, given | {"q": given["q"].float()}, "q.dtype is torch.float32", "torch.float16 or torch.bfloat16")
    assert_refused(op, given | {"q": given["q"].requires_grad_()}, "requires_grad is True", "no gradient with a cache")
    scaled = good(op) | both(ones())
    assert_refused(op, scaled, "k_scale is ()", "goes with a cache of one of torch.float8_e4m3fn")


def test_other_operations_say_what_takes_such_a_cache() -> None:
    for op, names in (("attention", ("k", "v")), ("varlen_attention", ("k", "v"))):
        given = good(op)
        changed = {name: given[name].to(E4M3) for name in names}
        assert_refused(op, given | changed, f"{names[0]}.dtype is torch.float8_e4m3fn", "take caches of it")
        bytes_ = {name: given[name].to(INT4) for name in names}
        assert_refused(op, given | bytes_, f"{names[0]}.dtype is torch.uint8", "int4 numbers, two to a byte")


def test_scales_of_tokens_that_no_sequence_has_may_hold_anything() -> None:
    decode, paged = quantised("decode_attention"), quantised("paged_attention")
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    scale = ones(2, 2, 7)
    scale[0, :, 3:] = NAN
    scale[1] = -1.0
    assert portattn.decode_attention(**decode | {"seqlens_k": lengths}, **both(scale)).isfinite().all()
    by_sequence = torch.tensor([[1.0, 1.0], [0.0, NAN]])
    assert portattn.decode_attention(**decode | {"seqlens_k": lengths}, **both(by_sequence)).isfinite().all()
    pages = ones(5, 4, 2)
    pages[1, 2:] = 0.0  # tokens 6 and 7 of the first sequence, whose pages are 0, 1 and 2
    pages[2] = NAN
    assert portattn.paged_attention(**paged | {"seqlens_k": torch.tensor([6, 0]).int()}, **both(pages)).isfinite().all()
    with pytest.raises(ArgumentError, match="k_scale of sequence 0, head 0, token 6 is 0"):
        portattn.paged_attention(**paged, **both(pages))


@pytest.mark.parametrize("paged", [False, True])
def test_scales_of_tokens_that_no_head_has_chosen_may_hold_anything(paged: bool) -> None:
    """The good call chooses tokens 0 and 2."""
    given = quantised("sparse_attention")
    scale, by_sequence = torch.full((2, 2, 7), NAN), ones(2, 2)
    scale[:, :, [0, 2]] = 1.0
    if paged:  # tokens 0 and 2 are in the first pages of the sequences, 0 and 3
        given |= sparse_paged()
        given |= {"q": given["q"].bfloat16(), **{n: given[n].to(E4M3) for n in ("k_cache", "v_cache")}}
        scale = torch.full((5, 4, 2), NAN)
        scale[[[0], [3]], [0, 2]] = 1.0
    assert portattn.sparse_attention(**given, **both(scale)).isfinite().all()
    bad = scale.clone()
    bad[(3, 2, 1) if paged else (1, 1, 2)] = 0.0
    assert_refused("sparse_attention", given | both(bad), "k_scale of sequence 1, query head 2, place 1 is 0.0")
    given["counts"] = torch.tensor([[3] * 4, [0] * 4], dtype=torch.int32)
    by_sequence[1] = NAN
    assert portattn.sparse_attention(**given, **both(bad)).isfinite().all()
    assert portattn.sparse_attention(**given, **both(by_sequence)).isfinite().all()


def test_values_are_read_where_they_are_to_be_validated() -> None:
    bad = both(torch.zeros(()))
    portattn.decode_attention(**quantised("decode_attention"), **bad, validate=False)
    with pytest.raises(ArgumentError, match="positive and finite"):
        portattn.decode_attention(**quantised("decode_attention"), **bad, validate=True)


@pytest.mark.parametrize("off", [(0, 0), (4, 4), (0, 2), (2, 0), (4, 1)])
def test_rows_of_keys_and_of_values_decide_whether_words_are_read(off: tuple[int, int]) -> None:
    def cache(by: int) -> torch.Tensor:
        memory = torch.zeros(2 * 32 * 64 + 64, dtype=torch.uint8)
        start = -memory.data_ptr() % 16 + by
        return memory[start : start + 2 * 32 * 64].view(1, 2, 32, 64).view(torch.float8_e4m3fn)

    q = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
    found = portattn.plan("decode_attention", q, *map(cache, off), None).problem
    assert found.word_aligned is (off[0] % 4 == off[1] % 4 == 0)


# Bad quantised latent caches: their formats, their scales, and the bytes of fp8_ds_mla rows.


OP = "mla_attention"
ROWS = (5, 4)


def quantised_latent(dtype: torch.dtype = E4M3, **changes: Any) -> dict[str, Any]:
    given = good(OP)
    queries = {name: given[name].bfloat16() for name in ("q_nope", "q_rope")}
    return given | queries | {"kv_pages": given["kv_pages"].to(dtype)} | changes


def ds_rows(**changes: Any) -> dict[str, Any]:
    """A good call over rows of fp8_ds_mla: 128 numbers, a scale, 8 rotary numbers."""
    queries = {"q_nope": torch.zeros(2, 4, 1, 128).bfloat16(), "q_rope": torch.zeros(2, 4, 1, 8).bfloat16()}
    return good(OP) | queries | {"kv_pages": torch.zeros(*ROWS, 148, dtype=torch.uint8)} | changes


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.float8_e4m3fnuz, INT8])
def test_the_shapes_that_a_scale_may_have(dtype: torch.dtype) -> None:
    given = quantised_latent(dtype)
    given["kv_pages"] = torch.ones(5, 4, 24).to(dtype)
    for shape in ((), (1,), ROWS):
        out = portattn.mla_attention(**given, kv_scale=torch.full(shape, 2.0))
        torch.testing.assert_close(out, torch.full_like(out, 2.0))
    if dtype is not INT8:
        torch.testing.assert_close(portattn.mla_attention(**given), torch.ones_like(out))


@pytest.mark.parametrize(
    ("changes", "what", "limit"),
    [
        ({"kv_scale": 1.0}, "kv_scale is 'float'", "float32 torch.Tensor"),
        ({"kv_scale": torch.ones(()).half()}, "kv_scale.dtype is torch.float16", "torch.float32"),
        ({"kv_scale": torch.ones((), device="meta")}, "kv_scale.device is 'meta'", "q's, cpu"),
        ({"kv_scale": torch.ones(2, 1)}, "kv_scale.shape is (2, 1)", "(pages, page_size), (5, 4)"),
        ({"kv_scale": torch.zeros(())}, "kv_scale of sequence 0, head 0 is 0.0", "positive and finite"),
        ({"kv_scale": torch.full(ROWS, -1.0)}, "kv_scale of sequence 0, head 0, token 0 is -1.0", "positive"),
        ({"kv_scale": torch.full((1,), NAN)}, "kv_scale of sequence 0, head 0 is nan", "positive and finite"),
        ({"kv_pages": torch.zeros(5, 4, 24, dtype=INT8)}, "kv_scale is None", "with a cache of torch.int8"),
        ({"kv_pages": torch.zeros(5, 4, 25).to(E4M3)}, "kv_pages's head_dim is 25", "16 + 8"),
        ({"kv_pages": torch.zeros(5, 4, 24).half()}, "kv_pages.dtype is torch.float16", "must be q_nope's"),
        ({"q_nope": torch.zeros(2, 4, 1, 16), "q_rope": torch.zeros(2, 4, 1, 8)}, "q_nope.dtype is torch.float32", ""),
    ],
    ids=str,
)
def test_bad_caches_are_named(changes: dict[str, Any], what: str, limit: str) -> None:
    assert_refused(OP, quantised_latent() | changes, what, limit)


def test_a_scale_beside_numbers_of_the_queries_dtype() -> None:
    assert_refused(OP, good(OP) | {"kv_scale": torch.ones(())}, "kv_scale is ()", "goes with a cache of one of")


@pytest.mark.parametrize(
    ("changes", "what", "limit"),
    [
        ({"kv_pages": torch.zeros(*ROWS, 147, dtype=torch.uint8)}, "kv_pages's row is 147", "must be 148 bytes"),
        ({"kv_scale": torch.ones(())}, "kv_scale is ()", "rows hold their scales"),
        ({"q_nope": torch.zeros(2, 4, 1, 128).half(), "q_rope": torch.zeros(2, 4, 1, 8).half()},
         "q_nope.dtype is torch.float16", "must be torch.bfloat16"),
        ({"q_nope": torch.zeros(2, 4, 1, 96).bfloat16()}, "q_nope's head_dim is 96", "multiple of 128"),
        ({"kv_pages": torch.zeros(*ROWS, 150, dtype=torch.uint8)[..., :148]}, "kv_pages.stride() is (600, 150, 1)",
         "multiples of 4"),
        ({"kv_pages": torch.zeros(*ROWS, 152, dtype=torch.uint8)[..., 2:150]}, "kv_pages.stride()", "the offset (2)"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_rows_are_named(changes: dict[str, Any], what: str, limit: str) -> None:
    portattn.mla_attention(**ds_rows())
    assert_refused(OP, ds_rows(**changes), what, limit)


def test_scales_of_tokens_of_latent_rows_that_no_sequence_has_may_hold_anything() -> None:
    scale = torch.full(ROWS, NAN)
    scale[[0, 1]] = 1.0  # the good call's first sequence has 10 tokens on pages 0, 1 and 2, its second 8 on 3 and 4
    scale[2, :2] = 1.0
    scale[[3, 4]] = 1.0
    assert portattn.mla_attention(**quantised_latent(), kv_scale=scale).isfinite().all()
    scale[4, 3] = 0.0
    assert_refused(OP, quantised_latent(kv_scale=scale), "kv_scale of sequence 1, head 0, token 7 is 0.0", "positive")


def test_there_is_no_gradient() -> None:
    given = quantised_latent()
    assert_refused(OP, given | {"q_nope": given["q_nope"].requires_grad_()}, "requires_grad is True", "no gradient")


# Bad quantised q, k and v of attention and varlen_attention: formats, scales, and the results' dtype.


OPS = ("attention", "varlen_attention")
ONE = torch.ones(())


def quantised_operands(op: str, dtype: torch.dtype = E4M3) -> dict[str, Any]:
    given, generator = good(op), torch.Generator().manual_seed(0)
    values = {name: torch.randn(given[name].shape, generator=generator) * 2.0 for name in ("q", "k", "v")}
    changed = {name: tensor.to(dtype) for name, tensor in values.items()}
    if dtype is INT8:
        changed["v"] = values["v"].bfloat16()
    return given | changed


def scales(op: str, *shape: int, dtype: torch.dtype = E4M3, value: float = 1.0) -> dict[str, torch.Tensor]:
    names = ("q_scale", "k_scale") if dtype is INT8 else ("q_scale", "k_scale", "v_scale")
    return {name: torch.full(shape, value) for name in names}


def heads(op: str) -> int:
    return int(good(op)["k"].shape[1])


def batch(op: str) -> int:
    given = good(op)
    return int(given["q"].shape[0]) if op == "attention" else len(given["cu_seqlens_q"]) - 1


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.float8_e4m3fnuz, INT8])
def test_the_shapes_that_scales_of_operands_may_have(op: str, dtype: torch.dtype) -> None:
    shapes = ((), (1,), (heads(op),), (batch(op), heads(op)))
    cases: list[dict[str, Any]] = [scales(op, *shape, dtype=dtype) for shape in shapes]
    given = quantised_operands(op, dtype)
    if dtype is INT8:
        tokens = {n: torch.ones(given[n].shape[:-1]) for n in "qk"}
        cases.append({f"{n}_scale": scale for n, scale in tokens.items()})
    else:
        cases.append({})
    found = [getattr(portattn, op)(**given, **case) for case in cases]
    for result in found[1:]:
        torch.testing.assert_close(result, found[0])


BAD_OPERANDS: list[tuple[torch.dtype, dict[str, Any], str, str]] = [
    (E4M3, {"k_scale": ONE}, "q_scale is None", "float32 torch.Tensor, as k_scale is given"),
    (E4M3, {"q_scale": 1.0, "k_scale": ONE, "v_scale": ONE}, "q_scale is 'float'", "float32"),
    (E4M3, {"q_scale": ONE.half(), "k_scale": ONE, "v_scale": ONE}, "q_scale.dtype", "torch.float32"),
    (E4M3, {"q_scale": ONE, "k_scale": ONE.to("meta"), "v_scale": ONE}, "k_scale.device is 'meta'", "q's, cpu"),
    (E4M3, {"q_scale": ONE, "k_scale": ONE, "v_scale": torch.ones(7)}, "v_scale.shape is (7,)",
     "must be (), (1,), (heads_k,) or (batch, heads_k)"),
    (E4M3, {"q_scale": ONE, "k_scale": ONE * 0, "v_scale": ONE}, "k_scale of sequence 0, head 0 is 0.0", ""),
    (E4M3, {"q_scale": -ONE, "k_scale": ONE, "v_scale": ONE}, "q_scale of sequence 0", "positive"),
    (E4M3, {"q_scale": ONE, "k_scale": ONE, "v_scale": ONE * NAN}, "v_scale of sequence 0", "finite"),
    (INT8, {}, "q_scale is None", "with q and k of torch.int8"),
    (INT8, {"q_scale": ONE, "k_scale": ONE, "v_scale": ONE}, "v_scale is ()", "whose values are of 16 bits"),
    (torch.bfloat16, {"q_scale": ONE}, "q_scale is ()", "goes with q and k of one of"),
    (E4M3, {"out_dtype": torch.float32}, "out_dtype is torch.float32", "torch.float16 or"),
    (INT8, {"q_scale": ONE, "k_scale": ONE, "out_dtype": torch.float16}, "out_dtype is torch.float16",
     "v's, torch.bfloat16"),
    (torch.bfloat16, {"out_dtype": torch.float16}, "out_dtype is torch.float16", "q's, torch.bfloat16"),
    (E4M3, {"out_dtype": "bf16"}, "out_dtype is 'bf16'", "must be a torch.dtype"),
]  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", BAD_OPERANDS, ids=lambda case: case[2])
def test_bad_scales_and_dtypes_are_named(op: str, bad: tuple[torch.dtype, dict[str, Any], str, str]) -> None:
    dtype, changes, what, limit = bad
    assert_refused(op, quantised_operands(op, dtype) | changes, what, limit)


@pytest.mark.parametrize("op", OPS)
def test_mixed_formats_are_named(op: str) -> None:
    given = quantised_operands(op)
    wide = good(op)
    for name, dtype, what in (
        ("k", torch.float8_e5m2, "must be q's, torch.float8_e4m3fn"), ("v", INT8, "must be q's, torch.float8_e4m3fn"),
        ("k", torch.float32, "must be q's, torch.float8_e4m3fn"),
    ):  # fmt: skip
        assert_refused(op, given | {name: wide[name].to(dtype)}, f"{name}.dtype is {dtype}", what)
    assert_refused(op, wide | {"k": given["k"]}, "k.dtype is torch.float8_e4m3fn", "must be q's, torch.float32")
    narrow = quantised_operands(op, INT8)
    assert_refused(
        op, narrow | {"v": wide["v"].to(E4M3)}, "v.dtype is torch.float8_e4m3fn", "with q and k of torch.int8"
    )
    for dtype in (torch.uint8, torch.float8_e5m2fnuz):
        assert_refused(op, {**wide, "q": wide["q"].to(dtype)}, f"q.dtype is {dtype}", "must be one of")


@pytest.mark.parametrize("op", OPS)
def test_a_scale_for_each_token_goes_with_another(op: str) -> None:
    given = quantised_operands(op, INT8)
    by_token = torch.ones(given["q"].shape[:-1])
    assert_refused(op, given | {"q_scale": by_token, "k_scale": ONE}, "k_scale.shape is ()", "for each token")


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_refused_at_the_forward(op: str) -> None:
    """Of int8 operands the values could have one, and of any the scales."""
    given = quantised_operands(op, INT8) | scales(op, dtype=INT8)
    given["v"].requires_grad_()
    assert_refused(op, given, "requires_grad is True", f"{op} has no gradient with queries and keys of int8")
    asked = scales(op)
    asked["v_scale"].requires_grad_()
    assert_refused(
        op, quantised_operands(op) | asked, "requires_grad is True", f"{op} has no gradient with queries and keys of"
    )
    with torch.no_grad():
        assert getattr(portattn, op)(**given).isfinite().all()


def test_scales_of_sequences_without_keys_may_hold_anything() -> None:
    given, scale = quantised_operands("attention"), torch.ones(batch("attention"), heads("attention"))
    scale[1] = NAN
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    assert batch("attention") == 2
    found = portattn.attention(**given | {"seqlens_k": lengths}, q_scale=scale, k_scale=scale, v_scale=scale)
    assert found.isfinite().all()
    assert not found[1].any()


def test_scales_of_rows_of_no_sequence_may_hold_anything() -> None:
    given = quantised_operands("varlen_attention", INT8) | {
        "cu_seqlens_q": int32(0, 4, 8), "cu_seqlens_k": int32(0, 5, 10),
    }  # fmt: skip
    q_scale, k_scale = torch.ones(9, 4), torch.ones(12, 2)
    q_scale[8:], k_scale[10:] = NAN, -1.0
    assert portattn.varlen_attention(**given, q_scale=q_scale, k_scale=k_scale).isfinite().all()
    k_scale[9, 1] = 0.0
    assert_refused(
        "varlen_attention", given | {"q_scale": q_scale, "k_scale": k_scale},
        "k_scale of sequence 0, head 1, token 9 is 0.0", "positive",
    )  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_values_of_operands_are_read_where_they_are_to_be_validated(op: str) -> None:
    given = quantised_operands(op) | scales(op, value=0.0)
    getattr(portattn, op)(**given, validate=False)
    with pytest.raises(portattn.ArgumentError, match="positive and finite"):
        getattr(portattn, op)(**given, validate=True)
