"""A tensor that is only a shape has the sizes and strides that torch's own views have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from portattn.launch.symbolic_tensor import SymbolicTensor, TensorKind
from portattn.schema.symbolic_int import Trace, Untraceable
from portattn.schema.tensors import spans

SIZES = (0, 1, 1, 2, 3, 16)


def layouts(count: int, ndim: int) -> list[torch.Tensor]:
    """Tensors on the meta device of random sizes, with contiguous, spaced, swapped, and random strides."""
    rng, found = random.Random(5), []
    for _ in range(count):
        shape = [rng.choice(SIZES) for _ in range(ndim)]
        spaced = torch.empty([2 * n + 1 for n in shape], device="meta")[tuple(slice(n) for n in shape)]
        strides = [rng.choice((0, 1, 2, 8, 100)) for _ in shape]
        found += [torch.empty(shape, device="meta"), spaced, torch.empty(shape, device="meta").transpose(0, -1)]
        found.append(torch.empty_strided(shape, strides, device="meta"))
    return found


def shaped(tensor: torch.Tensor) -> SymbolicTensor:
    kind = TensorKind(tensor.dtype, tensor.device, tensor.ndim, 0, False)
    return SymbolicTensor.make(kind, tensor.shape, tensor.stride())


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride())


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(0, 1), "new first axis": lambda x: x[None], "new axis": lambda x: x[:, None],
    "new last axis": lambda x: x[..., None], "slice": lambda x: x[..., :2], "whole": lambda x: x[..., : x.shape[-1]],
    "new_empty": lambda x: x.new_empty((3, 0, 5)), "expand to itself": lambda x: x.expand(x.shape),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    for tensor in layouts(40, 3):
        assert layout(VIEWS[name](shaped(tensor))) == layout(VIEWS[name](tensor)), layout(tensor)


def test_first_of_an_axis() -> None:
    for tensor in layouts(40, 3):
        if tensor.shape[1]:
            assert layout(shaped(tensor)[:, 0]) == layout(tensor[:, 0])


@pytest.mark.parametrize("ndim", [1, 2, 4])
def test_expanding(ndim: int) -> None:
    """Axes in front included: one of one element has the stride of what follows it, and not 0."""
    rng = random.Random(9)
    for tensor in layouts(60, ndim):
        wanted = [rng.choice((1, 2, 5)) for _ in range(4 - ndim)]
        wanted += [rng.choice(SIZES) if size == 1 else size for size in tensor.shape]
        assert layout(shaped(tensor).expand(*wanted)) == layout(tensor.expand(*wanted)), (layout(tensor), wanted)
        assert layout(shaped(tensor).expand(tuple(wanted))) == layout(tensor.expand(wanted))


def test_what_is_computed_of_a_layout() -> None:
    for tensor in layouts(60, 3):
        found = shaped(tensor)
        assert found.is_contiguous() == tensor.is_contiguous(), layout(tensor)
        assert (found.numel(), found.element_size()) == (tensor.numel(), tensor.element_size())
        assert spans(found) == spans(tensor)


def test_a_batch_of_one_is_another_branch() -> None:
    """Slopes of heads alone, expanded to a batch: the stride of a batch of one is no 0, which kernels are specialised
    on."""
    trace = Trace()
    kind = TensorKind(torch.float32, torch.device("cpu"), 1, 0, False)
    batch = trace.input(2)
    view = SymbolicTensor.make(kind, (trace.input(4),), (trace.input(1),)).expand(batch, 4)
    program = trace.program([view.stride(0)])
    assert program((3, 4, 1)) == [0]
    assert program((1, 4, 1)) is None


@pytest.mark.parametrize(
    "view",
    [lambda x: x[..., :-1], lambda x: x[..., 1:], lambda x: x[..., ::2], lambda x: x[1], lambda x: x[0:2, 1],
     lambda x: x.expand(7, 7, 7), lambda x: x.as_strided((1,), (1,), 3), lambda x: x + 1,
     lambda x: x == x.transpose(0, 1), lambda x: x.item(), lambda x: x.untyped_storage()],
)  # fmt: skip
def test_what_is_not_known_raises(view: Callable[[Any], Any]) -> None:
    with pytest.raises(Untraceable):
        view(shaped(torch.empty(2, 3, 4, device="meta")))
