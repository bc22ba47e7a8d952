"""Calls on a CPU like an earlier one: a vendor's path run again without validating or planning.

Of a call whose kind and sizes are known, nothing is left to decide (launch/cache.py). Calls with lengths, page ids or
cumulated lengths are not kept: on a CPU these are read and checked at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from portattn.api.request import Request, inputs_of
from portattn.config import Settings
from portattn.launch import cache
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.plan import Plan

if TYPE_CHECKING:
    from portattn.launch.cached_launch import CachedLaunch

Results = tuple[torch.Tensor, torch.Tensor | None]


class RepeatedCall:
    """Calls of one kind with the sizes of their first: what a Kind asks of a class of sizes (CachedLaunch)."""

    __slots__ = ("inputs", "plan", "run", "settings")

    def __init__(self, plan: Plan, settings: Settings, inputs: Sequence[int], run: Callable[..., Results]) -> None:
        self.plan, self.settings, self.inputs, self.run = plan, settings, list(inputs), run

    def program(self, inputs: Sequence[int]) -> Sequence[int] | None:
        """The sizes themselves where they are these ones."""
        return self.inputs if inputs == self.inputs else None

    def note(self, inputs: Sequence[int]) -> Plan:
        return self.plan

    def native(self) -> None:
        """native.c launches kernels; this calls torch."""
        return

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], sizes: Sequence[int],
        place: torch.Tensor | None = None,
    ) -> Results:  # fmt: skip
        """Run with these tensors: (out, LSE or None). place: where out goes."""
        out, lse = self.run(*tensors)
        return (out if place is None else place.copy_(out)), lse


def keep(request: Request, call: Call, plan: Any) -> None:
    """Keep a call that has run on a CPU by this plan, where its path can run others like it.

    Not where gradients are asked for, autocast is on, or Request.cacheable forbids it on any device.
    """
    if call.q.device.type != "cpu" or not isinstance(plan, Plan) or plan.key or call.problem.needs_grad:
        return
    backend = Registry.load().backends[plan.target.partition(":")[0]]
    vendor = next((v for v in backend.vendor if v.name == plan.path), None)
    run = None if vendor is None else vendor.repeated(call)
    if run is None or call.copied or torch.is_autocast_enabled("cpu") or not request.repeatable():
        return
    kind = request.kind()
    kind.add(cast("CachedLaunch", RepeatedCall(plan, request.settings, inputs_of(request), run)))
    cache.remember(kind)
