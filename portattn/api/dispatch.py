"""From a Call to its result: detect the target, plan, see that the kernel compiles, run, and say what happened."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import torch

from portattn.api import autocast, shape_polymorphism
from portattn.api.candidate import Candidate, candidate
from portattn.compile import compile_check
from portattn.config import Settings
from portattn.errors import FallbackWarning, PathUnavailable, warn_caller
from portattn.launch import cache, has_rows
from portattn.launch.cached_launch import CachedLaunch
from portattn.launch.run import INTERPRET_HINT, NOT_TO_INTERPRET, device_guard, may_interpret
from portattn.planning.detect_target import detect_target
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.reference import blockwise, gradients, writing
from portattn.schema.call import Call
from portattn.schema.compile_record import CompileRecord
from portattn.schema.plan import Plan, Rejection
from portattn.schema.problem import Problem
from portattn.schema.target import Target

_last = cache.last_plan
# Like _last, for the process's last backward pass: autograd runs each device's backward in a thread of its own.
_last_backward: Any = None
_warned: set[tuple[str, str, str, str]] = set()
# Keys of plans, under a canary setting, whose families gave right numbers here or need not show it.
_trusted: set[tuple[str, str]] = set()
PLAN_CACHE = 4096  # plans cached, by problem, device and settings


def last_plan() -> Plan | None:
    """The plan of the last call that ran in this thread or task, as it ran, fall-backs included; None before any.

    A cached call plans nothing: its plan is made when it is asked for here.

    Returns the Plan.

    Raises nothing.

    >>> import torch, portattn
    >>> q = torch.randn(1, 2, 5, 16)
    >>> out = portattn.attention(q, q, q)
    >>> portattn.last_plan().path
    'sdpa'
    """
    found = _last.get()
    if type(found) is tuple:
        found = _materialize_plan(found)
        _last.set(found)
    made: Plan | None = found
    return made


def last_backward_plan() -> Plan | None:
    """The plan of the last backward pass that portattn computed in this process, in whatever thread; None before any.

    It is one of the gradients' operations (`attention_backward`, `varlen_attention_backward`). Where their kernels did
    not run after all, it is that of the forward which was computed anew and differentiated. Where torch differentiates
    the forward's own path, such as `sdpa`, portattn computes no backward pass, and this stays as it was: the notes of
    the forward's plan say `gradients by sdpa`.

    Returns the Plan.

    Raises nothing.

    >>> import torch, portattn
    >>> q = torch.randn(1, 2, 5, 16, requires_grad=True)
    >>> portattn.attention(q, q, q, backend="interpreter").sum().backward()
    >>> portattn.last_plan().problem.op, portattn.last_backward_plan().problem.op
    ('attention', 'attention_backward')
    """
    global _last_backward
    found = _last_backward
    if type(found) is tuple:
        made = _materialize_plan(found)
        if _last_backward is found:  # and not that of another thread's meanwhile
            _last_backward = made
        found = made
    plan: Plan | None = found
    return plan


def _materialize_plan(noted: tuple[Any, Any]) -> Any:
    planner, inputs = noted
    return planner(inputs)


def last_plan_state() -> Any:
    """Return the state of `last_plan`, which `set_last_plan` restores."""
    return _last.get()


def forget_backward() -> None:
    """Forget the last backward pass: what `last_backward_plan` says then is of a later one."""
    global _last_backward
    _last_backward = None


def note_backward(before: Any) -> None:
    """Remember what was noted last as the backward pass's, and `before`, which it replaced, as this thread's call."""
    global _last_backward
    _last_backward = _last.get()
    _last.set(before)


def set_last_plan(made: Any) -> None:
    """Remember as the last one a plan that ran by other means than `run`, or what makes it (CachedLaunch.note)."""
    _last.set(made)


@functools.lru_cache(maxsize=PLAN_CACHE)
def _planned(problem: Problem, device_type: str, index: int | None, settings: Settings) -> Plan:
    target, unknown = detect_target(device_type, index)
    if not unknown:
        return plan(problem, target, settings=settings)
    if settings.backend not in ("auto", "reference"):
        raise PathUnavailable(f"{problem.op}: backend={settings.backend!r} cannot run: {unknown}")
    # The target stands for any CPU, whose own library does not run there.
    made = plan(problem, target, settings=msgspec.structs.replace(settings, backend="reference"))
    rejection = Rejection(path="triton", reason=unknown, hint="write a backend: docs/backends.md")
    return msgspec.structs.replace(made, requested=settings.backend, rejected=(rejection,))


def forget_plans() -> None:
    """Drop every cached plan: records or data have changed."""
    _planned.cache_clear()
    _trusted.clear()
    cache.forget()
    training = sys.modules.get("portattn.api.training")
    if training is not None:
        training.forget()


class LaunchRecorder(Protocol):
    """What keeps the launches of a call (request.CacheWriter).

    given   names of the tensors that the call brings, in order
    inputs  its sizes and strides
    """

    given: tuple[str, ...]
    inputs: list[int]

    def recipe(self, target: Target, failed: Mapping[str, CompileRecord]) -> shape_polymorphism.CallRecipe: ...

    def keep(self, cached: CachedLaunch, seconds: float) -> None:
        """seconds  that it may be kept"""
        ...


def plan_call(call: Call, settings: Settings) -> Plan:
    """How a call would run here, with what failed to compile before taken into account. Nothing is launched."""
    call.dry = True
    made, _, _ = _compilable(call, settings)
    _refuse(made, settings)
    return made


def prepare_call(call: Call, settings: Settings, caching: LaunchRecorder) -> tuple[Plan, CachedLaunch | None]:
    """A call's plan, its kernels compiled and found right here, and its launches; None where no kernel of portattn's
    runs, as after a compile that failed, also one that may pass: what is prepared is not prepared again. Nothing is
    launched, and nothing kept for other calls.
    """
    call.dry = False
    with _without_autocast(call.q):  # canaries are compared with what torch computes in their dtype
        made, own, failed = _compilable(call, settings)
    _refuse(made, settings)
    return made, None if own is None else _cached(own, call, caching, failed)


def _cached(own: Candidate, call: Call, caching: LaunchRecorder, failed: Mapping[str, CompileRecord]) -> CachedLaunch:
    recipe = caching.recipe(_target(call), failed)
    with device_guard(call.q):
        return own.cached(recipe, caching.inputs, caching.given)


def _target(call: Call) -> Target:
    return detect_target(call.q.device.type, call.q.device.index)[0]


def run(
    call: Call, settings: Settings, caching: LaunchRecorder | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call by the plan for it: (out (B,Hq,Sq,Dv), LSE (B,Hq,Sq) float32 or None).

    caching  records the launches of portattn's own kernels for calls with the same call key

    A failed compile becomes an Incident, and the call is planned again without that path; after a failed variant the
    core runs, which is no fall-back. A passing failure caches nothing; a launch cached after a time-out is dropped when
    the time-out's record expires. An error while a kernel runs passes through: it is never retried elsewhere.

    Autocast is off: kernels do not see it, and the other paths must compute in the given dtypes too.
    """
    with _without_autocast(call.q):
        return _run(call, settings, caching)


