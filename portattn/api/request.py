"""Request: one call of a public operation before validation."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.autograd import forward_ad

from portattn.api.shape_polymorphism import CallRecipe
from portattn.api.unknown_arguments import require
from portattn.config import Settings, current
from portattn.errors import ArgumentError
from portattn.launch import cache
from portattn.launch.cached_launch import CachedLaunch
from portattn.launch.guards import in_mode
from portattn.schema.call import Call
from portattn.schema.compile_record import CompileRecord
from portattn.schema.ops import ROWS
from portattn.schema.target import Target
from portattn.validate.builders import build_call
from portattn.validate.checks import as_value, check_dense, refuse_gradients

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Window = tuple[int | None, int | None]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Request:
    """What the caller gave.

    tensors  by the names that they have in kernels' arguments; None for those that are not given
    values   everything else that decides the plan, by the caller's names
    asked    `backend` and `validate` as the caller gave them
    """

    op: str
    settings: Settings
    tensors: dict[str, Any]
    values: dict[str, Any]
    asked: tuple[Any, Any] = (None, None)

    def build(self) -> Call:
        """Validate, and make the Call. Raises ArgumentError."""
        call = build_call(self.op, self.settings, self.tensors, self.values)
        if call.problem.needs_grad:
            refuse_gradients(self.op, self.named_tensors, self.settings.backend)
        return call

    @property
    def return_lse(self) -> bool:
        return bool(self.values.get("return_lse"))

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the tensors that the caller gave."""
        return tuple(name for name, tensor in self.tensors.items() if tensor is not None)

    @property
    def named_tensors(self) -> dict[str, Any]:
        """The tensors by the names that the caller knows them by."""
        called = ROWS[self.op].called
        return {called[name]: tensor for name, tensor in self.tensors.items()}

    @property
    def lengths(self) -> dict[str, Any]:
        """The arguments that are sizes."""
        return {name: self.values[name] for name in ROWS[self.op].lengths}

    @property
    def fixed_values(self) -> tuple[Any, ...]:
        """All other arguments, and what the call asked for."""
        return (*(self.values[name] for name in ROWS[self.op].fixed), *self.asked)

    @property
    def parts(self) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """What `request_from` makes it of: tensors, fixed values, sizes."""
        return tuple(self.tensors.values()), self.fixed_values, tuple(self.lengths.values())

    def cacheable(self) -> bool:
        """Return whether the launch cache may hold calls like it.

        Not on a CPU, nor with arguments that are no tensors, tensor subclasses (fake tensors have no storage) and
        lazily negated views. Nor with validation at each call, arguments of unusual types, forward-mode differentiation
        or an active torch mode: no later call would match.
        """
        return self._comparable() and self.launched_by_address()

    def repeatable(self) -> bool:
        """The same of a call on a CPU whose tensors hold nothing that is checked at each call."""
        return self._comparable() and self._has_addresses()

    def _comparable(self) -> bool:
        if self.settings.validate == "always" or not cache.plain_values(self.fixed_values):
            return False
        return forward_ad._current_level < 0 and not in_mode()

    def launched_by_address(self) -> bool:
        """Whether kernels get the tensors' addresses as they are, and each has one."""
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
        """The kind of the call: one that is known, or a new one, which is not remembered yet."""
        settings, values, lengths = current(), self.fixed_values, self.lengths
        for known in cache.kinds(self.op, values):
            if known.match(tuple(self.tensors.values()), values, tuple(lengths.values()), settings) is not None:
                return known
        return self.new_kind()

    def new_kind(self, only: list[int] | None = None) -> cache.CallKey:
        """The kind of the call anew; of calls with these sizes alone where some are given."""
        lengths = self.lengths
        return cache.CallKey(self.op, self.tensors, self.fixed_values, lengths, current(), only, ROWS[self.op].fixed)


def request_of(op: str, given: Mapping[str, Any]) -> Request:
    """The request of a call with these arguments, by the names of the operation's parameters; others are passed over.

    Nothing is validated but `backend`, `validate`, what stands for several tensors, and that each tensor is a dense
    one. Raises ArgumentError, and TypeError where an argument that must be given is not.
    """
    row, given = ROWS[op], dict(given)
    require(op, given)
    if row.arguments:
        row.load("arguments")(given)
    for name, parameter in row.tensors.items():
        check_dense(op, row.called[name], given[parameter])
    for name in row.values:
        given[name] = as_value(op, name, given[name])
    backend, validate = given["backend"], given["validate"]
    return Request(
        op, settings_for(op, backend, validate), {name: given[parameter] for name, parameter in row.tensors.items()},
        {name: given[name] for name in row.values}, (backend, validate),
    )  # fmt: skip


def request_from(op: str, tensors: Sequence[Any], values: Sequence[Any], lengths: Sequence[Any]) -> Request:
    """The request of a call by the values of its row, in their order; `backend` and `validate` come last of `values`.

    Raises ArgumentError for these two.
    """
    row = ROWS[op]
    *fixed, backend, validate = values
    named = dict(zip(row.fixed, fixed, strict=True)) | dict(zip(row.lengths, lengths, strict=True))
    return Request(
        op, settings_for(op, backend, validate), dict(zip(row.tensors, tensors, strict=True)),
        {name: named[name] for name in row.values}, (backend, validate),
    )  # fmt: skip


def inputs_of(request: Request) -> list[int]:
    """What decides the class of its sizes: sizes and strides of each tensor once, and the arguments that are sizes."""
    distinct = list({id(t): t for t in request.tensors.values() if t is not None}.values())
    return cache.sizes_of(distinct) + [n for n in request.lengths.values() if n is not None]


class CacheWriter:
    """Keeps what a call launches, for calls of its kind."""

    def __init__(self, request: Request, only: bool = False) -> None:
        self._request = request
        self.kind, self.given = request.kind(), request.given
        self.inputs = inputs_of(request)
        if only:
            self.kind = request.new_kind(self.inputs)

    def recipe(self, target: Target, failed: Mapping[str, CompileRecord]) -> CallRecipe:
        """What makes calls of its kind of their sizes."""
        request = self._request
        return CallRecipe(
            op=request.op, settings=request.settings, kinds=self.kind.kinds, tensors=self.kind.places,
            values=request.values, lengths=tuple(request.lengths), target=target, failed=failed,
        )  # fmt: skip

    def keep(self, cached: CachedLaunch, seconds: float) -> None:
        self.kind.add(cached)
        cache.remember(self.kind, seconds)


def settings_for(op: str, backend: Any, validate: Any) -> Settings:
    """The settings in force, with a call's own path and its own word on reading values back."""
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
    """Built once, not at every call."""
    reading = settings.validate if validate is None else "always" if validate else "never"
    return msgspec.structs.replace(settings, backend=backend, validate=reading)
