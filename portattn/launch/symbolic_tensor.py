"""SymbolicTensor: a tensor of only sizes and strides, as Sizes of a Trace; other accesses raise Untraceable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from portattn.launch.torch_compat import contiguous
from portattn.schema.symbolic_int import Untraceable
from portattn.schema.tensors import POINTER_ALIGNMENT


@dataclass(slots=True, frozen=True)
class TensorKind:
    """A tensor's properties in a call key; holds no tensor. `residue` is the address modulo POINTER_ALIGNMENT."""

    dtype: torch.dtype
    device: torch.device
    ndim: int
    residue: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        residue = tensor.data_ptr() % POINTER_ALIGNMENT
        return cls(tensor.dtype, tensor.device, tensor.ndim, residue, tensor.requires_grad)


class _Address:
    def __init__(self, residue: int) -> None:
        self._residue = residue

    def __mod__(self, divisor: int) -> int:
        if POINTER_ALIGNMENT % divisor:
            raise Untraceable(f"an address is taken modulo {divisor}")
        return self._residue % divisor


class SymbolicTensor(torch.Tensor):
    kind: TensorKind
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: bool  # its first element is the first of the memory, whose alignment is known

    @classmethod
    def make(cls, kind: TensorKind, sizes: Any, strides: Any, first: bool = True) -> SymbolicTensor:
        made = torch.Tensor._make_subclass(cls, torch.empty(0, dtype=kind.dtype, device="meta"))
        made.kind, made.sizes, made.strides, made.first = kind, tuple(sizes), tuple(strides), first
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise Untraceable(f"{getattr(func, '__name__', func)} is asked of a tensor that is only a shape")

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return self.sizes

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.sizes)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.kind.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.kind.device

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return torch.strided

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.kind.requires_grad

    is_nested = False
    is_meta = False

    def is_neg(self) -> bool:
        return False

    def resolve_neg(self) -> SymbolicTensor:
        return self

    def dim(self) -> int:
        return len(self.sizes)

    def size(self, axis: int | None = None) -> Any:
        return self.sizes if axis is None else self.sizes[axis]

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def element_size(self) -> int:
        return self.kind.dtype.itemsize

    def numel(self) -> int:
        found = 1
        for size in self.sizes:
            found = found * size
        return found

    def is_contiguous(self, memory_format: Any = None) -> bool:
        """Like torch: strides of axes of one element do not count."""
        if self.numel() == 0:
            return True
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size == 1:
                continue
            if stride != step:
                return False
            step = step * size
        return True

    def data_ptr(self) -> Any:
        if not self.first:
            raise Untraceable("the address of a part of a tensor is asked for")
        return _Address(self.kind.residue)

    def _view(self, sizes: Any, strides: Any, first: bool = True) -> SymbolicTensor:
        return SymbolicTensor.make(self.kind, sizes, strides, self.first and first)

    def transpose(self, a: int, b: int) -> SymbolicTensor:
        order = list(range(len(self.sizes)))
        order[a], order[b] = order[b], order[a]
        return self._view([self.sizes[i] for i in order], [self.strides[i] for i in order])

    def view(self, dtype: Any) -> SymbolicTensor:  # type: ignore[override]
        """Return the same bytes as another dtype of equal width."""
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != self.kind.dtype.itemsize:
            raise Untraceable(f"a tensor is viewed as {dtype}")
        kind = replace(self.kind, dtype=dtype)
        return SymbolicTensor.make(kind, self.sizes, self.strides, self.first)

    def expand(self, *shape: Any) -> SymbolicTensor:  # type: ignore[override]
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        added = len(wanted) - len(self.sizes)
        sizes: list[Any] = []  # from the last axis on
        strides: list[Any] = []
        for axis in reversed(range(len(wanted))):
            size = wanted[axis]
            if axis >= added:
                own, stride = self.sizes[axis - added], self.strides[axis - added]
            else:  # torch gives a new axis of one element the next axis's extent as stride
                own, stride = 1, sizes[-1] * strides[-1] if sizes else 0
            if own != size:
                if own != 1:
                    raise Untraceable(f"{own} is expanded to {size}")
                stride = 0
            sizes.append(size)
            strides.append(stride)
        return self._view(sizes[::-1], strides[::-1])

    def as_strided(self, size: Any, stride: Any, storage_offset: Any = None) -> SymbolicTensor:
        if storage_offset is not None:
            raise Untraceable("as_strided with an offset")
        return self._view(size, stride)

    def __getitem__(self, index: Any) -> SymbolicTensor:
        given = index if isinstance(index, tuple) else (index,)
        taken = sum(1 for one in given if one is not None and one is not Ellipsis)
        if Ellipsis in given:
            place = given.index(Ellipsis)
            given = (*given[:place], *[slice(None)] * (len(self.sizes) - taken), *given[place + 1 :])
        sizes, strides, axis, first = [], [], 0, True
        for one in given:
            if one is None:
                # The stride that torch gives a new axis: the next axis's extent.
                follows = axis < len(self.sizes)
                sizes.append(1)
                strides.append(self.sizes[axis] * self.strides[axis] if follows else 1)
                continue
            if isinstance(one, slice):
                if one.start not in (None, 0) or one.step not in (None, 1) or (one.stop is not None and one.stop < 0):
                    raise Untraceable(f"a tensor is sliced by {one}")
                whole = one.stop is None
                sizes.append(self.sizes[axis] if whole or one.stop >= self.sizes[axis] else one.stop)
                strides.append(self.strides[axis])
            elif type(one) is int and one == 0:
                pass
            else:
                raise Untraceable(f"a tensor is indexed by {one!r}")
            axis += 1
        return self._view([*sizes, *self.sizes[axis:]], [*strides, *self.strides[axis:]], first)

    def new_empty(self, *shape: Any, dtype: Any = None, device: Any = None, **other: Any) -> SymbolicTensor:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        kind = TensorKind(dtype or self.kind.dtype, torch.device(device or self.kind.device), len(sizes), 0, False)
        return SymbolicTensor.make(kind, sizes, contiguous(tuple(sizes)))

    def __repr__(self, **other: Any) -> str:  # type: ignore[override]
        return f"SymbolicTensor({list(self.sizes)}, {list(self.strides)}, {self.kind.dtype})"
