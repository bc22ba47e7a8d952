"""Bad quantised q, k and v of attention and varlen_attention: formats, scales, and the results' dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from good_calls import NAN, assert_refused, good, int32

import portattn

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
OPS = ("attention", "varlen_attention")
ONE = torch.ones(())


def quantised(op: str, dtype: torch.dtype = E4M3) -> dict[str, Any]:
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
def test_the_shapes_that_scales_may_have(op: str, dtype: torch.dtype) -> None:
    """All ones: the result of each is the same."""
    shapes = ((), (1,), (heads(op),), (batch(op), heads(op)))
    cases: list[dict[str, Any]] = [scales(op, *shape, dtype=dtype) for shape in shapes]
    given = quantised(op, dtype)
    if dtype is INT8:
        tokens = {n: torch.ones(given[n].shape[:-1]) for n in "qk"}
        cases.append({f"{n}_scale": scale for n, scale in tokens.items()})
    else:
        cases.append({})
    found = [getattr(portattn, op)(**given, **case) for case in cases]
    for result in found[1:]:
        torch.testing.assert_close(result, found[0])


BAD: dict[str, tuple[torch.dtype, dict[str, Any], str, str]] = {
    "one scale": (E4M3, {"k_scale": ONE}, "q_scale is None", "float32 torch.Tensor, as k_scale is given"),
    "no tensor": (E4M3, {"q_scale": 1.0, "k_scale": ONE, "v_scale": ONE}, "q_scale is 'float'", "float32"),
    "float16": (E4M3, {"q_scale": ONE.half(), "k_scale": ONE, "v_scale": ONE}, "q_scale.dtype", "torch.float32"),
    "elsewhere": (
        E4M3, {"q_scale": ONE, "k_scale": ONE.to("meta"), "v_scale": ONE}, "k_scale.device is 'meta'", "q's, cpu",
    ),
    "shape": (
        E4M3, {"q_scale": ONE, "k_scale": ONE, "v_scale": torch.ones(7)}, "v_scale.shape is (7,)",
        "must be (), (1,), (heads_k,) or (batch, heads_k)",
    ),
    "zero": (E4M3, {"q_scale": ONE, "k_scale": ONE * 0, "v_scale": ONE}, "k_scale of sequence 0, head 0 is 0.0", ""),
    "negative": (E4M3, {"q_scale": -ONE, "k_scale": ONE, "v_scale": ONE}, "q_scale of sequence 0", "positive"),
    "NaN": (E4M3, {"q_scale": ONE, "k_scale": ONE, "v_scale": ONE * NAN}, "v_scale of sequence 0", "finite"),
    "int8 without": (INT8, {}, "q_scale is None", "with q and k of torch.int8"),
    "int8 with v's": (
        INT8, {"q_scale": ONE, "k_scale": ONE, "v_scale": ONE}, "v_scale is ()", "whose values are of 16 bits",
    ),
    "not quantised": (torch.bfloat16, {"q_scale": ONE}, "q_scale is ()", "goes with q and k of one of"),
    "out_dtype of float8": (E4M3, {"out_dtype": torch.float32}, "out_dtype is torch.float32", "torch.float16 or"),
    "out_dtype of int8": (
        INT8, {"q_scale": ONE, "k_scale": ONE, "out_dtype": torch.float16}, "out_dtype is torch.float16",
        "v's, torch.bfloat16",
    ),
    "out_dtype of others": (
        torch.bfloat16, {"out_dtype": torch.float16}, "out_dtype is torch.float16", "q's, torch.bfloat16",
    ),
    "out_dtype's type": (E4M3, {"out_dtype": "bf16"}, "out_dtype is 'bf16'", "must be a torch.dtype"),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_scales_and_dtypes_are_named(op: str, bad: tuple[torch.dtype, dict[str, Any], str, str]) -> None:
    dtype, changes, what, limit = bad
    assert_refused(op, quantised(op, dtype) | changes, what, limit)


@pytest.mark.parametrize("op", OPS)
def test_mixed_formats_are_named(op: str) -> None:
    given = quantised(op)
    wide = good(op)
    for name, dtype, what in (
        ("k", torch.float8_e5m2, "must be q's, torch.float8_e4m3fn"), ("v", INT8, "must be q's, torch.float8_e4m3fn"),
        ("k", torch.float32, "must be q's, torch.float8_e4m3fn"),
    ):  # fmt: skip
        assert_refused(op, given | {name: wide[name].to(dtype)}, f"{name}.dtype is {dtype}", what)
    assert_refused(op, wide | {"k": given["k"]}, "k.dtype is torch.float8_e4m3fn", "must be q's, torch.float32")
    narrow = quantised(op, INT8)
    assert_refused(
        op, narrow | {"v": wide["v"].to(E4M3)}, "v.dtype is torch.float8_e4m3fn", "with q and k of torch.int8"
    )
    for dtype in (torch.uint8, torch.float8_e5m2fnuz):
        assert_refused(op, {**wide, "q": wide["q"].to(dtype)}, f"q.dtype is {dtype}", "must be one of")


@pytest.mark.parametrize("op", OPS)
def test_a_scale_for_each_token_goes_with_another(op: str) -> None:
    given = quantised(op, INT8)
    by_token = torch.ones(given["q"].shape[:-1])
    assert_refused(op, given | {"q_scale": by_token, "k_scale": ONE}, "k_scale.shape is ()", "for each token")


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_refused_at_the_forward(op: str) -> None:
    """Of int8 operands the values could have one, and of any the scales."""
    given = quantised(op, INT8) | scales(op, dtype=INT8)
    given["v"].requires_grad_()
    assert_refused(op, given, "requires_grad is True", f"{op} has no gradient with queries and keys of int8")
    asked = scales(op)
    asked["v_scale"].requires_grad_()
    assert_refused(op, quantised(op) | asked, "requires_grad is True", f"{op} has no gradient with queries and keys of")
    with torch.no_grad():
        assert getattr(portattn, op)(**given).isfinite().all()


def test_scales_of_sequences_without_keys_may_hold_anything() -> None:
    given, scale = quantised("attention"), torch.ones(batch("attention"), heads("attention"))
    scale[1] = NAN
    lengths = torch.tensor([3, 0], dtype=torch.int32)
    assert batch("attention") == 2
    found = portattn.attention(**given | {"seqlens_k": lengths}, q_scale=scale, k_scale=scale, v_scale=scale)
    assert found.isfinite().all()
    assert not found[1].any()


def test_scales_of_rows_of_no_sequence_may_hold_anything() -> None:
    given = quantised("varlen_attention", INT8) | {"cu_seqlens_q": int32(0, 4, 8), "cu_seqlens_k": int32(0, 5, 10)}
    q_scale, k_scale = torch.ones(9, 4), torch.ones(12, 2)
    q_scale[8:], k_scale[10:] = NAN, -1.0
    assert portattn.varlen_attention(**given, q_scale=q_scale, k_scale=k_scale).isfinite().all()
    k_scale[9, 1] = 0.0
    assert_refused(
        "varlen_attention",
        given | {"q_scale": q_scale, "k_scale": k_scale},
        "k_scale of sequence 0, head 1, token 9 is 0.0",
        "positive",
    )


@pytest.mark.parametrize("op", OPS)
def test_values_are_read_where_they_are_to_be_validated(op: str) -> None:
    given = quantised(op) | scales(op, value=0.0)
    getattr(portattn, op)(**given, validate=False)
    with pytest.raises(portattn.ArgumentError, match="positive and finite"):
        getattr(portattn, op)(**given, validate=True)
