"""The launch of dense_forward, for dense and packed tensors."""

from __future__ import annotations

import torch

from portattn.launch.arguments import (
    CAPTURED_SIZES,
    alibi_stride,
    block_strides,
    captured_sizes,
    captured_tensors,
    dropping,
    features,
    numbers,
    outer_strides,
    scale_strides,
    score_strides,
    strides,
    warp_split_call,
    window,
)
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs import CORES, ceil_div, heads_together, packed_tiles
from portattn.planning.registry import Registry
from portattn.schema.call import Call
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least

MODULE = "portattn.kernels.dense"
UNSPECIALISED = frozenset(
    {
        "heads_q", "group", "seq_q", "seq_k", "row_tiles", "together", "tiles", "batches", "left", "right", "chunk",
        "threshold", *CAPTURED_SIZES,
    }
)  # fmt: skip


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    problem, kernel = plan.problem, CORES[plan.problem.op]
    lowering, launch = plan.specialised
    out = call.new_out()
    lse = call.new_lse() if problem.return_lse else None
    tiles = kernel.tiles(problem, launch)
    row_tiles = packed_tiles(problem, launch, 1) if problem.packed else ceil_div(problem.seq_q, launch.block_m)
    threshold, keep_scale = dropping(call)
    arguments = {
        "q": call.q, "k": call.k, "v": call.v, "q_scale": call.q_scale, "k_scale": call.k_scale,
        "v_scale": call.v_scale, "out": out, "lse": lse,
        "seqlens_q": call.seqlens_q, "seqlens_k": call.seqlens_k,
        "leftpad_q": call.leftpad_q, "leftpad_k": call.leftpad_k,
        "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k,
        **features(call), **captured_tensors(call), "dropout_seed": call.dropout_seed, **numbers(call),
        "keep_scale": keep_scale,
        **strides("q", call.q, "bhsd"), **strides("k", call.k, "bhsd"), **strides("v", call.v, "bhsd"),
        **scale_strides(call, ("q_scale", "k_scale", "v_scale")), **outer_strides("o", out, "bhs"),
        **alibi_stride(call), **score_strides(call), **block_strides(call),
        "heads_q": problem.heads_q, "group": problem.group,
        "seq_q": problem.query_rows[1], "seq_k": problem.seq_k if problem.total_k is None else problem.total_k,
        "row_tiles": row_tiles, "together": heads_together(problem, Registry.load().arch(plan.target)),
        "tiles": tiles, "batches": problem.batch, **window(problem), "threshold": threshold, **captured_sizes(call),
    }  # fmt: skip
    constexprs = kernel.constexprs(problem, lowering, launch)
    if kernel.form(lowering):
        own = arguments | {"heads_k": problem.heads_k}
        return [warp_split_call(own, constexprs, launch, (tiles,))], out, lse
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    return [KernelCall(MODULE, kernel.function, grid, arguments, constexprs, launch, UNSPECIALISED)], out, lse
