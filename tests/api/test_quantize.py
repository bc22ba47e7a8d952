"""portattn.quantize: its numbers and scales, by the formulas, and through the operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import portattn
from portattn import ArgumentError
from portattn.schema.tensors import KV_DTYPE

FLOAT8 = ("e4m3", "e5m2", "e4m3fnuz")


def tensors(dtype: torch.dtype = torch.bfloat16, layout: str = "bhsd") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 70, 32), (2, 2, 90, 32), (2, 2, 90, 24))
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made[1][1] += 3.0  # one sequence's keys have something in common
    return made if layout == "bhsd" else [t.transpose(1, 2).contiguous() for t in made]


def packed() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Sequences of 30, 0 and 40 queries over 50, 7 and 30 keys, and three rows of no sequence."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(rows, heads, 32, generator=generator).bfloat16() for rows, heads in ((73, 4), (90, 2), (90, 2))]
    made[1][50:] *= 5.0
    return made, torch.tensor([0, 30, 30, 70]).int(), torch.tensor([0, 50, 57, 87]).int()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("method", FLOAT8)
def test_float8_fills_the_formats_range_for_each_head(method: str, layout: str) -> None:
    given = tensors(torch.float32, layout)
    made = portattn.quantize(*given, method, layout=layout)
    largest = torch.finfo(KV_DTYPE[method]).max
    for tensor, numbers, scale in zip(
        given, (made.q, made.k, made.v), (made.q_scale, made.k_scale, made.v_scale), strict=True
    ):
        assert numbers.dtype == KV_DTYPE[method]
        assert numbers.shape == tensor.shape
        assert scale is not None
        assert scale.shape == (2, 2)
        rows, stored = (t if layout == "bhsd" else t.transpose(1, 2) for t in (tensor, numbers.float()))
        by_head = rows.unflatten(1, (2, -1)).abs().amax((2, 3, 4))
        torch.testing.assert_close(scale, by_head / largest)
        assert stored.unflatten(1, (2, -1)).abs().amax((2, 3, 4)).eq(largest).all()
        each = scale.repeat_interleave(rows.shape[1] // 2, 1)[:, :, None, None]
        step = 2.0 ** -(2 if method == "e5m2" else 3)
        torch.testing.assert_close(stored * each, rows, rtol=step / 2, atol=float(scale.max()) * largest * 1e-4)


def test_one_scale_for_a_tensor() -> None:
    made = portattn.quantize(*tensors(), scales="tensor")
    assert made.q_scale.shape == made.k_scale.shape == ()
    assert made.k.float().abs().max() == 448.0


@pytest.mark.parametrize("block", [1, 64])
def test_sage_takes_the_mean_from_the_keys(block: int) -> None:
    q, k, v = tensors(torch.float16)
    made = portattn.quantize(q, k, v, "sage", block=block)
    assert made.v is v
    assert made.v_scale is None
    smooth = k.float() - k.float().mean(2, keepdim=True)
    blocks = torch.nn.functional.pad(smooth.abs().amax(3), (0, -90 % block)).unflatten(2, (-1, block)).amax(3)
    torch.testing.assert_close(made.k_scale, (blocks / 127.0).repeat_interleave(block, 2)[:, :, :90])
    assert made.k.abs().max() == 127
    error = (made.k.float() * made.k_scale[..., None] - smooth).abs()
    assert (error <= made.k_scale[..., None] * 0.5001).all()
    assert made.lse_shift is not None
    mean = k.float().mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(made.lse_shift, torch.einsum("bhsd,bhd->bhs", q.float(), mean), rtol=1e-4, atol=1e-4)


def cosine(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(ours.double().flatten(), exact.double().flatten(), dim=0))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("method", "least"), [("e4m3", 0.995), ("e5m2", 0.98), ("e4m3fnuz", 0.995), ("sage", 0.9995)])
def test_attention_of_it_is_near_the_original(method: str, least: float, layout: str) -> None:
    given = tensors(layout=layout)
    made = portattn.quantize(*given, method, layout=layout)
    out, lse = portattn.attention(**made.arguments(causal=True, return_lse=True))
    exact, exact_lse = portattn.attention(
        *(t.float() for t in given), causal=True, return_lse=True, layout=layout
    )  # fmt: skip
    assert cosine(out, exact) >= least
    torch.testing.assert_close(made.corrected(lse), exact_lse, rtol=0, atol={"e5m2": 1.0, "sage": 0.1}.get(method, 0.4))


@pytest.mark.parametrize(("method", "least"), [("e4m3", 0.995), ("sage", 0.9995)])
def test_packed_rows_are_quantised_by_sequence(method: str, least: float) -> None:
    (q, k, v), cu_q, cu_k = packed()
    made = portattn.quantize(q, k, v, method, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    rest: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 40, "max_seqlen_k": 50}
    out, lse = portattn.varlen_attention(**made.arguments(), **rest, return_lse=True)
    exact, exact_lse = portattn.varlen_attention(q.float(), k.float(), v.float(), **rest, return_lse=True)
    assert cosine(out[:70], exact[:70]) >= least
    torch.testing.assert_close(
        made.corrected(lse)[:, :70], exact_lse[:, :70], rtol=0, atol=0.2 if method == "sage" else 0.8
    )
    if method == "e4m3":
        assert made.k_scale.shape == (3, 2)
        assert (made.k_scale[2] > 3 * made.k_scale[0]).all()
        alone = portattn.quantize(*(t[None, a:b] for t, (a, b) in zip((q, k, v), ((0, 30), (0, 50), (0, 50)),
                                                                        strict=True)), layout="bshd")  # fmt: skip
        torch.testing.assert_close(made.k[:50].float(), alone.k[0].float(), rtol=0, atol=0)
        torch.testing.assert_close(made.q_scale[:1], alone.q_scale, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_the_correction_has_the_scale_of_the_call(scale: float) -> None:
    given = tensors()
    made = portattn.quantize(*given, "sage")
    _, lse = portattn.attention(**made.arguments(scale=scale), return_lse=True)
    _, exact = portattn.attention(*(t.float() for t in given), scale=scale, return_lse=True)
    torch.testing.assert_close(made.corrected(lse, scale), exact, rtol=0, atol=scale)
    assert (made.corrected(lse) - exact).abs().max() > 2 * scale  # that of 1/√D, which is another one


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([0, 5, 3], r"cu_seqlens_k\[2\] is 3, but must be at least cu_seqlens_k\[1\], 5"),
        ([1, 3], r"cu_seqlens_k\[0\] is 1, but must be 0"), ([0, 99], r"cu_seqlens_k\[1\] is 99, .*packed rows, 6"),
    ],
)  # fmt: skip
def test_beginnings_that_cannot_be_are_refused(ends: list[int], said: str) -> None:
    rows = torch.randn(6, 2, 16, dtype=torch.float16)
    whole = torch.tensor([0, *[6] * (len(ends) - 1)], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=said):
        portattn.quantize(
            rows, rows, rows, "sage", cu_seqlens_q=whole, cu_seqlens_k=torch.tensor(ends, dtype=torch.int32)
        )


def test_without_smoothing_nothing_is_to_be_corrected() -> None:
    given = tensors()
    made = portattn.quantize(*given, "sage", smooth_k=False)
    out, lse = portattn.attention(**made.arguments(), sinks=torch.zeros(4), softcap=20.0, return_lse=True)
    exact, exact_lse = portattn.attention(*given, sinks=torch.zeros(4), softcap=20.0, return_lse=True)
    assert made.corrected(lse) is lse
    assert cosine(out, exact) >= 0.999
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=0.1)


def test_zeros_and_nothing_have_scales_of_one() -> None:
    q, k, v = (torch.zeros(1, 2, rows, 16) for rows in (3, 0, 0))
    made = portattn.quantize(q, k, v)
    assert all((s == 1.0).all() for s in (made.q_scale, made.k_scale, made.v_scale))
    assert not portattn.attention(**made.arguments()).any()
    sage = portattn.quantize(q.half(), k.half(), v.half(), "sage")
    assert not portattn.attention(**sage.arguments()).any()
    tiny = torch.full((1, 2, 3, 16), 1e-44)
    assert (portattn.quantize(tiny, tiny, tiny).k_scale > 0).all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "fp4"}, "method is 'fp4', but must be one of e4m3"),
    "scales": ({"scales": "row"}, "scales is 'row', but must be one of head, tensor"),
    "block": ({"block": 0}, "block is 0, but must be an integer ≥ 1"),
    "smooth_k": ({"smooth_k": 1}, "smooth_k is 1, but must be True or False"),
    "layout": ({"layout": "hbsd"}, "layout is 'hbsd'"),
    "float32": ({"method": "sage", "dtype": torch.float32}, "q.dtype is torch.float32"),
    "heads": ({"k": torch.ones(2, 3, 90, 32).bfloat16(), "v": torch.ones(2, 3, 90, 32).bfloat16()}, "q's heads is 4"),
    "batch": ({"q": torch.ones(3, 4, 70, 32).bfloat16()}, "k's batch is 2, but must be q's, 3"),
    "width": ({"q": torch.ones(2, 4, 70, 16).bfloat16()}, "k's head_dim is 32, but must be q's, 16"),
    "rank": ({"q": torch.ones(4, 70, 16)}, "q.ndim is 3"),
    "NaN": ({"v": torch.full((2, 2, 90, 24), float("nan")).bfloat16()}, "v is 'NaN or infinity'"),
    "cu alone": ({"cu_seqlens_q": torch.zeros(2).int()}, "q.ndim is 4"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_input_is_named(bad: tuple[dict[str, Any], str]) -> None:
    changes, said = dict(bad[0]), bad[1]
    q, k, v = tensors(changes.pop("dtype", torch.bfloat16))
    with pytest.raises(ArgumentError) as raised:
        portattn.quantize(**{"q": q, "k": k, "v": v} | changes)
    assert said in str(raised.value)


@pytest.mark.parametrize("feature", [{"softcap": 5.0}, {"sinks": torch.zeros(2)}])
def test_what_sees_the_mean_of_keys_is_refused_with_smoothed_ones(feature: dict[str, Any]) -> None:
    """A softcap's results are others then: the cosine to exact attention falls from 0.999 to 0.94."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 32, dtype=torch.bfloat16).unbind()
    k = k + 4 * torch.randn(32, dtype=torch.bfloat16)
    (name,) = feature
    with pytest.raises(ArgumentError, match=rf"arguments: {name} is .*smooth_k=False"):
        portattn.quantize(q, k, v, "sage").arguments(**feature)
    exact = portattn.attention(q, k, v, **feature).double().flatten()
    made = portattn.quantize(q, k, v, "sage", smooth_k=False)
    out = portattn.attention(**made.arguments(causal=False, **feature)).double().flatten()
    assert torch.cosine_similarity(out, exact, 0) > 0.995
    assert made.arguments(softcap=None).keys() == made.arguments().keys() | {"softcap"}


def test_corrected_names_a_wrong_lse() -> None:
    made = portattn.quantize(*tensors(), "sage")
    with pytest.raises(ArgumentError, match=r"lse is \(2, 70\), but must be a tensor of shape \(2, 4, 70\)"):
        made.corrected(torch.zeros(2, 70))


@pytest.mark.parametrize("method", ["e4m3", "sage"])
def test_the_layout_is_an_argument(method: str) -> None:
    """As many heads as rows: no shape tells the layouts apart."""
    q, k, v = torch.randn(3, 2, 6, 6, 16, generator=torch.Generator().manual_seed(0)).half().unbind()
    made = portattn.quantize(q, k, v, method, layout="bshd")
    expected = portattn.attention(q, k, v, layout="bshd")
    out = portattn.attention(**made.arguments()).to(expected.dtype)
    assert (out - expected).abs().max() < 0.2
    assert made.arguments(layout="bshd").keys() == made.arguments().keys()
    with pytest.raises(portattn.ArgumentError, match="layout is 'bhsd'"):
        made.arguments(layout="bhsd")
    assert "layout" not in portattn.quantize(q, k, v, method).arguments()
