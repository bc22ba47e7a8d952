"""A backend with a compiler of its own, as another package brings one: docs/backends.md goes through it."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from portattn.backends import Backend, VendorPath

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from portattn.schema.call import Call
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

MAX_HEAD_DIM = 256  # what the vendor's library takes


class ExampleAttention(VendorPath):
    """The vendor's library: torch's SDPA stands in for it."""

    name = "example_attention"
    ops = ("attention",)

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        from portattn.schema.plan import Rejection

        if problem.head_dim > MAX_HEAD_DIM:
            reason = f"head_dim is {problem.head_dim}, and example_attention takes up to {MAX_HEAD_DIM}"
            return Rejection(path=self.name, reason=reason, hint="backend='reference'")
        return None

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        import torch

        grouped = call.q.shape[1] != call.k.shape[1]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(call.q, call.k, call.v, scale=call.scale, enable_gqa=grouped), None


class ExampleBackend(Backend):
    name = "example"
    title = "Example"
    device_type = "example"
    folder = Path(__file__).parent
    interface = 2
    compilers = ("triton-example",)
    adapter = "adapter.py:compile_kernel"
    options = MappingProxyType({"fuse": bool})
    vendor = (ExampleAttention(),)

    def detect(self, index: int | None = None) -> str | None:
        return None  # there is no such chip

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Any, ...]:
        from portattn_example.executor import ExampleExecutor

        return (ExampleExecutor(seconds),)

    def quirk_folder(self) -> Path:
        return self.folder / "quirks"
