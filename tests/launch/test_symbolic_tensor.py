"""Tensors that are only shapes answer as torch's do, and refuse what they cannot; what is asked of torch's devices."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portattn.launch import torch_compat
from portattn.launch.symbolic_tensor import SymbolicTensor, TensorKind
from portattn.launch.torch_compat import contiguous, runtime
from portattn.schema.symbolic_int import Trace, Untraceable, plain_sizes
from portattn.schema.tensors import spans


def same(shaped: SymbolicTensor, tensor: torch.Tensor) -> None:
    for one in (shaped.shape, shaped.size()):
        assert plain_sizes(tuple(one)) == tuple(tensor.shape)
    assert (plain_sizes(tuple(shaped.stride())), plain_sizes(shaped.numel())) == (tensor.stride(), tensor.numel())
    assert shaped.is_contiguous() == tensor.is_contiguous()
    assert (shaped.ndim, shaped.dim(), shaped.dtype, shaped.device) == (tensor.ndim, tensor.ndim, tensor.dtype,
        tensor.device)  # fmt: skip
    assert (shaped.element_size(), shaped.layout, shaped.requires_grad) == (tensor.element_size(), tensor.layout,
        tensor.requires_grad)  # fmt: skip
    assert (shaped.is_neg(), shaped.is_nested, shaped.is_meta) == (False, False, False)
    assert shaped.resolve_neg() is shaped
    for axis in range(-tensor.ndim, tensor.ndim):
        assert plain_sizes(shaped.size(axis)) == tensor.size(axis)
        assert plain_sizes(shaped.stride(axis)) == tensor.stride(axis)


VIEWS: list[Callable[[Any], Any]] = [
    lambda t: t, lambda t: t.transpose(1, 2), lambda t: t.transpose(0, -1), lambda t: t[0], lambda t: t[:, 0],
    lambda t: t[None], lambda t: t[:, None], lambda t: t[..., None], lambda t: t[..., :2], lambda t: t[:, :, :1],
    lambda t: t[:, ..., 0], lambda t: t[0, :, None, :3], lambda t: t[:, :99], lambda t: t[:, 0:1],
    lambda t: t[:, ::1], lambda t: t[None].expand(5, *t.shape), lambda t: t[:1].expand(7, *t.shape[1:]),
    lambda t: t.expand(tuple(t.shape)), lambda t: t.expand((2, *t.shape)), lambda t: t.as_strided((0, 2), (7, 1)),
    lambda t: t.new_empty(3, 5), lambda t: t.new_empty((3, 0, 5)), lambda t: t.new_empty((4,), dtype=torch.int32),
    lambda t: t.transpose(1, 2)[:, :2].transpose(2, 3),
]  # fmt: skip
SHAPES = [(2, 3, 4, 5), (1, 3, 1, 5), (2, 3, 1, 1), (3, 2, 0, 4), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("view", range(len(VIEWS)))
def test_views_are_torchs(shape: tuple[int, ...], view: int) -> None:
    """Of contiguous tensors, of transposed ones, and of those that lie in larger ones; sizes traced or not."""
    for tensor in (torch.zeros(shape, dtype=torch.float16), torch.zeros(shape[::-1]).permute(3, 2, 1, 0),
            torch.zeros(*shape[:2], shape[2] + 3, shape[3])[:, :, : shape[2]]):  # fmt: skip
        trace = Trace()
        for wrap in (int, trace.input):
            shaped = SymbolicTensor.make(TensorKind.of(tensor), map(wrap, tensor.shape), map(wrap, tensor.stride()))
            same(VIEWS[view](shaped), VIEWS[view](tensor))


def test_contiguity_is_traced() -> None:
    """What a class was found to be contiguous by holds for its other sizes."""
    trace = Trace()
    shape = [trace.input(n) for n in (2, 3, 8)]
    strides = [trace.input(n) for n in (24, 8, 1)]
    assert SymbolicTensor.make(TensorKind.of(torch.zeros(2, 3, 8)), shape, strides).is_contiguous()
    program = trace.program([])
    assert program((5, 7, 16, 112, 16, 1)) is not None
    assert (program((5, 7, 16, 113, 16, 1)), program((5, 7, 16, 112, 16, 2))) == (None, None)


def test_what_is_refused() -> None:
    shaped = SymbolicTensor.make(TensorKind.of(torch.zeros(4, 6)), (4, 6), (6, 1))
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.add(shaped, 1), "is asked of a tensor that is only a shape"),
        (lambda: shaped.clone(), "is asked of a tensor that is only a shape"),
        (lambda: shaped[1:], "sliced"), (lambda: shaped[::2], "sliced"), (lambda: shaped[1], "indexed"),
        (lambda: shaped[torch.zeros(1, dtype=torch.int64)], "indexed"), (lambda: shaped[True], "indexed"),
        (lambda: shaped.expand(4, 7), "6 is expanded to 7"), (lambda: shaped.as_strided((1,), (1,), 1), "offset"),
        (lambda: shaped.data_ptr() % 32, "modulo 32"),
    ]  # fmt: skip
    for use, said in refused:
        with pytest.raises(Untraceable, match=said):
            use()


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_of_an_address_the_alignment_is_known(shift: int) -> None:
    tensor = torch.zeros(64, dtype=torch.float32)[shift:]
    shaped = SymbolicTensor.make(TensorKind.of(tensor), tensor.shape, tensor.stride())
    for divisor in (1, 2, 4, 8, 16):
        assert shaped.data_ptr() % divisor == tensor.data_ptr() % divisor
    assert shaped[None, :3].data_ptr() % 16 == tensor.data_ptr() % 16
    assert shaped.new_empty(3).data_ptr() % 16 == 0, "memory of its own is aligned"


def test_a_kind_of_tensors() -> None:
    tensor = torch.zeros(2, 9, dtype=torch.float32)[:, 1:].requires_grad_()
    kind = TensorKind.of(tensor)
    assert kind == TensorKind(torch.float32, torch.device("cpu"), 2, tensor.data_ptr() % 16, True)
    assert SymbolicTensor.make(kind, (2, 8), (9, 1)).requires_grad
    assert not SymbolicTensor.make(kind, (2, 8), (9, 1)).new_empty(4).requires_grad
    assert repr(SymbolicTensor.make(kind, (2, 8), (9, 1))) == "SymbolicTensor([2, 8], [9, 1], torch.float32)"


def test_contiguous_strides() -> None:
    for shape in [*itertools.product((0, 1, 3), repeat=3), (), (5,)]:
        assert contiguous(shape) == torch.empty(shape).stride()


def test_what_is_asked_of_a_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the public functions of its torch module, where there is no shorter way."""
    stream = lambda index: SimpleNamespace(npu_stream=index + 100)  # noqa: E731
    module = SimpleNamespace(current_device=lambda: 3, current_stream=stream)
    monkeypatch.setattr(torch, "npu", module, raising=False)
    asked: list[Any] = []

    def empty(*given: Any, **named: Any) -> torch.Tensor:
        asked.append((given, named))
        return torch.empty(1)

    monkeypatch.setattr(torch, "empty_strided", empty)
    found = runtime.__wrapped__("npu")
    assert (found.current(), found.stream(5)) == (3, 105)
    found.empty((2, 3), (3, 1), torch.float16)
    assert asked == [(((2, 3), (3, 1)), {"dtype": torch.float16, "device": "npu"})]


