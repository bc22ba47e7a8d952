"""Run a Call: detect the target, plan, check that the kernel compiles, launch, and note the plan."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from portattn.api import autocast, shape_polymorphism
from portattn.compile import ensure_compiled, variants
from portattn.config import Settings
from portattn.errors import FallbackWarning, PathUnavailable, warn_caller
from portattn.launch import cache, has_rows, kernel_calls, launch_all
from portattn.launch.cached_launch import CachedLaunch, ShapeClass
from portattn.launch.run import INTERPRET_HINT, NOT_TO_INTERPRET, device_guard, launch_tensors, may_interpret
from portattn.planning.backend import Variant
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, detect_target
from portattn.reference import blockwise, write
from portattn.schema.call import Call
from portattn.schema.compile_record import CompileRecord
from portattn.schema.plan import Plan, Rejection
from portattn.schema.problem import Problem
from portattn.schema.target import Target

Results = tuple[torch.Tensor, torch.Tensor | None]


class Candidate(Protocol):
    """A kernel of portattn's that a plan runs."""

    def compiled(self) -> Sequence[ensure_compiled.Compiled]:
        """Return its launches as a compiler sees them."""
        ...

    def known_failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        """Return the record of a known failure to compile here, or None. Compiles nothing."""
        ...

    def failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        """Return the record of a failed compile (compiling first if needed), or None."""
        ...

    def results(self) -> Results:
        """Return memory for out (B, Hq, Sq, Dv) and the requested LSE (B, Hq, Sq), the same at each call."""
        ...

    def run(self) -> None:
        """Launch through Triton, into `results`."""
        ...

    def traced(self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int]) -> ShapeClass:
        """Return the shape class that `cached` would have. Compiles nothing."""
        ...

    def cached(
        self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int], given: Sequence[str],
        known: ShapeClass | None,
    ) -> CachedLaunch:  # fmt: skip
        """Return its launches for calls with the same call key. On the call's device.

        known: the shape class that `traced` returned for such a call, if it is known"""
        ...


class CoreCandidate:
    def __init__(self, plan: Plan, call: Call, cores: int) -> None:
        self._plan, self._call = plan, call
        self._launches, self._out, self._lse = kernel_calls(plan, call, cores)

    @property
    def _interpreted(self) -> bool:
        return self._plan.path == "interpreter"

    def compiled(self) -> Sequence[ensure_compiled.Compiled]:
        return [] if self._interpreted else self._launches

    def known_failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        return None if self._interpreted else ensure_compiled.known_failure(self._plan, self._launches, settings)

    def failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        if self._interpreted:
            return None
        return ensure_compiled.ensure(self._plan, self._launches, self._call.q, target, settings)

    def results(self) -> Results:
        return self._out, self._lse

    def run(self) -> None:
        launch_all(self._launches, self._plan, self._call.q)

    def traced(self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int]) -> ShapeClass:
        return shape_polymorphism.trace_core(recipe, inputs, self._plan, self._launches, *self.results())[1]

    def cached(
        self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int], given: Sequence[str],
        known: ShapeClass | None,
    ) -> CachedLaunch:  # fmt: skip
        return shape_polymorphism.cache_core(
            recipe, inputs, self._plan, given, self._launches, *self.results(), self._call.q.device, known
        )


