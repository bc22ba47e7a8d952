"""Request: one call of a public operation before validation, and how it is carried out, planned or prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch._subclasses import FakeTensor

from portattn import dispatch, fastpath, monitoring
from portattn.call import Call
from portattn.config import Settings, current
from portattn.errors import ArgumentError
from portattn.kept import Kept
from portattn.planned import Plan

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_recent = fastpath.recent


@dataclass(slots=True)
class Request:
    """What the caller gave.

    tensors  by the names that they have in kernels' arguments; None for those that are not given
    values   everything else that decides the plan, by the caller's names
    build    validates and makes the Call
    asked    `backend` and `validate` as the caller gave them
    """

    op: str
    settings: Settings
    tensors: dict[str, Any]
    values: dict[str, Any]
    build: Callable[[], Call]
    asked: tuple[Any, Any] = (None, None)

    @property
    def return_lse(self) -> bool:
        return bool(self.values["return_lse"])

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the tensors that the caller gave."""
        return tuple(name for name, tensor in self.tensors.items() if tensor is not None)

    def key(self) -> Hashable | None:
        """The key under which the call is kept; None for what is never kept.

        Those are calls on a CPU, of what is no tensor, and of tensors that do not simply lie in memory: subclasses
        (fake tensors have no memory at all) and views whose negation is still to be done.
        """
        q = self.tensors["q"]
        if not isinstance(q, torch.Tensor) or q.device.type == "cpu":
            return None
        for tensor in self.tensors.values():
            if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()):
                return None
        return fastpath.key_of(self.op, self.tensors, self.values)


class Collected(list[Request]):
    """Requests of operations that are not to be performed."""

    def again(self, op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
        """What to do with a call before a request is made of it: a result ends it, None makes and adds the request."""
        return None


_collected: ContextVar[Collected | None] = ContextVar("portattn_collected", default=None)


@contextmanager
def collecting(collected: Collected | None = None) -> Iterator[Collected]:
    """Inside the block, public operations are not performed; yields the list that their requests are added to."""
    requests = Collected() if collected is None else collected
    token = _collected.set(requests)
    try:
        yield requests
    finally:
        _collected.reset(token)


def again(op: str, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Result | None:
    """Perform a call like one of the last few of its operation; None where there was none like it.

    tensors, values  as the Request has them, in its order; `backend` and `validate` come last. Nothing is known of them
    """
    collected = _collected.get()
    if collected is not None:
        return collected.again(op, tensors, values)
    settings = current()
    for entry in _recent.get(op, ()):
        hit = entry.hit
        if hit is not None:
            found = hit(tensors, values, settings, None, None, None)
            if found is not NotImplemented:
                if found is not None:
                    return found
                continue
        matched = entry.match(tensors, values, settings)
        if matched is not None:
            dispatch.note(entry.kept.plan)
            out, lse = entry.kept(*matched)
            return out if lse is None else (out, lse)
    return None


def perform(request: Request) -> Result:
    """Carry a request out: out in the caller's layout, with the LSE where it is asked for."""
    collected = _collected.get()
    if collected is not None:
        collected.append(request)
        return None  # type: ignore[return-value]  # the collector never looks at it
    key = request.key()
    if key is not None:
        kept = dispatch.kept(key, request.settings)
        if kept is not None:
            _remember(request, kept)
            given = [tensor for tensor in request.tensors.values() if tensor is not None]
            out, lse = kept(given, [tensor.data_ptr() for tensor in given])
            return out if lse is None else (out, lse)
    call = request.build()
    if any(isinstance(tensor, FakeTensor) for tensor in request.tensors.values()):
        return finished(call, call.new_out(), call.new_lse() if call.problem.return_lse else None)
    with monitoring.watching(request, key):
        out, lse = dispatch.run(call, request.settings, key, request.given)
    if key is not None:
        kept = fastpath.find(key, request.settings)
        if kept is not None:
            _remember(request, kept)
    return finished(call, out, lse)


def _remember(request: Request, kept: Kept) -> None:
    if request.settings.validate != "always":
        values = (*request.values.values(), *request.asked)
        fastpath.remember(request.op, tuple(request.tensors.values()), values, current(), kept)


def finished(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> Result:
    """Results as (B, Hq, Sq, Dv) and (B, Hq, Sq) in the layout that the caller uses."""
    problem = call.problem
    if problem.packed:
        out = out[0].transpose(0, 1)
        lse = None if lse is None else lse[0]
    elif problem.layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if lse is not None and problem.return_lse else out


def plan_request(request: Request) -> Plan:
    """How a request would run, without running it."""
    return dispatch.plan_call(request.build(), request.settings)


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