def test_cuda_is_asked_by_the_shortest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import guards

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 4, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7 + index, raising=False)
    monkeypatch.setattr(guards, "_empty_strided_cuda", "shortest", raising=False)
    found = runtime.__wrapped__("cuda")
    assert (found.current(), found.stream(1), found.empty) == (4, 8, "shortest")
    monkeypatch.delattr(guards, "_empty_strided_cuda")
    plain = object()
    assert torch_compat._shortest(plain) is plain  # type: ignore[arg-type,comparison-overlap]
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 9)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=index))
    found = runtime.__wrapped__("cuda")
    assert (found.current(), found.stream(2)) == (9, 2)


@pytest.mark.parametrize("allocator", ["native", "cudaMallocAsync", "pluggable", "somebody's"])
def test_memory_comes_by_address_from_torch_s_own_allocators(monkeypatch: pytest.MonkeyPatch, allocator: str) -> None:
    take, give = object(), object()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 4, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", take, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", give, raising=False)
    monkeypatch.delattr(torch._C, "_cuda_getAllocatorBackend", raising=False)
    assert runtime.__wrapped__("cuda").take is None, "this torch does not say whose it is"
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: allocator, raising=False)
    found = runtime.__wrapped__("cuda")
    assert (found.take, found.give) == ((None, None) if allocator == "somebody's" else (take, give))


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


@pytest.mark.parametrize("ndim", [1, 2, 4])
def test_expanding(ndim: int) -> None:
    """Leading axes included: an axis of one element has the stride of the next axis, and not 0."""
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
    assert (program((3, 4, 1)), program((1, 4, 1))) == ([0], None)