class VariantCandidate:
    def __init__(self, variant: Variant, plan: Plan, call: Call) -> None:
        self._variant, self._plan, self._call = variant, plan, call
        self._tensors: dict[str, Any] = {}
        self._launcher: Any = None

    def compiled(self) -> Sequence[ensure_compiled.Compiled]:
        return variants.launch_signatures(self._variant, self._plan, self._call)

    def known_failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        return variants.known_failure(self._variant, self._plan, self._call, target, settings)

    def failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        return variants.failure(self._variant, self._plan, self._call, target, settings)

    def results(self) -> Results:
        tensors, _ = self._described()
        return tensors["out"], tensors["lse"]

    def _described(self) -> tuple[Mapping[str, Any], Any]:
        """Return the call's tensors and results, and the launcher, made once a kernel is known to compile."""
        if self._launcher is None:
            self._launcher, self._tensors = self._variant.launcher(self._call), launch_tensors(self._call)
        return self._tensors, self._launcher

    def run(self) -> None:
        tensors, launcher = self._described()
        with device_guard(self._call.q):
            launcher(tensors)

    def traced(self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int]) -> ShapeClass:
        launcher, tensors = self._variant.described(self._call), launch_tensors(self._call)
        return shape_polymorphism.trace_variant(recipe, inputs, self._plan, self._variant, launcher, tensors)[1]

    def cached(
        self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int], given: Sequence[str],
        known: ShapeClass | None,
    ) -> CachedLaunch:  # fmt: skip
        tensors, launcher = self._described()
        return shape_polymorphism.cache_variant(
            recipe, inputs, self._plan, given, self._variant, launcher, tensors, self._call.q.device, known
        )


def candidate(plan: Plan, call: Call, target: Target) -> Candidate | None:
    """Return a plan's candidate, or None for a vendor's path or the reference."""
    if not plan.key:
        return None
    variant = variants.variant_of(plan)
    if variant is None:
        return CoreCandidate(plan, call, target.arch.cores)
    return VariantCandidate(variant, plan, call)


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

    Returns:
        The Plan.

    Examples:
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

    It is one of the gradients' operations (`attention_backward`, `varlen_attention_backward`). If their kernels did not
    run after all, it is the plan of the recomputed forward. If torch differentiates the forward's own path, such as
    `sdpa`, portattn computes no backward pass, and this plan stays: the forward's plan notes `gradients by sdpa`.

    Returns:
        The Plan.

    Examples:
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
    return _last.get()


def forget_backward() -> None:
    global _last_backward
    _last_backward = None


def note_backward(before: Any) -> None:
    """Make this thread's last plan the backward pass's, and restore `before`, which it replaced."""
    global _last_backward
    _last_backward = _last.get()
    _last.set(before)


def set_last_plan(made: Any) -> None:
    """Set the last plan of a call that ran by other means than `run`: the plan, or its source (CachedLaunch.note)."""
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
    """A store of a call's launches (request.CacheWriter)."""

    given: tuple[str, ...]  # names of the tensors that the call brings, in order
    inputs: list[int]  # its sizes and strides

    def recipe(self, target: Target, failed: Mapping[str, CompileRecord]) -> shape_polymorphism.CallRecipe: ...

    def trace_for(self, recipe: shape_polymorphism.CallRecipe) -> ShapeClass | None: ...

    def keep(self, cached: CachedLaunch, seconds: float) -> None: ...


def plan_problem(problem: Problem, device: torch.device, settings: Settings) -> Plan:
    """Return the plan of a problem on a device, without the records of compiles that failed."""
    return _planned(problem, device.type, device.index, settings)


def plan_call(call: Call, settings: Settings) -> Plan:
    """Return the plan of a call here, known failures to compile taken into account. Launches nothing."""
    call.dry = True
    made, _, _ = _compilable(call, settings)
    _refuse(made, settings)
    return made


def trace_call(
    call: Call, settings: Settings, caching: LaunchRecorder | None
) -> tuple[Plan, Sequence[ensure_compiled.Compiled], shape_polymorphism.CallRecipe | None, ShapeClass | None]:
    """Return a call's plan, its launches, and its recipe with its shape class if it can be cached. Compiles nothing."""
    call.dry = True
    made, own, failed = _compilable(call, settings)
    _refuse(made, settings)
    if own is None or caching is None:
        return made, [] if own is None else own.compiled(), None, None
    recipe = caching.recipe(_target(call), failed)
    with device_guard(call.q):
        return made, own.compiled(), recipe, own.traced(recipe, caching.inputs)


