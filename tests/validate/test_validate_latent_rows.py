"""Bad quantised latent caches: their formats, their scales, and the bytes of fp8_ds_mla rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from good_calls import NAN, assert_refused, good

import portattn

OP = "mla_attention"
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
TOKENS = (5, 4)


def quantised(dtype: torch.dtype = E4M3, **changes: Any) -> dict[str, Any]:
    """A good call over a latent cache of this dtype."""
    given = good(OP)
    queries = {name: given[name].bfloat16() for name in ("q_nope", "q_rope")}
    return given | queries | {"kv_pages": given["kv_pages"].to(dtype)} | changes


def ds_rows(**changes: Any) -> dict[str, Any]:
    """A good call over rows of fp8_ds_mla: 128 numbers, a scale, 8 rotary numbers."""
    queries = {"q_nope": torch.zeros(2, 4, 1, 128).bfloat16(), "q_rope": torch.zeros(2, 4, 1, 8).bfloat16()}
    return good(OP) | queries | {"kv_pages": torch.zeros(*TOKENS, 148, dtype=torch.uint8)} | changes


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, torch.float8_e4m3fnuz, INT8])
def test_the_shapes_that_a_scale_may_have(dtype: torch.dtype) -> None:
    given = quantised(dtype)
    given["kv_pages"] = torch.ones(5, 4, 24).to(dtype)
    for shape in ((), (1,), TOKENS):
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
        ({"kv_scale": torch.full(TOKENS, -1.0)}, "kv_scale of sequence 0, head 0, token 0 is -1.0", "positive"),
        ({"kv_scale": torch.full((1,), NAN)}, "kv_scale of sequence 0, head 0 is nan", "positive and finite"),
        ({"kv_pages": torch.zeros(5, 4, 24, dtype=INT8)}, "kv_scale is None", "with a cache of torch.int8"),
        ({"kv_pages": torch.zeros(5, 4, 25).to(E4M3)}, "kv_pages's head_dim is 25", "16 + 8"),
        ({"kv_pages": torch.zeros(5, 4, 24).half()}, "kv_pages.dtype is torch.float16", "must be q_nope's"),
        ({"q_nope": torch.zeros(2, 4, 1, 16), "q_rope": torch.zeros(2, 4, 1, 8)}, "q_nope.dtype is torch.float32", ""),
    ],
    ids=str,
)
def test_bad_caches_are_named(changes: dict[str, Any], what: str, limit: str) -> None:
    assert_refused(OP, quantised() | changes, what, limit)


def test_a_scale_beside_numbers_of_the_queries_dtype() -> None:
    assert_refused(OP, good(OP) | {"kv_scale": torch.ones(())}, "kv_scale is ()", "goes with a cache of one of")


@pytest.mark.parametrize(
    ("changes", "what", "limit"),
    [
        ({"kv_pages": torch.zeros(*TOKENS, 147, dtype=torch.uint8)}, "kv_pages's row is 147", "must be 148 bytes"),
        ({"kv_scale": torch.ones(())}, "kv_scale is ()", "rows hold their scales"),
        (
            {"q_nope": torch.zeros(2, 4, 1, 128).half(), "q_rope": torch.zeros(2, 4, 1, 8).half()},
            "q_nope.dtype is torch.float16", "must be torch.bfloat16",
        ),
        ({"q_nope": torch.zeros(2, 4, 1, 96).bfloat16()}, "q_nope's head_dim is 96", "multiple of 128"),
        (
            {"kv_pages": torch.zeros(*TOKENS, 150, dtype=torch.uint8)[..., :148]},
            "kv_pages.stride() is (600, 150, 1)", "multiples of 4",
        ),
        ({"kv_pages": torch.zeros(*TOKENS, 152, dtype=torch.uint8)[..., 2:150]}, "kv_pages.stride()", "the offset (2)"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_rows_are_named(changes: dict[str, Any], what: str, limit: str) -> None:
    portattn.mla_attention(**ds_rows())
    assert_refused(OP, ds_rows(**changes), what, limit)


def test_scales_of_tokens_that_no_sequence_has_may_hold_anything() -> None:
    scale = torch.full(TOKENS, NAN)
    scale[[0, 1]] = 1.0  # the good call's first sequence has 10 tokens on pages 0, 1 and 2, its second 8 on 3 and 4
    scale[2, :2] = 1.0
    scale[[3, 4]] = 1.0
    assert portattn.mla_attention(**quantised(), kv_scale=scale).isfinite().all()
    scale[4, 3] = 0.0
    assert_refused(OP, quantised(kv_scale=scale), "kv_scale of sequence 1, head 0, token 7 is 0.0", "positive")


def test_there_is_no_gradient() -> None:
    given = quantised()
    assert_refused(OP, given | {"q_nope": given["q_nope"].requires_grad_()}, "requires_grad is True", "no gradient")
