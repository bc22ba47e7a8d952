"""Reads of a tensor's sizes, strides and address by native.c, through torch's own C functions.

In Python each of the three makes objects: 0.15 to 0.25 µs, for every tensor at every call. libtorch has the same as C
functions (`aoti_torch_get_…`, the stable interface of ahead-of-time compiled models), which take the address of an
`at::Tensor`. Its offset in a Python tensor is no interface: it is searched and tried out once a process, and if any
check fails, tensors are asked in Python.

The functions complain on stderr about tensors without sizes (nested and sparse, other C++ classes). native.c calls them
only for the plain class, which it knows by the first word of the object that an `at::Tensor` points to.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_WORD = ctypes.sizeof(ctypes.c_void_p)
_FUNCTIONS = ("dim", "sizes", "strides", "data_ptr", "dtype", "device_type", "device_index")
# (type, offset, class, and the addresses of the functions): what native.c's Kind takes as `reader`.
Reader = tuple[type, int, int, int, int, int, int, int, int, int]


@functools.lru_cache(maxsize=1)
def reader() -> Reader | None:
    """What native.c reads tensors of exactly these types by: torch.Tensor, torch.nn.Parameter; None where it must not.

    (torch.Tensor, bytes from an object's address to its at::Tensor, first word of a plain tensor's implementation,
    addresses of the seven functions)
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), mode=_LOADED)
        functions = [getattr(library, f"aoti_torch_get_{name}") for name in _FUNCTIONS]
        with torch.device("cpu"):  # whatever the caller's default is: the answer is the process's
            tensors = _samples()
        offsets = {_offset(tensor) for tensor in tensors}
        if len(offsets) != 1 or None in offsets:
            return None
        offset: int = offsets.pop()  # type: ignore[assignment]
        classes = {_word(tensor._cdata) for tensor in tensors}
        if len(classes) != 1 or not all(_read(functions[:4], tensor, offset) == _said(tensor) for tensor in tensors):
            return None
        read = {(tensor.dtype, *_numbers(functions[4:], tensor, offset)) for tensor in tensors}
        if not len(read) == len({one[0] for one in read}) == len({one[1] for one in read}):
            return None
    except (OSError, AttributeError, RuntimeError, TypeError):
        return None
    places = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return (torch.Tensor, offset, classes.pop(), *places)  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def dtype_codes(*dtypes: torch.dtype) -> tuple[int, ...]:
    """The numbers that the functions say of dtypes; 0 where there is no reader."""
    found = reader()
    if found is None:
        return (0,) * len(dtypes)
    ask = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(place) for place in found[7:]]
    with torch.device("cpu"):
        return tuple(_numbers(ask, torch.empty(0, dtype=dtype), found[1])[0] for dtype in dtypes)


_LOADED = getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", 0)  # torch has loaded it


def _samples() -> Sequence[torch.Tensor]:
    """Plain tensors of every kind that a call may bring: of few and many axes, views, parameters, results."""
    x = torch.zeros(2, 3, 4, 5)
    asking = torch.zeros(2, 6, requires_grad=True)
    return [
        x, torch.zeros(()), torch.zeros(0, 3), torch.zeros(1, 2, 1, 2, 1, 2, 3), x.transpose(1, 2)[1:, :, 1:],
        torch.zeros(1, 3).expand(4, 3), torch.nn.Parameter(torch.zeros(3)), asking, asking * 2.0,
        torch.zeros(8, dtype=torch.bfloat16)[3:],
    ]  # fmt: skip


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _offset(tensor: torch.Tensor) -> int | None:
    """Where in a tensor's object the pointer is that torch says it holds."""
    size = type(tensor).__basicsize__
    places = range(object.__basicsize__, size - _WORD + 1, _WORD)
    return next((place for place in places if _word(id(tensor) + place) == tensor._cdata), None)


def _said(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.data_ptr()


def _read(functions: Sequence[Any], tensor: torch.Tensor, offset: int) -> tuple[Any, ...]:
    """What the functions say of a tensor."""
    dim, sizes, strides, address = functions
    place = ctypes.c_void_p(id(tensor) + offset)
    count, found = ctypes.c_int64(), [ctypes.c_void_p() for _ in range(3)]
    errors = [dim(place, ctypes.byref(count))]
    errors += [ask(place, ctypes.byref(to)) for ask, to in zip((sizes, strides, address), found, strict=True)]
    if any(errors) or count.value != tensor.ndim:
        raise RuntimeError("torch does not say a tensor's sizes")
    axes = ctypes.c_int64 * count.value
    listed = [tuple(axes.from_address(one.value)) if one.value else () for one in found[:2]]
    return listed[0], listed[1], found[2].value or 0


def _numbers(functions: Sequence[Any], tensor: torch.Tensor, offset: int) -> tuple[int, ...]:
    """What functions that give one number each say of a tensor: its dtype, and its device's type and index."""
    place, found = ctypes.c_void_p(id(tensor) + offset), [ctypes.c_int32() for _ in functions]
    if any(ask(place, ctypes.byref(to)) for ask, to in zip(functions, found, strict=True)):
        raise RuntimeError("torch does not say a tensor's dtype or device")
    return tuple(one.value for one in found)
