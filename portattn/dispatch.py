"""From a Call to its result: detect the target, plan, see that the kernel compiles, run, and say what happened."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import msgspec
import torch

from portattn import fastpath
from portattn.call import Call
from portattn.config import Settings
from portattn.errors import FallbackWarning, PathUnavailable
from portattn.planner import Plan, Rejection, plan
from portattn.problem import Problem
from portattn.reference import blockwise
from portattn.registry import Registry
from portattn.target import Target
from portattn.toolchain import installed

_last: ContextVar[Plan | None] = ContextVar("portattn_last_plan", default=None)
_only_plan: ContextVar[list[Plan] | None] = ContextVar("portattn_only_plan", default=None)
_warned: set[tuple[str, str, str, str]] = set()
PLAN_CACHE = 4096  # plans kept, by problem, device and settings


def last_plan() -> Plan | None:
    """The plan of the last call that ran in this thread or task, as it ran, fall-backs included; None before any."""
    return _last.get()


@contextlib.contextmanager
def planning_only() -> Iterator[list[Plan]]:
    """Inside the block, calls are planned and not run; yields the list that plans are added to."""
    plans: list[Plan] = []
    token = _only_plan.set(plans)
    try:
        yield plans
    finally:
        _only_plan.reset(token)


@functools.lru_cache(maxsize=64)
def detect_target(device_type: str, index: int | None) -> tuple[Target, str]:
    """The target that a torch device is, and why it is only the CPU's reference when no backend knows the device."""
    registry = Registry.load()
    for backend in registry.backends.values():
        if backend.device_type != device_type:
            continue
        arch = backend.detect(index)
        if arch is not None and arch not in registry.arches[backend.name]:
            unknown = f"backend {backend.name} finds arch {arch}, which its arches.toml does not have"
            return registry.target("cpu:generic"), unknown
        if arch is not None:
            toolchain = installed().with_components(backend.machine_components())
            return registry.target(f"{backend.name}:{arch}", toolchain), ""
    target = registry.target("cpu:generic")
    known = ", ".join(sorted({b.device_type for b in registry.backends.values()}))
    return target, f"no backend knows device {device_type}:{index or 0}; device types of backends: {known}"


@functools.lru_cache(maxsize=PLAN_CACHE)
def _planned(problem: Problem, device_type: str, index: int | None, settings: Settings) -> Plan:
    from portattn.verdicts import store

    target, unknown = detect_target(device_type, index)
    if not unknown:
        return plan(problem, target, verdicts=store(settings), settings=settings)
    if settings.backend not in ("auto", "reference"):
        raise PathUnavailable(f"{problem.op}: backend={settings.backend!r} cannot run: {unknown}")
    made = plan(problem, target, settings=settings)
    rejection = Rejection(path="triton", reason=unknown, hint="write a backend: docs/backends.md")
    return msgspec.structs.replace(made, rejected=(rejection,))


def forget_plans() -> None:
    """Drop every cached plan: verdicts or data have changed."""
    _planned.cache_clear()
    fastpath.forget()


def repeat(
    key: Hashable, settings: Settings, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Run again what an earlier call with this key kept: (out in the caller's layout, LSE); None when nothing is."""
    if _only_plan.get() is not None or settings.validate == "always":
        return None
    kept = fastpath.find(key, settings)
    if kept is None:
        return None
    _last.set(kept.plan)
    return kept(q, k, v, optional)


def run(call: Call, settings: Settings, key: Hashable | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call by the plan for it: (out (B,Hq,Sq,Dv), LSE (B,Hq,Sq) float32 or None).

    With a key, a core path's launches are kept for `repeat`. A compile that fails becomes an Incident, and the call is
    planned again without that path. An error while the kernel runs passes through: it is never retried elsewhere.
    """
    device = call.q.device
    while True:
        made = _planned(call.problem, device.type, device.index, settings)
        collected = _only_plan.get()
        if collected is not None:
            collected.append(made)
            return call.q, None
        _report(made, settings)
        if made.path == "triton":
            from portattn import compiling

            target, _ = detect_target(device.type, device.index)
            failed = compiling.ensure(made, call, target, settings)
            if failed is not None:
                forget_plans()
                if settings.backend != "auto":
                    raise PathUnavailable(
                        f"{call.problem.op}: backend={settings.backend!r} does not compile here: {failed.reason}",
                        [Rejection(path=made.path, reason=failed.reason, incident=failed.incident)],
                    )
                continue
        result = _execute(made, call, settings, key)
        _last.set(made)
        return result


def _execute(
    made: Plan, call: Call, settings: Settings, key: Hashable | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if made.path == "reference":
        return blockwise.run(call)
    registry = Registry.load()
    backend = registry.backends[made.target.partition(":")[0]]
    if made.path == backend.core_path:
        from portattn.launch import kernel_calls, launch_all

        target, _ = detect_target(call.q.device.type, call.q.device.index)
        launches, out, lse = kernel_calls(made, call, target.arch.cores)
        launch_all(launches, made, call.q)
        if key is not None and out.numel() and not call.copied:
            fastpath.keep(key, fastpath.Kept(made, settings, launches, out, lse))
        return out, lse
    vendor = next(v for v in backend.vendor if v.name == made.path)
    return vendor.run(call)


def _report(made: Plan, settings: Settings) -> None:
    """Warn, raise or stay silent about a fall-back, as the settings say."""
    if not made.fell_back or settings.fallback == "silent":
        return
    first = made.rejected[0]
    if settings.fallback == "error":
        raise PathUnavailable(
            f"{made.problem.op}: the {first.path} path is not available on {made.target} and fallback='error'",
            made.rejected,
        )
    key = (made.problem.op, made.requested, made.path, first.reason)
    if key in _warned:
        return
    _warned.add(key)
    cause = f" [{first.quirk or first.incident}]" if first.quirk or first.incident else ""
    hint = f" Hint: {first.hint}." if first.hint else ""
    warnings.warn(
        f"{made.problem.op} runs on the {made.path} path, not {first.path}: {first.reason}{cause}.{hint}",
        FallbackWarning,
        stacklevel=5,  # _report, run, _finish, the op, its caller
    )
