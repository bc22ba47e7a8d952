"""The monitor: a warning for each kernel that is compiled after warm-up, with the cause."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from portattn.config import Settings
from portattn.errors import CompileWarning, warn_caller
from portattn.launch import cache, triton_compat
from portattn.schema.ops import ROWS
from portattn.schema.tensors import POINTER_ALIGNMENT

if TYPE_CHECKING:
    from portattn.api.request import Request

_armed = False
_at_arming: set[tuple[str, str]] = set()  # kernels' specialisations that were there when the monitor was armed
_warned: set[tuple[str, str]] = set()
_silent: ContextVar[bool] = ContextVar("portattn_monitor_silent", default=False)
_OURS = ("portattn.kernels.", "portattn.backends.")


def monitor(on: bool = True) -> tuple[str, ...]:
    """Warn (CompileWarning) from now on when a call compiles a kernel or loads it from Triton's cache; or no more.

    Args:
        on: True to warn, False to warn no more

    `warmup` does this by itself. Each kernel's specialisation is warned about once; the warning names the call, the
    seconds it took, the plan's key, and the differences from the most similar cached call: an argument's shape,
    strides, type, alignment, or another argument's value.

    The setting `monitor` (PORTATTN_MONITOR) overrules it: "always" warns from the first call on, "never" never.

    Returns:
        Names of the kernels that this process compiled or loaded since the monitor was armed (by `warmup`, say); none
        if it was not.

    Raises:
        CompileWarning: A call compiles, and Python's `warnings` turn warnings into errors.

    Examples:
        >>> import torch, portattn
        >>> portattn.monitor()
        ()
        >>> q = torch.randn(1, 2, 5, 16)
        >>> portattn.attention(q, q, q).shape  # compiles nothing on a CPU, and warns of nothing
        torch.Size([1, 2, 5, 16])
        >>> assert not portattn.monitor(False)
    """
    global _armed, _at_arming
    now = specialisations()
    found = tuple(name for name, _ in sorted(now - _at_arming)) if _armed else ()
    _armed, _at_arming = bool(on), now
    return found


def arm() -> None:
    monitor(True)


def should_warn(settings: Settings) -> bool:
    return not _silent.get() and (settings.monitor == "always" or (settings.monitor == "auto" and _armed))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


@contextlib.contextmanager
def watching(request: Request) -> Iterator[None]:
    """Warn, if wanted, about kernels that an uncached call compiles inside the block."""
    if not should_warn(request.settings):
        yield
        return
    before, begun = specialisations(), time.perf_counter()
    near = nearest(request)
    try:
        yield
    finally:
        new = specialisations() - before - _warned
        _warned.update(new)
        if new:
            _warn(request, sorted({name for name, _ in new}), time.perf_counter() - begun, near)


def _warn(request: Request, kernels: list[str], seconds: float, nearest: list[str] | None) -> None:
    from portattn.api.dispatch import last_plan

    made = last_plan()
    of_call = made is not None and made.problem.op == request.op
    about = f"{made.problem} on the {made.path} path" if made is not None and of_call else request.op
    key = f", key {made.key}" if made is not None and of_call and made.key else ""
    if nearest is None:
        other = "no call of this operation was kept before"
    elif nearest:
        other = f"from the nearest call that was kept it differs in {'; '.join(nearest)}"
    else:
        other = "a call like it was kept before, and forgotten"
    warn_caller(
        f"{' and '.join(kernels)} compiled after warm-up, in {seconds:.2f} s: {about}{key}; {other}. "
        "Give such a call to portattn.warmup",
        CompileWarning,
    )


_FACTS = ("shape", "strides", "type", "device", f"address modulo {POINTER_ALIGNMENT}")
Facts = dict[str, Any]


def nearest(request: Request) -> list[str] | None:
    """Return the differences between a call and the most similar cached call of its operation, or None."""
    if not request.cacheable():
        return None
    from portattn.api.request import CacheWriter

    mine, found = CacheWriter(request), None
    for kind in cache.every_kind():
        if kind.op != request.op:
            continue
        for cached in kind.classes:
            called = ROWS[kind.op].called
            differing = _differences(_facts(mine.kind, mine.inputs, called), _facts(kind, cached.inputs, called))
            differing += [
                f"the setting {name}: {getattr(request.settings, name)!r} instead of {getattr(cached.settings, name)!r}"
                for name in request.settings.__struct_fields__
                if getattr(request.settings, name) != getattr(cached.settings, name) and name != "monitor"
            ]
            if found is None or len(differing) < len(found):
                found = differing
    return found


def _facts(kind: cache.CallKey, inputs: Sequence[int], called: Mapping[str, str]) -> Facts:
    """Return a call's facts by the caller's names (called): tensors as _FACTS, other arguments as they are."""
    numbers, layouts = iter(inputs), []
    for one in kind.kinds:
        shape = tuple(next(numbers) for _ in range(one.ndim))
        strides = tuple(next(numbers) for _ in range(one.ndim))
        layouts.append((shape, strides, one.dtype, one.device, one.residue))
    facts: Facts = {
        called.get(name, name): None if place is None else layouts[place] for name, place in kind.places.items()
    }
    facts |= dict(zip(kind.value_names, kind.values, strict=False))
    facts |= {name: None if given is None else next(numbers) for name, given in kind.lengths.items()}
    return facts | {"gradients": any(one.requires_grad for one in kind.kinds)}


def _differences(mine: Facts, theirs: Facts) -> list[str]:
    found = []
    for name, one in mine.items():
        two = theirs.get(name)
        if cache.identical(one, two):
            continue
        if name == "gradients":
            found.append(f"gradients are {'' if one else 'not '}asked for")
        elif one is not None and two is not None and _is_layout(one) and _is_layout(two):
            found += [
                f"{name}'s {fact}: {_said(a)} instead of {_said(b)}"
                for fact, a, b in zip(_FACTS, one, two, strict=True)
                if a != b and not (fact == "strides" and one[0] != two[0])  # they mostly follow from the shape
            ]
        elif _is_layout(one) or _is_layout(two):
            found.append(f"{name} is {'not ' if one is None else ''}given")
        else:
            found.append(f"{name}: {one!r} instead of {two!r}")
    return found


def _is_layout(fact: Any) -> bool:
    return type(fact) is tuple and len(fact) == len(_FACTS) and isinstance(fact[2], torch.dtype)


def _said(fact: Any) -> str:
    return str(tuple(fact)) if isinstance(fact, tuple) else str(fact)


def specialisations() -> set[tuple[str, str]]:
    """Return (name, specialisation) of every kernel of portattn's that Triton compiled or loaded in this process."""
    jit_function, found = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None), set[tuple[str, str]]()
    if jit_function is None:
        return found
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            for kernel in list(vars(module).values()):
                # A kernel that another module imported is of its own module.
                if isinstance(kernel, jit_function) and kernel.__module__ == name:
                    found |= {(kernel.__name__, key) for key in triton_compat.keys(kernel)}
    return found
