"""Launches of write_cache, into contiguous caches and pages, and of the kernels that fill a call's `result`."""

from __future__ import annotations

import msgspec
import torch

from portattn.launch.arguments import BLOCK_SCALES, outer_strides, scale_strides, strides
from portattn.launch.kernelcall import KernelCall
from portattn.planning.kernel_specs import CORES, CacheWrite, ceil_div
from portattn.schema.call import Call
from portattn.schema.lowering import FUSED
from portattn.schema.plan import Plan
from portattn.schema.symbolic_int import least

MODULE = "portattn.kernels.write"
UNSPECIALISED = frozenset({"heads_k", "seq_q", "seq_k", "angles", "rows", "tiles"})
# A rotation's sum of two products is rounded after each of the three, as in the reference: with one rounding less the
# numbers that are stored would depend on the compiler.
_UNFUSED = dict.fromkeys(FUSED, False)


def calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, None]:
    """Return the launch, and a tensor without elements for the result: the cache is filled in place."""
    problem, kernel = plan.problem, CORES[plan.problem.op]
    assert isinstance(kernel, CacheWrite)
    lowering, launch = plan.specialised
    if problem.rotary != "none":
        options = tuple(sorted((dict(launch.options) | _UNFUSED).items()))
        launch = msgspec.structs.replace(launch, options=options)
    tiles = kernel.tiles(problem, launch)
    tables = [call.cos, call.sin]
    cos_stride, sin_stride = (None if table is None else table.stride(0) for table in tables)
    arguments = {
        "q": call.q, "new_v": call.new_v, "k": call.k, "v": call.v, "seqlens_k": call.seqlens_k, "slots": call.slots,
        "k_scale": call.k_scale, "v_scale": call.v_scale, "k_block_scale": call.k_block_scale,
        "v_block_scale": call.v_block_scale, "cos": call.cos, "sin": call.sin,
        "positions": call.positions,
        **strides("q", call.q, "bhsd"), **strides("new_v", call.new_v, "bhsd"),
        **strides("k", call.k, "bhsd"), **strides("v", call.v, "bhsd"), **scale_strides(call),
        **scale_strides(call, BLOCK_SCALES),
        "cos_stride": cos_stride, "sin_stride": sin_stride,
        "heads_k": problem.heads_k, "seq_q": problem.seq_q, "seq_k": problem.seq_k,
        "angles": 0 if call.cos is None else call.cos.shape[0], "rows": kernel.all_rows(problem), "tiles": tiles,
    }  # fmt: skip
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    constexprs = kernel.constexprs(problem, lowering, launch)
    first = KernelCall(MODULE, kernel.function, grid, arguments, constexprs, launch, UNSPECIALISED)
    return [first], call.new_out(), None


INDEXER = "portattn.kernels.indexer"
LOGITS_UNSPECIALISED = frozenset({"seq_q", "seq_k", "pages", "row_tiles", "key_tiles", "tiles"})
TOPK_UNSPECIALISED = frozenset({"seq_q", "tokens", "rows"})
MOST_SEARCHES = 1024  # programs that search long rows: each has memory for a tile


def logits_calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, None]:
    problem, kernel = plan.problem, CORES[plan.problem.op]
    lowering, launch = plan.specialised
    tiles = kernel.tiles(problem, launch)
    scale_b, _, scale_s = scale_strides(call, ("k_scale",)).values()
    arguments = {
        "q": call.q, "k": call.k, "weights": call.weights, "k_scale": call.k_scale, "row_starts": call.row_starts,
        "row_ends": call.row_ends, "seqlens_k": call.seqlens_k, "page_table": call.page_table, "result": call.result,
        **strides("q", call.q, "bhsd"), **strides("k", call.k[:, 0], "bsd"),
        "k_scale_stride_b": scale_b, "k_scale_stride_s": scale_s,
        **strides("weights", call.weights, "bsh"), **outer_strides("result", call.result, "bs"),
        "table_stride_b": 0 if call.page_table is None else call.page_table.stride(0),
        "seq_q": problem.seq_q, "seq_k": problem.seq_k, "pages": call.k.shape[0],
        "row_tiles": ceil_div(problem.seq_q, launch.block_m), "key_tiles": ceil_div(problem.seq_k, launch.block_n),
        "tiles": tiles,
    }  # fmt: skip
    grid = (least(tiles, cores) if lowering.grid == "persistent" else tiles,)
    constexprs = kernel.constexprs(problem, lowering, launch)
    first = KernelCall(INDEXER, kernel.function, grid, arguments, constexprs, launch, LOGITS_UNSPECIALISED)
    return [first], call.new_out(), None


def topk_calls(plan: Plan, call: Call, cores: int) -> tuple[list[KernelCall], torch.Tensor, None]:
    problem, kernel = plan.problem, CORES[plan.problem.op]
    lowering, launch = plan.specialised
    rows = kernel.tiles(problem, launch)
    constexprs = kernel.constexprs(problem, lowering, launch)
    programs = least(rows, cores if lowering.grid == "persistent" else MOST_SEARCHES if constexprs["LONG"] else rows)
    candidates = call.empty(programs, launch.block_n, dtype=torch.int32) if constexprs["LONG"] else None
    arguments = {
        "q": call.q, "row_starts": call.row_starts, "row_ends": call.row_ends, "result": call.result,
        "candidates": candidates,
        **strides("q", call.q[:, 0], "bsd"), **outer_strides("result", call.result, "bs"),
        "seq_q": problem.seq_q, "seq_k": problem.seq_k, "tokens": problem.tokens, "rows": rows,
    }  # fmt: skip
    first = KernelCall(INDEXER, kernel.function, (programs,), arguments, constexprs, launch, TOPK_UNSPECIALISED)
    return [first], call.new_out(), None
