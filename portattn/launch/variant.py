"""Running a call by a variant: its own launcher, given the call's tensors and memory for the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from portattn.launch.run import device_guard
from portattn.planning.backend import Variant
from portattn.schema.call import TENSORS, Call


def run_variant(
    variant: Variant, call: Call
) -> tuple[Callable[[Mapping[str, torch.Tensor | None]], None], torch.Tensor, torch.Tensor | None]:
    """Run a call by a variant: (what runs others like it, out, LSE)."""
    launch, tensors = variant.launcher(call), launch_tensors(call)
    with device_guard(call.q):
        launch(tensors)
    return launch, tensors["out"], tensors["lse"]


def launch_tensors(call: Call) -> dict[str, Any]:
    """What a variant is launched with: a Call's tensors by name, and memory for out and LSE."""
    lse = call.new_lse() if call.problem.return_lse else None
    return {name: getattr(call, name) for name in TENSORS} | {"out": call.new_out(), "lse": lse}
