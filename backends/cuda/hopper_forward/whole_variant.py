"""The Hopper forward of int8 queries and keys, with a scale for each token, as a path of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from portattn.backends.cuda.canaries import WHOLE_FORWARD
from portattn.backends.cuda.copies import with_copies
from portattn.backends.cuda.gluon import NEEDS
from portattn.backends.cuda.hopper_forward.variant import ForwardLauncher, ForwardVariant, choice
from portattn.schema.kernel_step import Step, StepLauncher
from portattn.schema.plan import Rejection

if TYPE_CHECKING:
    from portattn.schema.call import Call
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

FORMAT = "int8"
WIDEST = 128
COLUMN_STEP = 16  # columns of a head of q and k: a multiple of so many, 16 bytes


class WholeVariant(ForwardVariant):
    """attention and varlen_attention on sm_90 of int8 q and k, whose product is exact, and v in fp16 or bf16."""

    name = "gluon_forward_int8"
    entries = name
    ops = ("attention", "varlen_attention")
    takes = (ForwardVariant.takes - {"needs_grad", "softcap"}) | {"kv_format"}
    needs = f"sm_90, {NEEDS}, int8 q and k of at most {WIDEST} columns, rows and strides of {COLUMN_STEP} bytes"
    canaries = WHOLE_FORWARD
    formats = (FORMAT,)

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        """Why the kernel cannot run the problem, or is not for it; None when it runs."""
        p = problem
        reasons = {
            f"is for q and k of {FORMAT}": p.q_format != FORMAT,
            f"takes a scale for each token, not {p.kv_scales}": p.kv_scales != "token",
            f"takes heads of at most {WIDEST} columns, not {p.head_dim}": p.head_dim > WIDEST,
            f"takes heads of a multiple of {COLUMN_STEP} columns, not {p.head_dim}": p.head_dim % COLUMN_STEP != 0,
        }
        reason = next((text for text, holds in reasons.items() if holds), None)
        return super().rejects(problem, target) if reason is None else Rejection(path=self.name, reason=reason)

    def defers_to_core(self, problem: Problem) -> str:
        """Return a reason: probabilities are rounded as in 16-bit attention, unlike the core's."""
        return (
            f"it rounds probabilities to {problem.dtype}, where the core rounds to float16, or to two numbers of it: "
            f"backend={self.name!r} asks for that"
        )

    def views(self, problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the caller's tensors and the results as a Call has them."""
        seen = super().views(problem, tensors)
        for name in ("q_scale", "k_scale"):
            if problem.packed:
                seen[name] = tensors[name].transpose(0, 1)[None]
            elif problem.layout == "bshd":
                seen[name] = tensors[name].transpose(1, 2)
        return seen

    def launcher(self, call: Call) -> Callable[[Mapping[str, Any]], None]:
        """What runs calls like this one."""
        return with_copies(self.described(call), call, ("q", "k", "v"), ("q",))

    def described(self, call: Call) -> StepLauncher:
        """The launches of calls like this one."""
        chosen = choice(call.problem, self.toolchain, self.entries)
        assert chosen is not None
        return WholeLauncher(call, chosen.schedule)


class WholeLauncher(ForwardLauncher):
    """The launches of a forward, with scales of rows and keys."""

    def steps(self, tensors: Mapping[str, Any]) -> list[Step]:
        """The launches for a call."""
        forward, *merging = super().steps(tensors)
        roles, arguments = dict(forward.roles), dict(forward.arguments)
        for name in ("q_scale", "k_scale"):
            b, h, s = tensors[name].stride()
            roles[name] = name
            arguments |= {name: tensors[name], f"{name}_b": b, f"{name}_h": h, f"{name}_s": s}
        arguments["SIDE"] = arguments["k_scale_s"] == 1
        return [Step(forward.kernel, forward.grid, arguments, forward.options, roles), *merging]

    def constants(self) -> dict[str, Any]:
        """Return the kernel's constants."""
        return super().constants() | {"INT8": True}
