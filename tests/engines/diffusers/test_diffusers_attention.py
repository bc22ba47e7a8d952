"""dispatch_attention_fn by portattn: every argument, against the definition in float64, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import support
import torch
from calls import assert_right, definition, dispatch, qkv

import portattn
from portattn.errors import ArgumentError

if TYPE_CHECKING:
    from portattn.integrations.diffusers import DiffusersRegistration


def check(
    handle: Any, tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None, meant: torch.Tensor | None = None,
    **named: Any,
) -> None:  # fmt: skip
    """A call, its LSE and its memory order. meant: the mask as it broadcasts to (B, Hq, Sq, Sk)."""
    options = {name: named[name] for name in ("is_causal", "scale") if name in named}
    meant = mask if meant is None else meant
    added = meant if meant is None or meant.dtype is torch.bool else meant.double()
    right, right_lse = definition(*(tensor.double() for tensor in tensors), added, **options)
    same, same_lse = definition(*tensors, meant, **options)
    out, lse = dispatch(handle, *tensors, attn_mask=mask, return_lse=True, **named)
    assert_right(out, same, right)
    assert out.dtype == tensors[0].dtype
    assert out.is_contiguous()  # models flatten it
    assert lse.dtype == torch.float32
    finite = right_lse.isfinite()
    assert torch.equal(finite, lse.isfinite())
    assert_right(lse[finite], same_lse.float()[finite], right_lse[finite])
    alone = dispatch(handle, *tensors, attn_mask=mask, **named)
    assert torch.equal(alone, out)


@pytest.mark.engine_feature("attention in both directions, cross-attention")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_a_mask(kernels: DiffusersRegistration, device: support.Device, dtype: torch.dtype) -> None:
    check(kernels, qkv(dtype=dtype, device=device.name))
    check(kernels, qkv(rows=1, keys=40, width=24, dtype=dtype, device=device.name), scale=0.3)


@pytest.mark.engine_feature("is_causal, aligned at the top left")
@pytest.mark.parametrize(("rows", "keys"), [(19, 19), (7, 23), (23, 7)])
def test_causal(kernels: DiffusersRegistration, device: support.Device, rows: int, keys: int) -> None:
    check(kernels, qkv(rows=rows, keys=keys, device=device.name), is_causal=True)


@pytest.mark.engine_feature("enable_gqa")
@pytest.mark.parametrize("heads_k", [1, 2])
def test_grouped_heads(kernels: DiffusersRegistration, device: support.Device, heads_k: int) -> None:
    check(kernels, qkv(heads_k=heads_k, device=device.name), enable_gqa=True)


SHAPES = {
    "(B, Sk)": (2, 23), "(1, Sk)": (1, 23), "(Sq, Sk)": (19, 23), "(1, Sq, Sk)": (1, 19, 23),
    "(B, 1, 1, Sk)": (2, 1, 1, 23), "(B, 1, Sq, Sk)": (2, 1, 19, 23), "(B, Hq, Sq, Sk)": (2, 4, 19, 23),
}  # fmt: skip


@pytest.mark.engine_feature("masks: boolean, of (B, Sk), (Sq, Sk) or four axes")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_boolean_masks(kernels: DiffusersRegistration, device: support.Device, shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, device=device.name) > 0.4
    check(kernels, qkv(device=device.name), mask, mask[:, None, None] if shape == (2, 23) else mask)


@pytest.mark.engine_feature("masks: added to the scores, in query's dtype or float32")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_added_masks(kernels: DiffusersRegistration, device: support.Device, shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape, device=device.name)
    mask[..., 3] = -math.inf
    check(kernels, qkv(device=device.name), mask, mask[:, None, None] if shape == (2, 23) else mask)


@pytest.mark.engine_feature("masks: added to the scores, in query's dtype or float32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_added_mask_beside_half_precision(
    kernels: DiffusersRegistration, device: support.Device, dtype: torch.dtype
) -> None:  # fmt: skip
    mask = torch.randn(2, 1, 1, 23, device=device.name).to(dtype)
    tensors = qkv(dtype=torch.bfloat16, device=device.name)
    right = definition(*(t.double() for t in tensors), mask.double())[0]
    out = dispatch(kernels, *tensors, attn_mask=mask)
    assert_right(out, definition(*tensors, mask.bfloat16())[0], right)


@pytest.mark.engine_feature("keys that a mask hides may hold NaN")
@pytest.mark.parametrize("poisoned", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
def test_hidden_keys_hold_nan(
    kernels: DiffusersRegistration, device: support.Device, poisoned: int, added: bool
) -> None:
    """One row of the mask hides everything: it gives 0."""
    tensors = qkv(device=device.name)
    mask = torch.ones(2, 1, 19, 23, dtype=torch.bool, device=device.name)
    mask[1, :, :, 9:] = False
    mask[0, :, 4] = False
    given = torch.zeros(mask.shape, device=device.name).masked_fill(~mask, -math.inf) if added else mask
    before = dispatch(kernels, *tensors, attn_mask=given)
    tensors[poisoned][1, 9:] = math.nan
    after = dispatch(kernels, *tensors, attn_mask=given)
    assert torch.equal(before, after)
    assert (after[0, 4] == 0).all()


@pytest.mark.engine_feature("no queries, no keys, no batch")
@pytest.mark.parametrize("sizes", [{"rows": 0}, {"keys": 0}, {"batch": 0}], ids=str)
def test_nothing_to_do(registered: DiffusersRegistration, sizes: dict[str, int]) -> None:
    tensors = qkv(**sizes)  # type: ignore[arg-type]
    out, lse = dispatch(registered, *tensors, return_lse=True)
    assert out.shape == tensors[0].shape
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert lse.shape == tensors[0].shape[:3]


@pytest.mark.engine_feature("new shapes each call")
def test_new_shapes_each_call(kernels: DiffusersRegistration, device: support.Device) -> None:
    for rows in (3, 17, 40, 5):
        check(kernels, qkv(rows=rows, keys=2 * rows, batch=1 + rows % 2, device=device.name))


@pytest.mark.engine_feature("gradients, of a mask too")
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "an added mask"])
def test_gradients(kernels: DiffusersRegistration, device: support.Device, masked: bool) -> None:
    tensors = qkv(device=device.name, requires_grad=True)
    mask = torch.randn(2, 1, 19, 23, device=device.name, requires_grad=True) if masked else None
    leaves = [*tensors, *([mask] if mask is not None else [])]
    grads = {}
    weights = torch.randn(2, 19, 4, 16, device=device.name)
    for name in ("ours", "same", "right"):
        given = [leaf.detach().to(torch.float64 if name == "right" else leaf.dtype).requires_grad_() for leaf in leaves]
        if name == "ours":
            out = dispatch(kernels, *given[:3], attn_mask=given[3] if masked else None)
        else:
            out = definition(*given)[0]
        grads[name] = torch.autograd.grad((out * weights).sum(), given)
    for ours, same, right in zip(grads["ours"], grads["same"], grads["right"], strict=True):
        assert_right(ours, same, right)


@pytest.mark.engine_feature("dropout_p")
def test_dropout(kernels: DiffusersRegistration, device: support.Device) -> None:
    """What is dropped is portattn's own choice: the mean over many values is what it is without."""
    q, k, _ = qkv(keys=200, device=device.name)
    value = torch.ones(2, 200, 4, 16, device=device.name)
    torch.manual_seed(3)
    out = dispatch(kernels, q, k, value, dropout_p=0.25)
    again = dispatch(kernels, q, k, value, dropout_p=0.25)
    assert not torch.equal(out, again)
    assert abs(float(out.mean()) - 1.0) < 0.05
    torch.manual_seed(3)
    assert torch.equal(dispatch(kernels, q, k, value, dropout_p=0.25), out)


