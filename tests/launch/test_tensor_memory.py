"""How tensors are read by torch's C functions, and that they are not where anything is not as it must be."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from portattn.launch import tensor_memory

linux = pytest.mark.skipif(platform.system() != "Linux", reason="libtorch has another name")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    tensor_memory.reader.cache_clear()
    yield
    tensor_memory.reader.cache_clear()


@linux
def test_this_torch_is_read_by_its_own_functions() -> None:
    """Of tensors that were not tried: what Python says of them."""
    found = tensor_memory.reader()
    assert found is not None
    kind, offset, plain, *places = found
    assert kind is torch.Tensor
    asks = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(place) for place in places]
    base = torch.zeros(3, 5, 7, dtype=torch.float16)
    for tensor in (base, base[:, 1:, ::2], base.permute(2, 0, 1), torch.zeros(0), torch.nn.Parameter(base.float())):
        assert tensor_memory._word(tensor._cdata) == plain
        assert tensor_memory._read(asks[:4], tensor, offset) == (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.data_ptr(),
        )


@linux
def test_dtypes_and_devices_are_read() -> None:
    """Each dtype has a number of its own, whatever the tensor's shape."""
    found = tensor_memory.reader()
    assert found is not None
    asks = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(place) for place in found[7:]]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn)
    codes = tensor_memory.dtype_codes(*dtypes)
    assert len(set(codes)) == len(dtypes)
    for dtype, code in zip(dtypes, codes, strict=True):
        for shape in ((), (2, 3), (0,)):
            here = tensor_memory._numbers(asks, torch.empty(shape, dtype=dtype), found[1])
            assert here[0] == code
            assert here[1:] != tensor_memory._numbers(asks, torch.empty(shape, device="meta"), found[1])[1:]


@linux
def test_tensors_without_sizes_are_of_another_class() -> None:
    """native.c never asks them: the functions would complain on stderr."""
    found = tensor_memory.reader()
    assert found is not None
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
    sparse = torch.zeros(2, 3).to_sparse()
    for tensor in (nested, sparse):
        assert type(tensor) is torch.Tensor
        assert tensor_memory._word(tensor._cdata) != found[2]


def test_the_default_device_does_not_count() -> None:
    with torch.device("meta"):
        inside = tensor_memory.reader()
    tensor_memory.reader.cache_clear()
    assert tensor_memory.reader() == inside


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_FUNCTIONS", ("dim", "sizes", "strides", "no_such_thing")),  # a torch that lacks one
        ("_offset", lambda tensor: None),  # the object holds no such pointer
        ("_offset", lambda tensor: 16 + 8 * (tensor.ndim == 0)),  # or not always in the same place
        ("_said", lambda tensor: (tuple(tensor.shape), tensor.stride(), 0)),  # the functions say something else
        ("_word", id),  # tensors of several classes
        ("_numbers", lambda *asked: (1, 0, 0)),  # dtypes that are not told apart
    ],
)
def test_what_is_not_as_it_must_be_is_not_used(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory, name, value)
    assert tensor_memory.reader() is None


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory.torch, "__file__", "/does/not/exist/torch/__init__.py")
    assert tensor_memory.reader() is None
