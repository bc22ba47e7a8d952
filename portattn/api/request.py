"""Request: one call of a public operation before validation."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.autograd import forward_ad

from portattn.api.argument_errors import require
from portattn.api.shape_polymorphism import CallRecipe
from portattn.config import Settings, current
from portattn.errors import ArgumentError
from portattn.launch import cache
from portattn.launch.cached_launch import CachedLaunch, ShapeClass
from portattn.launch.torch_compat import in_mode
from portattn.schema.call import Call
from portattn.schema.compile_record import CompileRecord
from portattn.schema.ops import ROWS
from portattn.schema.target import Target
from portattn.validate import build_call
from portattn.validate.checks import as_value, check_dense, refuse_gradients

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Window = tuple[int | None, int | None]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Request:
    op: str
    settings: Settings
    tensors: dict[str, Any]  # by the names of kernels' arguments; None: not given
    values: dict[str, Any]  # all other arguments that decide the plan, by the caller's names
    asked: tuple[Any, Any] = (None, None)  # `backend` and `validate` as the caller gave them
    known_trace: tuple[CallRecipe, ShapeClass] | None = None  # of a call like it
    record: Any = None  # of a training call: training.TrainingNode, whose `values` are the caller's

    def build(self) -> Call:
        """Validate, and return the Call. Raises ArgumentError."""
        call = build_call(self.op, self.settings, self.tensors, self.values)
        if call.problem.needs_grad:
            refuse_gradients(self.op, self.named_tensors, self.settings.backend)
        return call

    @property
    def return_lse(self) -> bool:
        return bool(self.values.get("return_lse"))

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.tensors.items() if tensor is not None)

    @property
    def named_tensors(self) -> dict[str, Any]:
        called = ROWS[self.op].called
        return {called[name]: tensor for name, tensor in self.tensors.items()}

    @property
    def lengths(self) -> dict[str, Any]:
        return {name: self.values[name] for name in ROWS[self.op].lengths}

    @property
    def fixed_values(self) -> tuple[Any, ...]:
        """Return the values that are no sizes, then `asked`."""
        return (*(self.values[name] for name in ROWS[self.op].fixed), *self.asked)

    @property
    def parts(self) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments of `request_from`: tensors, fixed values, sizes."""
        return tuple(self.tensors.values()), self.fixed_values, tuple(self.lengths.values())

    def cacheable(self) -> bool:
        """Return whether the launch cache may hold calls like it.

        It may not on a CPU, with tensor subclasses (fake tensors have no storage) or lazily negated views. No later
        call would match one with validation at each call, arguments of unusual types, forward-mode differentiation or
        an active torch mode."""
        return self._comparable() and self.launched_by_address()

    def repeatable(self) -> bool:
        """Like `cacheable`, for a call on a CPU."""
        return self._comparable() and self._has_addresses()

    def _comparable(self) -> bool:
        if self.settings.validate == "always" or not cache.plain_values(self.fixed_values):
            return False
        return forward_ad._current_level < 0 and not in_mode()

    def launched_by_address(self) -> bool:
        """Return whether kernels get the tensors' addresses unchanged, and each tensor has one."""
        return self._on_accelerator() and self._has_addresses()

    def _has_addresses(self) -> bool:
        if any(length is not None and type(length) is not int for length in self.lengths.values()):
            return False
        tensors = [tensor for tensor in self.tensors.values() if tensor is not None]
        return all(type(tensor) in _PLAIN and not tensor.is_neg() and tensor.data_ptr() for tensor in tensors)

    def _on_accelerator(self) -> bool:
        q = self.tensors["q"]
        return isinstance(q, torch.Tensor) and q.device.type not in ("cpu", "meta")

    def kind(self) -> cache.CallKey:
        """Return the call's key: a cached one that matches, or a new one, not cached yet."""
        settings, values, lengths = current(), self._key_values, self.lengths
        for known in cache.kinds(self.op, values):
            if known.match(tuple(self.tensors.values()), values, tuple(lengths.values()), settings) is not None:
                return known
        return self.new_kind()

    def new_kind(self, only: list[int] | None = None) -> cache.CallKey:
        """Return a new call key. only: sizes that it is limited to."""
        return cache.CallKey(
            self.op, self.tensors, self._key_values, self.lengths, current(), only, ROWS[self.op].fixed, self.record
        )

    @property
    def _key_values(self) -> tuple[Any, ...]:
        return self.fixed_values if self.record is None else self.record.values


