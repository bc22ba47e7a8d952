"""The launches of decode_split: over contiguous, paged and latent caches."""

from __future__ import annotations

import torch

from portattn.launch import combine
from portattn.launch.arguments import (
    BLOCK_SCALES,
    alibi_stride,
    features,
    numbers,
    scale_strides,
    score_strides,
    strides,
    tree_stride,
    window,
)
from portattn.launch.kernelcall import KernelCall
from portattn.launch.warps_apart import apart_call
from portattn.planning.kernel_specs import CORES, DecodeSplit
from portattn.schema.call import Call
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least

MODULE = "portattn.kernels.decode"
UNSPECIALISED = frozenset(
    {"heads_k", "seq_q", "seq_k", "pages", "row_tiles", "splits", "tiles", "batches", "left", "right", "chunk"}
)


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    """Launches of one decode, with its outputs (B,Hq,Sq,Dv) and LSE (B,Hq,Sq)."""
    problem, kernel = plan.problem, CORES[plan.problem.op]
    assert isinstance(kernel, DecodeSplit)
    lowering, launch = plan.specialised
    outputs = combine.Outputs.of(plan, call)
    tiles = kernel.tiles(problem, launch)
    table = call.page_table
    arguments = {
        "q": call.q, "q_rope": call.q_rope, "k": call.k, "v": call.v,
        "k_scale": call.k_scale, "v_scale": call.v_scale,
        "k_block_scale": call.k_block_scale, "v_block_scale": call.v_block_scale,
        "out": outputs.partial, "lse": outputs.partial_state,
        "seqlens_k": call.seqlens_k, "leftpad_k": call.leftpad_k, "cu_seqlens_q": call.cu_seqlens_q,
        "page_table": table,
        **features(call), **numbers(call),
        **strides("q", call.q, "bhsd"), **strides("rope", call.q_rope, "bhsd"),
        **strides("k", call.k, "bhsd"), **strides("v", call.v, "bhsd"),
        **scale_strides(call), **scale_strides(call, BLOCK_SCALES), **outputs.strides("pbhs"),
        "table_stride_b": 0 if table is None else table.stride(0), **alibi_stride(call),
        **score_strides(call), **tree_stride(call),
        "heads_k": problem.heads_k, "seq_q": problem.query_rows[1], "seq_k": problem.seq_k, "pages": call.k.shape[0],
        "row_tiles": kernel.row_tiles(problem, launch), "splits": launch.splits, "tiles": tiles,
        "batches": problem.batch, **window(problem),
    }  # fmt: skip
    followed = launch.splits > 1 and combine.dependent(plan)
    constexprs = kernel.constexprs(problem, lowering, launch) | {"FOLLOWED": followed}
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    splitting = combine.splitting(launch)
    if kernel.form(lowering):
        first = apart_call(arguments, constexprs, splitting, grid)
    else:
        first = KernelCall(MODULE, kernel.function, grid, arguments, constexprs, splitting, UNSPECIALISED)
    return [first, *combine.calls(plan, call, outputs, cores)], outputs.out, outputs.lse
