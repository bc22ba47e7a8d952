"""The launch that merges what a variant's blocks found in their shares of the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portattn.schema.kernel_step import Step
from portattn.schema.lowering import FUSED

if TYPE_CHECKING:
    from portattn.schema.problem import Problem

_ROLES = {"partial": "partial", "partial_state": "partial_lse", "out": "out", "lse": "lse"}


def merging(problem: Problem, splits: int, tensors: Mapping[str, Any]) -> Step:
    """tensors: `partial` (splits, B, Hq, Sq, Dv) and `partial_lse`, float32, and `out` and `lse` as a Call has them."""
    from portattn.kernels.combine import combine
    from portattn.launch.combine import merging_shape

    p, out = problem, tensors["out"]
    rows = p.batch * p.heads_q * p.seq_q
    constants, warps = merging_shape(splits, out.shape[-1])
    arguments = {
        **{name: tensors[role] for name, role in _ROLES.items()}, "sinks": None,
        "o_stride_b": out.stride(0), "o_stride_h": out.stride(1), "o_stride_s": out.stride(2),
        "heads_q": p.heads_q, "seq_q": p.seq_q, "rows": rows, "splits": splits, **constants,
        "STATE": "lse", "EXP": "exp", "NATURAL": True, "GRID": "full", "DEPENDENT": True,
    }  # fmt: skip
    return Step(combine, (rows,), arguments, {"num_warps": warps, "launch_pdl": True, **FUSED}, _ROLES)
