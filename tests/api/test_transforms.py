"""torch.func: what grad, vjp, jacrev and vmap make of a call is what they make of torch's own attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Device
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import portattn

Attention = Callable[..., torch.Tensor]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return portattn.attention(q, k, v, causal="top_left")


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """By plain products: the rules of vmap for torch's fused kernels are incomplete (2.11 on CUDA: "LSE is not
    correctly aligned")."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def loss(f: Attention, v: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda q, k: f(q, k, v).sin().sum()


def under_no_grad(f: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    def inner(q: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return f(q, k, v).sum() + q.sum()

    return grad(lambda q: inner(q) + q.sum())(q)


def inner_gradient_under_no_grad(f: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    def inner(q: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return grad(loss(f, v))(q, k).sum() + q.sum()

    return grad(lambda q: inner(q) + q.sum())(q)


def backward_through_vmap(f: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    leaf = q.detach().clone().requires_grad_()
    vmap(lambda q: f(q, k[0], v[0]))(leaf).sin().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


# Of q, k, v with one axis more than a call takes.
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, q, k, v: vmap(f)(q, k, v),
    "vmap of some": lambda f, q, k, v: vmap(f, in_dims=(0, None, None))(q, k[0], v[0]),
    "vmap of the keys alone": lambda f, q, k, v: vmap(f, in_dims=(None, 0, 0))(q[0], k, v),
    "vmap elsewhere": lambda f, q, k, v: vmap(f, in_dims=(1, None, 2), out_dims=1)(
        q.movedim(0, 1), k[0], v.movedim(0, 2)
    ),
    "vmap in parts": lambda f, q, k, v: vmap(f, chunk_size=2)(q, k, v),
    "vmap of vmap": lambda f, q, k, v: vmap(vmap(lambda q, k, v: f(q[None], k[None], v[None])))(q, k, v),
    "grad": lambda f, q, k, v: grad(loss(f, v[0]), argnums=(0, 1))(q[0], k[0]),
    "vjp": lambda f, q, k, v: vjp(f, q[0], k[0], v[0])[1](torch.ones_like(q[0])),
    "jacrev": lambda f, q, k, v: jacrev(lambda q: f(q, k[0], v[0]).sum((0, 1, 2)))(q[0]),
    "vmap of grad": lambda f, q, k, v: vmap(grad(loss(f, v[0]), argnums=(0, 1)))(q, k),
    "grad of vmap": lambda f, q, k, v: grad(lambda q: vmap(f)(q, k, v).sin().sum())(q),
    "backward through vmap": backward_through_vmap,
    "functionalize": lambda f, q, k, v: functionalize(f)(q[0], k[0], v[0]),
    "grad under no_grad": lambda f, q, k, v: under_no_grad(f, q[0], k[0], v[0]),
    "grad of grad under no_grad": lambda f, q, k, v: inner_gradient_under_no_grad(f, q[0], k[0], v[0]),
}  # fmt: skip


def tensors(device: Device) -> list[torch.Tensor]:
    return [torch.randn(3, 2, 4, 6, 16, device=device.name) for _ in range(3)]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transformed_call(transform: str, device: Device) -> None:
    q, k, v = tensors(device)
    before = ours(q[0], k[0], v[0])
    found, expected = (TRANSFORMS[transform](f, q, k, v) for f in (ours, torchs))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(ours(q[0], k[0], v[0]), before)  # no transform is left half done


def test_vmap_over_an_axis_without_elements(device: Device) -> None:
    """torch's own attention has no rule for it."""
    q, k, v = (t[:0] for t in tensors(device))
    assert vmap(ours)(q, k, v).shape == q.shape
    lengths = torch.tensor([0, 4, 6], dtype=torch.int32, device=device.name)
    packed = q[:, 0].movedim(-2, 1)  # (0, 6, 4, 16)
    varlen = vmap(lambda q: portattn.varlen_attention(q, q, q, lengths, lengths, 4, 4))
    assert varlen(packed).shape == packed.shape


@pytest.mark.parametrize("transform", ["vmap", "grad", "vmap of grad", "jacrev"])
def test_a_transformed_call_is_compiled(transform: str, device: Device) -> None:
    q, k, v = tensors(device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: TRANSFORMS[transform](ours, q, k, v), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), TRANSFORMS[transform](torchs, q, k, v), atol=2e-5, rtol=1e-4)


# Arguments beside q, k, v for three calls, and how torch's attention or the calls one by one have them.
MAPPED: dict[str, Callable[[], torch.Tensor]] = {
    "mask": lambda: torch.rand(3, 6, 6) > 0.3, "bias": lambda: torch.randn(3, 4, 6, 6),
    "alibi_slopes": lambda: torch.rand(3, 4), "sinks": lambda: torch.randn(3, 4),
    "seqlens_k": lambda: torch.tensor([[3, 4], [5, 6], [0, 2]], dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("argument", MAPPED)
def test_vmap_of_other_tensors(argument: str, lse: bool, device: Device) -> None:
    q, k, v = tensors(device)
    given = MAPPED[argument]().to(device.name)

    def call(q: torch.Tensor, given: torch.Tensor) -> Any:
        return portattn.attention(q, k[0], v[0], return_lse=lse, **{argument: given})

    several = [call(one, other) for one, other in zip(q, given, strict=True)]
    expected = tuple(map(torch.stack, zip(*several, strict=True))) if lse else torch.stack(several)
    torch.testing.assert_close(vmap(call)(q, given), expected, atol=1e-5, rtol=1e-5)
    last = vmap(call, in_dims=(0, -1))(q, given.movedim(0, -1))  # strides that are vmap's own
    torch.testing.assert_close(last, expected, atol=1e-5, rtol=1e-5)
    alone = vmap(lambda given: call(q[1], given))(given)  # q is not mapped
    torch.testing.assert_close(alone[1] if lse else alone, torch.stack([_last(call(q[1], g)) for g in given]))


def _last(found: Any) -> torch.Tensor:
    made: torch.Tensor = found[1] if isinstance(found, tuple) else found
    return made


def test_vmap_of_packed_sequences(device: Device) -> None:
    """An operation that has no batch axis is called once for each index."""
    lengths = torch.tensor([0, 3, 3, 10], dtype=torch.int32, device=device.name)
    q, k, v = (torch.randn(3, 10, heads, 16, device=device.name) for heads in (4, 2, 2))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return portattn.varlen_attention(q, k, v, lengths, lengths, 7, 7, causal=True)

    expected = torch.stack([call(*one) for one in zip(q, k, v, strict=True)])
    torch.testing.assert_close(vmap(call)(q, k, v), expected)


FORWARD: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, q: jvp(f, (q,), (q,)), "jacfwd": lambda f, q: jacfwd(f)(q), "hessian": lambda f, q: hessian(f)(q),
}  # fmt: skip


@pytest.mark.parametrize("transform", FORWARD)
def test_forward_mode_is_refused(transform: str, device: Device) -> None:
    q, k, v = (t[0] for t in tensors(device))
    with pytest.raises(portattn.TracingError, match=r"attention: forward-mode derivatives .* are not computed"):
        FORWARD[transform](lambda q: ours(q, k, v), q)


def test_dual_tensors_are_refused_and_others_beside_them_are_not(device: Device) -> None:
    import torch.autograd.forward_ad as forward_ad

    q, k, v = (t[0] for t in tensors(device))
    with forward_ad.dual_level():
        with pytest.raises(portattn.TracingError, match="forward-mode"):
            ours(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert torch.equal(ours(q, k, v), ours(q, k, v))


def test_second_derivatives_are_refused(device: Device) -> None:
    """They would be 0 otherwise: nobody would notice."""
    q, k, v = (t[0] for t in tensors(device))
    with pytest.raises(portattn.TracingError, match="attention: second derivatives"):
        grad(lambda q: grad(loss(ours, v))(q, k).sum())(q)


def test_second_derivatives_of_an_eager_call_are_right(device: Device) -> None:
    """On the reference, which torch differentiates."""

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT / 4).masked_fill(torch.ones(6, 6, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    def referred(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return portattn.attention(q, k, v, causal="top_left", backend="reference")

    q, k, v = (t[0].requires_grad_() for t in tensors(device))
    found = []
    for f in (referred, plain):
        (first,) = torch.autograd.grad(f(q, k, v).sin().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), q)[0])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("size", [3, 0])
def test_vmap_of_calls_with_arguments_that_are_lists(size: int, device: Device) -> None:
    q, sinks = torch.randn(3, 1, 2, 6, 16, device=device.name)[:size], torch.randn(3, 2, device=device.name)[:size]

    def call(q: torch.Tensor, sinks: torch.Tensor) -> Any:
        return portattn.attention(q, q, q, sinks=sinks, window=(3, 0))

    found = vmap(call)(q, sinks)
    assert found.shape == q.shape
    for one, mine, sink in zip(q, found, sinks, strict=True):
        torch.testing.assert_close(mine, call(one, sink), atol=1e-5, rtol=1e-5)


def test_vmap_of_one_sequence_with_lengths_that_are_not_mapped(device: Device) -> None:
    k, q = torch.randn(4, 1, 2, 9, 16, device=device.name), torch.ones(1, 2, 1, 16, device=device.name)
    lengths = torch.tensor([5], dtype=torch.int32, device=device.name)
    for call in (
        lambda k: portattn.decode_attention(q, k, k, lengths),
        lambda k: portattn.attention(q, k, k, leftpad_k=lengths),
    ):
        torch.testing.assert_close(vmap(call)(k), torch.stack([call(one) for one in k]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ask", ["plan", "explain", "prepare"])
def test_plans_are_not_asked_for_inside_of_a_transform(ask: str, device: Device) -> None:
    q = torch.randn(3, 1, 2, 6, 16, device=device.name)
    with pytest.raises(portattn.TracingError, match=f"(plan|{ask}): torch.func has the tensors"):
        vmap(lambda q: (getattr(portattn, ask)("attention", q, q, q), q)[1])(q)


def test_a_chunk_goes_through_graphs_transforms_and_handles() -> None:
    """chunk is one integer in the operator's schema, part of a prepared call's key, and of a graph's constants."""
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    at, key = torch.arange(40)[:, None], torch.arange(40)
    mask = (at // 7 == key // 7) & (key <= at)
    expected = portattn.attention(q, k, v, mask=mask, backend="reference")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return portattn.attention(q, k, v, causal=True, chunk=7)  # type: ignore[return-value]

    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return call(q, k, v)

    exported = torch.export.export(Module(), (q, k, v)).module()(q, k, v)
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)(q, k, v)
    mapped = torch.func.vmap(call)(*(x.expand(2, *x.shape) for x in (q, k, v)))[1]
    handle = portattn.prepare("attention", q, k, v, causal=True, chunk=7)
    for found in (exported, compiled, mapped, handle.run(q, k, v, causal=True, chunk=7), call(q, k, v)):
        assert torch.allclose(found, expected, atol=1e-5)
    with pytest.raises(portattn.ArgumentError, match="chunk is 8, but the call was prepared with 7"):
        handle.run(q, k, v, causal=True, chunk=8)


@pytest.mark.parametrize(
    ("name", "shape", "mapped"),
    [("seqlens_k", (1,), None), ("seqlens_k", (3,), None), ("seqlens_k", (4,), 0), ("alibi_slopes", (1, 3), None),
     ("alibi_slopes", (5, 3), None)],
)  # fmt: skip
def test_vmap_refuses_what_a_loop_refuses(name: str, shape: tuple[int, ...], mapped: int | None) -> None:
    q, k = torch.randn(4, 2, 3, 5, 8), torch.randn(4, 2, 3, 7, 8)
    value = torch.full(shape, 3, dtype=torch.int32 if name == "seqlens_k" else torch.float32)
    with pytest.raises(portattn.ArgumentError, match=rf"{name}\.shape"):
        torch.vmap(lambda q, k, value: portattn.attention(q, k, k, **{name: value}), (0, 0, mapped))(q, k, value)
