"""into(): a result in memory that the caller brings. A CPU copies it; kernels: tests/launch/test_hot_path.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import portattn
from portattn.api.out_argument import into
from portattn.errors import ArgumentError

Q = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(1))
NAN = float("nan")


def paged(**changed: Any) -> dict[str, Any]:
    pages = torch.randn(6, 4, 2, 16, generator=torch.Generator().manual_seed(2))
    table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    given = {"q": Q[:, :, :1], "k_pages": pages, "v_pages": pages, "page_table": table}
    return given | {"seqlens_k": torch.tensor([7, 3], dtype=torch.int32), "return_lse": False} | changed


def strided() -> torch.Tensor:
    return torch.full((5, 16, 4, 2), NAN).permute(3, 2, 0, 1)


def part() -> torch.Tensor:
    """Rows of a larger buffer, whose others must stay."""
    return torch.full((3, 4, 5, 16), NAN)[1:]


@pytest.mark.parametrize("make", [lambda: torch.full_like(Q, NAN), strided, part], ids=["alike", "strided", "part"])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_result(make: Callable[[], torch.Tensor], causal: bool) -> None:
    wanted = portattn.attention(Q, Q, Q, causal=causal)
    for _ in range(3):  # the first of its kind, and later ones
        place = make()
        whole = place._base if place._base is not None and place._base.shape[0] == 3 else None
        assert into(place, "attention", Q, Q, Q, causal=causal) is place
        assert torch.equal(place, wanted)
        assert whole is None or whole[0].isnan().all()


def test_pages_and_positional_arguments() -> None:
    given = paged()
    wanted = portattn.paged_attention(**given)
    place = torch.full_like(wanted, NAN)
    assert into(place, "paged_attention", *list(given.values())[:5]) is place
    assert torch.equal(place, wanted)
    given["page_table"] = portattn.PageTable(
        given["page_table"], torch.tensor([2, 1], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    )
    del given["seqlens_k"]
    again = torch.full_like(wanted, NAN)
    assert torch.equal(into(again, "paged_attention", **given), wanted)


def test_over_its_own_query() -> None:
    wanted, q = portattn.attention(Q, Q, Q), Q.clone()
    for _ in range(2):
        q.copy_(Q)
        assert torch.equal(into(q, "attention", q, q, q), wanted)


def test_in_a_compiled_function_and_under_autocast() -> None:
    def step(place: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return into(place, "attention", q, q, q) + 1

    place = torch.full_like(Q, NAN)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(place, Q), place + 1)
    assert torch.equal(place, portattn.attention(Q, Q, Q))
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.full_like(Q, NAN, dtype=torch.bfloat16)
        assert torch.equal(into(half, "attention", Q, Q, Q), portattn.attention(Q, Q, Q))


@pytest.mark.parametrize(
    ("place", "more", "text"),
    [
        (torch.full((2, 4, 5, 8), NAN), {}, "must be as the result: (2, 4, 5, 16), torch.float32, cpu"),
        (torch.full_like(Q, NAN, dtype=torch.bfloat16), {}, "must be as the result"),
        (torch.full_like(Q, NAN).requires_grad_(), {}, "must be False: results in given memory have no gradient"),
        (torch.full_like(Q, NAN), {"return_lse": True}, "must be False: there is a place for out alone"),
        (torch.full_like(Q, NAN), {"causal": "left"}, "causal"),
    ],
    ids=["width", "dtype", "gradient", "lse", "the operation's own"],
)
def test_what_cannot_be_is_said_and_nothing_is_written(place: torch.Tensor, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        into(place, "attention", Q, Q, Q, **more)
    assert text in str(error.value)
    assert place.detach().isnan().all()


@pytest.mark.parametrize(("place", "q", "text"), [
    ([NAN], Q, "place is 'list', but must be a torch.Tensor"),
    (torch.full_like(Q, NAN), Q.to_sparse(), "q is 'a torch.sparse_coo tensor', but must be a dense"),
], ids=["no tensor", "sparse queries"])  # fmt: skip
def test_what_has_no_memory(place: Any, q: torch.Tensor, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        into(place, "attention", q, Q, Q)


def test_no_gradients() -> None:
    place, q = torch.full_like(Q, NAN), Q.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="have no gradient"):
        into(place, "attention", q, q, q)
    assert place.isnan().all()
    with torch.no_grad():
        assert torch.equal(into(place, "attention", q, q, q), portattn.attention(Q, Q, Q))


def test_under_a_transform_it_is_a_copy() -> None:
    """Tensors of torch.func have no memory of their own to look at."""
    x = torch.randn(3, 1, 2, 5, 16)
    found = torch.func.vmap(lambda one: into(torch.empty_like(one), "attention", one, one, one))(x)
    expected = torch.stack([portattn.attention(one, one, one) for one in x])
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("op", ["append_kv", "no_such_operation"])
def test_an_operation_without_a_result_is_named(op: str) -> None:
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(portattn.ArgumentError, match=f"op is '{op}', but must be one of attention, .*varlen_attention"):
        into(torch.empty(1), op, q, q, q)
