"""The specs of warmup(): calls with tensors that are described, given, or described with sizes that vary."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from portattn.api.page_table import PageTable
from portattn.errors import ArgumentError
from portattn.schema.ops import PUBLIC
from portattn.schema.problem_limits import NVFP4
from portattn.schema.tensors import CACHE_DTYPE, PACKED, TORCH_DTYPE
from portattn.validate.checks import check_dense

MOST_SIZES = 1 << 17  # combinations of a spec's sizes: each takes about 30 µs to look at (a decode, on a CPU)
_SIZE = r"(?:\d+|[A-Za-z_]\w*)"
_SIZES = rf"\s*(?:{_SIZE}\s*(?:,\s*{_SIZE}\s*)*,?\s*)?"
_NUMBERS = r"\s*(?:\d+\s*(?:,\s*\d+\s*)*,?\s*)?"
_TENSOR = re.compile(rf"(\w+)\[({_SIZES})\](?::({_NUMBERS}))?")
_RANGE = re.compile(r"(\d+)\s*\.\.\s*(\d+)")
_DTYPES = TORCH_DTYPE | {"i32": torch.int32, "i64": torch.int64, "bool": torch.bool} | CACHE_DTYPE | {NVFP4: PACKED}
_PAIRS = ("window", "magicpig")  # arguments that are tuples, which JSON writes as lists


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor in words.

    shape    sizes, or the names of sizes that vary
    strides  in elements; None for a contiguous tensor
    """

    shape: tuple[int | str, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype

    def allocate(self, device: torch.device, sizes: Mapping[str, int], fill: float = 0.0) -> torch.Tensor:
        """Return a tensor filled with one number. Its elements may share memory, as an expanded tensor's do."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        strides = self.strides
        if device.type == "meta":  # nobody's memory
            made = torch.empty(shape, dtype=self.dtype, device=device)
            return made if strides is None else torch.empty_strided(shape, strides, dtype=self.dtype, device=device)
        if strides is None:
            return torch.full(shape, fill, dtype=self.dtype, device=device)
        reached = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        elements = 0 if 0 in shape else reached + 1
        return torch.full((elements,), fill, dtype=self.dtype, device=device).as_strided(shape, strides)

    @property
    def names(self) -> set[str]:
        return {size for size in self.shape if isinstance(size, str)}


class Spec:
    """One spec: an operation and its arguments. Raises ArgumentError for a malformed spec.

    place  among the specs
    """

    def __init__(self, place: int, given: Any) -> None:
        self.place, name = place, f"specs[{place}]"
        if not isinstance(given, Mapping):
            raise ArgumentError("warmup", name, given, 'must be a mapping of "op" and the operation\'s arguments')
        self.op = given.get("op")
        if self.op not in PUBLIC:
            raise ArgumentError("warmup", f"{name}.op", self.op, f"must be one of {', '.join(PUBLIC)}")
        rest = {str(key): value for key, value in given.items() if key not in ("op", "sizes")}
        self._arguments = {key: _argument(f"{name}.{key}", key, value) for key, value in rest.items()}
        self.sizes = _all_sizes(f"{name}.sizes", given.get("sizes"))
        self._check_names(name)

    def _check_names(self, name: str) -> None:
        used: set[str] = set()
        for key, value in self._arguments.items():
            if isinstance(value, str) and value in self.sizes:
                used.add(value)
            if isinstance(value, TensorSpec):
                used |= value.names
                unknown = sorted(value.names - set(self.sizes))
                if unknown:
                    limit = "must be a number or one of the spec's sizes" + (
                        f", {', '.join(self.sizes)}" * bool(self.sizes)
                    )
                    raise ArgumentError("warmup", f"{name}.{key}'s size", unknown[0], limit)
        unused = [size for size in self.sizes if size not in used]
        if unused:
            raise ArgumentError("warmup", f"{name}.sizes", unused[0], "must be the size of a tensor, or an argument")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that were given as themselves."""
        return [value for value in self._arguments.values() if isinstance(value, torch.Tensor)]

    @property
    def largest(self) -> dict[str, int]:
        return {name: max(values) for name, values in self.sizes.items()}

    @property
    def count(self) -> int:
        """How many combinations of sizes it stands for."""
        return math.prod(map(len, self.sizes.values()))

    def combinations(self) -> Iterator[dict[str, int]]:
        """All sizes that it stands for, the last name varying fastest; one empty mapping where none varies."""
        for values in itertools.product(*self.sizes.values()):
            yield dict(zip(self.sizes, values, strict=True))

    def arguments(self, device: torch.device, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The operation's arguments at some sizes. What is described is allocated on the device."""
        found = {}
        for name, value in self._arguments.items():
            if isinstance(value, TensorSpec):
                # A scale of 0 is none.
                scale = name in ("q_scale", "k_scale", "v_scale", "kv_scale")
                value = value.allocate(device, sizes, 1.0) if scale else value.allocate(device, sizes)
            elif isinstance(value, str):
                value = sizes.get(value, value)
            found[name] = value
        return found


def _argument(name: str, argument: str, value: Any) -> Any:
    """An argument of a spec, with a TensorSpec for each tensor that is not there."""
    check_dense("warmup", name, value)
    if argument == "out_dtype" and isinstance(value, str):
        if value not in TORCH_DTYPE:
            raise ArgumentError("warmup", name, value, f"must be one of {', '.join(TORCH_DTYPE)}")
        return TORCH_DTYPE[value]
    if isinstance(value, torch.Tensor) and value.is_meta:
        return TensorSpec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (torch.Tensor, PageTable)) or not isinstance(value, (str, list)):
        return value
    if isinstance(value, list):
        return tuple(_argument(name, argument, item) for item in value) if argument in _PAIRS else value
    found = _TENSOR.fullmatch(value.strip())
    if found is None:
        if "[" in value:
            raise ArgumentError("warmup", name, value, 'describes a tensor as "bf16[8,32,1,128]"')
        return value
    if found[1] not in _DTYPES:
        raise ArgumentError("warmup", name, value, f"must be of a type among {', '.join(_DTYPES)}")
    shape = tuple(int(part) if part.isdigit() else part for part in _parts(found[2]))
    strides = None if found[3] is None else tuple(map(int, _parts(found[3])))
    if strides is not None and len(strides) != len(shape):
        raise ArgumentError("warmup", name, value, f"must have as many strides as its {len(shape)} axes")
    return TensorSpec(shape, strides, _DTYPES[found[1]])


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _all_sizes(name: str, given: Any) -> dict[str, tuple[int, ...]]:
    """The sizes that vary, by name: each value once, in order. Raises ArgumentError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ArgumentError("warmup", name, given, 'must be a mapping of names to sizes, as {"S": "1..4096"}')
    for key in given:
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_]\w*", key):
            raise ArgumentError("warmup", f"{name}'s name", key, "must be a letter, or several with digits and _")
    found = {key: _values(f"{name}.{key}", value) for key, value in given.items()}
    count = math.prod(map(len, found.values()))
    if count > MOST_SIZES:
        limit = f"must be at most {MOST_SIZES} combinations: leave some out of a list, or make two specs"
        raise ArgumentError("warmup", name, count, limit)
    return found


def _values(name: str, given: Any) -> tuple[int, ...]:
    if isinstance(given, str):
        bounds = _RANGE.fullmatch(given.strip())
        if bounds is None or int(bounds[1]) > int(bounds[2]):
            raise ArgumentError("warmup", name, given, 'must be a range, as "1..4096", which has both ends')
        given = range(int(bounds[1]), int(bounds[2]) + 1)
    values = given if isinstance(given, (list, tuple, range)) else [None]
    if len(values) > MOST_SIZES:
        raise ArgumentError("warmup", name, given, f"must be at most {MOST_SIZES} sizes")
    if not values or any(type(value) is not int or value < 0 for value in values):
        raise ArgumentError("warmup", name, given, 'must be integers from 0 on, or a range, as "1..4096"')
    return tuple(sorted(set(values)))