@pytest.mark.engine_feature("autocast")
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "an added mask"])
def test_autocast(kernels: DiffusersRegistration, device: support.Device, masked: bool) -> None:
    tensors = qkv(device=device.name)
    mask = torch.randn(2, 1, 1, 23, device=device.name) if masked else None
    with torch.autocast(device.name, torch.bfloat16):
        out = dispatch(kernels, *tensors, attn_mask=mask)
    assert out.dtype == torch.bfloat16
    half = tuple(tensor.bfloat16() for tensor in tensors)
    assert torch.equal(out, dispatch(kernels, *half, attn_mask=mask))


@pytest.mark.engine_feature("torch.compile with fullgraph=True")
@pytest.mark.parametrize("case", ["plain", "mask", "causal", "lse", "autocast"])
def test_compiled(registered: DiffusersRegistration, case: str) -> None:
    tensors = qkv(heads_k=2)
    named: dict[str, Any] = {
        "mask": {"attn_mask": torch.rand(2, 23) > 0.4}, "causal": {"is_causal": True}, "lse": {"return_lse": True},
    }.get(case, {})  # fmt: skip

    def call(*tensors: torch.Tensor) -> Any:
        return dispatch(registered, *tensors, enable_gqa=True, **named)

    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
        expected = call(*tensors)
    for ours, right in zip(*((r if case == "lse" else (r,)) for r in (found, expected)), strict=True):
        assert torch.equal(ours, right)