def checked_request(op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any]) -> Request:
    """Like `request_from`, but check required arguments, dense tensors and scalars, as the caller gave them.

    Raises ArgumentError, and TypeError if a required argument is missing."""
    row = ROWS[op]
    require(op, dict(zip((*row.parameters, *row.fixed, *row.lengths), (*tensors, *values[:-2], *lengths), strict=True)))
    for name, tensor in zip(row.tensors, tensors, strict=True):
        check_dense(op, row.called[name], tensor)
    *fixed, backend, validate = values
    lengths = [as_value(op, name, value) for name, value in zip(row.lengths, lengths, strict=True)]
    fixed = [as_value(op, name, value) for name, value in zip(row.fixed, fixed, strict=True)]
    return request_from(op, tensors, (*fixed, backend, validate), lengths)


def request_from(op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any]) -> Request:
    """Return a call's request; values are in its row's order, `backend` and `validate` last. Raises ArgumentError."""
    row = ROWS[op]
    *fixed, backend, validate = values
    named = dict(zip(row.fixed, fixed, strict=True)) | dict(zip(row.lengths, lengths, strict=True))
    return Request(
        op, settings_for(op, backend, validate), dict(zip(row.tensors, tensors, strict=True)),
        {name: named[name] for name in row.values}, (backend, validate),
    )  # fmt: skip


def inputs_of(request: Request) -> list[int]:
    """Return the inputs of a shape class: sizes and strides of each tensor once, then the arguments that are sizes."""
    distinct = list({id(t): t for t in request.tensors.values() if t is not None}.values())
    return cache.sizes_of(distinct) + [n for n in request.lengths.values() if n is not None]


class CacheWriter:
    def __init__(self, request: Request, only: bool = False) -> None:
        self._request = request
        self.kind, self.given = request.kind(), request.given
        self.inputs = inputs_of(request)
        if only:
            self.kind = request.new_kind(self.inputs)

    def recipe(self, target: Target, failed: Mapping[str, CompileRecord]) -> CallRecipe:
        request = self._request
        return CallRecipe(
            op=request.op, settings=request.settings, kinds=self.kind.kinds, tensors=self.kind.places,
            values=request.values, lengths=tuple(request.lengths), target=target, failed=failed,
        )  # fmt: skip

    def trace_for(self, recipe: CallRecipe) -> ShapeClass | None:
        """Return the request's shape class if it was traced before, for this recipe and these sizes."""
        known, shape = self._request.known_trace or (None, None)
        return shape if shape is not None and known == recipe and shape.trace.inputs == self.inputs else None

    def keep(self, cached: CachedLaunch, seconds: float) -> None:
        self.kind.add(cached)
        cache.remember(self.kind, seconds)


def settings_for(op: str, backend: Any, validate: Any) -> Settings:
    settings = current()
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(op, "backend", backend, "must be the name of a path, or None")
    if validate is not None and not isinstance(validate, bool):
        raise ArgumentError(op, "validate", validate, "must be True, False, or None for the setting")
    if validate is None and (backend is None or backend == settings.backend):
        return settings
    return _changed(settings, settings.backend if backend is None else backend, validate)


@functools.lru_cache(maxsize=64)
def _changed(settings: Settings, backend: str, validate: bool | None) -> Settings:
    reading = settings.validate if validate is None else "always" if validate else "never"
    return msgspec.structs.replace(settings, backend=backend, validate=reading)
