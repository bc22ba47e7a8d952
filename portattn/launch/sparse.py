"""The launches of sparse_split."""

from __future__ import annotations

import torch

from portattn.launch import combine
from portattn.launch.arguments import alibi_stride, features, numbers, scale_strides, strides
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs import CORES
from portattn.schema.call import Call
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least

MODULE = "portattn.kernels.sparse"
UNSPECIALISED = frozenset({"heads_q", "group", "seq_k", "pages", "places", "splits", "tiles", "batches"})


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, torch.Tensor | None]:
    """Launches of one token-sparse decode, with its outputs (B,Hq,1,Dv) and LSE (B,Hq,1)."""
    problem, kernel = plan.problem, CORES[plan.problem.op]
    lowering, launch = plan.specialised
    outputs = combine.Outputs.of(plan, call)
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
    first = KernelCall(MODULE, kernel.function, grid, arguments, constexprs, combine.splitting(launch), UNSPECIALISED)
    return [first, *combine.calls(plan, call, outputs, cores)], outputs.out, outputs.lse
