"""The Hopper forward of e4m3 queries, keys and values as a path of its own: its probabilities are e4m3 too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.schema.plan import Rejection

if TYPE_CHECKING:
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target


class NarrowVariant(ForwardVariant):
    """attention and varlen_attention of e4m3 tensors on sm_90, with products of 8 bits."""

    name = "gluon_forward_fp8"
    ops = ("attention", "varlen_attention")
    takes = ForwardVariant.takes - {"needs_grad"} | {"kv_format"}
    needs = ForwardVariant.needs
    canaries = ()

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Why the kernel cannot run the problem, or is not for it; None when it runs."""
        if problem.q_format != "e4m3":
            return Rejection(path=self.name, reason=f"is for q, k and v of e4m3, not {problem.q_format}")
        return super().rejects(problem, target)
