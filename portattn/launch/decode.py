"""Launches of decode_split, sparse_split and block_forward, which split keys over programs, and of combine, which
merges the parts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from portattn.launch.arguments import (
    BLOCK_SCALES,
    CAPTURED_SIZES,
    alibi_stride,
    captured_sizes,
    captured_tensors,
    features,
    list_strides,
    numbers,
    outer_strides,
    scale_strides,
    score_strides,
    strides,
    tree_stride,
    warp_split_call,
    window,
)
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs import CORES, MIN_DOT, DecodeSplit, ceil_div
from portattn.schema.call import Call
from portattn.schema.lowering import Launch
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least, next_power_of_two

COMBINE = "portattn.kernels.combine"
COMBINE_UNSPECIALISED = frozenset({"heads_q", "seq_q", "rows", "splits"})
CHUNK = 16  # partial rows that the merging kernel holds at a time
# Columns of a row that a warp of 32 reads, 16 bytes a thread: no sum crosses warps, which would wait for each other.
COLUMNS = 128
MOST_WARPS = 4
PART, MOST_CHUNK = 32, 32  # columns and partial rows of a program where a row has several


@dataclass(slots=True)
class Outputs:
    """Tensors that a splitting kernel fills; without a split, the partial ones are the results."""

    out: torch.Tensor  # (B,Hq,Sq,Dv)
    lse: torch.Tensor | None  # (B,Hq,Sq)
    partial: torch.Tensor  # float32 (splits,B,Hq,Sq,Dv)
    partial_state: torch.Tensor | None  # each row's softmax maximum and sum (splits,B,Hq,Sq,2)

    @classmethod
    def of(cls, plan: Plan, call: Call) -> Outputs:
        """Allocate the outputs; beyond the results a split takes splits·B·Hq·Sq·(Dv + 2) float32."""
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


def merge_begins_early(plan: Plan) -> bool:
    """Return whether a plan's merging kernel begins before the splitting one has ended."""
    return bool(plan.specialised[1].get(DEPENDENT)) and plan.path != "interpreter"


def splitting_launch(launch: Launch) -> Launch:
    """Return the launch of the splitting kernel, which waits for whatever was launched before."""
    return msgspec.structs.replace(launch, options=tuple(pair for pair in launch.options if pair[0] != DEPENDENT))