def _without_autocast(q: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, torch's operators compute in the dtypes that they are given."""
    return autocast.off(q.device.type) if autocast.is_on(q) else contextlib.nullcontext()


def _run(call: Call, settings: Settings, caching: LaunchRecorder | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    made, own, failed = _compilable(call, settings)
    if not _settled(failed):
        caching = None
    _refuse(made, settings)
    _warn(made, settings)
    if own is None:
        result = _run_elsewhere(made, call)
    else:
        if made.problem.needs_grad:  # its result would have no graph
            raise RuntimeError(f"portattn: {made.path} records no gradients: a training call must be its operator's")
        result = own.results()
        if caching is None or call.copied or not has_rows(made):
            own.run()
        else:
            first = _cached(own, call, caching, failed)
            if first.direct is None:
                own.run()
            else:
                del own  # and with it the buffers between its kernels: the cached launch has its own
                _run_cached(first, call, *result)
            caching.keep(first, _seconds(failed))
    _last.set(made)
    return result


def _run_cached(first: CachedLaunch, call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Run a call by its cached launch: Triton's launchers would have to be built first."""
    inputs = [getattr(call, name) for name in first.given]
    first(inputs, [tensor.data_ptr() for tensor in inputs], first.sizes, out, lse)


def _compilable(call: Call, settings: Settings) -> tuple[Plan, Candidate | None, dict[str, CompileRecord]]:
    """Return a call's plan, its candidate (None for other paths) and the records of candidates that failed here."""
    device = call.q.device
    made = _planned(call.problem, device.type, device.index, settings)
    if made.path == "interpreter" and not may_interpret():
        no = Rejection(path=made.path, reason=NOT_TO_INTERPRET, hint=INTERPRET_HINT)
        raise PathUnavailable(f"{call.problem.op}: backend={made.path!r} cannot run in this process", (no,))
    failed: dict[str, CompileRecord] = {}
    while made.key:  # a kernel of portattn's: where it fails, the plan goes on without it
        target = _target(call)
        if not call.dry and made.path != "interpreter":
            compile_check.expect(settings)
        own = candidate(made, call, target)
        failure = None if own is None else _failure(own, made, call, target, settings)
        if failure is None:
            return made, own, failed
        failed[made.key] = failure
        made = plan(call.problem, target, records=failed, settings=settings)
    return made, None, failed


def _settled(failed: Mapping[str, CompileRecord]) -> bool:
    """Whether the plan holds for later calls too: no failure that may pass has led to it."""
    return all(record.standing != "passing" for record in failed.values())


def _seconds(failed: Mapping[str, CompileRecord]) -> float:
    """How long the plan holds: until the first time-out that has led to it is over."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return min(((v.until - now).total_seconds() for v in failed.values() if v.until is not None), default=math.inf)


def _failure(own: Candidate, made: Plan, call: Call, target: Target, settings: Settings) -> CompileRecord | None:
    """Return the failure that forbids the candidate (compiling it if needed), or None, as under the interpreter."""
    if made.path == "interpreter":
        return None
    if call.dry:
        from portattn.testing import canary

        return own.known_failure(target, settings) or canary.known_failure(made, target, settings)
    failure = own.failure(target, settings)
    return _untrusted(made, target, settings, call.q.device) if failure is None else failure


def _untrusted(made: Plan, target: Target, settings: Settings, device: torch.device) -> CompileRecord | None:
    """Return the record that quarantines the plan's family here (running its canaries if needed), or None."""
    if settings.canary == "never" or (made.key, settings.canary) in _trusted:
        return None
    from portattn.testing import canary  # only where it may be needed: it brings the worker and the oracle

    failure = canary.check(made, target, settings, device)
    if failure is None:
        _trusted.add((made.key, settings.canary))
    return failure


def _run_elsewhere(made: Plan, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run on a path that is not portattn's own: a vendor's library, or the reference."""
    if made.path == "reference" and call.problem.writes:
        return writing.run(call)
    if made.path == "reference":
        return gradients.run(call) if call.problem.backward else blockwise.run(call)
    backend = Registry.load().backends[made.target.partition(":")[0]]
    vendor = next(v for v in backend.vendor if v.name == made.path)
    return vendor.run(call)


def _refuse(made: Plan, settings: Settings) -> None:
    """Raise where falling back is forbidden and the plan does."""
    if made.fell_back and settings.fallback == "error":
        first = made.rejected[0]
        raise PathUnavailable(
            f"{made.problem.op}: the {first.path} path is not available on {made.target} and fallback='error'",
            made.rejected,
        )


def _warn(made: Plan, settings: Settings) -> None:
    """Warn about a fall-back, once for each cause."""
    if not made.fell_back or settings.fallback == "silent":
        return
    first = made.rejected[0]
    key = (made.problem.op, made.requested, made.path, first.reason)
    if key in _warned:
        return
    _warned.add(key)
    cause = f" [{first.quirk or first.incident}]" if first.quirk or first.incident else ""
    hint = f" Hint: {first.hint}." if first.hint else ""
    warn_caller(
        f"{made.problem.op} runs on the {made.path} path, not {first.path}: {first.reason}{cause}.{hint}",
        FallbackWarning,
    )
