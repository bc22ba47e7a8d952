"""Bad quantised caches: what they may hold, what their scales must be, and what takes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from good_calls import NAN, assert_refused, good, sparse_paged

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
        "decode_attention",
        quantised("decode_attention") | both(ones(2, 7, 2)),
        "k_scale.shape is (2, 7, 2)",
        "(2, 2, 7)",
    )


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "k_scale alone": ({"k_scale": ones()}, "v_scale is None", "as k_scale is"),
    "v_scale alone": ({"v_scale": ones()}, "k_scale is None", "as v_scale is"),
    "no tensor": ({"k_scale": 1.0, "v_scale": 1.0}, "k_scale is 'float'", "float32 torch.Tensor"),
    "float16": (both(ones().half()), "k_scale.dtype is torch.float16", "torch.float32"),
    "elsewhere": (both(torch.ones((), device="meta")), "k_scale.device is 'meta'", "q's, cpu"),
    "a head too many": (both(ones(3)), "k_scale.shape is (3,)", "(heads_k,)"),
    "a number for each column": (both(ones(2, 2, 7, 16)), "k_scale.shape is (2, 2, 7, 16)", "(2, 2)"),
    "one of them by token": (
        {"k_scale": ones(), "v_scale": None}, "k_scale.shape is ()", "a scale for each token, as one of the two has",
    ),
    "the other by token": (
        {"k_scale": None, "v_scale": ones()}, "v_scale.shape is ()", "a scale for each token, as one of the two has",
    ),
    "negated": (
        {"k_scale": torch._neg_view(-ones()), "v_scale": ones()}, "k_scale is 'a view to be negated'", "resolve_neg()",
    ),
    "zero": (both(torch.zeros(())), "k_scale of sequence 0, head 0 is 0.0", "positive and finite"),
    "negative": (both(-ones(2)), "k_scale of sequence 0, head 0 is -1.0", "positive and finite"),
    "NaN": (both(torch.full((1,), NAN)), "k_scale of sequence 0, head 0 is nan", "positive and finite"),
    "infinite": (both(torch.full((), float("inf"))), "k_scale of sequence 0, head 0 is inf", "positive and finite"),
}  # fmt: skip


@pytest.mark.parametrize("op", CACHES)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
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
