"""attention of jagged nested tensors: each sequence as it would be alone, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import Device

import portattn

QUERIES, KEYS = (3, 5, 0, 2), (4, 1, 3, 6)


def jagged(lengths: tuple[int, ...], heads: int, device: Device, width: int = 16) -> torch.Tensor:
    """(B, *, heads, width)"""
    rows = [torch.randn(n, heads, width, device=device.name) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def with_holes(like: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([1, 2, 0, 1], device=like.device)
    return torch.nested.nested_tensor_from_jagged(like.values().detach(), like.offsets(), lengths=lengths)


def each(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every sequence of (B, *, heads, width) as (1, heads, rows, width)."""
    ends = itertools.pairwise(tensor.offsets().tolist())
    values = tensor.values()
    return [values[a:b].transpose(0, 1)[None] for a, b in ends]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "values",
    [{}, {"causal": True, "window": (2, 0)}, {"softcap": 3.0, "scale": 0.3}],
    ids=["plain", "window", "softcap"],
)
def test_jagged_tensors(values: dict[str, Any], layout: str, device: Device) -> None:
    q, k, v = jagged(QUERIES, 4, device), jagged(KEYS, 2, device), jagged(KEYS, 2, device, 24)
    k = torch.nested.nested_tensor_from_jagged(k.values().detach(), v.offsets()).requires_grad_()
    sinks = torch.randn(4, device=device.name)
    given = (q, k, v) if layout == "bshd" else tuple(t.transpose(1, 2) for t in (q, k, v))
    out, lse = portattn.attention(*given, **values, sinks=sinks, layout=layout, return_lse=True)
    assert out.is_nested
    assert lse.is_nested
    rows = out if layout == "bshd" else out.transpose(1, 2)
    alone = [
        portattn.attention(*one, **values, sinks=sinks, return_lse=True)
        for one in zip(each(q), each(k), each(v), strict=True)
    ]
    for found, (expected, _) in zip(each(rows), alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for found, (_, expected) in zip(each(lse.transpose(1, 2)[..., None]), alone, strict=True):
        torch.testing.assert_close(found[..., 0], expected, atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(rows.values().sin().sum(), (q, k, v), retain_graph=True)
    theirs = torch.autograd.grad(sum(o.sin().sum() for o, _ in alone), (q, k, v))
    for g, t in zip(mine, theirs, strict=True):
        torch.testing.assert_close(g.values(), t.values(), atol=1e-5, rtol=1e-4)


def test_the_result_goes_on_with_its_queries(device: Device) -> None:
    """Its sequences are q's: torch adds jagged tensors of the same sequences only."""
    q = jagged(QUERIES, 4, device)
    out = portattn.attention(q, q, q, layout="bshd")
    assert torch.equal((out + q).values(), out.values() + q.values())


def test_jagged_tensors_in_a_compiled_function(device: Device) -> None:
    torch._dynamo.reset()
    q = jagged(QUERIES, 4, device)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return portattn.attention(q.sin(), q, q, causal=True, layout="bshd") * 2

    found = torch.compile(layer, backend="aot_eager")(q)
    torch.testing.assert_close(found.values(), layer(q).values())


def test_what_packed_rows_cannot_have_is_named(device: Device) -> None:
    q, k = jagged(QUERIES, 4, device), jagged(KEYS, 2, device)
    dense = torch.randn(4, 5, 4, 16, device=device.name)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "mask is .* but goes with dense tensors only"),
        ({"layout": "bhsd"}, r"q is .*ragged at the star"),
        ({"k": dense}, "q is 'a jagged nested tensor', but must be a dense"),
        ({"q": with_holes(q)}, "q is 'jagged with holes', but must have no holes"),
        ({"v": jagged((4, 1, 2, 7), 2, device)}, "v is .* must have the sequences of k"),
    ]
    for change, words in wrong:
        given: dict[str, Any] = {"q": q, "k": k, "v": k, "layout": "bshd"} | change
        with pytest.raises(portattn.ArgumentError, match=words):
            portattn.attention(**given)


def test_a_plan_of_jagged_tensors_is_of_packed_rows(device: Device) -> None:
    q = jagged(QUERIES, 4, device)
    plan = portattn.plan("attention", q, q, q, layout="bshd")
    assert (plan.problem.op, plan.problem.total_q) == ("varlen_attention", sum(QUERIES))
    assert "varlen_attention" in portattn.explain("attention", q, q, q, layout="bshd")
