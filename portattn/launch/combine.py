"""Outputs of a kernel that splits keys over programs, and the launch that merges their partial results."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from portattn.launch.arguments import outer_strides
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs import CORES, MIN_DOT, DecodeSplit
from portattn.schema.call import Call
from portattn.schema.lowering import Launch
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least, next_power_of_two

MODULE = "portattn.kernels.combine"
UNSPECIALISED = frozenset({"heads_q", "seq_q", "rows", "splits"})
CHUNK = 16  # partial rows that the merging kernel holds at a time
# Columns of a row that a warp of 32 reads, 16 bytes a thread: no sum crosses warps, which would wait for each other.
COLUMNS = 128
MOST_WARPS = 4
PART, MOST_CHUNK = 32, 32  # columns and partial rows of a program where a row has several


@dataclass(slots=True)
class Outputs:
    """Where a splitting kernel writes.

    out, lse                 the call's results, (B,Hq,Sq,Dv) and (B,Hq,Sq) or None
    partial, partial_state   what the kernel fills: float32 (splits,B,Hq,Sq,Dv), and the maximum and sum of each row's
                             softmax (splits,B,Hq,Sq,2); or the results
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    partial: torch.Tensor
    partial_state: torch.Tensor | None

    @classmethod
    def of(cls, plan: Plan, call: Call) -> Outputs:
        """Uninitialised outputs; beyond the results a split allocates splits·B·Hq·Sq·(Dv + 2) float32."""
        problem = plan.problem
        splits = plan.specialised[1].splits
        out = call.new_out()
        lse = call.new_lse() if problem.return_lse else None
        if splits == 1:
            return cls(out, lse, out, lse)
        batch, rows = problem.query_rows
        shape = (splits, batch, problem.heads_q, rows)
        partial = call.empty(*shape, problem.head_dim_v, dtype=torch.float32)
        return cls(out, lse, partial, call.empty(*shape, 2, dtype=torch.float32))

    def strides(self, axes: str) -> dict[str, int]:
        """Return the kernel's `o_stride_*`; `p` is the distance between two splits."""
        given = self.partial.stride() if self.partial is not self.out else (0, *self.out.stride())
        return {f"o_stride_{axis}": stride for axis, stride in zip("pbhs", given, strict=False) if axis in axes}


DEPENDENT = "launch_pdl"  # the launch option that is the merging kernel's: to begin before the other one has ended


def dependent(plan: Plan) -> bool:
    """Whether a plan's merging kernel begins before the other one has ended."""
    return bool(plan.specialised[1].get(DEPENDENT)) and plan.path != "interpreter"


def splitting(launch: Launch) -> Launch:
    """The launch of the kernel whose results are merged: it waits for whatever was launched before."""
    return msgspec.structs.replace(launch, options=tuple(pair for pair in launch.options if pair[0] != DEPENDENT))


def merging_shape(splits: int, head_dim_v: int) -> tuple[dict[str, int], int]:
    """The merging kernel's constants for so many partial results of such rows, and its warps."""
    columns = max(next_power_of_two(head_dim_v), MIN_DOT)
    constants = {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": columns, "CHUNK": min(CHUNK, next_power_of_two(splits))}
    return constants, min(max(columns // COLUMNS, 1), MOST_WARPS)


def merging_parts(splits: int, head_dim_v: int) -> tuple[dict[str, int], int, int]:
    """Likewise where merging begins early: a program has PART columns of a row. The third is a row's programs.

    A thread of a warp that has a whole row reads 16 bytes of each of 16 splits: for so many registers ptxas waits four
    times for memory (sm_90). Of PART columns it reads a quarter of them, at once.
    """
    columns = max(next_power_of_two(head_dim_v), MIN_DOT)
    part = min(columns, PART)
    constants = {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": part, "CHUNK": min(MOST_CHUNK, next_power_of_two(splits))}
    return constants, 1, columns // part


def calls(plan: Plan, call: Call, outputs: Outputs, cores: int) -> list[KernelCall]:
    """The merging launch; none where keys are not split."""
    problem, kernel = plan.problem, CORES[plan.problem.op]
    assert isinstance(kernel, DecodeSplit)
    lowering, launch = plan.specialised
    if launch.splits == 1:
        return []
    batch, seq = problem.query_rows
    rows = batch * problem.heads_q * seq
    arguments = {
        "partial": outputs.partial, "partial_state": outputs.partial_state, "out": outputs.out, "lse": outputs.lse,
        "sinks": None if outputs.lse is None else call.sinks,
        **outer_strides("o", outputs.out, "bhs"),
        "heads_q": problem.heads_q, "seq_q": seq, "rows": rows, "splits": launch.splits,
    }  # fmt: skip
    begins_early = dependent(plan)
    constants, warps = merging_shape(launch.splits, problem.head_dim_v)
    parts = 1
    if begins_early:
        constants, warps, parts = merging_parts(launch.splits, problem.head_dim_v)
    constexprs = {
        **constants, "STATE": "max_sum", "EXP": lowering.exp, "NATURAL": kernel.natural_scores(problem),
        "GRID": lowering.grid, "DEPENDENT": begins_early,
    }  # fmt: skip
    grid = (least(rows, cores) if lowering.grid == "persistent" else rows, parts)
    few = Launch(num_warps=warps, num_stages=1, options=((DEPENDENT, True),) if begins_early else ())
    return [KernelCall(MODULE, "combine", grid, arguments, constexprs, few, UNSPECIALISED)]