def refusals() -> list[Any]:
    """name -> how the call differs from one that works, and what the error says."""
    half = torch.zeros(2, 1, 1, 23, dtype=torch.float16)
    whole = torch.ones(2, 23, dtype=torch.long)
    seen = torch.ones(19, 23, dtype=torch.bool)
    cases = {
        "float64": ({"dtype": torch.float64}, {}, "float64"),
        "a mask beside is_causal": ({}, {"attn_mask": seen, "is_causal": True}, "is_causal is True"),
        "a mask of integers": ({}, {"attn_mask": whole}, r"attn_mask\.dtype is torch\.int64"),
        "an added mask in another dtype than query's or float32": ({}, {"attn_mask": half},
            r"attn_mask\.dtype is torch\.float16"),
        "a mask of three axes, which could be of sequences or of heads": ({}, {"attn_mask": seen.expand(2, 19, 23)},
            r"attn_mask\.shape is \(2, 19, 23\)"),
        "a mask of one axis": ({}, {"attn_mask": seen[0]}, r"attn_mask\.shape is \(23,\)"),
        "a mask of other sizes than the scores": ({}, {"attn_mask": seen[:, :9]}, "mask"),
        "fewer key heads without enable_gqa": ({"heads_k": 2}, {}, "enable_gqa is False"),
        "key heads that do not divide query's": ({"heads_k": 3}, {"enable_gqa": True}, "3"),
        "dropout_p of 1": ({}, {"dropout_p": 1.0}, r"dropout_p is 1\.0"),
    }  # fmt: skip
    return [
        pytest.param(*case, id=name, marks=pytest.mark.engine_feature(name, refused=True))
        for name, case in cases.items()
    ]


@pytest.mark.parametrize(("sizes", "named", "says"), refusals())
def test_what_is_refused(
    registered: DiffusersRegistration, sizes: dict[str, Any], named: dict[str, Any], says: str,
    refusal: Callable[..., Any],
) -> None:  # fmt: skip
    with refusal(ArgumentError, match=says):
        dispatch(registered, *qkv(**sizes), **named)


def test_a_refusal_of_what_is_compiled(registered: DiffusersRegistration) -> None:
    """Without fullgraph the graph breaks where it is raised, and the error is the same."""
    with pytest.raises(Exception, match="enable_gqa is False, but must be True where key has 2 heads and query 4"):
        torch.compile(lambda *tensors: dispatch(registered, *tensors), backend="eager")(*qkv(heads_k=2))


def test_a_tensor_of_three_axes(registered: DiffusersRegistration) -> None:
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=r"query\.shape is \(2, 19, 64\), but must be \(B, S, H, D\)"):
        dispatch(registered, q.flatten(2), k, v)


def test_diffusers_checks_may_be_on(registered: DiffusersRegistration, monkeypatch: pytest.MonkeyPatch) -> None:
    """DIFFUSERS_ATTN_CHECKS: no argument is reported as removed."""
    from diffusers.models import attention_dispatch

    said: list[str] = []
    monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_checks_enabled", True)
    monkeypatch.setattr(attention_dispatch.logger, "warning", said.append)
    dispatch(registered, *qkv(), return_lse=True)
    assert said == []
    assert portattn.last_plan() is not None
