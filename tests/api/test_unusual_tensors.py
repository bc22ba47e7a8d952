"""Tensors that do not simply lie in memory: fake, meta, and views whose negation is still to be done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opcalls import pretend_accelerator
from support import Device
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import portattn
from portattn.api import dispatch
from portattn.errors import ArgumentError
from portattn.launch import cache


def dense(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(2, heads, rows, 16) for heads, rows in ((8, 5), (2, 9), (2, 9)))
    return q.to(device), k.to(device), v.to(device)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view of their negation, which no kernel would see."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    assert torch.equal(view, tensor)
    return view


class _Counting(TorchDispatchMode):
    """A mode that looks at operators, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


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
    planned: list[Any] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *given: planned.append(given) or run(*given))
    cache.forget()
    portattn.attention(*real)
    portattn.attention(*real)
    assert len(planned) == 1, "the second call is a kept one"
    with FakeTensorMode() as mode:
        out = portattn.attention(*(mode.from_tensor(t) for t in real))
    assert isinstance(out, torch._subclasses.FakeTensor)
    portattn.attention(negated(real[0]), *real[1:])
    assert len(planned) == 2, "a view to be negated is no cached call"
    kinds = len(cache.every_kind())
    with _Counting() as counting:
        portattn.attention(*real)
        known = len(planned)
        portattn.attention(*real)
    assert counting.seen == ["portattn.attention.default"] * 2, "a mode sees operators, and a launch is none"
    assert len(planned) == known <= 3, "an operator's calls are kept; they may be of a kind of their own"
    assert len(cache.every_kind()) <= kinds + 1


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


class _Wrapper(torch.Tensor):
    """A tensor that wraps another, as DTensors do: no memory of its own, and an address of 0."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        size, stride = inner.shape, inner.stride()
        made = torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "portattn", f"{func} runs on a tensor without memory"
        return func(*(value.inner if isinstance(value, _Wrapper) else value for value in args))

    def __repr__(self, **other: Any) -> str:  # type: ignore[override]
        return "_Wrapper()"


def given_back(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was freed under it, as sharded training does with parameters."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_wrappers_of_tensors_get_the_operator(path: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would read from address 0: on a device that ends the process's context. A handle, which launches
    without torch's dispatcher, refuses them."""
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    q, k, v = dense(device.name)
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=device.name)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "seqlens_k": lengths, "backend": path}
    handle = portattn.prepare("decode_attention", **arguments)
    expected = handle.run(**arguments)
    for name in ("q", "k_cache", "v_cache", "seqlens_k"):
        wrapped = arguments | {name: _Wrapper(arguments[name])}
        with pytest.raises(ArgumentError, match=f"{name} is .* must lie in memory"):
            handle.run(**wrapped)
        assert torch.equal(portattn.decode_attention(**wrapped), expected)
    assert torch.equal(handle.run(**arguments), expected)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_a_first_call_of_a_tensor_whose_memory_was_freed_is_refused(
    path: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    q, k, v = dense(device.name)
    cache.forget()
    with pytest.raises(ArgumentError, match=r"k is 'a Tensor without memory of its own', but must lie in memory"):
        portattn.attention(q, given_back(k), v, backend=path)


def test_a_prepared_run_of_fake_tensors_gives_shapes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    real = dense(device.name)
    handle = portattn.prepare("attention", *real)
    mode = FakeTensorMode()
    out = handle.run(*(mode.from_tensor(t) for t in real))
    assert (type(out), out.shape) == (torch._subclasses.FakeTensor, real[0].shape)


def test_real_tensors_among_fake_ones_give_shapes(device: Device) -> None:
    """In such a mode what is allocated is fake: a kernel would write to address 0."""
    real = dense(device.name)
    portattn.attention(*real, backend=device.path)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = portattn.attention(*real, backend=device.path)
    assert (type(out), out.shape) == (torch._subclasses.FakeTensor, real[0].shape)


def test_a_negated_view_is_another_argument_of_a_prepared_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory holds the negated values, and its shape and strides are those of what was prepared."""
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    q, k, v = dense(device.name)
    handle = portattn.prepare("attention", q, k, v)
    with pytest.raises(ArgumentError, match=r"whether k is a view to be negated is True.*prepared with False"):
        handle.run(q, torch._neg_view(k), v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_the_inputs_and_nothing_inside(dtype: torch.dtype) -> None:
    """The reference path's products would be of that type: scores of 10⁵ are infinite in float16. A handle computes
    in the dtypes that it was prepared for."""
    q, k, v = (t * 100 for t in dense())
    prepared = portattn.attention(q, k, v)
    handle = portattn.prepare("attention", q, k, v)
    lower = [t.to(dtype) for t in (q, k, v)]
    expected = portattn.attention(*lower)
    assert expected.isfinite().all()
    asking, cast = q.clone().requires_grad_(), lower[0].clone().requires_grad_()
    [gradient] = torch.autograd.grad(portattn.attention(cast, *lower[1:]).sum(), cast)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(portattn.attention(q, k, v), expected)
        assert torch.equal(handle.run(q, k, v), prepared)
        assert (q @ k[:, :1].transpose(2, 3)).dtype == dtype, "autocast is on again"
        out = portattn.attention(asking, k, v)
    assert torch.equal(torch.autograd.grad(out.sum(), asking)[0], gradient.float())
