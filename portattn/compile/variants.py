"""Compile checks of a variant's kernels, as ensure_compiled.py has them for the core's."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from portattn.compile import ensure_compiled
from portattn.config import Settings
from portattn.launch import Signature, load_kernels, preload
from portattn.launch.kernelcall import is_aligned, signatures
from portattn.launch.run import device_guard
from portattn.planning.backend import Variant
from portattn.planning.core_path import seen_to_run
from portattn.planning.registry import Registry
from portattn.schema.call import TENSORS, Call
from portattn.schema.compile_record import CompileRecord
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.schema.toolchain import Toolchain

# Launches of earlier calls, as a compiler sees them: two calls with one key have the same launches.
_seen: dict[Hashable, list[Signature]] = {}
_MOST_SEEN = 4096


def variant_of(made: Plan) -> Variant | None:
    """Return a plan's variant, with its schedules for the plan's compiler; None if the plan takes another path."""
    backend = Registry.load().backends.get(made.target.partition(":")[0])
    found = next((v for v in backend.variants if v.name == made.path), None) if backend else None
    return None if found is None else found.for_toolchain(Toolchain.parse(made.toolchain))


# Raised by a launch's description if this release of Triton lacks a name or an argument that the variant uses.
_LACKING = (ImportError, AttributeError, TypeError, AssertionError)


def known_failure(variant: Variant, made: Plan, call: Call, target: Target, settings: Settings) -> CompileRecord | None:
    """Return the negative record on the variant here, or None. Nothing is compiled, nothing run."""
    launches = _seen_or_lacking(variant, made, call, target, settings)
    return launches if isinstance(launches, CompileRecord) else ensure_compiled.known_failure(made, launches, settings)


def failure(variant: Variant, made: Plan, call: Call, target: Target, settings: Settings) -> CompileRecord | None:
    """Return the record of a failed compile (compiling first if needed), or None."""
    load_kernels("portattn.kernels.combine", interpreted=False)  # says so where Triton interprets in this process
    launches = _seen_or_lacking(variant, made, call, target, settings)
    if isinstance(launches, CompileRecord):
        return launches
    return ensure_compiled.ensure_all(
        made, launches, _LaunchLoader(variant, call, launches, settings), call.q, target, settings
    )


def _seen_or_lacking(
    variant: Variant, made: Plan, call: Call, target: Target, settings: Settings
) -> list[Signature] | CompileRecord:
    """Return a call's launches as a compiler sees them, or the record that this Triton lacks a name that they need."""
    try:
        return launch_signatures(variant, made, call)
    except _LACKING as error:
        # Where tests of such a problem have run with this Triton, the error is the variant's own.
        if seen_to_run(target, problem=made.problem) is not None:
            raise
        return ensure_compiled.missing_feature_record(made, error, target, settings)


def launch_signatures(variant: Variant, made: Plan, call: Call) -> list[Signature]:
    places = tuple(is_aligned(getattr(call, name)) for name in TENSORS)
    key = (made.key, call.problem, call.softcap, places, call.q.device)
    found = _seen.get(key)
    if found is None:
        with device_guard(call.q):
            found = signatures(variant, call)
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[key] = found
    return found


class _LaunchLoader:
    """Compiles and loads the launches of a call in this process, each asked for by its Signature."""

    def __init__(self, variant: Variant, call: Call, seen: list[Signature], settings: Settings) -> None:
        self._variant, self._call, self._seen, self._settings = variant, call, seen, settings
        self._steps: list[Any] | None = None

    def __call__(self, launch: ensure_compiled.Compiled) -> None:
        if self._steps is None:
            self._steps = self._described()
        step = self._steps[next(place for place, one in enumerate(self._seen) if one is launch)]
        compiled = step.kernel.run(*step.values, grid=step.grid, warmup=True, **step.options)
        preload.load(compiled, self._settings.cache_dir)

    def _described(self) -> list[Any]:
        call = self._call
        launcher = self._variant.described(call)
        named: dict[str, torch.Tensor | None] = {name: getattr(call, name) for name in TENSORS}
        named |= {"out": call.new_out(), "lse": call.new_lse() if call.problem.return_lse else None}
        return [step for step in launcher.steps({**named, **launcher.fresh(call.q)}) if 0 not in step.grid]