def prepare_call(call: Call, settings: Settings, caching: LaunchRecorder) -> tuple[Plan, CachedLaunch | None]:
    """Return a call's plan and its launches, compiled and checked. Launches nothing and caches nothing.

    The launches are None if no kernel of portattn's runs, also after a passing failure: a handle is prepared once."""
    call.dry = False
    with _without_autocast(call.q):  # canaries are compared with torch's results in their dtype
        made, own, failed = _compilable(call, settings)
    _refuse(made, settings)
    return made, None if own is None else _cached(own, call, caching, failed)


def _cached(own: Candidate, call: Call, caching: LaunchRecorder, failed: Mapping[str, CompileRecord]) -> CachedLaunch:
    recipe = caching.recipe(_target(call), failed)
    with device_guard(call.q):
        return own.cached(recipe, caching.inputs, caching.given, caching.trace_for(recipe))


def _target(call: Call) -> Target:
    return detect_target(call.q.device.type, call.q.device.index)[0]


def run(
    call: Call, settings: Settings, caching: LaunchRecorder | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call by its plan and return (out (B, Hq, Sq, Dv), LSE (B, Hq, Sq) float32 or None). Autocast is off.

    A failed compile becomes an Incident, and the call is planned again without that path; the core after a failed
    variant is no fall-back. A passing failure caches nothing; a launch cached after a time-out is dropped when the
    time-out's record expires. An error while a kernel runs passes through: it is never retried elsewhere.

    Args:
        caching: records the launches of portattn's own kernels for calls with the same call key
    """
    with _without_autocast(call.q):
        return _run(call, settings, caching)


def _without_autocast(q: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a block without autocast: kernels do not see it, and other paths must compute in the given dtypes too."""
    return autocast.off(q.device.type) if autocast.is_on(q) else contextlib.nullcontext()


def _run(call: Call, settings: Settings, caching: LaunchRecorder | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    made, own, failed = _compilable(call, settings)
    if not _settled(failed):
        caching = None
    _refuse(made, settings)
    _warn(made, settings)
    if own is None:
        result = runner(made)(call)
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
    made = plan_problem(call.problem, device, settings)
    if made.path == "interpreter" and not may_interpret():
        no = Rejection(path=made.path, reason=NOT_TO_INTERPRET, hint=INTERPRET_HINT)
        raise PathUnavailable(f"{call.problem.op}: backend={made.path!r} cannot run in this process", (no,))
    failed: dict[str, CompileRecord] = {}
    while made.key:  # a kernel of portattn's: where it fails, the plan goes on without it
        target = _target(call)
        if not call.dry and made.path != "interpreter":
            ensure_compiled.expect(settings)
        own = candidate(made, call, target)
        failure = None if own is None else _failure(own, made, call, target, settings)
        if failure is None:
            return made, own, failed
        failed[made.key] = failure
        made = plan(call.problem, target, records=failed, settings=settings)
    return made, None, failed


def _settled(failed: Mapping[str, CompileRecord]) -> bool:
    """Return whether the plan holds for later calls: no passing failure led to it."""
    return all(record.standing != "passing" for record in failed.values())


def _seconds(failed: Mapping[str, CompileRecord]) -> float:
    """Return the seconds that the plan holds: until the first time-out that led to it expires."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return min(((v.until - now).total_seconds() for v in failed.values() if v.until is not None), default=math.inf)


def _failure(own: Candidate, made: Plan, call: Call, target: Target, settings: Settings) -> CompileRecord | None:
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


def runner(made: Plan) -> Callable[[Call], tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the function that runs a plan without a kernel of portattn's: vendor or reference."""
    if made.path == "reference" and made.problem.writes:
        return write.run
    if made.path == "reference":
        return blockwise.run_backward if made.problem.backward else blockwise.run
    backend = Registry.load().backends[made.target.partition(":")[0]]
    return next(v for v in backend.vendor if v.name == made.path).run


def _refuse(made: Plan, settings: Settings) -> None:
    if made.fell_back and settings.fallback == "error":
        first = made.rejected[0]
        raise PathUnavailable(
            f"{made.problem.op}: the {first.path} path is not available on {made.target} and fallback='error'",
            made.rejected,
        )


def _warn(made: Plan, settings: Settings) -> None:
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
