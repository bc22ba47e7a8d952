"""The monitor: a warning for each kernel that is compiled once a program should be warm, and what brought it about."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from portattn import fastpath
from portattn.config import Settings
from portattn.errors import CompileWarning
from portattn.launch import triton_runtime

if TYPE_CHECKING:
    from portattn.request import Request

_armed = False
_warned: set[tuple[str, str]] = set()
_silent: ContextVar[bool] = ContextVar("portattn_monitor_silent", default=False)
_OURS = ("portattn.kernels.", "portattn.backends.")


def monitor(on: bool = True) -> None:
    """Warn from now on (CompileWarning) when a call compiles a kernel, or loads one from Triton's cache; or no more.

    `warmup` does this by itself. Each kernel's specialisation is warned about once; the warning names the call, the
    seconds it took, the plan's key, and in what the call differs from the nearest one that was kept: an argument's
    shape, strides, type, alignment, or another argument's value.

    The setting `monitor` (PORTATTN_MONITOR) overrules it: "always" warns from the first call on, "never" never.
    """
    global _armed
    _armed = bool(on)


def arm() -> None:
    monitor(True)


def wanted(settings: Settings) -> bool:
    """Whether a compile is to be warned about now."""
    return not _silent.get() and (settings.monitor == "always" or (settings.monitor == "auto" and _armed))


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Inside the block compiles are expected."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """Yields a list that, after the block, names portattn's kernels that this process compiled or loaded in it."""
    before, found = _specialisations(), list[str]()
    yield found
    found += [name for name, _ in sorted(_specialisations() - before)]


@contextlib.contextmanager
def watching(request: Request, key: Any) -> Iterator[None]:
    """Around what a call does that none was kept for: warns, where that is wanted, about what it compiled."""
    if not wanted(request.settings):
        yield
        return
    before, begun = _specialisations(), time.perf_counter()
    nearest = fastpath.nearest(key, request.settings, tuple(request.tensors), tuple(request.values))
    try:
        yield
    finally:
        new = _specialisations() - before - _warned
        _warned.update(new)
        if new:
            _warn(request, sorted({name for name, _ in new}), time.perf_counter() - begun, nearest)


def _warn(request: Request, kernels: list[str], seconds: float, nearest: list[str] | None) -> None:
    made = fastpath.last_plan.get()
    of_call = made is not None and made.problem.op == request.op
    about = f"{made.problem} on the {made.path} path" if made is not None and of_call else request.op
    key = f", key {made.key}" if made is not None and of_call and made.key else ""
    if nearest is None:
        other = "no call of this operation was kept before"
    elif nearest:
        other = f"from the nearest call that was kept it differs in {'; '.join(nearest)}"
    else:
        other = "a call like it was kept before, and forgotten"
    warnings.warn(
        f"{' and '.join(kernels)} compiled after warm-up, in {seconds:.2f} s: {about}{key}; {other}. "
        "Give such a call to portattn.warmup",
        CompileWarning,
        stacklevel=6,  # _warn, watching, contextlib, perform, the op, its caller
    )


def _specialisations() -> set[tuple[str, str]]:
    """Every kernel of portattn's that Triton has compiled or loaded in this process: (name, specialised on what)."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            for kernel in list(vars(module).values()):
                # A kernel that another module imported is of its own module.
                if getattr(kernel, "__module__", None) == name:
                    found |= {(kernel.__name__, key) for key in triton_runtime.keys(kernel)}
    return found
