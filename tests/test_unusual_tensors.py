"""Tensors that do not simply lie in memory: fake, meta, nested, and views whose negation is still to be done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opcalls import pretend_accelerator
from support import Device
from torch._subclasses import FakeTensorMode

import portattn
from portattn import dispatch, fastpath, request
from portattn.errors import ArgumentError


def dense(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(2, heads, rows, 16) for heads, rows in ((8, 5), (2, 9), (2, 9)))
    return q.to(device), k.to(device), v.to(device)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view of their negation, which no kernel would see."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    assert torch.equal(view, tensor)
    return view


@pytest.mark.parametrize("validate", [None, True])
def test_fake_tensors_give_shapes(validate: bool | None) -> None:
    with FakeTensorMode():
        q, k, v = dense()
        lengths = torch.tensor([3, 4], dtype=torch.int32)
        out, lse = portattn.attention(q, k, v, seqlens_k=lengths, return_lse=True, validate=validate)
        assert (tuple(out.shape), tuple(lse.shape), lse.dtype) == ((2, 8, 5, 16), (2, 8, 5), torch.float32)
        by_rows = portattn.attention(*(t.transpose(1, 2) for t in (q, k, v)), layout="bshd")
    assert tuple(by_rows.shape) == (2, 5, 8, 16)
    assert portattn.attention(*dense("meta")).shape == (2, 8, 5, 16)


def test_fake_tensors_never_reach_a_kept_launch(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has the shape of a real one, and an address of 0."""
    real = dense(device.name)
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    calls: list[Any] = []
    original = dispatch.kept
    monkeypatch.setattr(fastpath, "recent", {})
    monkeypatch.setattr(request, "_recent", {})
    monkeypatch.setattr(dispatch, "kept", lambda *given: calls.append(original(*given)) or calls[-1])
    portattn.attention(*real)
    portattn.attention(*real)
    assert [call is not None for call in calls] == [False, True]
    with FakeTensorMode() as mode:
        out = portattn.attention(*(mode.from_tensor(t) for t in real))
    assert isinstance(out, torch._subclasses.FakeTensor)
    portattn.attention(negated(real[0]), *real[1:])
    assert len(calls) == 2


@pytest.mark.parametrize("path", ["reference", "kernels"])
def test_negated_views_of_q_k_and_v_are_copied(device: Device, path: str) -> None:
    q, k, v = dense(device.name)
    backend = device.path if path == "kernels" else path
    expected = portattn.attention(q, k, v, backend=backend)
    assert torch.equal(portattn.attention(negated(q), negated(k), negated(v), backend=backend), expected)


@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes"])
def test_other_negated_views_are_refused(name: str) -> None:
    shape = (9,) if name == "bias" else (8,)
    with pytest.raises(ArgumentError, match=f"{name} is 'a view to be negated'.*resolve_neg"):
        portattn.attention(*dense(), **{name: negated(torch.randn(shape))})


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(4, 5, 16)], layout=torch.jagged)
    with pytest.raises(ArgumentError, match=r"q is 'a nested tensor'.*varlen_attention takes packed rows"):
        portattn.attention(nested, *dense()[1:])
