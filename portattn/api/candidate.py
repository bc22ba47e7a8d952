"""One of portattn's own kernels as a call takes it: a core kernel or a variant, which dispatch does not tell apart.

A candidate describes its launches once. The same description is compiled, launched, and cached for other calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from portattn.api import shape_polymorphism
from portattn.compile import compile_check, variants
from portattn.config import Settings
from portattn.launch import kernel_calls, launch_all
from portattn.launch.cached_launch import CachedLaunch
from portattn.launch.run import device_guard
from portattn.launch.variant import launch_tensors
from portattn.planning.backend import Variant
from portattn.schema.call import Call
from portattn.schema.compile_record import CompileRecord
from portattn.schema.plan import Plan
from portattn.schema.target import Target

Results = tuple[torch.Tensor, torch.Tensor | None]


class Candidate(Protocol):
    """What a plan with a key runs."""

    def compiled(self) -> Sequence[compile_check.Compiled]:
        """What a compiler sees of its launches."""
        ...

    def known_failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        """Why its launches are known not to compile here. Nothing is compiled."""
        ...

    def failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        """Return the record of a failed compile (compiling first if needed), or None."""
        ...

    def results(self) -> Results:
        """Memory for out (B,Hq,Sq,Dv), and for the LSE (B,Hq,Sq) where it is asked for; the same at each call."""
        ...

    def run(self) -> None:
        """Launch by Triton's own way, into `results`."""
        ...

    def cached(
        self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int], given: Sequence[str]
    ) -> CachedLaunch:
        """Its launches for calls of the same kind. On the call's device."""
        ...


class CoreCandidate:
    """A core kernel, on a device or under the interpreter."""

    def __init__(self, plan: Plan, call: Call, cores: int) -> None:
        self._plan, self._call = plan, call
        self._launches, self._out, self._lse = kernel_calls(plan, call, cores)

    @property
    def _interpreted(self) -> bool:
        return self._plan.path == "interpreter"

    def compiled(self) -> Sequence[compile_check.Compiled]:
        return [] if self._interpreted else self._launches

    def known_failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        return None if self._interpreted else compile_check.known_failure(self._plan, self._launches, settings)

    def failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        if self._interpreted:
            return None
        return compile_check.ensure(self._plan, self._launches, self._call.q, target, settings)

    def results(self) -> Results:
        return self._out, self._lse

    def run(self) -> None:
        launch_all(self._launches, self._plan, self._call.q)

    def cached(
        self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int], given: Sequence[str]
    ) -> CachedLaunch:
        return shape_polymorphism.cache_core(
            recipe, inputs, self._plan, given, self._launches, *self.results(), self._call.q.device
        )


class VariantCandidate:
    """A variant of a backend."""

    def __init__(self, variant: Variant, plan: Plan, call: Call) -> None:
        self._variant, self._plan, self._call = variant, plan, call
        self._tensors: dict[str, Any] = {}
        self._launcher: Any = None

    def compiled(self) -> Sequence[compile_check.Compiled]:
        return variants.launch_signatures(self._variant, self._plan, self._call)

    def known_failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        return variants.known_failure(self._variant, self._plan, self._call, target, settings)

    def failure(self, target: Target, settings: Settings) -> CompileRecord | None:
        return variants.failure(self._variant, self._plan, self._call, target, settings)

    def results(self) -> Results:
        tensors, _ = self._described()
        return tensors["out"], tensors["lse"]

    def _described(self) -> tuple[Mapping[str, Any], Any]:
        """The call's tensors with memory for results, and the launcher: made once a kernel is known to compile."""
        if self._launcher is None:
            self._launcher, self._tensors = self._variant.launcher(self._call), launch_tensors(self._call)
        return self._tensors, self._launcher

    def run(self) -> None:
        tensors, launcher = self._described()
        with device_guard(self._call.q):
            launcher(tensors)

    def cached(
        self, recipe: shape_polymorphism.CallRecipe, inputs: Sequence[int], given: Sequence[str]
    ) -> CachedLaunch:
        tensors, launcher = self._described()
        return shape_polymorphism.cache_variant(
            recipe, inputs, self._plan, given, self._variant, launcher, tensors, self._call.q.device
        )


def candidate(plan: Plan, call: Call, target: Target) -> Candidate | None:
    """What a plan runs of portattn's own; None where a vendor's path or the reference runs."""
    if not plan.key:
        return None
    variant = variants.variant_of(plan)
    if variant is None:
        return CoreCandidate(plan, call, target.arch.cores)
    return VariantCandidate(variant, plan, call)