def merging_shape(splits: int, head_dim_v: int) -> tuple[dict[str, int], int]:
    columns = max(next_power_of_two(head_dim_v), MIN_DOT)
    constants = {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": columns, "CHUNK": min(CHUNK, next_power_of_two(splits))}
    return constants, min(max(columns // COLUMNS, 1), MOST_WARPS)


def merging_parts(splits: int, head_dim_v: int) -> tuple[dict[str, int], int, int]:
    """Like `merging_shape` for a merge that begins early, with programs per row as third.

    A thread of a warp with a whole row reads 16 bytes of each of 16 splits: for so many registers ptxas waits four
    times for memory (sm_90). With PART columns it reads a quarter, at once."""
    columns = max(next_power_of_two(head_dim_v), MIN_DOT)
    part = min(columns, PART)
    constants = {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": part, "CHUNK": min(MOST_CHUNK, next_power_of_two(splits))}
    return constants, 1, columns // part


def combine_calls(plan: Plan, call: Call, outputs: Outputs, cores: int) -> list[KernelCall]:
    """Return the merging launch; no launch if keys are not split."""
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
    begins_early = merge_begins_early(plan)
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
    return [KernelCall(COMBINE, "combine", grid, arguments, constexprs, few, COMBINE_UNSPECIALISED)]


def list_rows(indices: torch.Tensor) -> torch.Tensor:
    """Return lists (B, Sq, tokens) or (Tq, tokens) so that stride(-2) is the distance between two queries' lists."""
    return indices[:, 0] if indices.ndim == 3 and indices.shape[1] == 1 else indices


MODULE = "portattn.kernels.decode"
UNSPECIALISED = frozenset(
    {
        "heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "tiles", "batches", "left", "right", "chunk",
        *CAPTURED_SIZES,
    }
)  # fmt: skip


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    problem, kernel = plan.problem, CORES[plan.problem.op]
    assert isinstance(kernel, DecodeSplit)
    lowering, launch = plan.specialised
    outputs = Outputs.of(plan, call)
    tiles = kernel.tiles(problem, launch)
    table = call.page_table if call.indices is None else list_rows(call.indices)
    arguments = {
        "q": call.q, "q_rope": call.q_rope, "k": call.k, "v": call.v,
        "k_scale": call.k_scale, "v_scale": call.v_scale,
        "k_block_scale": call.k_block_scale, "v_block_scale": call.v_block_scale,
        "out": outputs.partial, "lse": outputs.partial_state,
        "seqlens_k": call.seqlens_k, "leftpad_k": call.leftpad_k, "cu_seqlens_q": call.cu_seqlens_q,
        "page_table": call.page_table, "indices": call.indices, "counts": call.counts,
        **features(call), **captured_tensors(call), **numbers(call),
        **strides("q", call.q, "bhsd"), **strides("rope", call.q_rope, "bhsd"),
        **strides("k", call.k, "bhsd"), **strides("v", call.v, "bhsd"),
        **scale_strides(call), **scale_strides(call, BLOCK_SCALES), **outputs.strides("pbhs"),
        "table_stride_b": 0 if table is None else table.stride(-2), **alibi_stride(call),
        **score_strides(call), **tree_stride(call),
        "heads_k": problem.heads_k, "seq_q": problem.query_rows[1], "seq_k": problem.seq_k, "pages": call.k.shape[0],
        "row_tiles": kernel.row_tiles(problem, launch), "splits": launch.splits, "tiles": tiles,
        "batches": problem.batch, **window(problem), **captured_sizes(call),
    }  # fmt: skip
    followed = launch.splits > 1 and merge_begins_early(plan)
    constexprs = kernel.constexprs(problem, lowering, launch) | {"FOLLOWED": followed}
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    splitting = splitting_launch(launch)
    if kernel.form(lowering):
        first = warp_split_call(arguments, constexprs, splitting, grid)
    else:
        first = KernelCall(MODULE, kernel.function, grid, arguments, constexprs, splitting, UNSPECIALISED)
    return [first, *combine_calls(plan, call, outputs, cores)], outputs.out, outputs.lse


SPARSE = "portattn.kernels.sparse"
SPARSE_UNSPECIALISED = frozenset({"heads_q", "group", "seq_k", "pages", "places", "splits", "tiles", "batches"})


def sparse_calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    problem, kernel = plan.problem, CORES[plan.problem.op]
    lowering, launch = plan.specialised
    outputs = Outputs.of(plan, call)
    tiles = kernel.tiles(problem, launch)
    table, weights = call.page_table, call.log_weights
    assert call.indices is not None
    assert call.counts is not None
    arguments = {
        "q": call.q, "k": call.k, "v": call.v, "k_scale": call.k_scale, "v_scale": call.v_scale,
        "out": outputs.partial, "lse": outputs.partial_state,
        "indices": call.indices, "counts": call.counts, "log_weights": weights,
        "magicpig_bits": call.magicpig_bits, "magicpig_tables": call.magicpig_tables,
        "seqlens_k": call.seqlens_k, "page_table": table,
        **features(call), **numbers(call),
        **{f"q_stride_{axis}": s for axis, s in zip("bhsd", call.q.stride(), strict=True) if axis != "s"},
        **strides("k", call.k, "bhsd"), **strides("v", call.v, "bhsd"),
        **scale_strides(call), **outputs.strides("pbh"),
        "indices_stride_b": call.indices.stride(0), "indices_stride_h": call.indices.stride(1),
        "counts_stride_b": call.counts.stride(0), "counts_stride_h": call.counts.stride(1),
        "weights_stride_b": 0 if weights is None else weights.stride(0),
        "weights_stride_h": 0 if weights is None else weights.stride(1),
        "table_stride_b": 0 if table is None else table.stride(0), **alibi_stride(call),
        "heads_q": problem.heads_q, "group": problem.group, "seq_k": problem.seq_k, "pages": call.k.shape[0],
        "places": problem.tokens, "splits": launch.splits, "tiles": tiles, "batches": problem.batch,
    }  # fmt: skip
    bits, tables = call.magicpig
    constexprs = kernel.constexprs(problem, lowering, launch) | {"PIG_BITS": bits, "PIG_TABLES": tables}
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    first = KernelCall(
        SPARSE, kernel.function, grid, arguments, constexprs, splitting_launch(launch), SPARSE_UNSPECIALISED
    )
    return [first, *combine_calls(plan, call, outputs, cores)], outputs.out, outputs.lse


BLOCK_UNSPECIALISED = frozenset({"heads_k", "seq_q", "seq_k", "places", "row_tiles", "splits", "tiles", "batches"})


def block_calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    problem, kernel = plan.problem, CORES[plan.problem.op]
    assert isinstance(kernel, DecodeSplit)
    lowering, launch = plan.specialised
    outputs = Outputs.of(plan, call)
    tiles = kernel.tiles(problem, launch)
    arguments = {
        "q": call.q, "k": call.k, "v": call.v, "out": outputs.partial, "lse": outputs.partial_state,
        "seqlens_k": call.seqlens_k, "indices": call.indices, "counts": call.counts, "sinks": call.sinks,
        "scale": abs(float(call.scale)),
        **strides("q", call.q, "bhsd"), **strides("k", call.k, "bhsd"), **strides("v", call.v, "bhsd"),
        **outputs.strides("pbhs"), **list_strides(call),
        "heads_k": problem.heads_k, "seq_q": problem.seq_q, "seq_k": problem.seq_k, "places": problem.tokens,
        "row_tiles": ceil_div(problem.group, launch.block_m), "splits": launch.splits, "tiles": tiles,
        "batches": problem.batch,
    }  # fmt: skip
    constexprs = kernel.constexprs(problem, lowering, launch)
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    launches = splitting_launch(launch)
    first = KernelCall(MODULE, kernel.function, grid, arguments, constexprs, launches, BLOCK_UNSPECIALISED)
    return [first, *combine_calls(plan, call, outputs, cores)], outputs.out, outputs.lse
